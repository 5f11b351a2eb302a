"""Rows on their way from servers to trainers, in fewer bytes.

What arrives of a row depends on its bits, its table and the step, and on nothing else: not on what
else is in the message, which server sent it, or whether it came early. So a job with lossy lookups
is as reproducible as an exact one, whoever dies.

Servers keep nothing of it: a lookup carries the bounds of its step (planaria.trainer.bounds), and
which encoder a table has is written down with the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from planaria.config import Config
from planaria.errors import ArgumentError, ConfigError, WireError
from planaria.kernels import lossy
from planaria.kernels.types import Bytes, Floats, Index, Mask
from planaria.layout import Layout
from planaria.tables import Arena
from planaria.wire.messages import Answer, Early, Lookup

EXACT = "exact"
HALVES = ("fp16", "bf16")
NO_FRAME: Bytes = np.zeros(0, np.uint8)
Rows = TypeVar("Rows", Answer, Early)


@dataclass(frozen=True)
class Coding:
    """How the rows of each table travel. Without encoders all are exact."""

    arenas: Sequence[Arena] = ()
    names: Sequence[str] = ()  # of all tables
    encoders: Sequence[str] = ()  # of all tables: `exact`, `fp16`, `bf16`, or one of codes

    def __post_init__(self) -> None:
        known = lossy.available()
        missing = [
            (name, one)
            for name, one in zip(self.names, self.encoders, strict=False)
            if one not in known
        ]
        if missing:
            name, one = missing[0]
            raise ConfigError(
                f"wire: the rows of table {name!r} are to be sent with {one}, which is not "
                "installed here; pip install planaria[compression] on every machine"
            )

    @classmethod
    def of_job(cls, config: Config) -> Coding:
        names = [table.name for table in config.tables]
        encoders = [config.wire.encoder_of(name) for name in names]
        return cls(config.arenas, names, encoders) if {*encoders} != {EXACT} else cls()

    @cached_property
    def adapts(self) -> Mask:
        """By table: whether it has a bound."""
        return np.array([one not in (EXACT, *HALVES) for one in self.encoders], np.bool_)

    @cached_property
    def _codes(self) -> list[bool]:
        """By arena: whether any of its tables is not sent exactly."""
        return [
            any(self.encoders[table] != EXACT for table in arena.table_ids)
            if self.encoders
            else False
            for arena in self.arenas
        ]

    @cached_property
    def _named(self) -> list[tuple[list[str], list[str]]]:
        """By arena: names and encoders of its tables."""
        ids = [arena.table_ids.tolist() for arena in self.arenas]
        return [([self.names[t] for t in own], [self.encoders[t] for t in own]) for own in ids]

    # ------------------------------------------------------------------ a server's side

    def check(self, lookup: Lookup) -> None:
        """What a lookup says of bounds, before anything is done with it."""
        if lookup.exact or not self.adapts.any():
            return
        if len(lookup.bounds) != 1 or lookup.bounds[0].shape != self.adapts.shape:
            raise ArgumentError(f"a lookup needs {len(self.adapts)} bounds, one for each table")
        bounds = lookup.bounds[0]
        if not bool(((bounds >= 0) & (bounds <= lossy.HIGHEST_BOUND)).all()):
            raise ArgumentError("a lookup has a bound that is none, or above 2^126")

    def packed(
        self,
        layout: Layout,
        place: int,
        lookup: Lookup,
        indices: Sequence[Index],
        weights: list[Floats],
    ) -> tuple[list[Floats], list[Bytes]]:
        """The rows of an answer as it has them, per arena: themselves, or a frame. indices: their
        record numbers. NotFiniteError where they cannot be sent so.
        """
        if lookup.exact or not any(self._codes):
            return weights, []
        all_bounds = lookup.bounds[0] if lookup.bounds else np.zeros(len(self.names), np.float32)
        plain, frames = list(weights), [NO_FRAME] * len(weights)
        for number, arena in enumerate(self.arenas):
            if self._codes[number]:
                names, encoders = self._named[number]
                tables = self.tables(layout, place, number, indices[number])
                bounds = np.ascontiguousarray(all_bounds[arena.table_ids])
                self._require_numbers(number, bounds, tables, weights[number])
                frames[number] = lossy.encode(weights[number], tables, bounds, encoders, names)
                plain[number] = weights[number][:0]
        return plain, frames

    def _require_numbers(
        self, number: int, bounds: Floats, tables: NDArray[np.int32], weights: Floats
    ) -> None:
        """Where tables with bounds have none so far, nobody else looks."""
        arena = self.arenas[number]
        exactly = self.adapts[arena.table_ids] & (bounds == 0)
        if exactly.any():
            wrong = ~np.isfinite(weights).all(axis=1) & exactly[tables]
            if wrong.any():
                lossy.refuse_rows(self._named[number][0][tables[np.argmax(wrong)]])

    # ------------------------------------------------------------------ a trainer's side

    def unpacked(self, message: Rows, layout: Layout, indices: Sequence[Index]) -> Rows:
        """A message with rows instead of frames. indices: that were asked for. WireError where
        these are no frames of such rows.
        """
        if not message.frames:
            return message
        which = message.which
        if {len(message.frames), len(message.weights)} != {len(self.arenas)}:
            raise WireError("an answer has frames of other arenas than this job's")
        if which and [len(b) for b in which] != [-(-len(index) // 8) for index in indices]:
            raise WireError("an answer does not say which of the rows it has")
        if which:
            masks = [np.unpackbits(b, count=len(i)) for b, i in zip(which, indices, strict=True)]
            indices = [i[mask.view(np.bool_)] for i, mask in zip(indices, masks, strict=True)]
        weights = list(message.weights)
        for number, (frame, index) in enumerate(zip(message.frames, indices, strict=True)):
            if len(frame):
                tables = self.tables(layout, message.place, number, index)
                weights[number] = lossy.decode(frame, tables, self.arenas[number].dim)
        return msgspec.structs.replace(message, weights=weights, frames=[])

    # ------------------------------------------------------------------ tables

    def tables(self, layout: Layout, place: int, number: int, index: Index) -> NDArray[np.int32]:
        """By record: which of its arena's tables it belongs to."""
        arena = self.arenas[number]
        if len(arena.table_ids) == 1:
            return np.zeros(len(index), np.int32)
        return self.of_rows(number, layout.arena(arena.rows).row_at(place, index))

    def of_rows(self, number: int, rows: Index) -> NDArray[np.int32]:
        """The same by rows of the arena."""
        first = self.arenas[number].first_rows
        return (np.searchsorted(first, rows, side="right") - 1).astype(np.int32)


EXACTLY = Coding()


def bytes_spared(message: object) -> int:
    """By the frames of a message: what its rows would have taken more without."""
    if not isinstance(message, Answer | Early):
        return 0
    return sum(lossy.rows_bytes(frame) - frame.nbytes for frame in message.frames if len(frame))
