"""Marks: places in a file of lines from which it can be read on, kept for whoever comes later.

A reader that passes a file leaves a mark every SPACING bytes of text, so that the next one, a
replacement trainer for instance, starts close to the line that it wants. A mark of a gzip file
holds what its decompressor needs: a bit of the file and the 32 KB of text before it. One of a plain
file is the beginning of a line, and saves counting those before it.

    <cache>/marks/<hash of the path>-<size>-<mtime>/<offset>-<lines>

A mark is a function of the file alone. So any number of readers may leave it: each is a file of
its own that appears whole, and equal ones replace each other. It has a checksum, and one that is
damaged is removed, and made anew when the place is passed again. Marks only save time: where none
can be written or read, everything works without.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

SPACING = 2**25  # bytes of text between marks: a tenth of a second to pass, 0.05 % of it to keep
FILES_KEPT = 64  # of how many data files marks are kept
WINDOW = 2**15

_HEAD = Struct("<8sQQQIQ")
_MAGIC = b"planmrk1"


@dataclass(frozen=True)
class Mark:
    """Before byte `offset` of the text there are `lines` line ends."""

    offset: int
    lines: int
    bit: int = 0  # of the gzip file, where a block of its deflate stream begins
    crc: int = 0  # of the text of its member so far
    length: int = 0  # of the same
    window: bytes = b""  # the text before it, up to WINDOW bytes; marks of plain files have none

    @property
    def begins_line(self) -> bool:
        return self.window[-1:] in (b"", b"\n")

    @property
    def name(self) -> str:
        return f"{self.offset:016x}-{self.lines:016x}"

    def pack(self) -> bytes:
        head = _HEAD.pack(_MAGIC, self.offset, self.lines, self.bit, self.crc, self.length)
        content = head + zlib.compress(self.window, 1)
        return content + zlib.crc32(content).to_bytes(4, "little")

    @classmethod
    def unpack(cls, content: bytes) -> Mark | None:
        """None if it is damaged."""
        body, crc = content[:-4], content[-4:]
        if len(body) < _HEAD.size or zlib.crc32(body).to_bytes(4, "little") != crc:
            return None
        magic, offset, lines, bit, member_crc, length = _HEAD.unpack_from(body)
        try:
            window = zlib.decompressobj().decompress(body[_HEAD.size :], WINDOW)
        except zlib.error:
            return None
        mark = cls(offset, lines, bit, member_crc, length, window)
        return mark if magic == _MAGIC else None


BEGINNING = Mark(0, 0)


def next_multiple(offset: int) -> int:
    """A mark is left at the first chance from each multiple of SPACING on; this is the next."""
    return (offset // SPACING + 1) * SPACING


def default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "planaria"


class Marks:
    """The marks of one file, as it is now."""

    def __init__(self, path: str, stamp: tuple[int, int], cache: Path | None = None) -> None:
        """stamp: size and time of the last change; with another one, other marks hold."""
        name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
        self._all = (default_cache() if cache is None else cache) / "marks"
        self._folder = self._all / "-".join([name, *map(str, stamp)])
        self._writable = True

    def before_line(self, line: int) -> Mark:
        """The last mark with the beginning of this line behind it."""
        return self._last(lambda _, lines: lines < line)

    def before_offset(self, offset: int) -> Mark:
        """The last mark that is not behind this byte of the text."""
        return self._last(lambda at, _: at <= offset)

    def leave(self, mark: Mark) -> None:
        path = self._folder / mark.name
        if not self._writable or path.exists():
            return
        try:
            if not self._folder.exists():
                self._folder.mkdir(parents=True)
                self._forget_old()
            # Not files.write_atomically: with its fsync a mark of 32 KB takes 8 ms instead of 0.3,
            # and one that a power cut has damaged is known by its checksum.
            half = path.with_name(f"{mark.name}.{os.getpid()}.half")
            half.write_bytes(mark.pack())
            half.replace(path)
        except OSError:  # a full or read-only disk: it is no reason to end a job
            self._writable = False

    def _last(self, fits: Callable[[int, int], bool]) -> Mark:
        try:
            names = sorted(os.listdir(self._folder), reverse=True)
        except OSError:
            return BEGINNING
        for name in names:
            try:
                offset, lines = (int(number, 16) for number in name.split("-"))
            except ValueError:
                continue  # half of a mark
            if fits(offset, lines) and (mark := self._load(name)):
                return mark
        return BEGINNING

    def _load(self, name: str) -> Mark | None:
        path = self._folder / name
        try:
            mark = Mark.unpack(path.read_bytes())
            if mark and mark.name == name:
                return mark
            path.unlink()
        except OSError:
            pass
        return None

    def _forget_old(self) -> None:
        """Those of the same file as it was before, and of files that were marked long ago."""
        path_hash = self._folder.name.partition("-")[0]
        others = [folder for folder in self._all.iterdir() if folder != self._folder]
        others.sort(key=lambda folder: folder.stat().st_mtime)
        too_many = len(others) + 1 - FILES_KEPT
        for number, folder in enumerate(others):
            if number < too_many or folder.name.startswith(path_hash):
                shutil.rmtree(folder, ignore_errors=True)
