"""From ids to rows by hashing: fixed functions of numbers and bytes, the same on every machine.

An id becomes a 64-bit key: an integer is one as it is, text is folded eight bytes at a time. A key
becomes a row: mixed with the number of its table, modulo (rows - 1), plus 1. Row 0 of every table
stands for "missing", and for nothing else unless the table has one row only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planaria.kernels.twin_numbers import GOLDEN, mix
from planaria.kernels.types import Bytes, Index, Keys

Mask = NDArray[np.bool_]
WORD = 8  # bytes that are folded at once
_ALL = np.uint64(2**64 - 1)


def rows_of(keys: Keys, missing: Mask, tables: Index, rows: Index) -> Index:
    """Rows of keys[..., i], whose table has number tables[i] and rows[i] rows."""
    salt = mix((tables + 1).astype(np.uint64) * GOLDEN)
    spread = np.maximum(rows - 1, 1).astype(np.uint64)
    found: Index = (mix(keys + salt) % spread).astype(np.int64) + 1
    found[missing] = 0
    np.minimum(found, rows - 1, out=found)
    return found


def text_keys(data: Bytes, starts: Index, lengths: Index) -> Keys:
    """Keys of the texts data[starts[i] : starts[i] + lengths[i]]."""
    padded = np.concatenate([data, np.zeros(WORD, np.uint8)])
    # The eight bytes from any byte on, in an order that is that of no machine in particular.
    words: Keys = np.ndarray((len(data) + 1,), "<u8", padded, 0, (1,))
    keys = mix(lengths.astype(np.uint64) + GOLDEN)
    going_on = np.arange(len(keys))
    for at in range(0, int(lengths.max(initial=0)), WORD):
        going_on = going_on[lengths[going_on] > at]
        left = np.minimum(lengths[going_on] - at, WORD).astype(np.uint64)
        word = words[starts[going_on] + at] & (_ALL >> (np.uint64(8 * WORD) - np.uint64(8) * left))
        keys[going_on] = mix((keys[going_on] ^ word) + GOLDEN)
    return keys
