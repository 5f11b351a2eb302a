"""Writing one part: a server's records, or the trainers' dense state.

A part gets a file name that nobody else has, so a writer that was given up can never spoil the
file of its successor; what no manifest names does not count and is removed later.

The caller owns all arrays and must not change them during a call; after it they are its own again.
One thread at a time may use a writer. It keeps no more than its write buffer and one encoded chunk.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.checkpoints.chunks import (
    CHUNK_BYTES,
    DENSE,
    Chunk,
    Kind,
    pack_chunk,
    pack_file_header,
)
from planaria.checkpoints.encodings import RAW_BITS, Encoding, Raw
from planaria.checkpoints.folders import NO_SPACE, AnyFolder, open_folder, what_to_do
from planaria.checkpoints.manifest import PartSummary, step_folder
from planaria.checkpoints.names import check_job_id, part_name
from planaria.errors import ArgumentError, CheckpointError
from planaria.kernels import saves
from planaria.kernels.checks import array, require
from planaria.kernels.types import Bytes, Index, Records

MAX_RECORDS = 2**44


class PartWriter:
    """Writes a part of the checkpoint of `step`. End it with `finish`, or with `abandon`."""

    def __init__(
        self,
        folder: AnyFolder,
        step: int,
        place: int = DENSE,
        encodings: Sequence[Encoding] | None = None,
        job: str = "",
    ) -> None:
        """folder: the one of all checkpoints. encodings: one per arena; records as they are if
        none are given. job: the id of the job that the part belongs to.
        """
        check_job_id(job)
        require(step >= 0 and place >= DENSE, f"there is no step {step} or place {place}")
        self.step = step
        self.place = place
        self.bytes = 0
        self._encodings = encodings
        bits = {encoding.bits for encoding in encodings or ()} or {RAW_BITS}
        require(len(bits) == 1, f"the arenas of one checkpoint have one number of bits, not {bits}")
        self._bits = bits.pop()
        self._chunks = 0
        self._records = 0
        self._seal = hashlib.sha256()
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._listed: dict[int, Bytes] = {}  # by arena: a bit per record
        self._names: set[str] = set()
        self._ended = False
        self.file = part_name(place, job)
        self._folder = open_folder(folder).folder(step_folder(step))
        with self._no_half_files(opened=False):
            self._file = self._folder.open_write(self.file)
        self._write_header(pack_file_header(place, step))

    # ------------------------------------------------------------------ content

    def add(self, arena: int, first: int, records: Records) -> None:
        """Records first, first + 1, ... of an arena: uint32[n, words]. No record twice.

        A chunk never spans two calls. A server that adds region by region (see layout) makes
        chunks of which others need all or nothing, and what they do not need they pass over.
        """
        self._check_open()
        array("records", records, np.uint32, 2)
        require(0 <= arena < 2**32, f"there is no arena {arena}")
        require(
            first >= 0 and first + len(records) <= MAX_RECORDS,
            f"records are numbered 0 to 2^44 - 1, not {first} to {first + len(records)}",
        )
        require(arena not in self._listed, f"arena {arena} has listed records; add no ranges to it")
        if not len(records):
            return
        ranges = _with_range(self._ranges.get(arena, []), first, first + len(records))
        for piece in _pieces(len(records), 4 * records.shape[1]):
            self._add_records(Kind.RANGE, arena, first + piece.start, None, records[piece])
        self._ranges[arena] = ranges

    def add_rows(self, arena: int, index: Index, records: Records) -> None:
        """Records `index` of an arena, int64[n]: what changed. No record twice in one part."""
        self._check_open()
        array("index", index, np.int64, 1)
        array("records", records, np.uint32, 2)
        array("records", records, np.uint32, 2, shape=(len(index), records.shape[1]))
        require(0 <= arena < 2**32, f"there is no arena {arena}")
        require(arena not in self._ranges, f"arena {arena} has ranges; add no listed records to it")
        if not len(index):
            return
        self._note_listed(arena, index)
        for piece in _pieces(len(index), 4 * records.shape[1] + 8):
            self._add_records(Kind.LISTED, arena, 0, index[piece], records[piece])

    def add_bytes(self, name: str, content: bytes | NDArray[np.generic]) -> None:
        """Named bytes of any length: an array of the dense state. Each name once."""
        self._check_open()
        require(name not in self._names, f"{name!r} was added before; give each its own name")
        if isinstance(content, np.ndarray):
            require(content.flags.c_contiguous, f"{name} must be C-contiguous; pass a copy")
            payload: Bytes = content.reshape(-1).view(np.uint8)
        else:
            payload = np.frombuffer(content, np.uint8)
        key = np.frombuffer(name.encode(), np.uint8)
        self._names.add(name)
        for piece in _pieces(len(payload), 1) or [slice(0, 0)]:
            self._add_chunk(Kind.NAMED, 0, 0, piece.start, len(key), key, payload[piece])

    # ------------------------------------------------------------------ the end

    def finish(self) -> PartSummary:
        """Makes the file durable and says what publish must know of it."""
        self._check_open()
        with self._no_half_files():
            self._folder.finish(self._file)
        self._ended = True
        return PartSummary(
            file=self.file,
            place=self.place,
            bytes=self.bytes,
            chunks=self._chunks,
            seal=self._seal.hexdigest(),
            bits=self._bits,
            records=self._records,
            ranges=self._ranges,
        )

    def abandon(self) -> None:
        """Removes the file. Does nothing after `finish` or when done already."""
        if not self._ended:
            self._ended = True
            self._folder.discard(self._file, self.file)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()

    # ------------------------------------------------------------------ inside

    def _note_listed(self, arena: int, index: Index) -> None:
        limit = int(index.max()) + 1
        require(limit <= MAX_RECORDS, f"records are numbered 0 to 2^44 - 1, not {limit - 1}")
        kernels.check_distinct(index, limit)
        bitmap = self._listed.get(arena, np.zeros(0, np.uint8))
        if len(bitmap) * 8 < limit:
            larger = np.zeros(max(-(-limit // 8), 2 * len(bitmap)), np.uint8)
            larger[: len(bitmap)] = bitmap
            bitmap = larger
        require(
            len(kernels.missing(bitmap, index)) == len(index),
            f"a record of arena {arena} was listed before; list what changed once",
        )
        kernels.mark(bitmap, index)
        self._listed[arena] = bitmap

    def _add_records(
        self, kind: Kind, arena: int, first: int, index: Index | None, records: Records
    ) -> None:
        words = records.shape[1]
        if self._encodings is None:
            encoding: Encoding = Raw(words)
        else:
            require(arena < len(self._encodings), f"arena {arena} was given no encoding")
            encoding = self._encodings[arena]
        key = np.zeros(0, np.uint8) if index is None else index.view(np.uint8)
        self._add_chunk(kind, arena, words, first, len(records), key, encoding.encode(records))
        self._records += len(records)

    def _add_chunk(
        self, kind: Kind, arena: int, words: int, first: int, count: int, key: Bytes, payload: Bytes
    ) -> None:
        checksum = saves.crc32(payload, saves.crc32(key))
        chunk = Chunk(kind, self._bits, arena, words, first, count, len(payload), checksum)
        self._write_header(pack_chunk(chunk))
        self._write(key.data)
        self._write(payload.data)
        self._chunks += 1

    def _write_header(self, header: bytes) -> None:
        self._seal.update(header)
        self._write(memoryview(header))

    def _write(self, content: memoryview) -> None:
        if content.nbytes:
            with self._no_half_files():
                self._file.write(content)
            self.bytes += content.nbytes

    def _check_open(self) -> None:
        if self._ended:
            raise CheckpointError(f"{self.file} was finished or given up; start a new part")

    @contextlib.contextmanager
    def _no_half_files(self, opened: bool = True) -> Iterator[None]:
        """What cannot be written is removed. Drivers of fsspec raise any kind of exception."""
        try:
            yield
        except Exception as why:
            if opened:
                self.abandon()
            self._ended = True
            number = why.errno if isinstance(why, OSError) else None
            cause = "no space is left" if number in NO_SPACE else "writing failed"
            raise CheckpointError(
                f"{self.file} of step {self.step} was not saved to {self._folder}: {cause} "
                f"({why}); nothing of this checkpoint counts. To save again, {what_to_do(why)}"
            ) from why


def _pieces(count: int, item_bytes: int) -> list[slice]:
    """Slices of about CHUNK_BYTES each, and at least one item."""
    step = max(1, CHUNK_BYTES // item_bytes)
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


def _with_range(ranges: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """The ranges and one more, ascending and merged where they touch. None may overlap."""
    merged: list[tuple[int, int]] = []
    for a, b in sorted([*ranges, (first, end)]):
        if merged and a < merged[-1][1]:
            raise ArgumentError(f"records {a} to {min(b, merged[-1][1]) - 1} were added before")
        if merged and a == merged[-1][1]:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return merged
