"""GF(2^8) with polynomial 0x11d, as tables: what the NumPy twin and the codes compute with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x11D


def _exp_log() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    exp = np.zeros(510, np.uint8)
    log = np.zeros(256, np.int64)
    power = 1
    for exponent in range(255):  # 2 generates the field
        exp[exponent] = exp[exponent + 255] = power
        log[power] = exponent
        power <<= 1
        if power & 0x100:
            power ^= POLYNOMIAL
    return exp, log


def _products(exp: NDArray[np.uint8], log: NDArray[np.int64]) -> NDArray[np.uint8]:
    table: NDArray[np.uint8] = exp[log[:, None] + log[None, :]]
    table[0, :] = table[:, 0] = 0
    return table


_EXP, _LOG = _exp_log()

PRODUCT: NDArray[np.uint8] = _products(_EXP, _LOG)
"""PRODUCT[a, b] = a * b, uint8[256, 256]."""

PRODUCT.flags.writeable = False


def inverse(a: int) -> int:
    """1 / a; zero has none."""
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return int(_EXP[255 - _LOG[a]])


def multiply(a: int, b: int) -> int:
    return int(PRODUCT[a, b])


def matmul(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Product of two small matrices."""
    product: NDArray[np.uint8] = np.bitwise_xor.reduce(PRODUCT[a[:, :, None], b[None]], axis=1)
    return product


def invert(matrix: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Inverse of a square matrix, by Gauss and Jordan; LinAlgError when it has none."""
    n = len(matrix)
    work = np.concatenate([matrix, np.eye(n, dtype=np.uint8)], axis=1)
    for column in range(n):
        candidates = np.flatnonzero(work[column:, column])
        if not len(candidates):
            raise np.linalg.LinAlgError("singular matrix over GF(2^8)")
        pivot = column + int(candidates[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = PRODUCT[inverse(int(work[column, column])), work[column]]
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= PRODUCT[factors[:, None], work[column][None, :]]
    return work[:, n:].copy()
