"""What a source of samples is, and which of its samples a trainer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planaria.errors import ArgumentError
from planaria.kernels.types import Floats, Index

DENSE_FEATURES = 13
"""Dense features per sample, as in Criteo's data."""
MAX_ROWS = 2**40
MAX_SAMPLES = 2**62


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples in order. The reader owns the arrays; no source writes to them again."""

    dense: Floats  # float32[n, 13]
    ids: Index  # int64[n, tables]: one row number per table
    labels: Floats  # float32[n]: 0 or 1

    def __len__(self) -> int:
        return len(self.labels)


class Source(Protocol):
    """Samples by number, the same ones however they are asked for."""

    @property
    def tables(self) -> Sequence[int]:
        """Rows per table."""

    @property
    def samples(self) -> int | None:
        """How many there are; None if they never end."""

    def read(self, start: int, count: int) -> Batch:
        """Samples start to start + count - 1, fewer where the source ends before."""


def sample_range(step: int, rank: int, trainers: int, batch: int) -> tuple[int, int]:
    """(start, count) of the samples that `rank` reads in `step`; steps count from 1.

    `batch` is that of all trainers together, so that what a step learns from does not depend on
    their number.
    """
    if step < 1 or not 0 <= rank < trainers or batch < 0:
        raise ArgumentError(
            "step and trainers count from 1, batch from 0, and ranks from 0 to trainers - 1, "
            f"not step {step}, rank {rank}, trainers {trainers}, batch {batch}"
        )
    first = batch * rank // trainers
    end = batch * (rank + 1) // trainers
    return (step - 1) * batch + first, end - first


def check_range(start: int, count: int) -> None:
    if not (0 <= start < MAX_SAMPLES and 0 <= count < MAX_SAMPLES):
        raise ArgumentError(
            f"cannot read {count} samples from sample {start}: both must be 0 to 2^62 - 1"
        )


def check_tables(tables: Sequence[int]) -> tuple[int, ...]:
    if not tables:
        raise ArgumentError("a source needs at least one table; give the rows of each")
    for number, rows in enumerate(tables):
        if not 1 <= rows <= MAX_ROWS:
            raise ArgumentError(f"table {number}: rows must be 1 to 2^40, not {rows}")
    return tuple(int(rows) for rows in tables)
