"""A job small enough to run thousands of times, in which a wrong bit cannot hide.

Gradients are hashes of everything that a trainer saw: the step, its rank, its rows' values and the
dense state. One wrong bit in one record changes every later gradient of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np

from planaria import kernels
from planaria.dense import DenseCopies, keepers, sum_in_rank_order
from planaria.kernels.types import Floats, Index, Records
from planaria.layout import Layout
from planaria.layout.arithmetic import Ints32
from planaria.optimizers import Optimizer
from planaria.server.digest import Digest
from planaria.server.job import ServerJob
from planaria.server.store import Store
from planaria.tables import Arena, Table, make_arenas
from planaria.trainer.bounds import BoundRule, Bounds
from planaria.trainer.job import TrainerJob
from planaria.wire.coding import EXACTLY, Coding
from planaria.wire.messages import NO_VIEW, Answer, Lookup, Shift

GOLDEN = 0x9E3779B97F4A7C15
ENCODERS = ("huffman", "none", "fp16")
RULE = BoundRule(decay_steps=6, sample_steps=3)


ToyTable = tuple[int, int] | tuple[int, int, Optimizer]
"""Rows, dim, and the optimizer if it is not the job's."""


@dataclass(frozen=True)
class ToyJob:
    servers: int = 4
    k: int = 2
    r: int = 1
    trainers: int = 2
    steps: int = 5
    tables: tuple[ToyTable, ...] = ((24, 2),)  # each dim and each optimizer is an arena
    rebuild_chunk: int = 5  # 1: ranges, since a region has so many records
    rebuild_priority: str = "redundancy"
    ids: int = 4  # per trainer and step, in all tables
    seed: int = 1
    optimizer: Optimizer = field(default_factory=lambda: Optimizer("adagrad", lr=0.1))
    keep_steps: int = 2
    early_answers: bool = False
    lossy: bool = False  # rows travel within bounds, each table's with another encoder
    peeks: bool = False  # servers that rebuild read in their mates' memory
    blocks: int = 1  # of groups
    restored_at: int = 0  # if set: everybody starts from a checkpoint of that step
    shifts: tuple[Shift, ...] = ()  # the number of trainers changes after these steps
    by_survivors: bool = False  # they rebuild what was lost

    @property
    def keepers(self) -> int:
        return keepers(self.r, self.trainers)

    def trainers_in(self, step: int) -> int:
        """How many there are in a step."""
        numbers = [shift.trainers for shift in self.shifts if shift.after < step]
        return numbers[-1] if numbers else self.trainers

    def lr(self, step: int) -> float:
        return 0.1 / step

    def lrs(self, step: int) -> list[float]:
        return [arena.optimizer.lr / step for arena in self.arenas]

    @property
    def layout(self) -> Layout:
        return _layout(self.servers, self.k, self.r, self.blocks)

    @property
    def arenas(self) -> list[Arena]:
        return _arenas(self.tables, self.optimizer)

    def server_job(self, retry_s: float) -> ServerJob:
        return ServerJob(
            self.arenas,
            self.layout,
            self.seed,
            keep_steps=self.keep_steps,
            retry_s=retry_s,
            rebuild_chunk=self.rebuild_chunk,
            rebuild_jobs=self.blocks,
            rebuild_priority=self.rebuild_priority,
            early_answers=self.early_answers,
            coding=self.coding,
        )

    def trainer_job(self, retry_s: float) -> TrainerJob:
        dims = [arena.dim for arena in self.arenas]
        rows = [arena.rows for arena in self.arenas]
        return TrainerJob(self.layout, rows, dims, retry_s, self.coding, RULE)

    @property
    def coding(self) -> Coding:
        return _coding(self.tables, self.optimizer) if self.lossy else EXACTLY

    @property
    def undisturbed(self) -> ToyJob:
        """Without what changes no bit of its records: jobs that are alike share one reference."""
        alike = ToyJob()
        return replace(
            self,
            keep_steps=alike.keep_steps,
            rebuild_chunk=alike.rebuild_chunk,
            rebuild_priority=alike.rebuild_priority,
            early_answers=alike.early_answers,
            peeks=alike.peeks,
            by_survivors=alike.by_survivors,
        )

    def restore(self, store: Store) -> None:
        """Fills a blank store with the records of the step that the job starts from."""
        first = _first_records(self.undisturbed)
        for arena, records in zip(store.arenas, first[store.place], strict=True):
            arena.records.put(0, records)
        store.set_all_valid()

    def first_dense(self) -> DenseCopies:
        """That of the step which the job starts after."""
        copies = DenseCopies()
        first = reference(self).batches[self.restored_at + 1, 0]
        copies.put(self.restored_at, np.frombuffer(first.dense + first.bounds, np.uint8))
        return copies

    def rows_of(self, step: int, rank: int) -> list[Index]:
        """The distinct rows of one trainer's samples, per arena; in some of them there are none."""
        key = _mix(self.seed, step, rank)
        ends = np.cumsum([arena.rows for arena in self.arenas])
        drawn = np.unique([_mix(key, i) % int(ends[-1]) for i in range(self.ids)])
        return [
            drawn[(end - arena.rows <= drawn) & (drawn < end)] - (end - arena.rows)
            for arena, end in zip(self.arenas, ends, strict=True)
        ]

    def gradients(
        self,
        step: int,
        rank: int,
        rows: Sequence[Index],
        values: Sequence[Floats],
        dense: Floats,
    ) -> tuple[list[Floats], Floats]:
        """Of the rows [n, dim] of each arena and of the dense state [5], in [-1, 1).

        Of many magnitudes, so that a sum in another order has other bits.
        """
        parts = [weights.view(np.uint32).ravel() for weights in [*values, dense]]
        key = np.array([step * 1000 + rank], np.uint64)
        seen = kernels.digest(np.concatenate(parts)[None, :], key)[0]
        words = [
            _mix(seen, arena, int(row), d)
            for arena, index in enumerate(rows)
            for row in index
            for d in range(self.arenas[arena].dim)
        ]
        words += [_mix(seen, -1, d) for d in range(len(dense))]
        drawn = np.array(words, np.uint64)
        floats = (drawn >> np.uint64(40)).astype(np.float32)
        floats = floats / np.float32(2**23) - np.float32(1)
        floats = np.ldexp(floats, -(drawn % np.uint64(16)).astype(np.int32))
        *sparse, own = np.split(floats, np.cumsum([weights.size for weights in values]))
        return [part.reshape(of.shape) for part, of in zip(sparse, values, strict=True)], own


@lru_cache
def _layout(servers: int, k: int, r: int, blocks: int = 1) -> Layout:
    """One base block and its shifts: enough groups for every pair, few enough to be quick. Where
    memberships move there are more of them, so that everybody has some.
    """
    shifts = range(servers * blocks)
    base = np.array([[(g + p) % servers for p in range(k + r)] for g in shifts], np.int32)
    return Layout(base, k)


@lru_cache
def _arenas(tables: tuple[ToyTable, ...], optimizer: Optimizer) -> list[Arena]:
    named = [
        Table(f"table {number}", rows, dim, optimizer=own[0] if own else None)
        for number, (rows, dim, *own) in enumerate(tables)
    ]
    return make_arenas(named, optimizer)


@lru_cache
def _coding(tables: tuple[ToyTable, ...], optimizer: Optimizer) -> Coding:
    names = [f"table {number}" for number in range(len(tables))]
    encoders = [ENCODERS[number % len(ENCODERS)] for number in range(len(tables))]
    return Coding(_arenas(tables, optimizer), names, encoders)


def _mix(*numbers: int) -> int:
    h = 0
    for number in numbers:
        h = (h ^ (number & (2**64 - 1))) + GOLDEN & (2**64 - 1)
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        h = (h ^ h >> 27) * 0x94D049BB133111EB & (2**64 - 1)
        h ^= h >> 31
    return h


Located = Sequence[tuple[Ints32, Index]]
"""Per arena: the places of some rows, and their record numbers there."""
Part = TypeVar("Part", Index, Floats)


def located(layout: Layout, arenas: Sequence[Arena], rows: Sequence[Index]) -> Located:
    return [layout.arena(arena.rows).locate(own) for arena, own in zip(arenas, rows, strict=True)]


def by_place(job: ToyJob, rows: Located, parts: Sequence[Part]) -> dict[int, list[Part]]:
    """What belongs to the rows of each place, arena by arena."""
    return {
        place: [part[at == place] for (at, _), part in zip(rows, parts, strict=True)]
        for place in range(job.servers)
    }


def joined(parts: Sequence[Floats]) -> bytes:
    return b"".join(part.tobytes() for part in parts)


def next_dense(state: Floats, total: Floats, lr: float) -> Floats:
    """What a driver makes of the dense state and of a step's summed gradient."""
    return state * np.float32(0.9) - np.float32(lr) * total


@dataclass(frozen=True)
class Batch:
    """One trainer's part in one step of the undisturbed run: what it asks for, sees and pushes."""

    ids: Mapping[int, list[Index]]  # per place, the record numbers in each arena
    seen: Mapping[int, bytes]  # per place, the weights that these records have then
    dense: bytes  # the state of the dense network then
    bounds: bytes  # what is kept behind it, where rows travel within bounds
    pushes: Mapping[int, list[Floats]]  # per place, for each arena
    dense_gradient: Floats


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: every batch, and what is there after the last step."""

    job: ToyJob
    batches: Mapping[tuple[int, int], Batch]  # by (step, rank)
    digest: Digest  # of all records
    dense: bytes  # and the bounds behind it

    def __reduce__(self) -> tuple[Callable[[ToyJob], Reference], tuple[ToyJob]]:
        return reference, (self.job,)  # copies of a world share it


def reference(job: ToyJob) -> Reference:
    """The run of a job on one store, without machines, messages or faults."""
    return _reference(job.undisturbed)


@lru_cache(maxsize=512)
def _reference(job: ToyJob) -> Reference:
    alone = _layout(1, 1, 0)
    store = Store(job.arenas, alone, 0, seed=job.seed)
    dense = np.arange(5, dtype=np.float32)
    batches: dict[tuple[int, int], Batch] = {}
    travel = _Travel(job, alone)
    for step in range(1, job.steps + 2):  # the last one only looks
        contributions, dense_gradients = [], []
        for rank in range(job.trainers_in(step)):
            rows = job.rows_of(step, rank)
            index = [there for _, there in located(alone, job.arenas, rows)]
            exact = [store.lookup(arena, there) for arena, there in enumerate(index)]
            values = travel.received(step, rank, rows, index, exact)
            sparse, own = job.gradients(step, rank, rows, values, dense)
            spread = located(job.layout, job.arenas, rows)
            batches[step, rank] = Batch(
                by_place(job, spread, [there for _, there in spread]),
                {place: joined(found) for place, found in by_place(job, spread, values).items()},
                dense.tobytes(),
                travel.kept,
                by_place(job, spread, sparse),
                own,
            )
            contributions.append(list(zip(index, sparse, strict=True)))
            dense_gradients.append(own)
        if step > job.steps:
            break
        store.apply(step, list(zip(*contributions, strict=True)), job.lrs(step))
        dense = next_dense(dense, sum_in_rank_order(dense_gradients), job.lr(step))
        travel.end(step)
    return Reference(job, batches, store.digest(), dense.tobytes() + travel.kept)


class _Travel:
    """What becomes of rows on their way, where a job is lossy: in one piece, from one server."""

    def __init__(self, job: ToyJob, alone: Layout) -> None:
        self.coding, self.alone = job.coding, alone
        self.bounds = Bounds.unknown(len(self.coding.adapts), 0)
        self.measured: Floats | None = None

    @property
    def kept(self) -> bytes:
        return self.bounds.pack().tobytes() if self.coding.adapts.any() else b""

    def received(
        self,
        step: int,
        rank: int,
        rows: Sequence[Index],
        index: list[Index],
        weights: list[Floats],
    ) -> list[Floats]:
        """By a trainer of its lookup. index: record numbers."""
        if not self.coding.adapts.any():
            return weights
        bounds = self.bounds.next * np.float32(RULE.factor(step))
        lookup = Lookup(view=NO_VIEW, rank=rank, step=step, part=0, indices=index, bounds=[bounds])
        plain, frames = self.coding.packed(self.alone, 0, lookup, index, weights)
        answer = Answer(
            view=NO_VIEW,
            place=0,
            step=step,
            part=0,
            protected=0,
            whole=True,
            weights=plain,
            frames=frames,
        )
        found = self.coding.unpacked(answer, self.alone, index).weights
        if rank == 0 and step == self.bounds.due:
            self.measured = self.bounds.measured(self.coding, RULE, rows, found)
        return found

    def end(self, step: int) -> None:
        if self.coding.adapts.any():
            self.bounds = self.bounds.after(step, self.measured, RULE)
            self.measured = None


@lru_cache(maxsize=512)
def _first_records(job: ToyJob) -> list[list[Records]]:
    """Per place and arena: the records, parity too, after the step that the job starts from."""
    stores = [Store(job.arenas, job.layout, place, seed=job.seed) for place in range(job.servers)]
    batches = reference(job).batches
    for step in range(1, job.restored_at + 1):
        ranks = [batches[step, rank] for rank in range(job.trainers_in(step))]
        for place, store in enumerate(stores):
            pushes = [zip(b.ids[place], b.pushes[place], strict=True) for b in ranks]
            changes = store.apply(step, list(zip(*pushes, strict=True)), job.lrs(step))
            for holder, deltas in store.parity_deltas(changes).items():
                stores[holder].apply_parity(place, step, deltas)
    return [[arena.records.copy() for arena in store.arenas] for store in stores]
