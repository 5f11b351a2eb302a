"""Records in two tiers: those in use lie in memory, a slot each, and the others in a file.

Rows are used by themselves, and the hot ones lie anywhere among the cold, so memory holds single
records and not pages. A record that is needed gets a slot; the clock's hand finds one that was not
used of late, and what was changed there is written to the file while work goes on. What lies in a
row is read from the file and overlaid with what is in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from planaria import kernels
from planaria.errors import RowError
from planaria.kernels import Applied
from planaria.kernels.checks import array, require
from planaria.kernels.tiers import COLD, Slots, claim, locate
from planaria.kernels.types import Bytes, Floats, Index, OptimizerRule, Records
from planaria.records.coldfile import RecordsFile

CALLS = 2**32  # after so many they are counted from 0 again
CLEARED_BYTES = 4 << 20  # of zeros at a time


@dataclass
class Accesses:
    """How often records were needed, how many of them were not in memory, and for how long
    somebody waited for those. The same record counts once for each of its uses.
    """

    touched: int = 0
    missed: int = 0
    waited_s: float = 0.0


class TieredRecords:
    """See StoredRecords. Threads may share it: each call is done as a whole.

    After a TierError it is of no use any more.
    """

    def __init__(self, folder: str, words: int, count: int, slots: int) -> None:
        """count: how many records there are; slots: how many of them in memory."""
        require(slots >= 1, f"at least 1 record must have room in memory, not {slots}")
        self.accesses = Accesses()
        self._words = words
        self._count = count
        self._file = RecordsFile(folder, words, count)
        self._table = Slots.empty(count, slots)
        self._hot = kernels.allocate(slots, words)
        self._changed = np.zeros(slots, np.bool_)  # since they came from the file
        self._hand = self._call = 0
        self._lock = threading.RLock()

    @property
    def room(self) -> int:
        return len(self._table.slot_of)

    @property
    def words(self) -> int:
        return self._words

    @property
    def nbytes(self) -> int:
        return self._count * self._words * 4

    @property
    def cold_bytes(self) -> int:
        """On the disk."""
        return self._file.nbytes

    def __len__(self) -> int:
        return self._count

    # ------------------------------------------------------------------ single records

    def gather(self, index: Index, out: Records | None = None) -> Records:
        self._check(index)
        if out is None:
            out = np.empty((len(index), self._words), np.uint32)
        with self._lock:
            for part in self._parts(index):
                kernels.gather(self._hot, self._bring(index[part]), out[part])
        return out

    def scatter(self, index: Index, values: Records) -> None:
        self._check(index, distinct=True)
        array("values", values, np.uint32, 2, shape=(len(index), self._words))
        with self._lock:
            for part in self._parts(index):
                slots = self._bring(index[part], read=False)
                kernels.scatter(self._hot, slots, values[part])
                self._changed[slots] = True

    def apply(
        self,
        rule: OptimizerRule,
        limit: int,
        dim: int,
        contributions: Sequence[tuple[Index, Floats]],
    ) -> Applied:
        contributions = list(contributions)
        for index, gradients in contributions:
            self._check(index, limit, distinct=True)
            array("gradients", gradients, np.float32, 2, shape=(len(index), dim))
        with self._lock:
            total = sum(len(index) for index, _ in contributions)
            pieces = -(-total // len(self._hot))
            if pieces <= 1:
                return self._apply(rule, dim, contributions)
            # Each record is in one piece with all that is contributed to it.
            size = -(-limit // pieces)
            found: list[Applied] = []
            for first in range(0, limit, size):
                found += self._apply_range(rule, dim, contributions, first, first + size)
            return Applied(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _apply_range(
        self,
        rule: OptimizerRule,
        dim: int,
        contributions: Sequence[tuple[Index, Floats]],
        first: int,
        stop: int,
    ) -> list[Applied]:
        """Halves the range until what it names has room in memory."""
        inside = [np.flatnonzero((index >= first) & (index < stop)) for index, _ in contributions]
        some = [
            (index[at], gradients[at])
            for (index, gradients), at in zip(contributions, inside, strict=True)
        ]
        if sum(map(len, inside)) <= len(self._hot) or stop - first <= len(self._hot):
            return [self._apply(rule, dim, some)]
        middle = (first + stop) // 2
        return [
            *self._apply_range(rule, dim, some, first, middle),
            *self._apply_range(rule, dim, some, middle, stop),
        ]

    def _apply(
        self, rule: OptimizerRule, dim: int, contributions: Sequence[tuple[Index, Floats]]
    ) -> Applied:
        indices = [index for index, _ in contributions]
        ends = np.cumsum([len(index) for index in indices])[:-1]
        slots = self._bring(np.concatenate([np.empty(0, np.int64), *indices]))
        in_slots = [
            (some, gradients)
            for some, (_, gradients) in zip(np.split(slots, ends), contributions, strict=True)
        ]
        applied = kernels.apply(rule, self._hot, len(self._hot), dim, in_slots)
        self._changed[applied.indices] = True
        return Applied(self._table.owner[applied.indices].astype(np.int64), applied.delta)

    def add(self, index: Index, coef: Bytes | None, delta: Records) -> None:
        self._check(index, distinct=True)
        array("delta", delta, np.uint32, 2, shape=(len(index), self._words))
        with self._lock:
            for part in self._parts(index):
                slots = self._bring(index[part])
                here = None if coef is None else coef[part]
                kernels.mul_add(self._hot, slots, here, delta[part])
                self._changed[slots] = True

    def add_delta(
        self,
        index: Index,
        slots: int,
        by_region: Bytes,
        delta: Records,
        valid: Bytes | None = None,
    ) -> Bytes | None:
        self._check(index, distinct=True)
        array("delta", delta, np.uint32, 2, shape=(len(index), self._words))
        coef = by_region[index // slots]
        if not coef.all():
            wrong = index[coef == 0][0]
            raise RowError(f"{wrong} lies in a region whose coefficient is 0")
        given = None if (coef == 1).all() else coef
        if valid is None:
            self.add(index, given, delta)
        else:
            at = np.flatnonzero(valid[index // 8] >> (index % 8).astype(np.uint8) & 1)
            here = None if given is None else given[at]
            self.add(index[at], here, kernels.gather(delta, at))
        return given

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
        inside = np.flatnonzero((index >= first) & (index < stop))
        rows = index[inside]
        new = inside[settled[rows // 8] >> (rows % 8).astype(np.uint8) & 1 == 0]
        rows = index[new]
        kernels.mark(settled, rows)
        count = len(new)
        out_index[:count] = rows
        self.gather(rows, out[:count])
        np.bitwise_xor(out[:count], kernels.gather(delta, new), out=out[:count])
        return count

    def prefetch(self, index: Index) -> None:
        self._check(index)
        with self._lock:
            index = index[: len(self._hot) // 2]
            found = locate(self._table, index, self._next_call())
            if len(found.missing):
                slots, self._hand = claim(
                    self._table, self._call, self._file.done(), self._hand, len(found.missing)
                )
                there = len(slots)
                self._table.slot_of[found.missing[there:]] = COLD  # not now
                self._fill(found.missing[:there], slots, read=True)
                self.accesses.missed += there

    # ------------------------------------------------------------------ records in a row

    def read(self, first: int, stop: int) -> Records:
        out = np.empty((stop - first, self._words), np.uint32)
        self.read_into(first, out)
        return out

    def read_into(self, first: int, out: Records) -> None:
        with self._lock:
            self._file.read_range(first, out)
            at, slots = self._in_memory(first, first + len(out))
            if len(at):
                kernels.scatter(out, at, kernels.gather(self._hot, slots))

    def put(self, first: int, values: Records) -> None:
        values = np.ascontiguousarray(values)
        with self._lock:
            self._file.wait_for_all()  # nobody reads what is being written
            self._file.write_range(first, values)
            at, slots = self._in_memory(first, first + len(values))
            if len(at):
                kernels.scatter(self._hot, slots, kernels.gather(values, at))
                self._changed[slots] = False

    @contextmanager
    def writing(self, first: int, stop: int) -> Iterator[Records]:
        values = kernels.allocate(stop - first, self._words)
        yield values
        self.put(first, values)

    def memory(self, first: int, stop: int) -> Records | None:
        return None

    def clear(self, first: int, stop: int) -> None:
        size = max(1, CLEARED_BYTES // (4 * self._words))
        zeros = np.zeros((min(size, stop - first), self._words), np.uint32)
        for at in range(first, stop, size):
            self.put(at, zeros[: stop - at])

    def hold(self, count: int, room: int) -> bool:
        with self._lock:
            enough = count <= self.room
            if not enough:
                # The disk is asked for no more than is needed, whatever there may be in the end.
                self._file.grow(count)
                slot_of = np.full(count, COLD, np.int32)
                slot_of[: self.room] = self._table.slot_of
                self._table = self._table._replace(slot_of=slot_of)
            self._count = count
            return enough

    def copy(self) -> Records:
        return self.read(0, self._count)

    def _in_memory(self, first: int, stop: int) -> tuple[Index, Index]:
        """Which of these records are, counted from the first, and in which slots."""
        slots = self._table.slot_of[first:stop]
        at = np.flatnonzero(slots >= 0)
        found = slots[at].astype(np.int64)
        if len(at):
            self._wait(int(self._table.ticket[found].max()))
        return at, found

    # ------------------------------------------------------------------ slots

    def _check(self, index: Index, limit: int | None = None, distinct: bool = False) -> None:
        """Raises before anything is done with it."""
        array("index", index, np.int64, 1)
        below = self._count if limit is None else limit
        if distinct:
            kernels.check_distinct(index, below)
        elif len(index) and index.view(np.uint64).max() >= below:
            raise RowError(f"index has a record outside 0 to {below - 1}")

    def _parts(self, index: Index) -> list[slice]:
        """As many records at a time as there is memory for."""
        size = len(self._hot)
        return [slice(at, at + size) for at in range(0, len(index), size)]

    def _next_call(self) -> int:
        self._call = (self._call + 1) % CALLS
        return self._call

    def _bring(self, index: Index, read: bool = True) -> Index:
        """The slots of these records, which are there until the next call.

        read: whether what they are matters; else they are about to be written as wholes.
        """
        found = locate(self._table, index, self._next_call())
        self.accesses.touched += len(index)
        ticket = found.ticket
        if len(found.missing):
            self.accesses.missed += len(found.missing)
            slots = self._free(len(found.missing))
            ticket = max(ticket, self._fill(found.missing, slots, read))
            lacking = found.slots < 0
            found.slots[lacking] = self._table.slot_of[index[lacking]]
        self._wait(ticket)
        return found.slots

    def _free(self, count: int) -> Index:
        """Slots for so many records besides those that this call needs."""
        slots, self._hand = claim(self._table, self._call, self._file.done(), self._hand, count)
        if len(slots) < count:  # reads for others are still under way
            self._file.wait_for_all()
            done = self._file.done()
            rest, self._hand = claim(self._table, self._call, done, self._hand, count - len(slots))
            slots = np.concatenate([slots, rest])
        assert len(slots) == count
        return slots

    def _fill(self, records: Index, slots: Index, read: bool) -> int:
        """Gives these records these slots, and what was in them to the file."""
        table = self._table
        owners = table.owner[slots]
        table.slot_of[owners[owners >= 0]] = COLD
        changed = slots[self._changed[slots]]
        if len(changed):
            self._file.write(table.owner[changed].astype(np.int64), changed, self._hot)
        table.slot_of[records] = slots
        table.owner[slots] = records
        table.uses[slots] = 1
        self._changed[slots] = False
        ticket = self._file.read(records, slots, self._hot) if read else 0
        table.ticket[slots] = ticket
        return ticket

    def _wait(self, ticket: int) -> None:
        if ticket > self._file.done():
            began = time.monotonic()
            self._file.wait(ticket)
            self.accesses.waited_s += time.monotonic() - began
        else:
            self._file.check()
