"""The file of an arena's cold records: opened in a folder of a local disk, and gone by its name.

It is the memory of a living process, not durable state. Every record lies in blocks of its own, so
that none is read to write another, and what comes back is compared with a checksum in memory.
"""

from __future__ import annotations

import errno
import os
import secrets
import zlib
from typing import NoReturn

import numpy as np

from planaria.errors import TierError
from planaria.kernels.tiers import open_cold
from planaria.kernels.types import Index, Records

THREADS = 8  # as many requests are under way
WRITE_ROOM = 2 << 20  # bytes that may wait to be written
BUFFER_BYTES = WRITE_ROOM + THREADS * (64 << 10)  # of memory, for one file
BLOCKS = (512, 4096)  # that a disk may want to be written in
CHECKSUM_BYTES = 4
ADVICE = "make room or give tier.path another folder"


class RecordsFile:
    """Room for `records` of `words` words, all of them zero."""

    def __init__(self, folder: str, words: int, records: int) -> None:
        self._folder = folder
        self._words = words
        try:
            self._descriptor, self._stride = _open(folder, words * 4)
        except OSError as error:
            self._raise(error, "opened")
        self._cold = open_cold(self._descriptor, words, self._stride, THREADS, WRITE_ROOM)
        self._sums = np.empty(0, np.uint32)
        self.grow(records)

    @property
    def stride(self) -> int:
        """Bytes from one record to the next, whole blocks of the disk."""
        return self._stride

    @property
    def nbytes(self) -> int:
        """On the disk."""
        return len(self._sums) * self._stride

    def grow(self, records: int) -> None:
        """The disk must have room for all of them now: later nobody could be asked for more."""
        self.wait_for_all()
        self.settle()
        size = records * self._stride
        try:
            try:
                os.posix_fallocate(self._descriptor, 0, max(size, 1))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                os.ftruncate(self._descriptor, size)  # a file system that reserves nothing
        except OSError as error:
            self._raise(error, f"given {size:,} bytes")
        sums = np.full(records, zlib.crc32(bytes(4 * self._words)), np.uint32)
        sums[: len(self._sums)] = self._sums
        self._sums = sums

    def write(self, records: Index, slots: Index, values: Records) -> None:
        """Takes copies of values[slots[i]]; they are written in time."""
        self._cold.write(records, slots, values, self._sums)
        self.check()

    def read(self, records: Index, slots: Index, values: Records) -> int:
        """Begins to read into values[slots[i]]; returns the ticket to wait with."""
        return self._cold.read(records, slots, values, self._sums)

    def write_range(self, first: int, values: Records) -> None:
        self._cold.write_range(first, values, self._sums)
        self.check()

    def read_range(self, first: int, values: Records) -> None:
        self._cold.read_range(first, values, self._sums)
        self.check()

    def wait(self, ticket: int) -> None:
        self._cold.wait(ticket)
        self.check()

    def wait_for_all(self) -> None:
        self.wait(2**64 - 1)

    def settle(self) -> None:
        self._cold.settle()
        self.check()

    def done(self) -> int:
        return self._cold.done()

    def check(self) -> None:
        """Raises TierError once anything has failed, and from then on."""
        failure = self._cold.failure()
        if failure is None:
            return
        writing, number, record = failure
        if number > 0:
            self._raise(OSError(number, os.strerror(number)), "written" if writing else "read")
        why = "other bytes came back than were written" if number == 0 else "its end came too soon"
        raise TierError(
            f"the file of cold records in {self._folder} is damaged at record {record}: {why}; "
            "this server ends, and its replacement decodes all records. If that happens again, "
            "give tier.path another disk"
        )

    def _raise(self, error: OSError, done: str) -> NoReturn:
        raise TierError(
            f"the file of cold records in {self._folder} cannot be {done}: "
            f"{error.strerror or error}; {ADVICE}"
        ) from error


def _open(folder: str, record_bytes: int) -> tuple[int, int]:
    """The descriptor, and how many bytes a record has in the file. Past the page cache, where the
    file system has that way: what is cached there would be memory that nobody counts.
    """
    path = os.path.join(folder, f"planaria-{os.getpid()}-{secrets.token_hex(8)}.cold")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags | direct, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor, direct = os.open(path, flags, 0o600), 0
    os.unlink(path)  # it goes with the process, however that ends
    try:
        block = _block(descriptor) if direct else 4
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, -(-record_bytes // block) * block


def _block(descriptor: int) -> int:
    """The least that can be written to a direct file at once."""
    page = np.zeros(2 * BLOCKS[-1], np.uint8)
    start = -page.ctypes.data % BLOCKS[-1]
    for block in BLOCKS:
        try:
            os.pwrite(descriptor, page[start : start + block].data, block)
        except OSError as error:
            if error.errno != errno.EINVAL or block == BLOCKS[-1]:
                raise
        else:
            return block
    raise AssertionError("the last block is written or refused")
