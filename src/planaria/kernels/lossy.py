"""The kernels of lossy lookups, checked: the rows of an answer in fewer bytes, and back.

An answer holds rows of one arena, which belong to several tables, in any order. Each table has an
encoder and, for those that make codes, a bound: no float comes back further from what it was than
that. What planaria.kernels promises of its functions holds for these; they use one thread.

    exact               float32, bit for bit
    fp16, bf16          floats of 16 bits, rounded to the nearest, half to even
    none                codes, packed to the bits that they need
    huffman, vector-lz  codes, in fewer bytes where that can be had
    zstd, lz4           the same by a general compressor, where its package is installed

A code is x / scale, rounded half to even; `scales` are twice the bounds, or a little less. A number
for which there is no code (they have 16 bits), or that as a float of 16 bits would be an infinity,
comes back as it was. With such a number among them a table's rows take float32 in that frame, and
come back as they do without: what a number becomes depends on its own bits and its table's bound
and encoder, never on what else the frame holds. Where `huffman` or `vector-lz` take no fewer bytes
than `none`, that is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.errors import NotFiniteError
from planaria.kernels import compressors, twin_lossy
from planaria.kernels.checks import array, require, require_apart
from planaria.kernels.twin_lossy import Encoding
from planaria.kernels.types import Bytes, Floats

ENCODERS = {
    "exact": Encoding.EXACT,
    "fp16": Encoding.FP16,
    "bf16": Encoding.BF16,
    "none": Encoding.PACKED,
    "huffman": Encoding.HUFFMAN,
    "vector-lz": Encoding.VECTOR_LZ,
    "zstd": Encoding.ZSTD,
    "lz4": Encoding.LZ4,
}
HIGHEST_BOUND = np.float32(2.0**126)
MOST_FLOATS = 2**29
MOST_TABLES = 2**24


def _backend() -> Any:
    return twin_lossy if kernels.level() == "numpy" else kernels.native


def available() -> list[str]:
    """The encoders that can be had here."""
    return [
        name
        for name, encoding in ENCODERS.items()
        if encoding <= Encoding.VECTOR_LZ or compressors.installed(encoding) is not None
    ]


# ---------------------------------------------------------------------------- frames


def scales(bounds: Floats) -> Floats:
    """Twice each bound, cut to nine significant bits: a code of 15 bits times that is exact."""
    mantissas, exponents = np.frexp(2 * bounds.astype(np.float64))
    cut: Floats = np.ldexp(np.floor(mantissas * 512) / 512, exponents).astype(np.float32)
    return cut


def encode(
    rows: Floats,
    tables: NDArray[np.int32],
    bounds: Floats,
    encoders: Sequence[str],
    names: Sequence[str] | None = None,
    out: Bytes | None = None,
) -> Bytes:
    """The frame of an answer's rows, float32[n, dim], of which row i belongs to table tables[i].

    bounds: float32[tables], 0 to 2^126; encoders: of each table. With bound 0 a table that would
    have codes is sent exactly. names: of the tables, for the error that is raised where a number
    that is not sent exactly is a NaN or an infinity. The frame is a part of `out`, which needs room
    for `frame_bound` bytes, or of new memory.
    """
    array("rows", rows, np.float32, 2)
    array("tables", tables, np.int32, 1, shape=(len(rows),))
    array("bounds", bounds, np.float32, 1)
    wanted = _wanted(bounds, encoders)
    if out is None:
        out = np.empty(frame_bound(len(rows), rows.shape[1], len(bounds)), np.uint8)
    array("out", out, np.uint8, 1, writable=True)
    room = frame_bound(len(rows), rows.shape[1], min(len(bounds), len(rows)))
    require(len(out) >= room, f"out must have {room} bytes or more, not {len(out)}")
    require_apart([out], [rows, tables, bounds])
    general = wanted > Encoding.VECTOR_LZ
    native = np.where(general, np.uint8(Encoding.CODES), wanted)
    size: int = _backend().encode_rows(rows, tables, scales(bounds), native, out)
    if size < 0:
        table = -1 - size
        refuse_rows(table if names is None else names[table])
    return compressors.compress(out[:size], wanted, out) if general.any() else out[:size]


def refuse_rows(table: int | str) -> NoReturn:
    raise NotFiniteError(
        f"table {table!r} has a NaN or an infinity in its rows, which can only be sent exactly; "
        "has training diverged?"
    )


def _wanted(bounds: Floats, encoders: Sequence[str]) -> Bytes:
    require(
        len(bounds) <= MOST_TABLES and len(encoders) == len(bounds),
        f"there must be an encoder for each of the {len(bounds)} bounds, 2^24 at most",
    )
    require(
        bool(((bounds >= 0) & (bounds <= HIGHEST_BOUND)).all()), "bounds must be from 0 to 2^126"
    )
    known = available()
    for name in set(encoders):
        require(name in known, f"encoder {name!r} is not one of {', '.join(known)}")
    wanted = np.array([ENCODERS[name] for name in encoders], np.uint8)
    wanted[(bounds == 0) & (wanted > Encoding.BF16)] = Encoding.EXACT
    return wanted


def frame_bound(rows: int, dim: int, tables: int) -> int:
    """A frame of so many rows takes no more bytes, nor does making it."""
    require(
        rows >= 0 and 1 <= dim <= MOST_FLOATS and rows * dim <= MOST_FLOATS,
        f"an answer has rows of one float or more, and 2^29 floats at most, not {rows} of {dim}",
    )
    return twin_lossy.frame_bound(rows, dim, min(tables, rows))


def rows_bytes(frame: Bytes) -> int:
    """Of the rows that `encode` made this frame of."""
    header = frame[: twin_lossy.FRAME.itemsize].view(twin_lossy.FRAME)[0]
    return 4 * int(header["rows"]) * int(header["dim"])


def decode(frame: Bytes, tables: NDArray[np.int32], dim: int, out: Floats | None = None) -> Floats:
    """The rows that `encode` made a frame of, each in its place: float32[len(tables), dim].

    Raises WireError, with anything in `out`, where the frame is not one of just these rows.
    """
    array("frame", frame, np.uint8, 1)
    array("tables", tables, np.int32, 1)
    frame_bound(len(tables), dim, 0)
    if out is None:
        out = np.empty((len(tables), dim), np.float32)
    array("out", out, np.float32, 2, shape=(len(tables), dim), writable=True)
    require_apart([out], [frame, tables])
    count = int(tables.max()) + 1 if len(tables) else 0
    require(count <= MOST_TABLES, "there are 2^24 tables at most")
    plain = compressors.decompress(frame, tables, dim)
    _backend().decode_rows(plain, tables, count, out)
    return out


# ---------------------------------------------------------------------------- the choice


class Measured(NamedTuple):
    """What an encoder does with a sample of one table's rows."""

    ratio: float  # bytes before over bytes after
    encode_rate: float  # bytes of rows per second
    decode_rate: float


def gain(measured: Measured, bandwidth: float) -> float:
    """How many times faster than as they are rows arrive over `bandwidth` bytes per second."""
    computing = 1 / measured.encode_rate + 1 / measured.decode_rate
    return 1 / (1 / measured.ratio + bandwidth * computing)


def choose(measured: Mapping[str, Measured], bandwidth: float) -> str:
    """The encoder with which a table's rows arrive first; `exact` where none gains anything."""
    gains = {name: gain(figures, bandwidth) for name, figures in measured.items()}
    best = max(gains, key=lambda name: gains[name], default="exact")
    return best if best in gains and gains[best] > 1 else "exact"
