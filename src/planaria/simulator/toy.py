"""A job small enough to run thousands of times, in which a wrong bit cannot hide.

Gradients are hashes of everything that a trainer saw: the step, its rank, its rows' values and the
dense state. One wrong bit in one record changes every later gradient of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from planaria import kernels
from planaria.errors import HistoryGone, StepError
from planaria.kernels.types import Floats, Index, Records
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server.digest import Digest
from planaria.server.job import ServerJob
from planaria.server.store import Store
from planaria.tables import Arena, Table, make_arenas
from planaria.trainer.machine import TrainerJob

GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class ToyJob:
    servers: int = 4
    k: int = 2
    r: int = 1
    trainers: int = 2
    steps: int = 5
    rows: int = 24
    rebuild_chunk: int = 5  # 1: ranges, since a region has so many records
    dim: int = 2
    ids: int = 4  # per trainer and step
    seed: int = 1
    optimizer: Optimizer = field(default_factory=lambda: Optimizer("adagrad", lr=0.1))
    keep_steps: int = 2

    @property
    def ranks(self) -> int:
        """Trainers, and as many shadows as make r + 1 replicas of the dense state."""
        return max(self.trainers, self.r + 1)

    def lr(self, step: int) -> float:
        return 0.1 / step

    @property
    def layout(self) -> Layout:
        return _layout(self.servers, self.k, self.r)

    @property
    def arenas(self) -> list[Arena]:
        return _arenas(self.rows, self.dim, self.optimizer)

    def server_job(self, retry_s: float) -> ServerJob:
        return ServerJob(
            self.arenas,
            self.layout,
            self.optimizer,
            self.seed,
            self.ranks,
            self.lr,
            self.steps,
            keep_steps=self.keep_steps,
            retry_s=retry_s,
            rebuild_chunk=self.rebuild_chunk,
            rebuild_jobs=1,
        )

    def trainer_job(self, retry_s: float) -> TrainerJob:
        return TrainerJob(
            self.servers, [self.dim], self.trainers, self.ranks, self.steps, self.lr, retry_s
        )

    def rows_of(self, step: int, rank: int) -> Index:
        """The distinct arena rows of one trainer's samples."""
        key = _mix(self.seed, step, rank)
        return np.unique([_mix(key, i) % self.rows for i in range(self.ids)])

    def gradients(
        self, step: int, rank: int, rows: Index, values: Floats, dense: Records
    ) -> tuple[Floats, Floats]:
        """Of the rows [n, dim] and of the dense state [4], in [-1, 1)."""
        records = np.concatenate([values.view(np.uint32).ravel(), dense.ravel()])[None, :]
        seen = kernels.digest(records, np.array([step * 1000 + rank], np.uint64))[0]
        words = [_mix(seen, int(row), d) for row in rows for d in range(self.dim)]
        words += [_mix(seen, -1, d) for d in range(4)]
        floats = (np.array(words, np.uint64) >> np.uint64(40)).astype(np.float32)
        floats = floats / np.float32(2**23) - np.float32(1)
        return floats[:-4].reshape(len(rows), self.dim), floats[-4:]


@lru_cache
def _layout(servers: int, k: int, r: int) -> Layout:
    """One base block and its shifts: enough groups for every pair, few enough to be quick."""
    base = np.array([[(g + p) % servers for p in range(k + r)] for g in range(servers)], np.int32)
    return Layout(base, k)


@lru_cache
def _arenas(rows: int, dim: int, optimizer: Optimizer) -> list[Arena]:
    return make_arenas([Table("a", rows, dim)], optimizer)


def _mix(*numbers: int) -> int:
    h = 0
    for number in numbers:
        h = (h ^ (number & (2**64 - 1))) + GOLDEN & (2**64 - 1)
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        h = (h ^ h >> 27) * 0x94D049BB133111EB & (2**64 - 1)
        h ^= h >> 31
    return h


class ToyDense:
    """Four floats and their last few versions; like DenseState, without a network."""

    def __init__(self, keep_steps: int = 2) -> None:
        self.step = 0
        self.keep_steps = keep_steps
        self.versions: dict[int, Records] = {0: np.arange(4, dtype=np.float32).view(np.uint32)}

    @property
    def state(self) -> Records:
        return self.versions[self.step]

    def apply(self, step: int, gradients: Sequence[Floats | None], lr: float) -> None:
        if step != self.step + 1:
            raise StepError(f"dense step {step} cannot follow {self.step}")
        state = self.state.view(np.float32).copy()
        for gradient in gradients:
            if gradient is not None:
                state = state * np.float32(0.9) - np.float32(lr) * gradient
        self.versions[step] = state.view(np.uint32)
        self.step = step
        self.versions.pop(step - self.keep_steps - 1, None)

    def export(self, as_of: int) -> Records:
        if as_of not in self.versions:
            raise HistoryGone(f"dense step {as_of} is gone", min(self.versions))
        return self.versions[as_of].reshape(1, -1)

    def restore(self, step: int, state: Records) -> None:
        self.step = step
        self.versions = {step: state.reshape(-1)}


@dataclass(frozen=True)
class Batch:
    """One trainer's part in one step of the undisturbed run: what it asks for, sees and pushes."""

    ids: Mapping[int, list[Index]]  # per place, the record numbers in the one arena
    seen: Mapping[int, bytes]  # per place, the weights that these records have then
    dense: bytes  # the state of the dense network then
    pushes: Mapping[int, list[Floats]]  # per place
    dense_gradient: Floats


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: every batch, and what is there after the last step."""

    job: ToyJob
    batches: Mapping[tuple[int, int], Batch]  # by (step, rank)
    digest: Digest  # of all records
    dense: bytes

    def __reduce__(self) -> tuple[Callable[[ToyJob], Reference], tuple[ToyJob]]:
        return reference, (self.job,)  # copies of a world share it


@lru_cache
def reference(job: ToyJob) -> Reference:
    """The run of a job on one store, without machines, messages or faults."""
    alone = _layout(1, 1, 0)
    store = Store(job.arenas, alone, 0, job.optimizer, seed=job.seed)
    dense = ToyDense()
    arena, spread = alone.arena(job.rows), job.layout.arena(job.rows)
    batches: dict[tuple[int, int], Batch] = {}
    for step in range(1, job.steps + 2):  # the last one only looks
        contributions, dense_gradients = [], []
        for rank in range(job.trainers):
            rows = job.rows_of(step, rank)
            index = arena.locate(rows)[1]
            values = store.lookup(0, index)
            sparse, own = job.gradients(step, rank, rows, values, dense.state)
            places, there = spread.locate(rows)
            at = {place: places == place for place in range(job.servers)}
            batches[step, rank] = Batch(
                {place: [there[here]] for place, here in at.items()},
                {place: values[here].tobytes() for place, here in at.items()},
                dense.state.tobytes(),
                {place: [sparse[here]] for place, here in at.items()},
                own,
            )
            contributions.append((index, sparse))
            dense_gradients.append(own)
        if step > job.steps:
            break
        store.apply(step, [contributions], job.lr(step))
        dense.apply(step, dense_gradients, job.lr(step))
    return Reference(job, batches, store.digest(), dense.state.tobytes())
