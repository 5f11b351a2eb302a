"""A set of rows of one table that are hot, at a bit and a half per row.

    words        uint64[ceil(rows / 64)]: bit x % 64 of word x // 64 says whether row x is hot
    before[i]    how many rows are hot in the words before word i

On file there are the words alone; `before` follows from them. It makes a bitmap a renumbering as
well: hot rows first, cold ones behind them, both in the order of their numbers.

    renumbered(x) = hot rows below x                    if x is hot
                    all hot rows + cold rows below x    otherwise
"""

from __future__ import annotations

from typing import Self

import numpy as np

from planaria.errors import ArgumentError, RowError
from planaria.kernels.types import Bytes, Index, Keys, Mask

WORD = 64
_SHIFT, _LOW = np.uint64(6), np.uint64(63)
_ONE = np.uint64(1)


class HotRows:
    """The bitmap belongs to this object; nobody writes to it."""

    def __init__(self, rows: int, words: Keys) -> None:
        if rows < 1 or words.shape != (-(-rows // WORD),) or words.dtype != np.uint64:
            raise ArgumentError(
                f"{rows} rows have a bitmap of uint64[{-(-rows // WORD)}], "
                f"not {words.dtype}{list(words.shape)}"
            )
        unused = -rows % WORD
        if unused and int(words[-1]) >> (WORD - unused):
            raise ArgumentError(f"a bitmap has bits past the last of its {rows} rows")
        self.rows, self.words = rows, words
        counts = np.cumsum(_ones(words))
        self.count = int(counts[-1])
        self._before = np.concatenate([[0], counts[:-1]]).astype(
            np.uint32 if rows < 2**32 else np.int64
        )

    @classmethod
    def of(cls, rows: int, hot: Index) -> Self:
        """hot: row numbers in any order."""
        if len(hot) and not 0 <= hot.min() <= hot.max() < rows:
            raise RowError(f"hot rows must be 0 to {rows - 1}")
        flags = np.zeros(-(-rows // WORD) * WORD, np.bool_)
        flags[hot] = True
        packed: Bytes = np.packbits(flags, bitorder="little")
        return cls(rows, packed.view("<u8").astype(np.uint64, copy=False))

    @property
    def nbytes(self) -> int:
        """Of memory, what `renumbered` needs included."""
        return int(self.words.nbytes + self._before.nbytes)

    def holds(self, rows: Index) -> Mask:
        """Which of these rows are hot."""
        at = self._checked(rows)
        bits: Mask = (self.words[at >> _SHIFT] >> (at & _LOW)) & _ONE != 0
        return bits

    def numbers(self) -> Index:
        """All hot rows, ascending."""
        return np.flatnonzero(
            np.unpackbits(self.words.astype("<u8").view(np.uint8), bitorder="little")
        )

    def renumbered(self, rows: Index) -> Index:
        """Where these rows stand when hot ones come first."""
        at = self._checked(rows)
        words, bit = self.words[at >> _SHIFT], at & _LOW
        below = self._before[at >> _SHIFT] + _ones(words & ((_ONE << bit) - _ONE)).astype(np.int64)
        hot = (words >> bit) & _ONE != 0
        found: Index = np.where(hot, below, self.count + rows - below).astype(np.int64)
        return found

    def original(self, numbers: Index) -> Index:
        """The other way round: rows by where they stand."""
        self._checked(numbers)
        found = np.empty(len(numbers), np.int64)
        hot = numbers < self.count
        before = self._before.astype(np.int64)
        found[hot] = _select(self.words, before, numbers[hot])
        cold_before = np.arange(len(before), dtype=np.int64) * WORD - before
        found[~hot] = _select(~self.words, cold_before, numbers[~hot] - self.count)
        return found

    def _checked(self, rows: Index) -> Keys:
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.rows:
            raise RowError(f"rows must be 0 to {self.rows - 1}")
        return rows.astype(np.uint64)


def _ones(words: Keys) -> Index:
    """How many bits are set in each word."""
    pairs = words - ((words >> np.uint64(1)) & np.uint64(0x5555555555555555))
    low = np.uint64(0x3333333333333333)
    fours = (pairs & low) + ((pairs >> np.uint64(2)) & low)
    eights = (fours + (fours >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    counts: Index = ((eights * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.int64)
    return counts


def _select(words: Keys, before: Index, ranks: Index) -> Index:
    """Where the bits are that have so many set ones before them."""
    # Of words without a set bit the last one with this count before it is the one that has some.
    at = np.searchsorted(before, ranks, side="right") - 1
    bits = np.unpackbits(
        words[at].astype("<u8").view(np.uint8).reshape(-1, 8), 1, bitorder="little"
    )
    place = np.argmax(
        np.cumsum(bits, axis=1, dtype=np.int64) > (ranks - before[at])[:, None], axis=1
    )
    found: Index = at * WORD + place
    return found
