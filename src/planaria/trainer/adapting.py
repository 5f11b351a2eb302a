"""A trainer's part in bounds: what its lookups carry, what it measures, and what it keeps of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria.dense import KEEP
from planaria.kernels.types import Bytes, Floats, Index
from planaria.layout import Layout
from planaria.trainer.bounds import Bounds, split
from planaria.trainer.job import Gradients, TrainerJob
from planaria.trainer.rerouting import FloatsByPlace, Route, RowsByPlace


class Adapting:
    """Idle where no table of the job has a bound: then nothing is kept, sent or copied for it."""

    def __init__(self, job: TrainerJob) -> None:
        self.job = job
        self.tables = len(job.coding.adapts) if job.coding.adapts.any() else 0
        self.bounds = Bounds.unknown(self.tables, 0)
        self._received: list[tuple[int, Route, FloatsByPlace]] = []  # in steps that measure
        self._extra: dict[int, int] = {}  # floats behind the dense gradient of a step

    def start(self, step: int, state: Bytes) -> Bytes:
        """The dense state that this trainer starts from, wherever it came from: with bounds."""
        own, trailer = split(state)
        if not self.tables:
            return own
        self._received.clear()
        if len(trailer):
            self.bounds = Bounds.unpack(trailer)
            if len(self.bounds.next) == self.tables:
                return state
        self.bounds = Bounds.unknown(self.tables, step)
        return np.concatenate([own, self.bounds.pack()])

    def of_lookup(self, step: int, *, after: int, exact: bool) -> list[Floats]:
        """What a lookup of this step carries. after: the last step whose dense state is here."""
        if not self.tables or exact:
            return []
        bounds = self.bounds.next if step == after + 1 else self.bounds.later
        return [bounds * np.float32(self.job.bound_rule.factor(step))]

    # ------------------------------------------------------------------ a step that measures

    def received(self, step: int, route: Route, values: FloatsByPlace) -> None:
        """Rows have come; values: by the driver's places."""
        if self.tables and step == self.bounds.due and not route.exact:
            self._received.append((step, route, values))

    def extended(self, step: int, rank: int, gradients: Gradients, dense: Floats) -> Floats:
        """The dense gradient of a step, with what was measured in it behind it. By rank 0, of rows
        that it pushes: whatever else it has looked at depends on what it has guessed before.
        """
        if not self.tables or step != self.bounds.due:
            return dense
        measured = np.zeros(self.tables, np.float32)
        if rank == 0:
            rows, values = self._pushed(step, gradients)
            rule = self.job.bound_rule
            measured = self.bounds.measured(self.job.coding, rule, rows, values)
        self._extra = {old: n for old, n in self._extra.items() if old > step - KEEP}
        self._extra[step] = self.tables
        return np.concatenate([dense, measured])

    def cut(self, step: int, total: Floats) -> Floats:
        """A sum without that."""
        return total[: len(total) - self._extra.get(step, 0)]

    def end(self, step: int, state: Bytes, total: Floats) -> Bytes:
        """The dense state after a step, as all keep it."""
        if not self.tables:
            return state
        measured = total[-self.tables :].copy() if step == self.bounds.due else None
        self.bounds = self.bounds.after(step, measured, self.job.bound_rule)
        self._received = [one for one in self._received if one[0] > step]
        return np.concatenate([state, self.bounds.pack()])

    # ------------------------------------------------------------------ inside

    def _pushed(self, step: int, gradients: Gradients) -> tuple[list[Index], list[Floats]]:
        """Per arena: the rows of a push in ascending order, and as what they were received."""
        parts = [(route, values) for of, route, values in self._received if of == step]
        wanted = self._rows(gradients.rows, gradients.layout or self.job.layout)
        came = [self._rows(route.asked, route.layout) for route, _ in parts]
        rows: list[Index] = []
        found: list[Floats] = []
        for arena, pushed in enumerate(wanted):
            own = [some[arena] for some in came]
            there = np.concatenate([np.zeros(0, np.int64), *own])
            weights = [v[arena] for _, values in parts for v in values.values()]
            nothing = np.zeros((0, self.job.dims[arena]), np.float32)
            unique, first = np.unique(there, return_index=True)
            known = np.intersect1d(unique, pushed)
            rows.append(known)
            found.append(np.concatenate([nothing, *weights])[first[np.searchsorted(unique, known)]])
        return rows, found

    def _rows(self, rows: RowsByPlace, layout: Layout) -> list[Index]:
        """Per arena, of all places one after the other: rows of the arena."""
        found: list[Index] = []
        for arena, count in enumerate(self.job.rows):
            of = layout.arena(count)
            named: Sequence[Index] = [of.row_at(place, own[arena]) for place, own in rows.items()]
            found.append(np.concatenate([np.zeros(0, np.int64), *named]))
        return found
