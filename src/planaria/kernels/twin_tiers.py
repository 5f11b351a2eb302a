"""The NumPy twin of the kernels of tiers. Its file is read and written at once, by the caller."""

from __future__ import annotations

import mmap
import os
import zlib

import numpy as np
from numpy.typing import NDArray

from planaria.kernels.twin import check_range
from planaria.kernels.types import Bytes, Index, Records

MOST_USES = 15
COLD, CLAIMED = -1, -2


def locate_slots(
    slot_of: NDArray[np.int32],
    owner: NDArray[np.int32],
    pin: NDArray[np.uint32],
    ticket: NDArray[np.uint64],
    uses: Bytes,
    index: Index,
    call: int,
    slots: Index,
    missing: Index,
) -> tuple[int, int]:
    check_range(index, len(slot_of), "index")
    found = slot_of[index].astype(np.int64)
    slots[:] = np.where(found >= 0, found, COLD)
    there = found[found >= 0]
    pin[there] = call
    touched, times = np.unique(there, return_counts=True)
    uses[touched] = np.minimum(uses[touched] + times, MOST_USES)
    lacking = index[found == COLD]
    fresh = lacking[np.sort(np.unique(lacking, return_index=True)[1])]
    slot_of[fresh] = CLAIMED
    missing[: len(fresh)] = fresh
    return len(fresh), int(ticket[there].max(initial=0))


def claim_slots(
    slot_of: NDArray[np.int32],
    owner: NDArray[np.int32],
    pin: NDArray[np.uint32],
    ticket: NDArray[np.uint64],
    uses: Bytes,
    call: int,
    done: int,
    hand: int,
    slots: Index,
) -> tuple[int, int]:
    count = 0
    for _ in range(len(owner) * (MOST_USES + 1)):
        if count == len(slots):
            break
        slot, hand = hand, (hand + 1) % len(owner)
        if pin[slot] == call or ticket[slot] > done:
            continue
        if owner[slot] >= 0 and uses[slot] > 0:
            uses[slot] -= 1
            continue
        pin[slot] = call
        slots[count] = slot
        count += 1
    return count, hand


class ColdFile:
    def __init__(
        self, descriptor: int, record_bytes: int, stride: int, threads: int, room: int
    ) -> None:
        self._descriptor = descriptor
        self._record_bytes = record_bytes
        self._stride = stride
        self._block = mmap.mmap(-1, stride)  # aligned, as a direct file needs it
        self._issued = 0
        self._failure: tuple[bool, int, int] | None = None

    def __del__(self) -> None:
        os.close(self._descriptor)

    def write(
        self, records: Index, slots: Index, values: Records, sums: NDArray[np.uint32]
    ) -> None:
        for record, slot in zip(records.tolist(), slots.tolist(), strict=True):
            self._write(record, values[slot], sums)

    def read(self, records: Index, slots: Index, values: Records, sums: NDArray[np.uint32]) -> int:
        for record, slot in zip(records.tolist(), slots.tolist(), strict=True):
            self._read(record, values[slot], sums)
        self._issued += 1
        return self._issued

    def write_range(self, first: int, values: Records, sums: NDArray[np.uint32]) -> None:
        for number, value in enumerate(values):
            self._write(first + number, value, sums)

    def read_range(self, first: int, values: Records, sums: NDArray[np.uint32]) -> None:
        for number, value in enumerate(values):
            self._read(first + number, value, sums)

    def wait(self, ticket: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def done(self) -> int:
        return self._issued

    def failure(self) -> tuple[bool, int, int] | None:
        return self._failure

    def _write(self, record: int, value: Records, sums: NDArray[np.uint32]) -> None:
        content = value.tobytes()
        sums[record] = zlib.crc32(content)
        self._block[: len(content)] = content
        self._transfer(True, record)

    def _read(self, record: int, value: Records, sums: NDArray[np.uint32]) -> None:
        if not self._transfer(False, record):
            return
        content = self._block[: self._record_bytes]
        if zlib.crc32(content) != sums[record]:
            self._fail(False, 0, record)
        else:
            value[:] = np.frombuffer(content, np.uint32)

    def _transfer(self, writes: bool, record: int) -> bool:
        move = os.pwritev if writes else os.preadv
        try:
            moved = move(self._descriptor, [self._block], record * self._stride)
        except OSError as error:
            return self._fail(writes, error.errno or -1, record)
        return moved == self._stride or self._fail(writes, -1, record)

    def _fail(self, writing: bool, error: int, record: int) -> bool:
        self._failure = self._failure or (writing, error, record)
        return False
