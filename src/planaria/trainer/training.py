"""The loop of `planaria train`: it reads samples, computes with PyTorch, and calls its client.

It runs in a thread of its own; whatever it tells the supervisor goes through `tell`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from planaria import kernels
from planaria.config import Config
from planaria.data import Ahead, Batch, CriteoFile, Source, Synthetic, sample_range
from planaria.data.metrics import RecentQuality
from planaria.kernels import Parts
from planaria.kernels.types import Floats, Index
from planaria.layout import Layout
from planaria.trainer.client import Client
from planaria.trainer.dense import DenseState
from planaria.trainer.dlrm import DLRM
from planaria.trainer.job import Gradients
from planaria.trainer.routing import Router
from planaria.wire.control import DataEnded, HeldOut, Short, StepDone, Told

QUALITY_SAMPLES = 16_384  # the last ones, over which it is measured while training
EVALUATED_SAMPLES = 16_384  # of a lookup after the last step
LOSSES_KEPT = 50  # of the last steps, over which the report takes the mean
LONG_READ_S = 1.0


class Line(Protocol):
    """What the loop says while it runs."""

    def tell(self, what: Told) -> None: ...
    def working(self, what: str, done: int, of: int) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A batch whose ids have been sorted by server."""

    batch: Batch
    inverse: Index  # [samples * tables]: which distinct row
    parts: Parts
    runs: list[slice]  # by place, within parts
    layout: Layout  # whose places these are

    @property
    def rows(self) -> dict[int, list[Index]]:
        return {place: [self.parts.indices[run]] for place, run in enumerate(self.runs)}


def make_source(config: Config, on_progress: Callable[[], None] = lambda: None) -> Source:
    """on_progress: called now and then while a file is scanned."""
    rows = config.model.table_rows
    if config.data.source == "synthetic":
        return Synthetic(rows, seed=config.seed, exponent=config.data.zipf)
    assert config.data.path is not None
    return CriteoFile(config.data.path, rows, on_progress=on_progress)


class Training:
    """One trainer's model and data. Made before the client, which starts with its `state`."""

    def __init__(self, config: Config, line: Line) -> None:
        self.config = config
        self.line = line
        self._scanned, self._reading_since = 0, time.monotonic()
        self.source = make_source(config, self._on_scanned)
        model = config.model
        self.model = DLRM(len(config.tables), model.dim, model.bottom, model.top)
        self.dense = DenseState(
            self.model.parameters,
            config.optimizer_rule,
            initial=self.model.initial_weights(config.seed),
        )
        self.model.bind(self.dense.weights)
        self.arena = config.arenas[0]
        self.router = Router(config.layout.arena(self.arena.rows))
        self.losses: list[float] = []
        self.recent = RecentQuality(QUALITY_SAMPLES)

    def _on_scanned(self) -> None:
        """A piece of the data was passed. That is worth a word where many lie before a sample."""
        self._scanned += 1
        if time.monotonic() - self._reading_since > LONG_READ_S:
            self.line.working("finding its samples", self._scanned, self._scanned + 1)

    @property
    def loss(self) -> float | None:
        """The mean of the last steps."""
        return float(np.mean(self.losses)) if self.losses else None

    # ------------------------------------------------------------------ the loop

    def run(self, client: Client) -> None:
        """All steps from where the trainer begins, the evaluation, and the end."""
        self.client = client
        self.rank, step, state = client.start()
        self.dense.restore(step, state)
        reached: int | None = step
        while reached is not None and reached < self.config.steps:
            reached = self._train(reached)
        if reached is not None:
            self.trainers = client.trainers
            self._evaluate()
            client.finish()

    def _train(self, step: int) -> int | None:
        """All steps after this one that have as many trainers; the last of them, or None if the
        samples end before.
        """
        last, self.trainers = self.config.steps, self.client.trainers
        with contextlib.ExitStack() as stack:
            samples_of = self._samples_of
            if self.config.data.source != "synthetic" and step < last:  # those are made in no time
                samples_of = stack.enter_context(Ahead(self._samples_of, step + 1, last)).get
            ahead: Prepared | None = None
            while step < last:
                step += 1
                prepared = ahead or self._ask(step, samples_of)
                if prepared is None:
                    return None
                ahead = self._ask(step + 1, samples_of) if step < last else None
                self._step(step, prepared)
                if self.client.trainers != self.trainers:
                    break  # they share the samples anew
                if ahead is None and step < last:
                    return None
        return step

    def _ask(self, step: int, samples_of: Callable[[int], Prepared | None]) -> Prepared | None:
        """Asks for the rows of a step's samples; None if there are too few of these."""
        prepared = samples_of(step)
        if prepared is None:
            self.line.tell(DataEnded(step=step, samples=self.source.samples or 0))
        else:
            self.client.ask(step, 0, prepared.rows, prepared.layout)
        return prepared

    def _samples_of(self, step: int) -> Prepared | None:
        config = self.config
        start, count = sample_range(step, self.rank, self.trainers, config.batch)
        batch = self._read(start, count)
        return self._prepare(batch) if len(batch) == count else None

    def _read(self, start: int, count: int) -> Batch:
        self._reading_since = time.monotonic()
        return self.source.read(start, count)

    def _prepare(self, batch: Batch) -> Prepared:
        unique, inverse = kernels.dedup((batch.ids + self.arena.first_rows).ravel())
        if self.router.layout is not self.client.layout:  # servers have come or gone
            self.router = Router(self.client.layout.arena(self.arena.rows))
        router = self.router
        parts = router.partition(unique)
        ends = np.cumsum(parts.counts).tolist()
        runs = [slice(end - n, end) for end, n in zip(ends, parts.counts.tolist(), strict=True)]
        return Prepared(batch, inverse, parts, runs, router.layout)

    def _step(self, step: int, prepared: Prepared) -> None:
        config, client, batch = self.config, self.client, prepared.batch
        embeddings = self._embeddings(prepared, client.rows(step, 0))
        gradients = self.model.step(batch.dense, embeddings, batch.labels, config.batch)
        summed = np.empty((len(prepared.parts.order), config.model.dim), np.float32)
        kernels.gradient_sum(
            gradients.embeddings.reshape(-1, config.model.dim), prepared.inverse, summed
        )
        in_order = kernels.gather(summed.view(np.uint32), prepared.parts.order).view(np.float32)
        pushes = {place: [in_order[run]] for place, run in enumerate(prepared.runs)}
        sparse = Gradients(prepared.rows, pushes, config.lrs(step), prepared.layout)
        client.push(step, sparse, gradients.dense)
        self._report(step, gradients.loss_sum, prepared, gradients.logits)
        self.dense.apply(step, client.sum(step), config.lr(step))
        client.end_step(step, self.dense.export())

    def _embeddings(self, prepared: Prepared, found: dict[int, list[Floats]]) -> Floats:
        """[samples, tables, dim], in memory of their own."""
        values = np.empty((len(prepared.parts.order), self.config.model.dim), np.float32)
        for place, run in enumerate(prepared.runs):
            values[prepared.parts.order[run]] = found[place][0]
        rows = kernels.gather(values.view(np.uint32), prepared.inverse).view(np.float32)
        return rows.reshape(-1, len(self.config.tables), self.config.model.dim)

    def _report(self, step: int, loss_sum: float, prepared: Prepared, logits: Floats) -> None:
        batch, config = prepared.batch, self.config
        self.losses.append(loss_sum / len(batch))
        del self.losses[:-LOSSES_KEPT]
        auc = normalized_entropy = None
        if self.rank == 0:
            self.recent.add(batch.labels, logits)
            if self.recent.due(step, config.steps):
                auc, normalized_entropy = map(_known, self.recent.measure())
        done = StepDone(
            rank=self.rank,
            step=step,
            rows=prepared.parts.counts.tolist(),
            loss=self.losses[-1],
            auc=auc,
            normalized_entropy=normalized_entropy,
        )
        self.line.tell(done)

    # ------------------------------------------------------------------ the held-out samples

    def _evaluate(self) -> None:
        """Some at a time, each with a lookup of its own: there may be millions."""
        config, step = self.config, self.config.steps + 1
        start, count = sample_range(1, self.rank, self.trainers, config.data.test_samples)
        start += config.steps * config.batch  # they lie behind all samples of the job
        for part, first in enumerate(range(0, count, EVALUATED_SAMPLES)):
            wanted = min(EVALUATED_SAMPLES, count - first)
            batch = self._read(start + first, wanted)
            if len(batch) < wanted:
                self.line.tell(Short(samples=first + len(batch), wanted=count))
            if len(batch):
                self._predict(step, part, first, batch)
                self.line.working("evaluating", first + len(batch), count)
            if len(batch) < wanted:
                return

    def _predict(self, step: int, part: int, first: int, batch: Batch) -> None:
        prepared = self._prepare(batch)
        self.client.ask(step, part, prepared.rows, prepared.layout, exact=True)
        embeddings = self._embeddings(prepared, self.client.rows(step, part))
        with torch.no_grad():
            logits = self.model.forward(batch.dense, embeddings).numpy()
        held_out = HeldOut(
            rank=self.rank,
            first=first,
            labels=batch.labels.astype(np.uint8),
            logits=np.ascontiguousarray(logits, np.float32),
        )
        self.line.tell(held_out)


def _known(value: float) -> float | None:
    """None where all samples have one label."""
    return None if math.isnan(value) else value
