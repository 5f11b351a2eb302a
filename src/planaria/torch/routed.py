"""Rows of all arenas, sorted by the server that holds them: one message for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planaria import kernels
from planaria.config import Config
from planaria.kernels import Parts
from planaria.kernels.types import Floats, Index
from planaria.layout import Layout
from planaria.trainer.routing import Router


@dataclass(frozen=True)
class Routed:
    """Distinct rows per arena, and which run of them each place has."""

    of: list[Index]  # the rows
    parts: list[Parts]
    runs: list[list[slice]]  # per arena, by place
    dims: Sequence[int]
    layout: Layout  # whose places these are

    @property
    def rows(self) -> dict[int, list[Index]]:
        """Per place and arena: record numbers there."""
        return {
            place: [
                part.indices[runs[place]] for part, runs in zip(self.parts, self.runs, strict=True)
            ]
            for place in range(len(self.runs[0]))
        }

    @property
    def counts(self) -> list[int]:
        """Rows by place, over all arenas."""
        counts: list[int] = np.sum([part.counts for part in self.parts], axis=0).tolist()
        return counts

    def gather(self, found: dict[int, list[Floats]]) -> list[Floats]:
        """Per arena float32[n, dim], in the order of the rows, of what each place has answered."""
        gathered = []
        for arena, (part, runs, dim) in enumerate(
            zip(self.parts, self.runs, self.dims, strict=True)
        ):
            values = np.empty((len(part.order), dim), np.uint32)
            for place, run in enumerate(runs):
                kernels.scatter(values, part.order[run], found[place][arena].view(np.uint32))
            gathered.append(values.view(np.float32))
        return gathered

    def split(self, per_arena: Sequence[Floats]) -> dict[int, list[Floats]]:
        """The other way round: per place and arena."""
        ordered = [
            kernels.gather(np.ascontiguousarray(values).view(np.uint32), part.order).view(
                np.float32
            )
            for values, part in zip(per_arena, self.parts, strict=True)
        ]
        return {
            place: [values[runs[place]] for values, runs in zip(ordered, self.runs, strict=True)]
            for place in range(len(self.runs[0]))
        }


ROUTES_KEPT = 2  # of the step in progress, and of the next one, whose rows were asked for ahead


class JobRouter:
    """Where the rows of a job are.

    Gradients go where the rows came from. So the last routes are kept, and found again by the very
    arrays that were given; nobody may write to them.
    """

    def __init__(self, config: Config) -> None:
        self._rows = [arena.rows for arena in config.arenas]
        self._layout: Layout | None = None
        self._routers: list[Router] = []
        self._dims = [arena.dim for arena in config.arenas]
        self._kept: deque[Routed] = deque(maxlen=ROUTES_KEPT)

    def route(self, rows: Sequence[Index], layout: Layout) -> Routed:
        """rows: per arena, distinct arena rows. layout: of now; what was kept stays as it was."""
        for routed in self._kept:
            pairs = zip(rows, routed.of, strict=True)
            if all(one is other or not len(one) + len(other) for one, other in pairs):
                return routed
        if layout is not self._layout:
            self._layout = layout
            self._routers = [Router(layout.arena(count)) for count in self._rows]
        parts = [router.partition(own) for router, own in zip(self._routers, rows, strict=True)]
        runs = []
        for part in parts:
            ends = np.cumsum(part.counts).tolist()
            counts = part.counts.tolist()
            runs.append([slice(end - n, end) for end, n in zip(ends, counts, strict=True)])
        routed = Routed(list(rows), parts, runs, self._dims, layout)
        self._kept.append(routed)
        return routed
