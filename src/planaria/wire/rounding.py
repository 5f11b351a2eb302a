"""Gradients of rows in 16 bits: a trainer rounds what it pushes, and what is sent loses no more.

What was rounded away is not kept and added later. A replacement has to have whatever a trainer's
next push depends on, so it would have to leave the machine in every step, in as many bytes as
rounding saves; sent to the server instead, the same bytes are a finer rounding, at once.
"""

from __future__ import annotations

import numpy as np

from planaria.errors import NotFiniteError, WireError
from planaria.kernels import lossy
from planaria.kernels.types import Bytes, Floats

EXACT = "exact"
KINDS = (EXACT, "fp16", "bf16")
NO_BOUND = np.zeros(1, np.float32)


def rounded(values: Floats, kind: str) -> Floats:
    """float32[n, dim] as floats of 16 bits would be. What each becomes depends on its own bits; a
    NaN or an infinity, or what would become one, stays as it is.
    """
    finite = np.isfinite(values)
    whole = bool(finite.all())
    frame = _encoded(values if whole else np.where(finite, values, np.float32(0)), kind)
    found = unpack(frame, *values.shape)
    return found if whole else np.where(finite, found, values)


def pack(values: Floats, kind: str) -> Bytes | None:
    """A frame of what was rounded; None if it has a number that is none."""
    try:
        return _encoded(values, kind)
    except NotFiniteError:
        return None


def unpack(frame: Bytes, rows: int, dim: int) -> Floats:
    """WireError if it is no frame of so many numbers."""
    if not (dim >= 1 and rows * dim <= lossy.MOST_FLOATS):
        raise WireError(f"packed gradients of {rows} rows of {dim}")
    return lossy.decode(frame, np.zeros(rows, np.int32), dim)


def _encoded(values: Floats, kind: str) -> Bytes:
    return lossy.encode(values, np.zeros(len(values), np.int32), NO_BOUND, [kind])
