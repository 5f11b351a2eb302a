"""A trainer as a process: it reads samples, computes with PyTorch, and lets its machine talk."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from planaria import kernels
from planaria.checkpoints import DENSE
from planaria.cluster.files import JobFiles
from planaria.cluster.node import IDLE_MS, MemberNode
from planaria.cluster.saving import PartSaver, SavedDense, read_dense
from planaria.config import Config
from planaria.data import Batch, CriteoFile, Source, Synthetic, sample_range
from planaria.data.metrics import Labels, auc, normalized_entropy
from planaria.errors import DataError
from planaria.kernels import Parts
from planaria.kernels.types import Floats, Index, Records
from planaria.tables import make_arenas
from planaria.trainer.dense import DenseState, sum_in_rank_order
from planaria.trainer.dlrm import DLRM
from planaria.trainer.machine import TrainerJob, TrainerMachine
from planaria.trainer.routing import Router
from planaria.wire.messages import Member, Message

QUALITY_S = 0.5  # between two measurements while training
QUALITY_SAMPLES = 16_384  # the last ones, over which it is measured


@dataclass(frozen=True)
class Prepared:
    """A batch whose ids have been sorted by server."""

    batch: Batch
    inverse: Index  # [samples * tables]: which distinct row
    parts: Parts
    runs: list[slice]  # by place, within parts

    @property
    def rows(self) -> dict[int, list[Index]]:
        return {place: [self.parts.indices[run]] for place, run in enumerate(self.runs)}


class Replica:
    """The dense state as the machine wants it: gradients of all ranks in, bits out."""

    def __init__(self, state: DenseState) -> None:
        self.state = state

    @property
    def step(self) -> int:
        return self.state.step

    def apply(self, step: int, gradients: Sequence[Floats | None], lr: float) -> None:
        self.state.apply(step, sum_in_rank_order(gradients), lr)

    def export(self, as_of: int) -> Records:
        return self.state.export(as_of)

    def restore(self, step: int, state: Records) -> None:
        self.state.restore(step, np.array(state))


def make_source(config: Config) -> Source:
    rows = config.model.table_rows
    if config.data.source == "synthetic":
        return Synthetic(rows, seed=config.seed, exponent=config.data.zipf)
    assert config.data.path is not None
    return CriteoFile(config.data.path, rows)


class TrainerNode(MemberNode):
    def __init__(self, files: JobFiles, member: Member, rank: int | None) -> None:
        super().__init__(files, member, "trainer")
        config = self.config
        torch.set_num_threads(config.threads.trainer)
        kernels.set_threads(config.threads.trainer)
        optimizer = config.optimizer_rule
        self.arena = make_arenas(config.tables, optimizer)[0]
        self.source = make_source(config)
        self.model = DLRM(
            len(config.tables), config.model.dim, config.model.bottom, config.model.top
        )
        self.dense = DenseState(
            self.model.parameters,
            optimizer,
            keep_steps=2,
            initial=self.model.initial_weights(config.seed),
        )
        self.model.bind(self.dense.weights)
        start = files.start()
        if start and rank is not None:
            self.dense.restore(start, read_dense(config, start))
        self.saver = PartSaver(config, self.link.say, start, told=self.told)
        job = TrainerJob(
            config.servers,
            [config.model.dim],
            config.trainers,
            config.ranks,
            config.steps,
            config.lr,
            config.cluster.retry_ms / 1000,
        )
        self.trainer = TrainerMachine(member, job, Replica(self.dense), fresh_rank=rank)
        self.machine = self.trainer
        self.router = Router(config.layout.arena(self.arena.rows))
        self.prepared: dict[int, Prepared] = {}
        self.losses: list[float] = []
        self.evaluated = False
        in_a_batch = max(config.batch // config.trainers, 1)
        self.recent: deque[tuple[Labels, Floats]] = deque(
            maxlen=max(QUALITY_SAMPLES // in_a_batch, 1)
        )
        self._measured = time.monotonic()
        self.link.say("ready", member=member)

    # ------------------------------------------------------------------ a step

    def _handle(self, sender: Member, address: str, message: Message) -> None:
        super()._handle(sender, address, message)
        self._save_if_due()

    def _save_if_due(self) -> None:
        """The dense state of a step that is due, which may be one step ago."""
        trainer, dense = self.trainer, self.dense
        if trainer.rank != 0 or trainer.blank:
            return
        step = self.saver.due(dense.step)
        if step is None:
            return
        if step >= dense.oldest:
            self.saver.save(step, DENSE, lambda: SavedDense(dense.export(step)))
        else:
            self.saver.missed(step, DENSE)

    def work(self) -> int:
        """One thing at a time: what came meanwhile may be a vote that lets gradients go."""
        trainer = self.trainer
        if (step := trainer.wants_ids()) is not None:
            self.prepared[step] = self._prepare(step)
            trainer.give_ids(step, self.prepared[step].rows)
        elif (found := None if trainer.shadow else trainer.ready()) is not None:
            self._compute(found)
            self._save_if_due()
        elif trainer.done and not trainer.left:
            if not self.evaluated and not trainer.shadow:
                self._evaluate()
            self._tell_what_it_holds()
        else:
            return IDLE_MS
        self.post(trainer.take_outbox())
        return 0

    def _prepare(self, step: int) -> Prepared:
        """Reads the samples of a step and sorts their rows by server."""
        config = self.config
        if step <= config.steps:
            start, count = sample_range(step, self.trainer.rank, config.trainers, config.batch)
        else:  # the held-out part, which lies behind all samples of the job
            start, count = sample_range(
                1, self.trainer.rank, config.trainers, config.data.test_samples
            )
            start += config.steps * config.batch
        batch = self.source.read(start, count)
        if step <= config.steps and len(batch) < count:
            there = self.source.samples or 0
            raise DataError(
                f"step {step} wants more samples than data.path has: its {there} suffice for "
                f"{there // config.batch} steps; lower steps or batch"
            )
        if len(batch) < count:
            self.link.say("short", samples=len(batch), wanted=count)
        unique, inverse = kernels.dedup((batch.ids + self.arena.first_rows).ravel())
        parts = self.router.partition(unique)
        ends = np.cumsum(parts.counts).tolist()
        runs = [slice(end - n, end) for end, n in zip(ends, parts.counts.tolist(), strict=True)]
        return Prepared(batch, inverse, parts, runs)

    def _embeddings(self, prepared: Prepared, found: dict[int, list[Floats]]) -> Floats:
        """[samples, tables, dim], in memory of their own."""
        dim = self.config.model.dim
        values = np.empty((len(prepared.parts.order), dim), np.float32)
        for place, run in enumerate(prepared.runs):
            values[prepared.parts.order[run]] = found[place][0]
        rows = kernels.gather(values.view(np.uint32), prepared.inverse).view(np.float32)
        return rows.reshape(len(prepared.batch), -1, dim)

    def _compute(self, found: dict[int, list[Floats]]) -> None:
        trainer, step = self.trainer, self.trainer.step
        prepared = self.prepared[step]
        batch = prepared.batch
        embeddings = self._embeddings(prepared, found)
        gradients = self.model.step(batch.dense, embeddings, batch.labels, self.config.batch)
        summed = np.empty((len(prepared.parts.order), self.config.model.dim), np.float32)
        kernels.gradient_sum(
            gradients.embeddings.reshape(-1, self.config.model.dim), prepared.inverse, summed
        )
        in_order = kernels.gather(summed.view(np.uint32), prepared.parts.order).view(np.float32)
        pushes = {place: [in_order[run]] for place, run in enumerate(prepared.runs)}
        trainer.give_gradients(step, pushes, gradients.dense)
        for old in [s for s in self.prepared if s < step]:
            del self.prepared[old]
        self._report(step, gradients.loss_sum, batch, gradients.logits)

    def _report(self, step: int, loss_sum: float, batch: Batch, logits: Floats) -> None:
        self.losses.append(loss_sum / len(batch))
        if self.trainer.rank == 0:
            self.recent.append((batch.labels, logits))
            self.link.say("step", step=step, loss=self.losses[-1], **self._quality())

    def _quality(self) -> dict[str, float]:
        """Of the last samples, as they were predicted before they were learnt; now and then."""
        now = time.monotonic()
        if now - self._measured < QUALITY_S:
            return {}
        self._measured = now
        labels, logits = map(np.concatenate, zip(*self.recent, strict=True))
        chances = 1 / (1 + np.exp(-logits.astype(np.float64)))
        measured = {
            "auc": auc(labels, logits),
            "normalized_entropy": normalized_entropy(labels, chances),
        }
        return {name: value for name, value in measured.items() if not np.isnan(value)}

    def _evaluate(self) -> None:
        found = self.trainer.final_rows()
        if found is None:
            return
        self.evaluated = True
        prepared = self.prepared[self.config.steps + 1]
        batch = prepared.batch
        if not len(batch):
            return
        with torch.no_grad():
            logits = self.model.forward(batch.dense, self._embeddings(prepared, found)).numpy()
        self.link.say(
            "evaluated",
            rank=self.trainer.rank,
            labels=batch.labels.astype(int).tolist(),
            logits=[float(x) for x in logits],
        )

    def _tell_what_it_holds(self) -> None:
        digest = self.dense.digest()
        self.link.say(
            "trainer done",
            rank=self.trainer.rank,
            digest=[str(digest.first), str(digest.second)],
            loss=float(np.mean(self.losses[-50:])) if self.losses else None,
        )
        self.post(self.trainer.leave())
