"""Small arrays of the kinds that kernels take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HUGE = 2**63 - 1


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def words(*shape: int) -> NDArray[np.uint32]:
    return np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) * np.uint32(0x01030507)


def raw(*shape: int) -> NDArray[np.uint8]:
    return (np.arange(np.prod(shape)) * 37 % 251).astype(np.uint8).reshape(shape)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
