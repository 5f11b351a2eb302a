"""Tables, and the arenas that they share.

An arena is all records of one size; tables with equal dim lie in one arena, one behind the other,
in the order in which they were given. A row is known by (table, row) to users and by its number in
the arena to everything below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planaria.errors import ArgumentError
from planaria.kernels.types import Distribution, Index, InitTables
from planaria.optimizers import Optimizer

MAX_ROWS = 2**40
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
    """One embedding table. Without `initial`: uniform within 1 / sqrt(rows) of zero, as DLRM's."""

    name: str
    rows: int
    dim: int
    initial: Initial | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or not 1 <= self.rows <= MAX_ROWS:
            raise ArgumentError(f"table {self.name}: rows must be 1 to 2^40, not {self.rows}")
        if not isinstance(self.dim, int) or not 1 <= self.dim <= 2**16:
            raise ArgumentError(f"table {self.name}: dim must be 1 to 65536, not {self.dim}")

    @property
    def start(self) -> Initial:
        bound = float(self.rows**-0.5)
        return self.initial or Initial.uniform(-bound, bound)


@dataclass(frozen=True, eq=False)
class Arena:
    """The tables of one record size, and which rows of the arena are theirs."""

    dim: int
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
    """The arenas of a job, in the order in which their first tables were given."""
    if not 1 <= len(tables) <= MAX_TABLES:
        raise ArgumentError(f"a job has 1 to {MAX_TABLES} tables, not {len(tables)}")
    names: set[str] = set()
    for table in tables:
        if table.name in names:
            raise ArgumentError(f"two tables are called {table.name!r}; give each its own name")
        names.add(table.name)
    return [_make_arena(tables, dim, optimizer) for dim in dict.fromkeys(t.dim for t in tables)]


def _make_arena(tables: Sequence[Table], dim: int, optimizer: Optimizer) -> Arena:
    ids = np.array([i for i, table in enumerate(tables) if table.dim == dim], np.int64)
    own = [tables[i] for i in ids]
    rows = np.array([table.rows for table in own], np.int64)
    first_rows = np.concatenate([[0], np.cumsum(rows)[:-1]]).astype(np.int64)
    distributions = [Distribution[table.start.distribution.upper()] for table in own]
    init = InitTables(
        ids,
        first_rows,
        np.array(distributions, np.int64),
        np.array([(table.start.a, table.start.b) for table in own], np.float32),
    )
    return Arena(dim, optimizer.record_words(dim), ids, first_rows, int(rows.sum()), init)
