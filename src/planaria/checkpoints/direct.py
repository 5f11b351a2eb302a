"""A new local file that is written past the page cache, while its writer prepares what comes next.

Through the cache, every page of a checkpoint is allocated, copied and given up again, for nobody
who reads it soon, and what others have there is pushed out. In a virtual machine whose host takes
free memory back that costs many times as much as all else about a save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from planaria.kernels.types import Bytes

BLOCK_BYTES = 2 << 20
ALIGNED_BYTES = 4096  # what every disk takes: of memory, of places in the file and of lengths


class DirectFile(io.RawIOBase):
    """Holds two blocks of memory: one is filled while another thread writes the other.

    So an error shows in a later call. Where the file system has only the cached way, that is taken.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):
            self._set_direct(True)
        self._filling, self._other = _aligned_block(), _aligned_block()
        self._filled = 0
        self._thread = ThreadPoolExecutor(1, "checkpoint-write")
        self._under_way: Future[None] | None = None

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        rest = np.frombuffer(content, np.uint8)
        size = len(rest)
        while len(rest):
            some = rest[: BLOCK_BYTES - self._filled]
            self._filling[self._filled : self._filled + len(some)] = some
            self._filled += len(some)
            rest = rest[len(some) :]
            if self._filled == BLOCK_BYTES:
                self._await()
                self._under_way = self._thread.submit(self._put, self._filling)
                self._filling, self._other = self._other, self._filling
                self._filled = 0
        return size

    def flush(self) -> None:
        """Hands all to the system. What follows goes through the cache: it has no whole blocks."""
        self._await()
        if self._filled:
            self._set_direct(False)
            count, self._filled = self._filled, 0
            self._put(self._filling[:count])

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()  # flushes
            finally:
                self._thread.shutdown()
                os.close(self._descriptor)

    def _await(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way:
            under_way.result()

    def _put(self, block: Bytes) -> None:
        view = block.data
        while view.nbytes:
            try:
                count = os.write(self._descriptor, view)
            except OSError as why:
                # Some file systems promise the direct way and refuse it then. At the limit of a
                # disk, too, what fits may be no whole block; the cached way tells what is wrong.
                if why.errno != errno.EINVAL or not self._set_direct(False):
                    raise
            else:
                view = view[count:]

    def _set_direct(self, on: bool) -> bool:
        """Returns whether that is a change."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, wanted)
        return wanted != flags


def _aligned_block() -> Bytes:
    memory = np.empty(BLOCK_BYTES + ALIGNED_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNED_BYTES
    return memory[start : start + BLOCK_BYTES]
