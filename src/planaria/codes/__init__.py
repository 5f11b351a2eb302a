"""Erasure codes over raw bytes: XOR for one parity, Reed-Solomon over GF(2^8) for up to four."""

from planaria.codes.code import COEFFICIENTS, Code
from planaria.layout.groups import MAX_K, MAX_R

__all__ = ["COEFFICIENTS", "MAX_K", "MAX_R", "Code"]
