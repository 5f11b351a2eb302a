"""What can be done with the records of one arena, wherever they live."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from planaria.kernels import Applied
from planaria.kernels.types import Bytes, Floats, Index, OptimizerRule, Records


class StoredRecords(Protocol):
    """Records 0 .. len - 1, uint32[len, words] in all. They are zero until somebody writes them.

    Indices of records outside, and wrong shapes, are refused as by `planaria.kernels`, before
    anything is written.
    """

    @property
    def room(self) -> int:
        """How many there may come to be before `hold` has to make room."""

    @property
    def words(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Of all records."""

    def __len__(self) -> int: ...

    def gather(self, index: Index, out: Records | None = None) -> Records:
        """Copies of these records; or of as many of their first words as `out` has."""

    def scatter(self, index: Index, values: Records) -> None:
        """Distinct records become these."""

    def apply(
        self,
        rule: OptimizerRule,
        limit: int,
        dim: int,
        contributions: Sequence[tuple[Index, Floats]],
    ) -> Applied:
        """One optimizer step on records below `limit`: see kernels.apply."""

    def add(self, index: Index, coef: Bytes | None, delta: Records) -> None:
        """records[index[i]] ^= coef[i] * delta[i], distinct ones; without coef, all ones."""

    def add_delta(
        self,
        index: Index,
        slots: int,
        by_region: Bytes,
        delta: Records,
        valid: Bytes | None = None,
    ) -> Bytes | None:
        """The same with the coefficients of regions: see kernels.parity.add_delta."""

    def preserve(
        self,
        settled: Bytes,
        first: int,
        stop: int,
        index: Index,
        delta: Records,
        out_index: Index,
        out: Records,
    ) -> int:
        """Keeps what those of a step were before it: see kernels.saves.preserve."""

    def prefetch(self, index: Index) -> None:
        """These are wanted soon."""

    def read(self, first: int, stop: int) -> Records:
        """Records in a row, to be read until the next call of anything here: it need not be a copy,
        and nobody writes to it.
        """

    def read_into(self, first: int, out: Records) -> None:
        """The same as a copy."""

    def put(self, first: int, values: Records) -> None:
        """Records in a row become these."""

    def writing(self, first: int, stop: int) -> AbstractContextManager[Records]:
        """Memory that these records are taken from when the block ends: nobody may write to it
        later. At first it has what they are, or zeros. After an error they hold nothing of use.
        """

    def memory(self, first: int, stop: int) -> Records | None:
        """Where these records themselves lie, for whoever writes to them over a longer time; None
        if that is not one piece of memory.
        """

    def clear(self, first: int, stop: int) -> None:
        """Records in a row become zero."""

    def hold(self, count: int, room: int) -> bool:
        """So many records from now on, and space for `room` where that costs nothing; those that
        were there stay. Returns whether it had space for them.
        """

    def copy(self) -> Records:
        """All of them. For small arenas, and tests."""
