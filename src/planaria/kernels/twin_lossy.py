"""The NumPy twin of the frames of lossy lookups. native/frames.hpp and lossy.hpp say what the bytes
are and why no number is off by more than it may be."""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.errors import RowError, WireError
from planaria.kernels import twin_codes
from planaria.kernels.types import Bytes, Floats, Index

MAGIC = 0x31514C50  # "PLQ1"
FRAME = np.dtype([(name, "<u4") for name in ("magic", "checksum", "rows", "dim", "pieces")])
PIECE = np.dtype(
    [
        ("table", "<i4"),
        ("rows", "<u4"),
        ("bytes", "<u4"),
        ("encoding", "<u4"),
        ("scale", "<f4"),
        ("low", "<i2"),
        ("span", "<u2"),
    ]
)
SLACK = 32
HIGHEST_CODE = 32767
FP16_LIMIT = np.float32(65520)
BF16_LIMIT = np.array(0x7F7F8000, np.uint32).view(np.float32)


class Encoding(IntEnum):
    """How a piece's bytes are to be read. Native code knows those up to VECTOR_LZ."""

    EXACT = 0
    FP16 = 1
    BF16 = 2
    CODES = 3
    PACKED = 4
    HUFFMAN = 5
    VECTOR_LZ = 6
    ZSTD = 7
    LZ4 = 8


def frame_bound(rows: int, dim: int, pieces: int) -> int:
    return FRAME.itemsize + pieces * PIECE.itemsize + rows * dim * 4 + SLACK


def refuse(why: str) -> WireError:
    return WireError(f"an answer's rows are no frame of them: {why}; look them up again")


def code_type(span: int) -> Any:
    return np.uint8 if span < 256 else np.uint16


def _groups(tables: NDArray[np.int32], count: int) -> list[tuple[int, Index]]:
    wrong = np.flatnonzero((tables < 0) | (tables >= count))
    if len(wrong):
        at = wrong[0]
        raise RowError(f"tables[{at}] is {tables[at]}, outside 0 to {count - 1}")
    return [(int(table), np.flatnonzero(tables == table)) for table in np.unique(tables)]


# ---------------------------------------------------------------------------- encoding


def encode_rows(
    values: Floats, tables: NDArray[np.int32], scales: Floats, encoders: Bytes, out: Bytes
) -> int:
    groups = _groups(tables, len(scales))
    headers, parts = np.zeros(len(groups), PIECE), []
    for header, (table, positions) in zip(headers, groups, strict=True):
        header["table"], header["rows"] = table, len(positions)
        piece = np.ascontiguousarray(values[positions])
        encoding = Encoding(int(encoders[table]))
        if encoding != Encoding.EXACT and not np.isfinite(piece).all():
            return -1 - table
        encoded = _encode_piece(piece, encoding, scales[table], header)
        header["bytes"] = len(encoded)
        parts.append(encoded)
    return seal(len(values), values.shape[1], headers, parts, out)


def seal(rows: int, dim: int, headers: NDArray[np.void], parts: list[Bytes], out: Bytes) -> int:
    """Writes the frame and returns its size."""
    frame = np.array([(MAGIC, 0, rows, dim, len(headers))], FRAME)
    content = np.concatenate([headers.view(np.uint8).reshape(-1), *parts])
    tail = np.concatenate([frame.view(np.uint8)[8:], content])
    frame["checksum"] = zlib.crc32(tail.tobytes())
    size = 8 + len(tail)
    out[:8] = frame.view(np.uint8)[:8]
    out[8:size] = tail
    return size


def _encode_piece(piece: Floats, encoding: Encoding, scale: np.float32, header: np.void) -> Bytes:
    header["encoding"] = encoding
    if encoding == Encoding.EXACT:
        return piece.reshape(-1).view(np.uint8)
    if encoding < Encoding.CODES:
        large = np.abs(piece) >= (FP16_LIMIT if encoding == Encoding.FP16 else BF16_LIMIT)
        halves = _halves(np.where(large, np.float32(0), piece), encoding)
        if not large.any():
            return halves.view(np.uint8)
        header["encoding"] = Encoding.EXACT
        rounded = _widened(halves, encoding).reshape(piece.shape)
        return np.where(large, piece, rounded).reshape(-1).view(np.uint8)
    codes = np.rint(piece.astype(np.float64) * (1.0 / np.float64(scale))).reshape(-1)
    within = np.abs(codes) <= HIGHEST_CODE
    with np.errstate(over="ignore"):
        rounded = np.where(within, codes, 0).astype(np.int32).astype(np.float32) * scale
    within &= np.isfinite(rounded)
    if not within.all():
        header["encoding"] = Encoding.EXACT
        return np.where(within, rounded, piece.reshape(-1)).view(np.uint8)
    low, span = int(codes.min()), int(codes.max() - codes.min())
    header["scale"], header["low"], header["span"] = scale, low, span
    return _encode_codes((codes - low).astype(code_type(span)), len(piece), header)


def _halves(values: Floats, encoding: Encoding) -> NDArray[np.uint16]:
    if encoding == Encoding.FP16:
        return values.astype(np.float16).reshape(-1).view(np.uint16)
    bits = values.view(np.uint32).reshape(-1)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _widened(halves: NDArray[np.uint16], encoding: Encoding) -> Floats:
    if encoding == Encoding.FP16:
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _encode_codes(codes: twin_codes.Codes, rows: int, header: np.void) -> Bytes:
    span, encoding = int(header["span"]), header["encoding"]
    bits = span.bit_length()
    below = twin_codes.packed_bytes(len(codes), bits)
    if encoding == Encoding.CODES:
        return codes.view(np.uint8)
    found = None
    if encoding == Encoding.HUFFMAN and codes.dtype == np.uint8 and span:
        found = twin_codes.huffman_encode(codes.view(np.uint8), span + 1, below)
    if encoding == Encoding.VECTOR_LZ and span:
        found = twin_codes.vector_lz_encode(codes, rows, bits, below)
    if found is None:
        header["encoding"] = Encoding.PACKED
        return twin_codes.pack(codes, bits)
    return found


# ---------------------------------------------------------------------------- decoding


def read_headers(frame: Bytes, rows: int, dim: int, pieces: int) -> NDArray[np.void]:
    """Those of all pieces. Raises WireError unless the frame is whole and of just these rows."""
    if len(frame) < FRAME.itemsize:
        raise refuse("it is cut off")
    header = frame[: FRAME.itemsize].view(FRAME)[0]
    if header["magic"] != MAGIC:
        raise refuse("it does not begin as one")
    if (header["rows"], header["dim"], header["pieces"]) != (rows, dim, pieces):
        raise refuse(
            f"it has {header['rows']} rows of {header['dim']} in {header['pieces']} pieces, not "
            f"{rows} of {dim} in {pieces}"
        )
    behind = FRAME.itemsize + pieces * PIECE.itemsize
    if len(frame) < behind:
        raise refuse("it is cut off")
    if zlib.crc32(frame[8:].tobytes()) != header["checksum"]:
        raise refuse("its checksum is another")
    return frame[FRAME.itemsize : behind].view(PIECE)


def decode_rows(frame: Bytes, tables: NDArray[np.int32], count: int, out: Floats) -> None:
    groups = _groups(tables, count)
    headers = read_headers(frame, len(tables), out.shape[1], len(groups))
    at = FRAME.itemsize + headers.nbytes
    for header, (table, positions) in zip(headers, groups, strict=True):
        size = int(header["bytes"])
        _check_piece(header, table, len(positions), out.shape[1], len(frame) - at)
        content = frame[at : at + size].copy()
        out[positions] = _decode_piece(content, header, len(positions), out.shape[1])
        at += size
    if at != len(frame):
        raise refuse("something follows it")


def _check_piece(header: np.void, table: int, rows: int, dim: int, left: int) -> None:
    which = f"the piece of table {table}"
    span, count, scale = int(header["span"]), rows * dim, float(header["scale"])
    if header["table"] != table or header["rows"] != rows:
        raise refuse(f"{which} is not where it belongs, or has other rows")
    if header["bytes"] > left:
        raise refuse(f"{which} is cut off")
    if header["encoding"] > Encoding.VECTOR_LZ:
        raise refuse(f"{which} has an encoding that does not exist")
    coded = header["encoding"] >= Encoding.CODES
    if not (0 < scale < np.inf if coded else scale == 0 == span == header["low"]):
        raise refuse(f"{which} has an impossible scale")
    if coded and int(header["low"]) + span > HIGHEST_CODE:
        raise refuse(f"{which} has codes that do not exist")
    size = {
        Encoding.EXACT: 4 * count,
        Encoding.FP16: 2 * count,
        Encoding.BF16: 2 * count,
        Encoding.CODES: np.dtype(code_type(span)).itemsize * count,
        Encoding.PACKED: twin_codes.packed_bytes(count, span.bit_length()),
    }.get(Encoding(int(header["encoding"])), header["bytes"])
    if header["bytes"] != size or (header["encoding"] == Encoding.HUFFMAN and span > 255):
        raise refuse(f"{which} has another size than its rows")


def _decode_piece(content: Bytes, header: np.void, rows: int, dim: int) -> Floats:
    encoding, span, count = header["encoding"], int(header["span"]), rows * dim
    if encoding == Encoding.EXACT:
        return content.view(np.float32).reshape(rows, dim)
    if encoding < Encoding.CODES:
        return _widened(content.view(np.uint16), encoding).reshape(rows, dim)
    codes: twin_codes.Codes
    try:
        if encoding == Encoding.CODES:
            codes = content.view(code_type(span))
        elif encoding == Encoding.PACKED:
            codes = twin_codes.unpack(content, count, span.bit_length())
        elif encoding == Encoding.HUFFMAN:
            codes = twin_codes.huffman_decode(content, span + 1, count)
        else:
            codes = twin_codes.vector_lz_decode(content, rows, dim, span.bit_length())
    except twin_codes.BadCodes:
        raise refuse(f"the codes of table {header['table']} cannot be decoded") from None
    with np.errstate(over="ignore"):
        numbers = (codes.astype(np.int32) + int(header["low"])).astype(np.float32)
        found: Floats = numbers * header["scale"]
    return found.reshape(rows, dim)
