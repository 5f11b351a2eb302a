"""Reading one part, chunk by chunk, with every byte that is used checked.

A body that nobody asks for is passed over without being read; its header is checked all the same.
So the seal, which stands for all headers, is compared whenever a part has been gone through.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, NoReturn

import numpy as np

from planaria.checkpoints.chunks import (
    CHUNK_HEADER_BYTES,
    FILE_HEADER_BYTES,
    Chunk,
    Kind,
    unpack_chunk,
    unpack_file_header,
)
from planaria.checkpoints.folders import Folder
from planaria.checkpoints.manifest import PartSummary
from planaria.errors import DamagedCheckpoint
from planaria.kernels import saves
from planaria.kernels.types import Bytes

READERS = 2  # threads: one waits for the disk while the other computes checksums
IN_FLIGHT = 3 * READERS  # chunks


def check_size(folder: Folder, part: PartSummary) -> None:
    """Raises unless the part is there with the length that it was written with."""
    try:
        size = folder.size(part.file)
    except OSError as why:
        raise DamagedCheckpoint(f"{part.file} in {folder} cannot be read: {why}") from why
    if size is None:
        raise DamagedCheckpoint(f"{part.file} in {folder} is missing")
    if size != part.bytes:
        how = "cut off" if size < part.bytes else "added to"
        raise DamagedCheckpoint(
            f"{part.file} in {folder} was {how}: it has {size} bytes and was written with "
            f"{part.bytes}"
        )


class _Check(NamedTuple):
    """A checksum that another thread is computing."""

    number: int  # of the chunk
    found: Future[int | None]
    expected: int


class PartReader:
    """Goes through a part once: `for chunk in reader.chunks()`, then `body` where it is wanted."""

    def __init__(self, folder: Folder, step: int, part: PartSummary) -> None:
        self._folder = folder
        self._part = part
        self._number = -1  # of the chunk that the file stands in
        self._left = 0  # bytes of its body that were not read
        self._position = 0
        self._scratch: Bytes = np.empty(0, np.uint8)
        self._pool: ThreadPoolExecutor | None = None
        self._checks: deque[_Check] = deque()
        check_size(folder, part)
        try:
            self._file = folder.open_read(part.file)
        except OSError as why:
            raise DamagedCheckpoint(f"{part.file} in {folder} cannot be read: {why}") from why
        try:
            header = self._read_header(FILE_HEADER_BYTES)
            self._seal = hashlib.sha256(header)
            if unpack_file_header(header) != (part.place, step):
                self._damaged(f"the file header is not that of place {part.place} at step {step}")
        except BaseException:
            self._file.close()
            raise

    def chunks(self) -> Iterator[Chunk]:
        """The headers in order. Ends with the comparison of the seal."""
        for number in range(self._part.chunks):
            self._number = number
            header = self._read_header(CHUNK_HEADER_BYTES)
            chunk = unpack_chunk(header)
            if chunk is None:
                self._damaged("its header is damaged")
            self._seal.update(header)
            self._left = chunk.body_bytes
            if self._position + self._left > self._part.bytes:
                self._damaged("it reaches past the end of the file")
            yield chunk
            if self._left:
                self._pass_over()
        while self._checks:
            self._await_check()
        self._number = -1
        if self._position != self._part.bytes or self._seal.hexdigest() != self._part.seal:
            self._damaged(
                "each chunk is whole, but they are not those that the manifest was made for"
            )

    def body(self, chunk: Chunk) -> tuple[Bytes, Bytes]:
        """(record numbers or name, payload), each uint8[n], checked.

        The payload lies in memory of the reader that the next call overwrites.
        """
        key = np.empty(chunk.key_bytes, np.uint8)
        if len(self._scratch) < chunk.payload_bytes:
            self._scratch = np.empty(chunk.payload_bytes, np.uint8)
        payload = self._scratch[: chunk.payload_bytes]
        self._read_into(key)
        self._read_into(payload)
        self._left = 0
        if saves.crc32(payload, saves.crc32(key)) != chunk.checksum:
            self._damaged("its bytes do not match their checksum")
        return key, payload

    def body_into(self, chunk: Chunk, out: Bytes) -> None:
        """The payload of a range straight into `out`, which the caller owns and leaves alone.

        Other threads check it, and read it if the file is a local one, while this one goes on; all
        is read and checked when `chunks` ends, and not before.
        """
        self._pool = self._pool or ThreadPoolExecutor(READERS, "checkpoint-read")
        if isinstance(self._file, io.BufferedReader):
            found = self._pool.submit(_read_at, self._file.fileno(), self._position, out)
            self._pass_over()
        else:
            self._read_into(out)
            self._left = 0
            found = self._pool.submit(saves.crc32, out)
        self._checks.append(_Check(self._number, found, chunk.checksum))
        if len(self._checks) > IN_FLIGHT:
            self._await_check()

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def __enter__(self) -> PartReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _read_header(self, size: int) -> bytes:
        header = np.empty(size, np.uint8)
        self._read_into(header)
        return header.tobytes()

    def _read_into(self, out: Bytes) -> None:
        view = out.data
        while len(view):
            try:
                count = self._file.readinto(view)
            except Exception as why:  # drivers of fsspec raise any kind
                self._damaged(f"it cannot be read: {why}", why)
            if not count:
                self._damaged("the file ends in the middle of it")
            self._position += count
            view = view[count:]

    def _await_check(self) -> None:
        """The oldest one's result."""
        check = self._checks.popleft()
        try:
            found = check.found.result()
        except OSError as why:
            self._number = check.number
            self._damaged(f"it cannot be read: {why}", why)
        if found != check.expected:
            self._number = check.number
            self._damaged(
                "the file ends in the middle of it"
                if found is None
                else "its bytes do not match their checksum"
            )

    def _pass_over(self) -> None:
        try:
            self._file.seek(self._left, 1)
        except Exception as why:
            self._damaged(f"it cannot be read: {why}", why)
        self._position += self._left
        self._left = 0

    def _damaged(self, what: str, why: Exception | None = None) -> NoReturn:
        where = f"chunk {self._number} of " if self._number >= 0 else ""
        raise DamagedCheckpoint(
            f"{where}{self._part.file} in {self._folder} is damaged: {what}"
        ) from why


def _read_at(descriptor: int, position: int, out: Bytes) -> int | None:
    """Fills `out` and returns its checksum; None if the file ends before."""
    view = out.data
    while view.nbytes:
        count = os.preadv(descriptor, [view], position)
        if not count:
            return None
        position += count
        view = view[count:]
    return saves.crc32(out)


def verify_part(folder: Folder, step: int, part: PartSummary) -> None:
    """Reads every byte of a part, and raises unless it is as it was written."""
    with PartReader(folder, step, part) as reader:
        for chunk in reader.chunks():
            reader.body(chunk)


def read_named(folder: Folder, step: int, part: PartSummary) -> dict[str, Bytes]:
    """The named bytes of a part, whole; the caller owns them."""
    with PartReader(folder, step, part) as reader:
        pieces: dict[str, list[Bytes]] = {}
        for chunk in reader.chunks():
            if chunk.kind == Kind.NAMED:
                name, payload = reader.body(chunk)
                pieces.setdefault(name.tobytes().decode(), []).append(payload.copy())
    return {name: np.concatenate(found) for name, found in pieces.items()}
