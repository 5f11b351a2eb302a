"""Tables, and the arenas that they share.

An arena is all records that are made and changed alike: tables with equal dim and equal optimizer
lie in one arena, one behind the other, in the order in which they were given. A row is known by
(table, row) to users and by its number in the arena to everything below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planaria.errors import ArgumentError
from planaria.kernels.types import Distribution, Index, InitTables
from planaria.optimizers import Optimizer

MAX_ROWS = 2**40
MAX_DIM = 2**16
MAX_TABLES = 2**20


@dataclass(frozen=True)
class Initial:
    """How the weights of a table start: `uniform` from a to b, `normal` with mean a and std b."""

    distribution: str = "zeros"
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        names = [d.name.lower() for d in Distribution]
        if self.distribution not in names:
            raise ArgumentError(
                f"unknown initial distribution {self.distribution!r}; use {', '.join(names)}"
            )
        if not (np.isfinite(self.a) and np.isfinite(self.b)):
            raise ArgumentError(f"initial {self.distribution}({self.a}, {self.b}) is not finite")
        if self.distribution == "uniform" and self.a > self.b:
            raise ArgumentError(
                f"initial uniform({self.a}, {self.b}): the bounds are turned around"
            )
        if self.distribution == "normal" and self.b < 0:
            raise ArgumentError(f"initial normal({self.a}, {self.b}): std must be 0 or more")

    @classmethod
    def uniform(cls, low: float, high: float) -> Initial:
        return cls("uniform", low, high)

    @classmethod
    def normal(cls, mean: float, std: float) -> Initial:
        return cls("normal", mean, std)


@dataclass(frozen=True)
class Table:
    """One embedding table. Without `initial`: uniform within 1 / sqrt(rows) of zero, as DLRM's.

    Without `optimizer` it has that of the job.
    """

    name: str
    rows: int
    dim: int
    initial: Initial | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or not 1 <= self.rows <= MAX_ROWS:
            raise ArgumentError(f"table {self.name}: rows must be 1 to 2^40, not {self.rows}")
        if not isinstance(self.dim, int) or not 1 <= self.dim <= MAX_DIM:
            raise ArgumentError(f"table {self.name}: dim must be 1 to 65536, not {self.dim}")

    @property
    def start(self) -> Initial:
        bound = float(self.rows**-0.5)
        return self.initial or Initial.uniform(-bound, bound)


@dataclass(frozen=True, eq=False)
class Arena:
    """The tables of one dim and one optimizer, and which rows of the arena are theirs."""

    dim: int
    optimizer: Optimizer
    words: int  # 4-byte words per record
    table_ids: Index  # numbers of its tables in the job, ascending
    first_rows: Index  # each table's first row in the arena
    rows: int
    init: InitTables = field(repr=False)

    def table_row(self, arena_row: Index) -> tuple[Index, Index]:
        """The other way round: (table number, row in the table)."""
        at = np.searchsorted(self.first_rows, arena_row, side="right") - 1
        return self.table_ids[at], arena_row - self.first_rows[at]


def make_arenas(tables: Sequence[Table], optimizer: Optimizer) -> list[Arena]:
    """The arenas of a job, in the order in which their first tables were given.

    optimizer: of the tables that have none of their own.
    """
    if not 1 <= len(tables) <= MAX_TABLES:
        raise ArgumentError(f"a job has 1 to {MAX_TABLES} tables, not {len(tables)}")
    names: set[str] = set()
    alike: dict[tuple[int, Optimizer], list[int]] = {}
    for number, table in enumerate(tables):
        if table.name in names:
            raise ArgumentError(f"two tables are called {table.name!r}; give each its own name")
        names.add(table.name)
        alike.setdefault((table.dim, table.optimizer or optimizer), []).append(number)
    return [_make_arena(tables, ids, dim, rule) for (dim, rule), ids in alike.items()]


def _make_arena(
    tables: Sequence[Table], numbers: Sequence[int], dim: int, optimizer: Optimizer
) -> Arena:
    ids = np.array(numbers, np.int64)
    own = [tables[i] for i in numbers]
    rows = np.array([table.rows for table in own], np.int64)
    first_rows = np.concatenate([[0], np.cumsum(rows)[:-1]]).astype(np.int64)
    distributions = [Distribution[table.start.distribution.upper()] for table in own]
    init = InitTables(
        ids,
        first_rows,
        np.array(distributions, np.int64),
        np.array([(table.start.a, table.start.b) for table in own], np.float32),
    )
    words = optimizer.record_words(dim)
    return Arena(dim, optimizer, words, ids, first_rows, int(rows.sum()), init)
