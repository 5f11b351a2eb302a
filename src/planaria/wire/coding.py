"""Rows on their way from servers to trainers, in fewer bytes.

What arrives of a row depends on its bits, its table and the step, and on nothing else: not on what
else is in the message, which server sent it, or whether it came early. So a job with lossy lookups
is as reproducible as an exact one, whoever dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planaria.kernels import lossy
from planaria.kernels.types import Bytes, Floats, Index
from planaria.layout import Layout
from planaria.tables import Arena
from planaria.wire.messages import Answer, Early, Lookup

KINDS = ("exact", "fp16", "bf16", "lossy")
DECAYS = 10  # times, until the bound is what was asked for


@dataclass(frozen=True)
class Coding:
    """How the rows of a job travel."""

    arenas: Sequence[Arena] = ()
    names: Sequence[str] = ()  # of all tables
    kind: str = "exact"
    bound: float = 0.0  # of lossy ones: how far a weight may be from what it was, in the end
    decay_steps: int = 0  # until then it is up to twice that
    encoder: str = "none"

    def packed(
        self,
        layout: Layout,
        place: int,
        lookup: Lookup,
        indices: Sequence[Index],
        weights: list[Floats],
    ) -> tuple[list[Floats], list[Bytes]]:
        """The rows of an answer as it has them: themselves, or a frame for each arena. indices:
        their record numbers.
        """
        if self.kind == "exact" or lookup.exact:
            return weights, []
        frames = []
        for number, (index, rows) in enumerate(zip(indices, weights, strict=True)):
            tables = self._tables(layout, place, number, index)
            names = self._names[number]
            bounds = np.full(len(names), self.bound_at(lookup.step), np.float32)
            encoders = [self.encoder if self.kind == "lossy" else self.kind] * len(names)
            frames.append(lossy.encode(rows, tables, bounds, encoders, names))
        return [], frames

    def unpack(self, message: Answer | Early, layout: Layout, indices: Sequence[Index]) -> None:
        """Gives a message that has frames its rows. indices: that were asked for. WireError where
        they are not frames of these rows; what is not even about them stays without.
        """
        frames, which = message.frames, message.which
        if len(frames) != len(self.arenas) or len(which) not in (0, len(frames)):
            return
        if any(len(bits) * 8 < len(index) for bits, index in zip(which, indices, strict=False)):
            return
        if which:
            masks = [np.unpackbits(b, count=len(i)) for b, i in zip(which, indices, strict=True)]
            indices = [i[mask.view(np.bool_)] for i, mask in zip(indices, masks, strict=True)]
        message.weights = [
            lossy.decode(frame, self._tables(layout, message.place, number, index), arena.dim)
            for number, (frame, index, arena) in enumerate(
                zip(frames, indices, self.arenas, strict=True)
            )
        ]
        message.frames = []

    def bound_at(self, step: int) -> float:
        """Twice the bound in the beginning, when weights are far from where they will be."""
        if step >= self.decay_steps:
            return self.bound
        return self.bound * 2 * (1 - 0.5 * (DECAYS * step // self.decay_steps) / DECAYS)

    @cached_property
    def _names(self) -> list[list[str]]:
        return [[self.names[table] for table in arena.table_ids] for arena in self.arenas]

    def _tables(self, layout: Layout, place: int, number: int, index: Index) -> NDArray[np.int32]:
        """By record: which of its arena's tables it belongs to."""
        arena = self.arenas[number]
        rows = layout.arena(arena.rows).row_at(place, index)
        return (np.searchsorted(arena.first_rows, rows, side="right") - 1).astype(np.int32)
