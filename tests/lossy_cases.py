"""Answers to encode, of every kind of numbers, with tables, bounds and encoders."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.kernels import lossy
from planaria.kernels.types import Bytes, Floats

CODED = ("none", "huffman", "vector-lz", "zstd", "lz4")
DENORMAL = np.float32(1e-45)
# fmt: off
KINDS = (
    "normal", "tiny", "denormal", "constant", "zero", "huge", "any bits", "repeated", "halves",
    "outliers",
)
# fmt: on


class Answer(NamedTuple):
    rows: Floats
    tables: NDArray[np.int32]
    bounds: Floats  # of each table
    encoders: list[str]

    def encode(self) -> Bytes:
        return lossy.encode(self.rows, self.tables, self.bounds, self.encoders)

    def decode(self, frame: Bytes) -> Floats:
        return lossy.decode(frame, self.tables, self.rows.shape[1])

    def of(self, chosen: NDArray[np.int64]) -> Answer:
        return self._replace(rows=self.rows[chosen], tables=self.tables[chosen])


def rows_of(rng: np.random.Generator, kind: str, count: int, dim: int) -> Floats:
    """Finite floats."""
    normal = rng.standard_normal((count, dim)).astype(np.float32)
    if kind == "tiny":
        return normal * np.float32(1e-37)
    if kind == "denormal":
        return rng.integers(-5000, 5000, (count, dim)).astype(np.float32) * DENORMAL
    if kind == "constant":
        return np.full((count, dim), normal[:1, :1].sum(), np.float32)
    if kind == "zero":
        return rng.choice(np.array([0.0, -0.0], np.float32), (count, dim))
    if kind == "huge":
        return np.ldexp(normal, rng.integers(-140, 126, (count, dim))).astype(np.float32)
    if kind == "any bits":
        drawn = rng.integers(0, 2**32, (count, dim), np.uint32).view(np.float32)
        return np.where(np.isfinite(drawn), drawn, np.float32(0))
    if kind == "repeated":
        return normal[rng.integers(0, max(1, count // 8), count)] if count else normal
    if kind == "halves":  # on the edge between two codes of many scales
        return (rng.integers(-999, 999, (count, dim)) / 2).astype(np.float32)
    if kind == "outliers":
        normal[rng.random((count, dim)) < 0.01] *= np.float32(1e6)
    return normal


def answer(
    seed: int, encoder: str | None = None, kind: str | None = None, most_rows: int = 60
) -> Answer:
    """Of one seed; of all encoders and kinds of numbers if none is given."""
    rng = np.random.default_rng(seed)
    dim, tables = int(rng.choice([1, 2, 3, 7, 8, 16, 17, 33, 64])), int(rng.integers(1, 6))
    rows = int(rng.integers(0, most_rows))
    of_row = rng.integers(0, tables, rows).astype(np.int32)
    values = np.empty((rows, dim), np.float32)
    known = lossy.available()
    for table in range(tables):
        own = of_row == table
        values[own] = rows_of(rng, kind or str(rng.choice(KINDS)), int(own.sum()), dim)
    bounds = np.ldexp(rng.random(tables), rng.choice([-148, -130, -14, -8, -2, 3, 126], tables))
    return Answer(
        values,
        of_row,
        np.maximum(bounds.astype(np.float32), DENORMAL),
        [encoder or str(rng.choice(known)) for _ in range(tables)],
    )
