"""The lines of a file by number, plain or gzip.

A file is read in chunks of whole lines, and where each begins is remembered the first time that it
is passed; the last few chunks stay in memory. What was never passed by this reader, or lies further
back, is reached from the nearest mark that any reader left, in about a tenth of a second; without
marks, by passing everything before it.
"""

from __future__ import annotations

import gzip
import os
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from planaria.data.marks import Mark, Marks, next_multiple
from planaria.data.packed import PackedText
from planaria.data.source import MAX_SAMPLES
from planaria.errors import DataError
from planaria.kernels import native

CHUNK_BYTES = 2**20
CHUNKS_KEPT = 4


class Text(Protocol):
    """What a file of text can do, packed or not."""

    def read(self, count: int, /) -> bytes: ...
    def tell(self) -> int: ...
    def seek(self, offset: int, /) -> object: ...
    def close(self) -> None: ...


class Chunk(NamedTuple):
    first: int  # line
    end: int
    text: bytes


class Lines:
    """Lines are numbered from 0.

    A chunk begins with line `_first_lines[i]` at byte `_offsets[i]` of the text, and ends with the
    last whole line of the next CHUNK_BYTES bytes. Both lists ascend; they have gaps where a mark
    was jumped to.
    """

    def __init__(self, path: str, cache: Path | None, on_progress: Callable[[], None]) -> None:
        self.path = path
        self._on_progress = on_progress
        self._first_lines = [0]
        self._offsets = [0]
        self._total: int | None = None
        self._kept: OrderedDict[int, Chunk] = OrderedDict()  # by offset, the latest used last
        self._tail = b""  # read, but part of the next chunk
        try:
            self._stamp = self._stamp_now()
            self._marks = Marks(path, self._stamp, cache)
            with open(path, "rb") as file:
                self._packed = file.read(2) == b"\x1f\x8b"
            self._text = self._open()
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror}; check the path") from error

    def _open(self) -> Text:
        if not self._packed:
            return open(self.path, "rb")
        if native is None:  # the standard library passes everything, and leaves no marks
            return gzip.GzipFile(self.path)
        return PackedText(self.path, self._marks, self._on_progress)

    def close(self) -> None:
        self._text.close()

    def count(self) -> int:
        if self._total is None:
            self._approach(MAX_SAMPLES)
        while self._total is None:
            self._chunk(len(self._offsets) - 1)
        return self._total

    def take(self, start: int, count: int) -> bytes:
        """`count` lines, each with its newline; fewer where the file ends before."""
        self._check_unchanged()
        pieces: list[bytes] = []
        at, end, approached = start, start + count, False
        while at < end and (self._total is None or at < self._total):
            chunk = self._chunk(bisect_right(self._first_lines, at) - 1)
            if at < chunk.end:
                stop = min(end, chunk.end)
                pieces.append(_cut(chunk.text, at - chunk.first, stop - chunk.first))
                at = stop
            elif not approached:
                self._approach(at)
                approached = True
        return b"".join(pieces)

    def _approach(self, line: int) -> None:
        """Makes a chunk begin behind the last mark before a line, if that is nearer than others."""
        mark = self._marks.before_line(line)
        if mark.lines <= self._first_lines[bisect_right(self._first_lines, line) - 1]:
            return
        if mark.begins_line:
            self._note_start(mark.lines, mark.offset)
            return
        text = self._read_at(mark.offset, CHUNK_BYTES)
        skipped = text.find(b"\n") + 1
        if skipped:
            self._note_start(mark.lines + 1, mark.offset + skipped)
            self._tail = text[skipped:]

    def _note_start(self, line: int, offset: int) -> None:
        number = bisect_left(self._offsets, offset)
        if number == len(self._offsets) or self._offsets[number] != offset:
            self._offsets.insert(number, offset)
            self._first_lines.insert(number, line)

    def _chunk(self, number: int) -> Chunk:
        first, offset = self._first_lines[number], self._offsets[number]
        if offset in self._kept:
            self._kept.move_to_end(offset)
            return self._kept[offset]
        text, at_end = self._read(offset)
        self._check_unchanged()
        chunk = Chunk(first, first + text.count(b"\n"), text)
        if at_end:
            self._total = chunk.end
        else:
            end = offset + len(text)
            self._note_start(chunk.end, end)
            if not self._packed and end >= next_multiple(offset):
                self._marks.leave(Mark(end, chunk.end))
        self._kept[offset] = chunk
        if len(self._kept) > CHUNKS_KEPT:
            self._kept.popitem(last=False)
        self._on_progress()
        return chunk

    def _read(self, offset: int) -> tuple[bytes, bool]:
        """(the chunk at `offset`, whether the file ends with it)."""
        text = self._read_at(offset, CHUNK_BYTES)
        if len(text) < CHUNK_BYTES:
            return text if text.endswith(b"\n") or not text else text + b"\n", True
        end = text.rfind(b"\n") + 1
        if end == 0:
            raise DataError(
                f"{self.path} has no line end in {CHUNK_BYTES} bytes from byte {offset}; "
                "expected one sample per line"
            )
        self._tail = text[end:]
        return text[:end], False

    def _read_at(self, offset: int, count: int) -> bytes:
        """Bytes of the text, which begin with what is left of the last ones if it fits."""
        try:
            if self._text.tell() == offset + len(self._tail):
                tail = self._tail
            else:
                self._text.seek(offset)
                tail = b""
            self._tail = b""
            return tail + self._text.read(count - len(tail))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {self.path}: {error}; restore the file") from error

    def _stamp_now(self) -> tuple[int, int]:
        status = os.stat(self.path)
        return status.st_size, status.st_mtime_ns

    def _check_unchanged(self) -> None:
        try:
            stamp = self._stamp_now()
        except OSError as error:
            raise DataError(
                f"{self.path} is gone ({error.strerror}); a job needs its data until it ends"
            ) from error
        if stamp != self._stamp:
            raise DataError(
                f"{self.path} was written to while it was read: {self._stamp[0]} bytes at first, "
                f"{stamp[0]} now; give a job a file that nobody changes"
            )


def _cut(chunk: bytes, first: int, stop: int) -> bytes:
    """Lines first to stop - 1 of a chunk."""
    ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
    return chunk[ends[first - 1] + 1 if first else 0 : ends[stop - 1] + 1]
