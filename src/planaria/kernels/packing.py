"""The kernels of packed arrays, checked: records and record numbers in fewer bytes, and back.

What changes in a step is old XOR new of floats that have moved a little: sign, exponent and first
digits are mostly zero. Record numbers of a message lie within a region or two. Nothing is lost, and
a frame that is damaged, cut or made up is refused: a checksum covers it and how much is in it.
docs/core.md draws the bytes. What planaria.kernels promises of its functions holds for these; they
use one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planaria import kernels
from planaria.errors import WireError
from planaria.kernels import twin_packing
from planaria.kernels.checks import array, require
from planaria.kernels.types import Bytes, Index, Records


def _backend() -> Any:
    return twin_packing if kernels.level() == "numpy" else kernels.native


def pack_records(records: Records) -> Bytes:
    """The frame of uint32[rows, words]; a part of new memory. It may be larger than they are."""
    array("records", records, np.uint32, 2)
    out = np.empty(twin_packing.words_bound(records.size), np.uint8)
    size: int = _backend().pack_words(records, out)
    return out[:size]


def unpack_records(frame: Bytes, rows: int, words: int) -> Records:
    """What `pack_records` made a frame of. WireError if it is not one of so many words."""
    array("frame", frame, np.uint8, 1)
    require(rows >= 0 and words >= 0, f"there are no {rows} rows of {words} words")
    _require_room(frame, twin_packing.least_words_frame(rows * words), f"[{rows}, {words}] records")
    out = np.empty((rows, words), np.uint32)
    if not _backend().unpack_words(frame, out):
        raise _refuse(frame, f"[{rows}, {words}] records")
    return out


def pack_index(numbers: Index) -> Bytes | None:
    """The frame of int64[n]; None where they lie too far apart, 2^56 or more."""
    array("numbers", numbers, np.int64, 1)
    out = np.empty(twin_packing.numbers_bound(len(numbers)), np.uint8)
    size: int = _backend().pack_numbers(numbers, out)
    return out[:size] if size else None


def unpack_index(frame: Bytes, n: int) -> Index:
    """What `pack_index` made a frame of. WireError if it is not one of n numbers."""
    array("frame", frame, np.uint8, 1)
    require(n >= 0, f"there are no {n} numbers")
    _require_room(frame, twin_packing.least_numbers_frame(n), f"{n} numbers")
    out = np.empty(n, np.int64)
    if not _backend().unpack_numbers(frame, out):
        raise _refuse(frame, f"{n} numbers")
    return out


def _require_room(frame: Bytes, least: int, what: str) -> None:
    """Before memory is taken for what the frame is said to hold: 64 times its size at most."""
    if len(frame) < least:
        raise _refuse(frame, what)


def _refuse(frame: Bytes, what: str) -> WireError:
    return WireError(f"{len(frame)} bytes that are not {what}, packed")
