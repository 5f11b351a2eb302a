"""All records in memory, in one array: each operation is one kernel on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from planaria import kernels
from planaria.kernels import Applied, saves
from planaria.kernels.parity import add_delta
from planaria.kernels.types import Bytes, Floats, Index, OptimizerRule, Records


class RamRecords:
    """See StoredRecords."""

    def __init__(self, room: Records, count: int | None = None) -> None:
        """room: uint32[n, words], which belongs to it from now on; the first `count` are in use."""
        self._room = room
        self._count = len(room) if count is None else count

    @property
    def array(self) -> Records:
        """The records themselves."""
        return self._room[: self._count]

    @property
    def room(self) -> int:
        return len(self._room)

    @property
    def words(self) -> int:
        return int(self._room.shape[1])

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def __len__(self) -> int:
        return self._count

    def gather(self, index: Index, out: Records | None = None) -> Records:
        return kernels.gather(self.array, index, out)

    def scatter(self, index: Index, values: Records) -> None:
        kernels.scatter(self.array, index, values)

    def apply(
        self,
        rule: OptimizerRule,
        limit: int,
        dim: int,
        contributions: Sequence[tuple[Index, Floats]],
    ) -> Applied:
        return kernels.apply(rule, self.array, limit, dim, contributions)

    def add(self, index: Index, coef: Bytes | None, delta: Records) -> None:
        kernels.mul_add(self.array, index, coef, delta)

    def add_delta(
        self,
        index: Index,
        slots: int,
        by_region: Bytes,
        delta: Records,
        valid: Bytes | None = None,
    ) -> Bytes | None:
        return add_delta(self.array, index, slots, by_region, delta, valid)

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
        # When servers come or go, a step may have changed what is not in use any more.
        return saves.preserve(settled, first, stop, index, self._room, delta, out_index, out)

    def prefetch(self, index: Index) -> None:
        pass

    def read(self, first: int, stop: int) -> Records:
        return self._room[first:stop]

    def read_into(self, first: int, out: Records) -> None:
        np.copyto(out, self._room[first : first + len(out)])

    def put(self, first: int, values: Records) -> None:
        np.copyto(self._room[first : first + len(values)], values)

    @contextmanager
    def writing(self, first: int, stop: int) -> Iterator[Records]:
        yield self._room[first:stop]

    def memory(self, first: int, stop: int) -> Records | None:
        return self._room[first:stop]

    def clear(self, first: int, stop: int) -> None:
        self._room[first:stop] = 0

    def hold(self, count: int, room: int) -> bool:
        enough = count <= len(self._room)
        if not enough:
            wider = kernels.allocate(room, self.words)
            wider[: self._count] = self.array
            self._room = wider
        self._count = count
        return enough

    def copy(self) -> Records:
        return self.array.copy()
