"""The text of a gzip file, from any mark on.

The standard library cannot say where a block of a deflate stream begins, nor go on in the middle
of one, so the decoder is our own (native/inflate.hpp). What wraps the stream is read here: members,
one or more, each with a header, a checksum and a length; zeros may follow the last.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from planaria.data.marks import BEGINNING, WINDOW, Mark, Marks, next_multiple
from planaria.errors import DataError
from planaria.kernels import native

PACKED_BYTES = 2**18  # read from the file at once
TEXT_BYTES = 2**20  # unpacked at once
PADDING = 8  # what the decoder may look at behind its input

_NEEDS_INPUT, _NEEDS_ROOM, _AT_BLOCK, _AT_END, _DAMAGED = range(5)
_HAS_CHECKSUM, _HAS_EXTRA, _HAS_NAME, _HAS_COMMENT = 2, 4, 8, 16


class PackedText:
    """Reads like a file of the text. Text that was unpacked but not read yet is at _given.._at."""

    def __init__(self, path: str, marks: Marks, on_progress: Callable[[], None]) -> None:
        self._path = path
        self._marks = marks
        self._on_progress = on_progress
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._packed = bytearray(PACKED_BYTES + PADDING)
        self._packed_array = np.frombuffer(self._packed, np.uint8)
        self._text = bytearray(WINDOW + TEXT_BYTES)
        self._text_array = np.frombuffer(self._text, np.uint8)
        self._restart(BEGINNING)

    def close(self) -> None:
        self._file.close()

    def tell(self) -> int:
        return self._end - (self._at - self._given)

    def seek(self, offset: int) -> None:
        mark = self._marks.before_offset(offset)
        if not mark.offset <= self.tell() <= offset:
            self._restart(mark)
        while (left := offset - self.tell()) > 0:
            if not self.read(min(left, TEXT_BYTES)):
                raise DataError(f"{self._path} has less text than before; restore the file")
            self._on_progress()

    def read(self, count: int) -> bytes:
        """`count` bytes, fewer at the end of the file."""
        pieces: list[bytes] = []
        while count and (self._given < self._at or self._unpack()):
            piece = bytes(self._text[self._given : min(self._given + count, self._at)])
            self._given += len(piece)
            count -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    # ------------------------------------------------------------------ unpacking

    def _restart(self, mark: Mark) -> None:
        assert native is not None
        self._first_byte = mark.bit // 8  # of the file, in _packed
        self._valid = 0  # bytes of _packed
        self._bit = mark.bit % 8  # of _packed
        self._file.seek(self._first_byte)
        self._text[: len(mark.window)] = mark.window
        self._given = self._at = len(mark.window)
        self._end, self._lines = mark.offset, mark.lines  # of what was unpacked
        self._crc, self._length = mark.crc, mark.length
        self._next_mark = next_multiple(mark.offset)
        # The beginning of the file is that of a member; marks are inside members.
        self._inflater = native.Inflater() if mark.bit else None
        self._fill()

    def _unpack(self) -> bool:
        """Unpacks some text; False at the end of the file."""
        kept = min(self._at, WINDOW)
        self._text[:kept] = self._text[self._at - kept : self._at]
        self._given = self._at = kept
        while self._at == self._given:
            if self._inflater is None and not self._begin_member():
                return False
            self._inflate()
        return True

    def _inflate(self) -> None:
        """Until the array is full, a mark was left, or the member or its input ends."""
        assert self._inflater is not None
        before = self._at
        pause_from = before + max(self._next_mark - self._end, 0)
        stop, self._bit, self._at = self._inflater.run(
            self._packed_array, self._valid, self._bit, self._text_array, before, pause_from
        )
        self._crc = zlib.crc32(memoryview(self._text)[before : self._at], self._crc)
        self._length += self._at - before
        self._end += self._at - before
        self._lines += self._text.count(b"\n", before, self._at)
        if stop == _AT_BLOCK:
            self._leave_mark()
        elif stop == _AT_END:
            self._end_member()
        elif stop == _DAMAGED:
            self._refuse("its content is no deflate stream")
        elif stop == _NEEDS_INPUT and not self._fill():
            self._refuse("it ends in the middle")

    def _leave_mark(self) -> None:
        bit = 8 * self._first_byte + self._bit
        window = bytes(self._text[max(self._at - WINDOW, 0) : self._at])
        self._marks.leave(Mark(self._end, self._lines, bit, self._crc, self._length, window))
        self._next_mark = next_multiple(self._end)

    # ------------------------------------------------------------------ members

    def _begin_member(self) -> bool:
        """False at the end of the file."""
        while (first := self._take(1)) == b"\0":
            pass
        if not first:
            return False
        head = first + self._take(9)
        if len(head) < 10:
            self._refuse("it ends in the middle")
        if head[:3] != b"\x1f\x8b\x08":
            self._refuse("a member does not begin as one")
        flags = head[3]
        if flags & _HAS_EXTRA:
            self._take(int.from_bytes(self._take(2), "little"))
        for has_text in (_HAS_NAME, _HAS_COMMENT):
            while flags & has_text and self._take(1) not in (b"\0", b""):
                pass
        if flags & _HAS_CHECKSUM:
            self._take(2)
        assert native is not None
        self._inflater = native.Inflater()
        self._crc = self._length = 0
        return True

    def _end_member(self) -> None:
        self._bit = (self._bit + 7) // 8 * 8
        self._inflater = None
        wanted = self._crc.to_bytes(4, "little") + (self._length % 2**32).to_bytes(4, "little")
        if (found := self._take(8)) != wanted:
            self._refuse("it ends in the middle" if len(found) < 8 else "its checksum is wrong")

    def _take(self, count: int) -> bytes:
        """Bytes between streams, fewer at the end of the file."""
        taken = b""
        while len(taken) < count:
            at = self._bit // 8
            piece = bytes(self._packed[at : min(at + count - len(taken), self._valid)])
            self._bit += 8 * len(piece)
            taken += piece
            if not piece and not self._fill():
                break
        return taken

    def _fill(self) -> bool:
        """Reads on behind what is left of the input; False at the end of the file."""
        at = self._bit // 8
        left = self._packed[at : self._valid]
        self._packed[: len(left)] = left
        self._first_byte += at
        self._bit %= 8
        view = memoryview(self._packed)[len(left) : PACKED_BYTES]
        count = self._file.readinto(view) or 0
        self._valid = len(left) + count
        return count > 0

    def _refuse(self, why: str) -> NoReturn:
        at = self._first_byte + self._bit // 8
        raise DataError(
            f"cannot read {self._path}: {why}, near byte {at} of "
            f"{os.path.getsize(self._path)}; restore the file"
        )
