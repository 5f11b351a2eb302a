"""A trainer as a process: it reads samples, computes with PyTorch, and lets its machine talk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from planaria import kernels
from planaria.checkpoints import DENSE
from planaria.cluster.files import JobFiles
from planaria.cluster.node import IDLE_MS, MemberNode
from planaria.cluster.parts import PartSaver, SavedDense, read_dense
from planaria.config import Config
from planaria.data import Batch, CriteoFile, Source, Synthetic, sample_range
from planaria.data.metrics import RecentQuality
from planaria.exactness import measure
from planaria.kernels import Parts
from planaria.kernels.types import Floats, Index, Records
from planaria.trainer.dense import DenseState, sum_in_rank_order
from planaria.trainer.dlrm import DLRM
from planaria.trainer.machine import TrainerJob, TrainerMachine
from planaria.trainer.routing import Router
from planaria.wire.control import (
    DataEnded,
    HeldOut,
    Ready,
    Short,
    StepDone,
    TrainerHolds,
    Waiting,
)
from planaria.wire.messages import NO_VIEW, Member, Message

QUALITY_SAMPLES = 16_384  # the last ones, over which it is measured while training
EVALUATED_SAMPLES = 16_384  # at a time
READ_SAMPLES = 65_536  # likewise
LOSSES_KEPT = 50  # of the last steps, over which the report takes the mean
LONG_READ_S = 1.0
WAITED_S = 5.0  # before a trainer says whom it waits for


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

    def adopt(self, step: int, state: Records) -> None:
        self.state.adopt(step, np.array(state))


def make_source(config: Config, on_progress: Callable[[], None] = lambda: None) -> Source:
    """on_progress: called now and then while a file is scanned."""
    rows = config.model.table_rows
    if config.data.source == "synthetic":
        return Synthetic(rows, seed=config.seed, exponent=config.data.zipf)
    assert config.data.path is not None
    return CriteoFile(config.data.path, rows, on_progress=on_progress)


class TrainerNode(MemberNode):
    def __init__(self, files: JobFiles, member: Member, rank: int | None) -> None:
        super().__init__(files, member, "trainer")
        config = self.config
        torch.set_num_threads(config.threads.trainer)
        kernels.set_threads(config.threads.trainer)
        self.arena = config.arenas[0]
        self._scanned, self._reading_since = 0, time.monotonic()
        self.source = make_source(config, self._on_scanned)
        self.model = DLRM(
            len(config.tables), config.model.dim, config.model.bottom, config.model.top
        )
        self.dense = DenseState(
            self.model.parameters,
            config.optimizer_rule,
            keep_steps=2,
            initial=self.model.initial_weights(config.seed),
        )
        self.model.bind(self.dense.weights)
        start = files.start()
        if start and rank is not None:
            self.dense.restore(start, read_dense(config, start))
        self.saver = PartSaver(config, self.line.tell, start, files.job())
        job = TrainerJob(
            config.servers,
            [config.model.dim],
            config.trainers,
            config.ranks,
            config.steps,
            config.lr,
            config.lrs,
            config.cluster.retry_ms / 1000,
        )
        self.trainer = TrainerMachine(member, job, Replica(self.dense), fresh_rank=rank)
        self.machine = self.trainer
        self.router = Router(config.layout.arena(self.arena.rows))
        self.prepared: dict[int, Prepared] = {}
        self.losses: list[float] = []
        self.evaluated = False
        self.recent = RecentQuality(QUALITY_SAMPLES)
        self._moved = (0, time.monotonic())  # the step that it is at, and since when
        self._told_in = NO_VIEW  # the view in which it told what it holds
        self.data_ended: int | None = None  # the first step that there are no samples for
        self.line.tell(Ready(fingerprint=measure(config.reproducible)))

    def _on_scanned(self) -> None:
        """A piece of the data was passed. That is worth a word where many lie before a sample."""
        self._scanned += 1
        self.line.turn()
        if time.monotonic() - self._reading_since > LONG_READ_S:
            self.line.working("finding its samples", self._scanned, self._scanned + 1)

    # ------------------------------------------------------------------ a step

    def _handle(self, sender: Member, address: str, message: Message) -> None:
        super()._handle(sender, address, message)
        self._save_if_due()

    def _save_if_due(self) -> None:
        """The dense state of a step that is due, which may be one step ago."""
        trainer, dense = self.trainer, self.dense
        if trainer.rank != 0 or trainer.blank:
            return
        step = self.saver.due(dense.step, self.orders)
        if step is None:
            return
        if step >= dense.oldest:
            self.saver.save(step, DENSE, lambda: SavedDense(dense.export(step)))
        else:
            self.saver.missed(step, DENSE)

    def work(self) -> int:
        """One thing at a time: what came meanwhile may be a vote that lets gradients go."""
        trainer = self.trainer
        self._save_if_due()  # the supervisor may want a step that is done
        if (step := self._wants_ids()) is not None:
            prepared = self._prepare(step)
            if prepared is None:
                return 0
            self.prepared[step] = prepared
            trainer.give_ids(step, prepared.rows)
        elif (found := None if trainer.shadow else trainer.ready()) is not None:
            self._compute(found)
            self._save_if_due()
        elif trainer.done and not trainer.left:
            if not self.evaluated and not trainer.shadow:
                self._evaluate()
            self._leave_when_saved()
            if not trainer.left:
                return IDLE_MS
        else:
            self._say_whom_it_waits_for()
            return IDLE_MS
        self.post(trainer.take_outbox())
        return 0

    def _wants_ids(self) -> int | None:
        step = self.trainer.wants_ids()
        return None if step is None or step == self.data_ended else step

    def _say_whom_it_waits_for(self) -> None:
        """Now and then, so that a stalled job can name them."""
        trainer, now = self.trainer, time.monotonic()
        if self._moved[0] != trainer.step:
            self._moved = (trainer.step, now)
        elif now - self._moved[1] > WAITED_S and trainer.install and not trainer.blank:
            self._moved = (trainer.step, now)
            answered = trainer.answers.get(trainer.step, {})
            places = [place for place in range(self.config.servers) if place not in answered]
            what = "rows" if places else "gradients"
            self.line.tell(Waiting(step=trainer.step, places=places, what=what))

    def _prepare(self, step: int) -> Prepared | None:
        """Reads the samples of a step and sorts their rows by server; None if there are none."""
        config = self.config
        if step <= config.steps:
            start, count = sample_range(step, self.trainer.rank, config.trainers, config.batch)
        else:  # the held-out part, which lies behind all samples of the job
            start, count = sample_range(
                1, self.trainer.rank, config.trainers, config.data.test_samples
            )
            start += config.steps * config.batch
        batch = self._read(start, count)
        if step <= config.steps and len(batch) < count:
            self.data_ended = step
            self.line.tell(DataEnded(step=step, samples=self.source.samples or 0))
            return None
        if len(batch) < count:
            self.line.tell(Short(samples=len(batch), wanted=count))
        unique, inverse = kernels.dedup((batch.ids + self.arena.first_rows).ravel())
        parts = self.router.partition(unique)
        ends = np.cumsum(parts.counts).tolist()
        runs = [slice(end - n, end) for end, n in zip(ends, parts.counts.tolist(), strict=True)]
        return Prepared(batch, inverse, parts, runs)

    def _read(self, start: int, count: int) -> Batch:
        """Some at a time: the held-out samples may be millions, and nothing else moves then."""
        pieces: list[Batch] = []
        for first in range(0, max(count, 1), READ_SAMPLES):
            self._reading_since = time.monotonic()
            pieces.append(self.source.read(start + first, min(READ_SAMPLES, count - first)))
            if count > READ_SAMPLES:
                self.line.working("reading samples", first + len(pieces[-1]), count)
            if len(pieces[-1]) < READ_SAMPLES:
                break
        if len(pieces) == 1:
            return pieces[0]
        return Batch(
            np.concatenate([piece.dense for piece in pieces]),
            np.concatenate([piece.ids for piece in pieces]),
            np.concatenate([piece.labels for piece in pieces]),
        )

    def _values(self, prepared: Prepared, found: dict[int, list[Floats]]) -> Floats:
        """[distinct rows, dim], in the order of their ids."""
        values = np.empty((len(prepared.parts.order), self.config.model.dim), np.float32)
        for place, run in enumerate(prepared.runs):
            values[prepared.parts.order[run]] = found[place][0]
        return values

    def _embeddings(self, values: Floats, inverse: Index) -> Floats:
        """[samples, tables, dim], in memory of their own."""
        rows = kernels.gather(values.view(np.uint32), inverse).view(np.float32)
        return rows.reshape(-1, len(self.config.tables), self.config.model.dim)

    def _compute(self, found: dict[int, list[Floats]]) -> None:
        trainer, step = self.trainer, self.trainer.step
        prepared = self.prepared[step]
        batch = prepared.batch
        embeddings = self._embeddings(self._values(prepared, found), prepared.inverse)
        gradients = self.model.step(batch.dense, embeddings, batch.labels, self.config.batch)
        summed = np.empty((len(prepared.parts.order), self.config.model.dim), np.float32)
        kernels.gradient_sum(
            gradients.embeddings.reshape(-1, self.config.model.dim), prepared.inverse, summed
        )
        in_order = kernels.gather(summed.view(np.uint32), prepared.parts.order).view(np.float32)
        pushes = {place: [in_order[run]] for place, run in enumerate(prepared.runs)}
        trainer.give_gradients(step, pushes, gradients.dense, self.config.lrs(step))
        for old in [s for s in self.prepared if s < step]:
            del self.prepared[old]
        self._report(step, gradients.loss_sum, prepared, gradients.logits)

    def _report(self, step: int, loss_sum: float, prepared: Prepared, logits: Floats) -> None:
        batch, config = prepared.batch, self.config
        self.losses.append(loss_sum / len(batch))
        del self.losses[:-LOSSES_KEPT]
        auc = normalized_entropy = None
        if self.trainer.rank == 0:
            self.recent.add(batch.labels, logits)
            if self.recent.due(step, config.steps):
                auc, normalized_entropy = map(_known, self.recent.measure())
        done = StepDone(
            rank=self.trainer.rank,
            step=step,
            rows=prepared.parts.counts.tolist(),
            loss=self.losses[-1],
            auc=auc,
            normalized_entropy=normalized_entropy,
        )
        self.line.tell(done)

    def _evaluate(self) -> None:
        """The held-out samples, some at a time: there may be millions."""
        found = self.trainer.final_rows()
        if found is None:
            return
        self.evaluated = True
        prepared = self.prepared[self.config.steps + 1]
        batch, tables = prepared.batch, len(self.config.tables)
        values = self._values(prepared, found)
        for first in range(0, len(batch), EVALUATED_SAMPLES):
            some = slice(first, first + EVALUATED_SAMPLES)
            inverse = prepared.inverse[first * tables : some.stop * tables]
            with torch.no_grad():
                embeddings = self._embeddings(values, inverse)
                logits = self.model.forward(batch.dense[some], embeddings).numpy()
            held_out = HeldOut(
                rank=self.trainer.rank,
                first=first,
                labels=batch.labels[some].astype(np.uint8),
                logits=np.ascontiguousarray(logits, np.float32),
            )
            self.line.tell(held_out)
            self.line.working("evaluating", first + len(batch.labels[some]), len(batch))

    def _leave_when_saved(self) -> None:
        """Nobody needs it any more when the trained model is saved and what it holds was heard."""
        if self.trainer.rank == 0 and not self.saver.last_done:
            self.line.working("saving the last step", round(1000 * self.saver.done_share), 1001)
            self.saver.give_up_stalled(DENSE)
        elif self._told_in != self.trainer.view:
            self._told_in = self.trainer.view
            self._tell_what_it_holds()
        elif not self.line.unheard:
            self.post(self.trainer.leave())

    def _tell_what_it_holds(self) -> None:
        digest = self.dense.digest()
        holds = TrainerHolds(
            rank=self.trainer.rank,
            digest=(str(digest.first), str(digest.second)),
            loss=float(np.mean(self.losses)) if self.losses else None,
        )
        self.line.tell(holds)


def _known(value: float) -> float | None:
    """None where all samples have one label."""
    return None if math.isnan(value) else value
