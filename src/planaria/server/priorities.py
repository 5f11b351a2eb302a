"""Which rows a server should save first: CPR's three rules for the largest tables.

    scar   those whose weights are farthest from the copy that was saved last
    mfu    those used most since they were saved last
    ssu    a sample of those used lately, filled from every second use

A use is a row in a trainer's push: a trainer that meets a row several times in one step pushes it
once. Each rule picks a share rho of the rows of the large tables, so that 1 / rho saves write about
as much as saving them all once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.kernels import saves
from planaria.kernels.types import Index, Records
from planaria.server.arena import ArenaStore
from planaria.server.store import Store
from planaria.tables import Arena

Score = TypeVar("Score", np.uint32, np.float32)


def large_tables(arenas: Sequence[Arena], share: float) -> set[int]:
    """The fewest tables, largest first, that hold at least this share of the bytes of all."""
    size: dict[int, int] = {}
    for arena in arenas:
        words = np.diff(arena.first_rows, append=arena.rows) * arena.words
        size |= zip(arena.table_ids.tolist(), words.tolist(), strict=True)
    chosen: set[int] = set()
    held = 0
    for table in sorted(size, key=lambda table: (-size[table], table)):
        if held >= share * sum(size.values()):
            break
        chosen.add(table)
        held += size[table]
    return chosen


class Priorities(ABC):
    """The rule of one server. `note` what is used, `choose` what to save, `saved` when it is."""

    def __init__(self, store: Store, rho: float, share: float) -> None:
        self.store = store
        tables = large_tables([arena.arena for arena in store.arenas], share)
        self.large = [_records_of(arena, tables) for arena in store.arenas]
        self.quota = [int(np.ceil(rho * np.count_nonzero(large))) for large in self.large]
        self._all_large = [bool(large.all()) for large in self.large]

    @abstractmethod
    def note(self, arena: int, index: Index) -> None:
        """These data records were used, each once."""

    @abstractmethod
    def choose(self, arena: int) -> Index:
        """The records of large tables to save now, ascending; at most the quota."""

    @abstractmethod
    def saved(self, arena: int, index: Index) -> None:
        """These records, ascending, are in a save as they are now."""

    def saved_all(self) -> None:
        """So are all."""
        for arena, store in enumerate(self.store.arenas):
            self.saved(arena, np.arange(store.data_records))

    def others(self, arena: int) -> Index:
        """The records of the other tables, which are saved once per interval."""
        return np.flatnonzero(~self.large[arena])

    def _large_only(self, arena: int, scores: NDArray[Score]) -> NDArray[Score]:
        return (
            scores
            if self._all_large[arena]
            else np.where(self.large[arena], scores, scores.dtype.type(0))
        )


class Mfu(Priorities):
    """A counter of 4 bytes per row; those of saved rows start again at 0."""

    def __init__(self, store: Store, rho: float, share: float) -> None:
        super().__init__(store, rho, share)
        self.counters = [np.zeros(arena.data_records, np.uint32) for arena in store.arenas]

    def note(self, arena: int, index: Index) -> None:
        saves.count_accesses(self.counters[arena], index)

    def choose(self, arena: int) -> Index:
        scores = self._large_only(arena, self.counters[arena])
        top = saves.top_rows(scores, self.quota[arena])
        return top[scores[top] > 0]  # what was not used since is saved as it is

    def saved(self, arena: int, index: Index) -> None:
        saves.reset_counters(self.counters[arena], index)

    @property
    def unsaved(self) -> int:
        """How many updates are in no save."""
        return sum(int(counters.sum(dtype=np.int64)) for counters in self.counters)


class Ssu(Priorities):
    """A list of the quota's length; when it is full, a random row makes room."""

    def __init__(self, store: Store, rho: float, share: float) -> None:
        super().__init__(store, rho, share)
        self.samples = [
            saves.new_sample(max(arena.data_records, 1), max(quota, 1))
            for arena, quota in zip(store.arenas, self.quota, strict=True)
        ]

    def note(self, arena: int, index: Index) -> None:
        if not self._all_large[arena]:
            index = index[self.large[arena][index]]
        saves.sample_accesses(self.samples[arena], self.store.seed, index)

    def choose(self, arena: int) -> Index:
        return saves.sampled_rows(self.samples[arena])

    def saved(self, arena: int, index: Index) -> None:
        saves.clear_sample(self.samples[arena])


class Scar(Priorities):
    """A copy of the weights as they were saved."""

    def __init__(self, store: Store, rho: float, share: float) -> None:
        super().__init__(store, rho, share)
        self.copies: list[Records] = [
            # Under sgd a record is its weights, and only a true copy is not the arena itself.
            np.array(_weights(arena), order="C")
            for arena in store.arenas
        ]

    def note(self, arena: int, index: Index) -> None:
        """The weights themselves tell."""

    def choose(self, arena: int) -> Index:
        store = self.store.arenas[arena]
        records = store.records.read(0, store.data_records)
        distances = saves.row_distances(records, self.copies[arena], store.arena.dim)
        scores = self._large_only(arena, distances)
        top = saves.top_rows(scores, self.quota[arena])
        moved: Index = top[scores[top] != 0]  # NaN, which is farthest, is not 0 either
        return moved

    def saved(self, arena: int, index: Index) -> None:
        store = self.store.arenas[arena]
        weights = np.empty((len(index), store.arena.dim), np.uint32)
        store.records.gather(index, weights)
        kernels.scatter(self.copies[arena], index, weights)


RULES: dict[str, type[Priorities]] = {"mfu": Mfu, "ssu": Ssu, "scar": Scar}


def _weights(arena: ArenaStore) -> Records:
    return arena.records.read(0, arena.data_records)[:, : arena.arena.dim]


def _records_of(arena: ArenaStore, tables: set[int]) -> NDArray[np.bool_]:
    """By data record of the server: whether it is a row of one of the tables, or padding."""
    rows = arena.layout.row_at(arena.place, np.arange(arena.data_records))
    table, _ = arena.arena.table_row(rows.clip(min=0))
    return np.isin(table, list(tables)) | (rows < 0)
