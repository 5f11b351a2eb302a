"""General compressors on the codes of lossy lookups, where their packages are installed.

Native code makes and reads frames with plain codes; here the codes of some pieces are compressed in
a frame that is made, and expanded in one that has come. `pip install planaria[compression]` brings
the packages.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.kernels import twin_lossy
from planaria.kernels.twin_lossy import FRAME, PIECE, Encoding, refuse
from planaria.kernels.types import Bytes

PACKAGES = {Encoding.ZSTD: "zstandard", Encoding.LZ4: "lz4.block"}
ZSTD_LEVEL = 1
LEAST_WINDOW = 1024  # bytes; zstd has no smaller one


def installed(encoding: Encoding) -> Any | None:
    try:
        return importlib.import_module(PACKAGES[encoding])
    except ImportError:
        return None


def compress(frame: Bytes, wanted: Bytes, out: Bytes) -> Bytes:
    """A frame with the codes of the tables compressed that want it, where they get smaller.

    The frame may lie in `out`, which has room for it.
    """
    rows, dim, pieces = frame[: FRAME.itemsize].view("<u4")[2:].tolist()
    behind = FRAME.itemsize + pieces * PIECE.itemsize
    headers = frame[FRAME.itemsize : behind].copy().view(PIECE)
    parts = [part.copy() for part in _split(frame[behind:], headers)]
    for at, header in enumerate(headers):
        if header["encoding"] == Encoding.CODES:
            encoding = Encoding(int(wanted[header["table"]]))
            content = np.frombuffer(_compressed(encoding, parts[at].tobytes()), np.uint8)
            if len(content) < len(parts[at]):
                header["encoding"], header["bytes"], parts[at] = encoding, len(content), content
    return out[: twin_lossy.seal(rows, dim, headers, parts, out)]


def decompress(frame: Bytes, tables: NDArray[np.int32], dim: int) -> Bytes:
    """A frame with plain codes where there were compressed ones, in new memory if there were any.

    The frame itself is looked at no further than that needs.
    """
    pieces = 0 if len(frame) < FRAME.itemsize else int(frame[16:20].copy().view("<u4")[0])
    behind = FRAME.itemsize + pieces * PIECE.itemsize
    if behind > len(frame):
        return frame  # which will be refused
    given = frame[FRAME.itemsize : behind].copy().view(PIECE)
    if not np.isin(given["encoding"], list(PACKAGES)).any():
        return frame
    if tables.min(initial=0) < 0:
        return frame
    counts = np.bincount(tables)
    counts = counts[counts > 0]
    headers = twin_lossy.read_headers(frame, len(tables), dim, len(counts)).copy()
    parts = _split(frame[behind:], headers)
    for at, (header, rows) in enumerate(zip(headers, counts.tolist(), strict=True)):
        if header["encoding"] in PACKAGES:
            code = np.dtype(twin_lossy.code_type(int(header["span"])))
            parts[at] = _expand(
                Encoding(int(header["encoding"])), parts[at], rows * dim * code.itemsize
            )
            header["encoding"], header["bytes"] = Encoding.CODES, len(parts[at])
    plain = np.empty(behind + sum(map(len, parts)), np.uint8)
    twin_lossy.seal(len(tables), dim, headers, parts, plain)
    return plain


def _split(content: Bytes, headers: NDArray[np.void]) -> list[Bytes]:
    ends = np.cumsum(headers["bytes"], dtype=np.int64)
    if ends[-1:].sum() != len(content):
        raise refuse("its pieces do not have its size")
    return np.split(content, ends[:-1])


def _compressed(encoding: Encoding, content: bytes) -> bytes:
    package = installed(encoding)
    assert package is not None  # the door has looked
    if encoding == Encoding.ZSTD:
        return bytes(package.ZstdCompressor(level=ZSTD_LEVEL).compress(content))
    return bytes(package.compress(content, store_size=False))


def _expand(encoding: Encoding, content: Bytes, size: int) -> Bytes:
    """Exactly `size` bytes; nothing larger is allocated, whatever the content claims."""
    package = installed(encoding)
    if package is None:
        raise refuse(f"it needs the package {PACKAGES[encoding]}, which is not installed")
    given = content.tobytes()
    try:
        if encoding == Encoding.ZSTD:
            claims = package.get_frame_parameters(given)
            if claims.content_size != size or claims.window_size > max(size, LEAST_WINDOW):
                raise refuse("a piece has another size than its rows")
            found = package.ZstdDecompressor().decompress(given, allow_extra_data=False)
        else:
            found = package.decompress(given, uncompressed_size=size)
    except _errors_of(encoding, package) as error:
        raise refuse(f"a piece cannot be decompressed ({error})") from None
    if len(found) != size:
        raise refuse("a piece has another size than its rows")
    return np.frombuffer(found, np.uint8)


def _errors_of(encoding: Encoding, package: Any) -> tuple[type[Exception], ...]:
    if encoding == Encoding.ZSTD:
        return (package.ZstdError,)
    return (package.LZ4BlockError, ValueError, OverflowError)
