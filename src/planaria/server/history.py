"""The deltas of the last few steps, which are what makes any of those steps readable.

A delta is its own undo: XOR the later deltas out of a record and it is as it was. A server keeps
one history for its own data records and one per source for its parity records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planaria import kernels
from planaria.errors import HistoryGone, StepError
from planaria.kernels.types import Bytes, Index, Records


class Change(NamedTuple):
    """What one step did to one arena: record indices[i] ^= coef[i] * delta[i].

    The arrays are shared with whoever made or sent them and are never written again.
    """

    indices: Index
    coef: Bytes | None  # None: all ones, as for data records
    delta: Records


class History:
    """The changes of steps oldest + 1 .. last; each step has one Change per arena."""

    def __init__(self, keep: int, step: int) -> None:
        self.keep = keep
        self.last = step
        self._steps: deque[Sequence[Change]] = deque(maxlen=keep)

    @property
    def oldest(self) -> int:
        """The oldest step that can still be read."""
        return self.last - len(self._steps)

    @property
    def bytes_used(self) -> int:
        return sum(
            (part.nbytes if part.base is None else part.base.nbytes)
            for changes in self._steps
            for change in changes
            for part in change
            if part is not None
        )

    def check_next(self, step: int) -> None:
        if step != self.last + 1:
            raise StepError(f"step {step} cannot follow step {self.last}; send {self.last + 1}")

    def push(self, step: int, changes: Sequence[Change]) -> None:
        self.check_next(step)
        self._steps.append(changes)
        self.last = step

    def after(self, step: int) -> list[Sequence[Change]]:
        """The changes of the steps after `step`, oldest first."""
        if step > self.last:
            raise StepError(f"step {step} is still to come; the last one is {self.last}")
        if step < self.oldest:
            raise HistoryGone(
                f"step {step} is gone; the oldest that can be read is {self.oldest}", self.oldest
            )
        return list(self._steps)[step - self.oldest :]

    def take_back(self, arena: int, query: Index, values: Records, step: int) -> None:
        """XORs the deltas after `step` out of values read for `query`, in place."""
        for changes in self.after(step):
            kernels.undo(values, query, *changes[arena])

    def take_back_range(self, arena: int, first: int, values: Records, step: int) -> None:
        """The same for the records from `first` on, which `values` holds in a row."""
        for part in self.within(arena, first, len(values), step):
            kernels.mul_add(values, *part)

    def within(self, arena: int, first: int, count: int, step: int) -> Iterator[Change]:
        """The changes after `step` to so many records from `first` on, counted from there."""
        for changes in self.after(step):
            index, coef, delta = changes[arena]
            inside = np.flatnonzero((index >= first) & (index < first + count))
            if len(inside):
                here = None if coef is None else coef[inside]
                yield Change(index[inside] - first, here, kernels.gather(delta, inside))

    def retract(self, step: int) -> list[Sequence[Change]]:
        """Forgets the steps after `step` and gives back their changes, for undoing."""
        forgotten = self.after(step)
        for _ in forgotten:
            self._steps.pop()
        self.last = step
        return forgotten
