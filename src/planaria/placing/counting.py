"""How often each row of a table was met, in bounded memory.

Up to `limit` rows are counted exactly. When more were met, two things are kept instead:

- **which rows are hot**: the counts of `limit` rows, after Misra and Gries. When there are more, as
  many accesses are taken off every count as bring the rest to zero, and those rows are dropped. No
  count is too low by more than was taken off in all, which is at most accesses / limit.
- **how many rows were met once, twice, ...**: exact counts of the rows whose hash ends in a number
  of zero bits, which are as good as drawn at random.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from planaria.kernels.twin_numbers import mix
from planaria.kernels.types import Index, Mask

BUFFER = 2**18  # rows that are collected before they are counted


class RowCounts:
    def __init__(self, limit: int = 2**20) -> None:
        self.limit = limit
        self.accesses = 0
        self.taken_off = 0  # of every count, so far
        self.zero_bits = 0
        self._rows, self._counts = _none(), _none()
        self._followed, self._followed_counts = _none(), _none()
        self._waiting: list[Index] = []
        self._waits = 0

    @classmethod
    def of(cls, counts: Index) -> Self:
        """Of a table whose rows were counted elsewhere: counts[x] is that of row x."""
        found = cls(len(counts))
        found._rows = np.flatnonzero(counts)
        found._counts = counts[found._rows]
        found.accesses = int(counts.sum())
        return found

    def add(self, rows: Index) -> None:
        """The rows of some accesses, in any order, one of them perhaps many times."""
        self.accesses += len(rows)
        self._waiting.append(rows)
        self._waits += len(rows)
        if self._waits >= BUFFER:
            self._count()

    @property
    def exact(self) -> bool:
        self._count()
        return self.zero_bits == 0

    @property
    def by_heat(self) -> tuple[Index, Index]:
        """(rows, counts), the hottest first, equally hot ones by number."""
        self._count()
        order = np.lexsort((self._rows, -self._counts))
        return self._rows[order], self._counts[order] + self.taken_off

    @property
    def spectrum(self) -> tuple[Index, NDArray[np.float64]]:
        """(counts, about how many rows have them), counts descending."""
        self._count()
        if not self.zero_bits:
            values, rows = np.unique(self._counts, return_counts=True)
            return values[::-1], rows[::-1].astype(np.float64)
        # Rows met so often were never dropped; of the others, those followed stand for all.
        sure = 2 * self.taken_off
        hot = self._counts[self._counts + self.taken_off > sure] + self.taken_off
        cold = self._followed_counts[self._followed_counts <= sure]
        most, hot_rows = np.unique(hot, return_counts=True)
        few, cold_rows = np.unique(cold, return_counts=True)
        parts = [cold_rows * float(1 << self.zero_bits), hot_rows.astype(np.float64)]
        return np.concatenate([few, most])[::-1], np.concatenate(parts)[::-1]

    def _count(self) -> None:
        if not self._waits:
            return
        new, counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        self._waiting, self._waits = [], 0
        if self.zero_bits:
            mine = self._is_followed(new)
            self._followed, self._followed_counts = _sum(
                self._followed, self._followed_counts, new[mine], counts[mine]
            )
        self._rows, self._counts = _sum(self._rows, self._counts, new, counts)
        if len(self._rows) > self.limit:
            if not self.zero_bits:
                self._followed, self._followed_counts = self._rows, self._counts
            self._thin()
            self._drop()

    def _thin(self) -> None:
        while len(self._followed) > self.limit // 2:
            self.zero_bits += 1
            keep = self._is_followed(self._followed)
            self._followed = self._followed[keep]
            self._followed_counts = self._followed_counts[keep]

    def _drop(self) -> None:
        # Half of the room at once, so that this is rare.
        lowest = int(np.partition(self._counts, -self.limit // 2)[-self.limit // 2])
        self.taken_off += lowest
        keep = self._counts > lowest
        self._rows, self._counts = self._rows[keep], self._counts[keep] - lowest

    def _is_followed(self, rows: Index) -> Mask:
        hashes = mix(rows.astype(np.uint64))
        mask: Mask = hashes & np.uint64((1 << self.zero_bits) - 1) == 0
        return mask


def _none() -> Index:
    return np.empty(0, np.int64)


def _sum(rows: Index, counts: Index, more: Index, more_counts: Index) -> tuple[Index, Index]:
    """Both counts of each row; rows ascend."""
    every, where = np.unique(np.concatenate([rows, more]), return_inverse=True)
    weights = np.concatenate([counts, more_counts]).astype(np.float64)
    return every, np.bincount(where, weights, len(every)).astype(np.int64)
