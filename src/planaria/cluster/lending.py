"""Memory below a connection: what is large is lent to the peer instead of sent.

For processes of one machine, over sockets that are files. Who sends owns the memory, and passes it
once, as a descriptor; who receives maps it, to read. A message that is lent says in the stream
where its arrays lie, and they are used there, without a copy. Both write the first page:

    byte       what
    0          1 as soon as the receiver has mapped the memory; until then nothing is lent
    1 to 64    of each loan: 1 from when it is given, 0 when the receiver is through with it

Loans lie where there is room, as low as possible: memory that is used again is warm, and fresh
memory is slow to touch. Where there is no room, or no memory, what is large goes through the
socket: nobody ever waits for a loan to end, and whoever keeps loans keeps no more than this. With
the connection ends the memory, but for those who still read it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from planaria.errors import WireError
from planaria.kernels.types import Bytes

LENT_BYTES = 32 << 20  # of one connection, at most: what is never lent is never touched
SMALLEST = 32 << 10  # that is worth a loan
LOANS = 64  # at a time
LINE = 64  # bytes of a line of the cache, which loans begin with
WHERE = struct.Struct("<QQ")  # a loan's first byte, and its number
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def _mapped(descriptor: int, size: int, protection: int) -> Bytes:
    """Until nobody has a view of it. Python's own mmap would keep a descriptor for so long."""
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


class Loan(NamedTuple):
    first: int
    end: int
    number: int

    @property
    def size(self) -> int:
        return self.end - self.first


class Lent:
    """The sender's end. Raises OSError where there is no memory, or no descriptor for it."""

    def __init__(self, size: int = LENT_BYTES) -> None:
        self.descriptor = os.memfd_create("planaria", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, PAGE + size)
            # So that nobody who reads it ever finds it shorter than it was.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            access = mmap.PROT_READ | mmap.PROT_WRITE
            self._memory = _mapped(self.descriptor, PAGE + size, access)
        except BaseException:
            self.passed()
            raise
        self._states = self._memory[:PAGE].data
        self._loans: list[Loan] = []  # as they lie
        self._promised: Loan | None = None  # it may be written, and is not lent yet
        self._written: Callable[[], object] = lambda: None  # what was promised, if it is in use
        self._numbers = list(range(1, LOANS + 1))  # that are free

    def passed(self) -> None:
        """The receiver has the descriptor, or never will; here it is of no use any more."""
        if self.descriptor != -1:
            os.close(self.descriptor)
            self.descriptor = -1

    def room(self, size: int) -> Bytes | None:
        """Memory to write an array into that is then lent, alone, without a copy. There is no other
        as long as that is neither lent nor forgotten.
        """
        if self._promised is not None:
            if self._written() is not None:
                return None
            self._states[self._promised.number] = 0
        self._promised = self._room(size)
        if self._promised is None:
            return None
        self._give(self._promised)
        room = self._memory[self._promised.first : self._promised.end]
        self._written = weakref.ref(room)
        return np.frombuffer(room.data, np.uint8)

    def _is_room(self, array: Any, size: int) -> bool:
        """Whether it is what was promised, of that size."""
        if self._promised is None or not size == array.nbytes == self._promised.size:
            return False
        return bool(array.ctypes.data == self._memory.ctypes.data + self._promised.first)

    def lend(self, arrays: Sequence[Any], places: Sequence[int], size: int) -> Loan | None:
        """Copies arrays, each to its place within so many bytes; None if there is no room."""
        if len(arrays) == 1 and self._is_room(arrays[0], size):
            loan, self._promised = self._promised, None
            return loan
        loan = self._room(size)
        if loan is None:
            return None
        for array, place in zip(arrays, places, strict=True):
            first = loan.first + place
            if array.nbytes:
                source = np.frombuffer(array, np.uint8)
                self._memory[first : first + len(source)] = source
        return self._give(loan)

    def _give(self, loan: Loan) -> Loan:
        self._states[loan.number] = 1
        self._numbers.remove(loan.number)
        self._loans.append(loan)
        self._loans.sort()
        return loan

    def _take_back(self) -> None:
        over = [loan for loan in self._loans if not self._states[loan.number]]
        if over:
            self._loans = [loan for loan in self._loans if loan not in over]
            self._numbers += [loan.number for loan in over]

    def _room(self, size: int) -> Loan | None:
        """The lowest that is large enough."""
        if not self._states[0]:
            return None
        self._take_back()
        first = PAGE
        for loan in self._loans:
            if first + size <= loan.first:
                break
            first = -(-loan.end // LINE) * LINE
        if not self._numbers or first + size > len(self._memory):
            return None
        return Loan(first, first + size, self._numbers[-1])


class Borrowed:
    """The receiver's end. What a sender says about it is compared with what is there."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor is closed here. Raises WireError if it is not one of such memory, and
        OSError where it cannot be mapped.
        """
        try:
            size = _checked_size(descriptor)
            self._memory = _mapped(descriptor, size, mmap.PROT_READ)
            self._states = _mapped(descriptor, PAGE, mmap.PROT_READ | mmap.PROT_WRITE).data
        finally:
            os.close(descriptor)
        self._reading: dict[int, weakref.ref[Any]] = {}  # by the number of the loan
        self._states[0] = 1

    def take(self, first: int, number: int, size: int) -> memoryview:
        """What is lent there. The loan ends when nobody has a view of it any more."""
        if not 1 <= number <= LOANS or number in self._reading or not self._states[number]:
            raise WireError(f"loan {number}, which was not given")
        if first % LINE or not size or not PAGE <= first <= len(self._memory) - size:
            raise WireError(f"a loan of {size} bytes at {first}, outside of what is shared")
        loan = np.frombuffer(self._memory, np.uint8, size, first)
        loan.flags.writeable = False
        end = partial(_give_back, self._reading, self._states, number, os.getpid())
        self._reading[number] = weakref.ref(loan, end)
        return loan.data

    def close(self) -> None:
        """Whoever still reads goes on; nobody else will have this memory again."""
        self._reading.clear()


def _checked_size(descriptor: int) -> int:
    """Of memory that will never be shorter: whoever read behind its end would be killed."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise WireError("a descriptor of something else than memory") from None
    size = os.fstat(descriptor).st_size
    if not seals & fcntl.F_SEAL_SHRINK or size <= PAGE:
        raise WireError(f"memory of {size} bytes, with the seals {seals}")
    return size


def _give_back(
    reading: dict[int, weakref.ref[Any]], states: memoryview, number: int, owner: int, _: object
) -> None:
    reading.pop(number, None)
    if os.getpid() == owner:  # a forked child forgets its copies, and its parent still reads
        states[number] = 0
