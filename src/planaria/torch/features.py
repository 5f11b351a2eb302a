"""The tables of one collection: where a job has put them, and from a batch's ids to their rows.

A job binds all collections at once: their tables, in the order in which the collections were
made, become the job's tables, and these share arenas (planaria.tables). From then on a batch is
turned into distinct arena rows by one native call per arena, whatever the number of tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Self

import numpy as np
import torch

from planaria import kernels
from planaria.errors import ArgumentError, OutsideJob, RowError
from planaria.kernels.types import Floats, Index, PooledFeatures, Pooling
from planaria.optimizers import Optimizer
from planaria.tables import Arena, Table, make_arenas
from planaria.torch.configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from planaria.torch.devices import CPU
from planaria.torch.keyed_jagged import KeyedJaggedTensor
from planaria.torch.optimizers import SparseOptimizer
from planaria.torch.sparse import ArenaBags, Prepared, SparseStep, Steps

_made: list[weakref.ref[FeatureTables]] = []


@dataclass(frozen=True)
class ArenaFeatures:
    """The features of a collection whose tables lie in one arena, in the order of the results."""

    arena: int
    dim: int
    numbers: list[int]  # of the features, among all of the collection
    limits: Index  # rows of each one's table
    first_rows: Index  # of that table in the arena
    pooled: PooledFeatures
    weighted: PooledFeatures  # the same where ids have weights


@dataclass(frozen=True)
class Bound:
    """What a job tells a collection."""

    steps: Steps
    arena_count: int
    arenas: list[ArenaFeatures]
    device: torch.device  # of results, where a collection names none


class FeatureTables:
    """Tables and their features. Copies of a module share it: they use the same tables."""

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        tables: Sequence[Table],
        as_keyed: Callable[..., KeyedJaggedTensor],
    ) -> None:
        """as_keyed: what forward is called with, as one object; it must not hold the module."""
        self.configs = list(configs)
        self._as_keyed = as_keyed
        self.optimizer: SparseOptimizer | None = None
        self.tables = list(tables)
        self.features = [(name, t) for t, c in enumerate(configs) for name in c.feature_names]
        self.dims = [configs[t].embedding_dim for _, t in self.features]
        self.width = sum(self.dims)
        self.bound: Bound | None = None
        self._keys: tuple[list[str], list[Index]] = ([], [])  # those of the last batch, by arena
        _made.append(weakref.ref(self))

    def use(self, optimizer: SparseOptimizer | None) -> None:
        """Whose rule the tables follow, and whose learning rate; None: the job's own."""
        self.optimizer = optimizer
        if optimizer is not None:
            self.tables = [replace(table, optimizer=optimizer.rule()) for table in self.tables]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    # -------------------------------------------------------------------------------- binding

    def bind(
        self,
        places: Sequence[tuple[int, int]],
        arena_count: int,
        steps: Steps,
        device: torch.device,
    ) -> None:
        """places: per table, the number of its arena and its first row there."""
        arenas = dict.fromkeys(arena for arena, _ in places)
        self._keys = ([], [])
        of_arenas = [self._arena(arena, places) for arena in arenas]
        self.bound = Bound(steps, arena_count, of_arenas, device)

    def _arena(self, arena: int, places: Sequence[tuple[int, int]]) -> ArenaFeatures:
        numbers = [n for n, (_, table) in enumerate(self.features) if places[table][0] == arena]
        tables = [self.features[n][1] for n in numbers]
        columns = np.cumsum([0, *self.dims])[numbers].astype(np.int64)
        sums = np.full(len(numbers), Pooling.SUM, np.int64)
        for at, table in enumerate(tables):
            config = self.configs[table]
            if isinstance(config, EmbeddingBagConfig) and config.pooling == PoolingType.MEAN:
                sums[at] = Pooling.MEAN
        return ArenaFeatures(
            arena,
            self.tables[tables[0]].dim,
            numbers,
            np.array([self.tables[table].rows for table in tables], np.int64),
            np.array([places[table][1] for table in tables], np.int64),
            PooledFeatures(sums, columns),
            PooledFeatures(np.full(len(numbers), Pooling.WEIGHTED, np.int64), columns),
        )

    def in_job(self) -> Bound:
        if self.bound is None:
            raise OutsideJob(
                "forward outside a job: nothing holds the rows of "
                f"{', '.join(table.name or 'an EmbeddingBag' for table in self.tables[:3])}"
                f"{', ...' if len(self.tables) > 3 else ''}; call "
                "planaria.torch.connect(), and make collections before the first batch"
            )
        return self.bound

    # -------------------------------------------------------------------------------- a batch

    def prepare(self, keyed: KeyedJaggedTensor, sources: tuple[Any, ...]) -> Prepared:
        """The distinct rows that a batch needs, and how its bags are made of them. Any thread may
        do this ahead of time: it needs no rows, and most of it runs without the GIL."""
        bound = self.in_job()
        samples = keyed.stride()
        ids, offsets = host_index(keyed.values()), host_index(keyed.offsets())
        rows = [_NO_ROWS] * bound.arena_count
        bags = []
        for own, keys in zip(bound.arenas, self._keys_by_arena(keyed, bound), strict=True):
            try:
                numbered = kernels.number_bags(
                    ids, offsets, samples, keys, own.limits, own.first_rows
                )
            except RowError:
                raise self._outside(keyed) from None
            bags.append(ArenaBags(own.arena, numbered))
            rows[own.arena] = numbered.rows
        return Prepared(self, sources, ids.copy(), offsets.copy(), samples, bags, rows)

    def prepare_from(self, *sources: Any) -> Prepared:
        """The same for a call of forward with these."""
        return self.prepare(self._as_keyed(*sources), sources)

    def prepared(
        self, step: SparseStep, keyed: KeyedJaggedTensor, sources: tuple[Any, ...]
    ) -> Prepared:
        """What was prepared from these objects, ahead of time or by an earlier forward."""
        ids, offsets = host_index(keyed.values()), host_index(keyed.offsets())
        found = step.expected(self, sources, ids, offsets)
        if found is None:
            found = self.prepare(keyed, sources)
            step.expect(found)
        return found

    def keys_of(self, keyed: KeyedJaggedTensor, own: ArenaFeatures) -> list[int]:
        """By feature of the arena, the number of its key in the batch."""
        index = keyed.index_per_key()
        missing = [name for name, _ in self.features if name not in index]
        if missing:
            raise ArgumentError(
                f"the batch has no feature {missing[0]!r}; its keys are {', '.join(index)}"
            )
        return [index[self.features[number][0]] for number in own.numbers]

    def _keys_by_arena(self, keyed: KeyedJaggedTensor, bound: Bound) -> list[Index]:
        known, by_arena = self._keys
        if known != keyed.keys() or not by_arena:
            by_arena = [np.array(self.keys_of(keyed, own), np.int64) for own in bound.arenas]
            self._keys = (list(keyed.keys()), by_arena)
        return by_arena

    def _outside(self, keyed: KeyedJaggedTensor) -> RowError:
        """Which id is not in its table, found the slow way."""
        for name, table in self.features:
            ids, rows = keyed[name].values(), self.tables[table].rows
            wrong = ids[(ids < 0) | (ids >= rows)]
            if len(wrong):
                return RowError(
                    f"table {self.tables[table].name} has no row {int(wrong[0])}, which feature "
                    f"{name!r} names; its ids must be from 0 to {rows - 1}"
                )
        raise AssertionError("the kernel refused an id that is in its table")


_NO_ROWS: Index = np.empty(0, np.int64)


def host_index(ids: torch.Tensor) -> Index:
    """Ids or offsets as the kernels take them; no copy where they are that already."""
    if ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 1:
        raise ArgumentError(
            f"ids must be int64 or int32 in one dimension, not {ids.dtype} of shape "
            f"{list(ids.shape)}"
        )
    index: Index = ids.detach().to("cpu", torch.int64).contiguous().numpy()
    return index


def host_floats(floats: torch.Tensor) -> Floats:
    """Weights or gradients as the kernels take them."""
    found: Floats = floats.detach().to("cpu", torch.float32).contiguous().numpy()
    return found


# ------------------------------------------------------------------------------------ all at once


def made_tables() -> list[FeatureTables]:
    """The tables of all collections that are alive and in no job yet, in order of creation."""
    _made[:] = [made for made in _made if (own := made()) is not None and own.bound is None]
    return [own for made in _made if (own := made()) is not None]


def bind_all(
    collections: Sequence[FeatureTables],
    optimizer: Optimizer,
    steps: Steps,
    device: torch.device = CPU,
) -> tuple[list[Table], list[Arena]]:
    """Puts the tables of these collections into one job: the job's tables and their arenas.

    A table without a name, which only an EmbeddingBag may have, gets one that depends on the
    order alone, so that all ranks and a resumed job agree on it.
    """
    number = count()
    for own in collections:
        own.tables = [
            table if table.name else replace(table, name=f"embedding_bag_{next(number)}")
            for table in own.tables
        ]
    tables = [table for own in collections for table in own.tables]
    arenas = make_arenas(tables, optimizer)
    places: dict[int, tuple[int, int]] = {}
    for arena, content in enumerate(arenas):
        for table_id, first_row in zip(content.table_ids, content.first_rows, strict=True):
            places[int(table_id)] = (arena, int(first_row))
    first = 0
    for own in collections:
        of_own = [places[first + at] for at in range(len(own.tables))]
        own.bind(of_own, len(arenas), steps, device)
        first += len(own.tables)
    return tables, arenas
