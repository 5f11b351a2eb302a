"""Which data records have changed since each of some steps: what a differential save writes.

A step sets the bits of what it changed in one bitmap, however many steps are of interest. When
another one becomes so, those bits are added to the bitmaps of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria import kernels
from planaria.kernels.types import Bytes
from planaria.server.history import Change

MAX_STEPS = 8  # of interest at once; the oldest are forgotten


class ChangedRows:
    """A bit per data record and step of interest. Nothing is of interest at first."""

    def __init__(self, data_records: Sequence[int]) -> None:
        """data_records: how many there are, arena by arena."""
        self._sizes = [-(-count // 8) for count in data_records]
        # Up to the step of interest that came after, up to now for the last one.
        self._since: dict[int, list[Bytes]] = {}

    @property
    def steps(self) -> list[int]:
        return list(self._since)

    def note(self, changes: Sequence[Change]) -> None:
        """What one step changed, arena by arena."""
        if self._since:
            newest = self._since[max(self._since)]
            for bits, change in zip(newest, changes, strict=True):
                kernels.mark(bits, change.indices)

    def begin(self, step: int) -> None:
        """From now on, changes since this step are of interest, too: it is the one just taken."""
        if self._since:
            newest = self._since[max(self._since)]
            for before in list(self._since)[:-1]:
                _add(self._since[before], newest)
        self._since[step] = [np.zeros(size, np.uint8) for size in self._sizes]
        for oldest in self.steps[:-MAX_STEPS]:
            del self._since[oldest]

    def since(self, step: int) -> list[Bytes] | None:
        """What has changed since, in memory of its own; None if that was not of interest."""
        if step not in self._since:
            return None
        found = [bits.copy() for bits in self._since[step]]
        if step != max(self._since):
            _add(found, self._since[max(self._since)])
        return found

    def forget(self, before: int) -> None:
        """Changes since earlier steps are not of interest any more."""
        for step in [step for step in self._since if step < before]:
            del self._since[step]


def _add(to: Sequence[Bytes], more: Sequence[Bytes]) -> None:
    for bits, others in zip(to, more, strict=True):
        np.bitwise_or(bits, others, out=bits)
