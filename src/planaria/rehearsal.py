"""A whole job on stores in one process: what a cluster computes, without processes or sockets.

It trains a click model (the chance of a click is the logistic of the sum of all its embeddings'
weights) on planted data, step by step as a cluster does: dedup, partition, lookup, gradient, push,
delta. A server can be lost between two steps; its replacement starts blank and is decoded from its
stripe-mates. Equal digests mean that nothing was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.kernels.types import Floats, Index
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server import Digest, Store, decode, find_mates
from planaria.tables import Arena, Table, make_arenas
from planaria.trainer import Router


@dataclass(frozen=True)
class Job:
    servers: int = 6
    parity: int = 1
    k: int | None = None
    trainers: int = 2
    steps: int = 150
    batch: int = 512
    tables: int = 8
    rows: int = 20_000
    dim: int = 16
    seed: int = 0
    optimizer: Optimizer = field(default_factory=lambda: Optimizer("adagrad", lr=0.02))


class Rehearsal:
    """The servers of one job, and its data."""

    def __init__(self, job: Job) -> None:
        self.job = job
        tables = [Table(f"table{t}", job.rows, job.dim) for t in range(job.tables)]
        self.arenas: list[Arena] = make_arenas(tables, job.optimizer)
        self.layout = Layout.fresh(job.servers, job.parity, job.k)
        self.router = Router(self.layout.arena(self.arenas[0].rows))
        self.stores = {place: self._store(place, None) for place in self.layout.places}
        self.loss = float("nan")

    def _store(self, place: int, blank_at: int | None) -> Store:
        job = self.job
        return Store(
            self.arenas, self.layout, place, job.optimizer, seed=job.seed, blank_at=blank_at
        )

    @property
    def step(self) -> int:
        return min(store.step for store in self.stores.values())

    @property
    def digest(self) -> Digest:
        return sum((store.digest() for store in self.stores.values()), Digest())

    def train_step(self) -> None:
        """One synchronous step over all trainers and servers."""
        step = self.step + 1
        pushes = [self._compute(step, rank) for rank in range(self.job.trainers)]
        for place, store in self.stores.items():
            changes = store.apply(step, [[push[place] for push in pushes]])
            for holder, deltas in store.parity_deltas(changes).items():
                self.stores[holder].apply_parity(place, step, deltas)

    def _compute(self, step: int, rank: int) -> dict[int, tuple[Index, Floats]]:
        """What one trainer pushes to each server: record numbers and summed gradients."""
        job = self.job
        ids, labels = self._samples(step, rank)
        unique, inverse = kernels.dedup(ids)
        parts = self.router.partition(unique)
        ends = np.cumsum(parts.counts)
        runs = {p: slice(int(ends[p] - parts.counts[p]), int(ends[p])) for p in self.stores}
        values = np.empty((len(unique), job.dim), np.float32)
        for place, run in runs.items():
            values[parts.order[run]] = self.stores[place].lookup(0, parts.indices[run])
        offsets = np.arange(0, len(ids) + 1, job.tables)
        score = kernels.pool(values, inverse, offsets).sum(axis=1)
        chance = 1 / (1 + np.exp(-score))
        self.loss = float(np.mean(np.logaddexp(0, np.where(labels, -score, score))))
        slope = ((chance - labels) / job.batch).astype(np.float32)
        grads = np.repeat(slope[:, None], job.dim, axis=1)
        summed = kernels.pool_backward(grads, inverse, offsets, np.empty_like(values))
        in_order = summed[parts.order]
        return {place: (parts.indices[run], in_order[run]) for place, run in runs.items()}

    def _samples(self, step: int, rank: int) -> tuple[Index, NDArray[np.bool_]]:
        """Ids [batch * tables] as arena rows, and labels planted in the ids themselves."""
        job = self.job
        random = np.random.default_rng((job.seed, step, rank))
        skewed = random.random((job.batch, job.tables)) ** 3  # few rows get most of the ids
        rows = (skewed * job.rows).astype(np.int64)
        taste = np.sin(rows * 12.9898 + np.arange(job.tables)).sum(axis=1)
        labels = random.random(job.batch) < 1 / (1 + np.exp(-2 * taste))
        return (rows + self.arenas[0].first_rows).ravel(), labels

    def lose(self, places: Collection[int]) -> int:
        """Loses servers between two steps and rebuilds them; returns the records decoded."""
        step = self.step
        replacements = {place: self._store(place, step) for place in places}
        for place in places:
            del self.stores[place]
        for place, store in replacements.items():
            for region in range(len(self.layout.regions(place).group)):
                for chunk in store.arenas[0].chunks(region):
                    self._rebuild(store, np.arange(chunk.start, chunk.stop), places)
        self.stores |= replacements
        self.stores = dict(sorted(self.stores.items()))
        return sum(len(arena.records) for s in replacements.values() for arena in s.arenas)

    def _rebuild(self, store: Store, index: Index, absent: Collection[int]) -> None:
        mates = find_mates(store.arenas[0].layout, store.place, index, absent)
        # One region at a time, so all its records have their i-th mate on one place.
        shards = [
            self.stores[int(places[0])].read(0, np.ascontiguousarray(mate), store.step)
            for places, mate in zip(mates.places.T, mates.indices.T, strict=True)
        ]
        store.restore(0, index, decode(mates, shards), store.step)


def run(
    job: Job, lose_at: Mapping[int, Collection[int]], report: Callable[[Rehearsal], None]
) -> Rehearsal:
    """Trains to the end, losing servers after the given steps."""
    rehearsal = Rehearsal(job)
    for step in range(1, job.steps + 1):
        rehearsal.train_step()
        if step in lose_at:
            rehearsal.lose(lose_at[step])
        report(rehearsal)
    return rehearsal
