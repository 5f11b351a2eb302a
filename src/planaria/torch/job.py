"""A user's loop as a trainer: `connect`, then a loop over `Job.batches`.

    job = planaria.torch.connect()
    job.keep(model=model, optimizer=optimizer)
    for batch in job.batches(dataset, batch_size=128):
        ...forward, backward, optimizer.step()...

The user's thread calls; another one talks (trainer/client.py). A step begins when a batch is handed
out and ends when the next one is asked for. Its gradients leave at the end of backward: those of
rows to the servers, and the dense ones to the other trainers, whose mean is in place when
backward returns.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planaria.cluster.files import JobFiles
from planaria.cluster.node import log_into
from planaria.cluster.trainer_node import TrainerNode
from planaria.collecting import keep_what_is_there
from planaria.config import Config
from planaria.errors import ArgumentError, ClusterError, ConfigError, JobOver, OutsideJob
from planaria.kernels.types import Floats, Index
from planaria.torch.averaging import DenseGradients
from planaria.torch.batches import Batches
from planaria.torch.declared import as_declared, numbered_optimizers
from planaria.torch.devices import CPU
from planaria.torch.features import bind_all, made_tables
from planaria.torch.frozen import State
from planaria.torch.keeping import Keeper, digest, seed_torch
from planaria.torch.looking_ahead import Ahead, find_features
from planaria.torch.replicas import Replicas
from planaria.torch.routed import JobRouter
from planaria.torch.sparse import SparseStep
from planaria.torch.step import Step, figures_of
from planaria.torch.watching import OptimizerWatch
from planaria.trainer.client import Client
from planaria.trainer.declaring import MOST_BYTES, Assignment, Declaration, Reply, encode
from planaria.trainer.job import Gradients
from planaria.wire.control import HeldOut, LastStep, LeftLoop, SaveWanted, StepDone

LOSSES_KEPT = 50  # of the last steps, over which the report takes the mean
STARTED = "the job has started; do this before the first batch"


class Job:
    """This process's part in a job."""

    def __init__(
        self,
        config: Config,
        line: socket.socket,
        supervisor: subprocess.Popen[bytes] | None = None,
        *,
        rank: int = 0,
        device: torch.device = CPU,
    ) -> None:
        """supervisor: of a job that this process has started itself, and is the only trainer of.
        rank: -1 in a spare.
        """
        self.config = config
        self._supervisor = supervisor
        self._device = device
        self.world_size = config.trainers
        self.rank = rank
        self.step = 0
        """The last one that is done; during a step, the one before it."""
        self._line = line
        self._kept: dict[str, object] = {}
        self._replicas = Replicas()
        self._client: Client | None = None
        self._now: Step | None = None
        # Numbers of lookups, beside those that go ahead. What is looked up after the gradients of
        # a step is of the next step, too, and no two lookups of a step may share one.
        self._parts = count(1)
        self._accumulating = False
        self._losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self._has_left = False  # the loop, before its end
        self._left: State | None = None  # with this dense state of its last step
        self._held: Callable[[], Generator[Any, None, None] | None] = lambda: None  # the loop

    # ------------------------------------------------------------------ before the first batch

    def keep(self, **objects: object) -> None:
        """Whatever must be exact after a failure, by name: all that training changes, and that has
        state_dict and load_state_dict. The gradients of modules among them are averaged.
        """
        if self._client is not None:
            raise OutsideJob(f"keep({', '.join(objects)}): {STARTED}")
        if twice := set(objects) & set(self._kept):
            raise ArgumentError(f"keep: {', '.join(sorted(twice))} is kept already")
        Keeper(objects)  # so that what cannot be kept is refused here
        self._kept.update(objects)

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = False,
        drop_last: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
        workers: int = 0,
    ) -> Iterator[Any]:
        """The batches of this trainer, from where the job is; a step for each.

        dataset: map-style, or anything with read(start, count). batch_size: of one trainer. steps:
        how many, instead of epochs. Which samples a trainer gets is a function of the job's seed,
        the step and its rank.
        """
        if self._client is not None:
            raise OutsideJob("batches: a job has one loop; give it epochs")

        def plan() -> Batches:
            return Batches(
                dataset,
                batch_size,
                epochs=epochs,
                steps=steps,
                shuffle=shuffle,
                drop_last=drop_last,
                collate_fn=collate_fn,
                workers=workers,
                world_size=self.world_size,
                rank=max(self.rank, 0),
                seed=self.config.seed,
            )

        loop = self._loop(plan, batch_size)
        self._held = weakref.ref(loop)
        atexit.register(self._leave)
        return loop

    # ------------------------------------------------------------------ during a step

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Several backwards, one step: gradients leave at the end of this block."""
        now = self._in_step("accumulate")
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False
        if now.backwards:
            self._sync()

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[None]:
        """A block in which lookups read the rows of now and nothing learns."""
        now = self._in_step("evaluate")
        training = now.sparse
        now.sparse = SparseStep(_Lookups(self, exact=True), self._dims, recording=False)
        try:
            with torch.no_grad():
                yield
        finally:
            now.sparse = training

    def save(self) -> None:
        """Asks for a checkpoint of one of the next steps, which all can be told of in time."""
        if self.config.checkpoint.path is None:
            raise ConfigError("save: there is nowhere to save to; set checkpoint.path")
        self._in_step("save")
        self._node.line.tell(SaveWanted())

    def log(
        self, loss: float, auc: float | None = None, normalized_entropy: float | None = None
    ) -> None:
        """What this step is to be shown and reported with. Rank 0's are those of the job."""
        self._in_step("log").figures = figures = figures_of(loss, auc, normalized_entropy)
        self._losses.append(figures[0] or 0.0)

    def judge(self, first: int, labels: torch.Tensor, logits: torch.Tensor) -> None:
        """Held-out samples, as the trained model predicts them: the report has their AUC.

        first: the number of the first of them among those of this rank, so that a rank that begins
        again tells of none twice.
        """
        self._in_step("judge")
        if labels.ndim != 1 or labels.shape != logits.shape:
            shapes = f"{list(labels.shape)} and {list(logits.shape)}"
            raise ArgumentError(f"judge: labels and logits must both be [samples], not {shapes}")
        held_out = HeldOut(
            rank=self.rank,
            first=first,
            labels=labels.detach().to("cpu").numpy().astype(np.uint8),
            logits=logits.detach().to("cpu").numpy().astype(np.float32),
        )
        self._node.line.tell(held_out)

    def finish(self) -> None:
        """Ends the job whose loop was left before its end, as the end of the script does by itself:
        for notebooks. A loop that a name still holds was left without our knowing.
        """
        if (held := self._held()) is not None:
            held.close()
        if not self._has_left:
            return
        assert self._client is not None
        self._has_left = False
        if self._left is not None:
            self._client.sum(self.step)
            self._client.end_step(self.step, self._left, last=True)
        self._node.line.tell(LastStep(step=self.step))
        self._finish()

    def current_step(self) -> SparseStep:
        """What collections ask for; see planaria.torch.sparse."""
        return self._in_step("forward").sparse

    def _in_step(self, what: str) -> Step:
        if self._now is None:
            raise OutsideJob(f"{what} outside a step: it needs a batch; use it in the loop")
        return self._now

    # ------------------------------------------------------------------ the loop

    def _loop(self, plan: Callable[[], Batches], batch_size: int) -> Generator[Any, None, None]:
        batches = plan()
        self._begin(batches, batch_size)
        assert self._client is not None
        while self.step < self._steps:
            batches.take_seat(self.rank, self.world_size)
            ahead, seated = Ahead(batches.from_step(self.step + 1)), True
            try:
                while seated and self.step < self._steps:
                    self._start_step(self.step + 1, ahead)
                    yield ahead.batch
                    seated = self._end_step()
            except (GeneratorExit, KeyboardInterrupt):
                self._leave_loop()
                raise
            finally:
                ahead.close()
        self._finish()

    def _leave_loop(self) -> None:
        """The loop was left before its end: by break, or by an exception, which cannot be told
        here. So the job ends with the script. What was learnt in this step counts. A notebook's
        user may have interrupted it, too.
        """
        now = self._now
        if now is None:
            return
        assert self._client is not None
        self._left = self._keeper.freeze() if now.pushed else None
        if now.pushed:
            self._tell_of(now)
        self._has_left = True
        self.step = now.step if now.pushed else now.step - 1
        self._client.rest()
        self._node.line.tell(LeftLoop(rank=self.rank, step=self.step))

    def _leave(self) -> None:
        """At the end of the script. One that an exception has ended has not meant the job to end;
        its loop is closed while there is still an interpreter.
        """
        if getattr(sys, "last_value", None) is not None:
            self._now, self._has_left = None, False
        with contextlib.suppress(JobOver):
            self.finish()

    def _finish(self) -> None:
        assert self._client is not None
        self._now = None
        self._client.finish()
        self._node.join()
        if self._supervisor is not None and self._supervisor.wait():
            raise ClusterError("the job has not ended well; its supervisor has said why")

    def _begin(self, batches: Batches, batch_size: int) -> None:
        """Declares this trainer, and waits for its part in the job."""
        if batches.steps is None:
            raise ArgumentError(
                "batches: the dataset does not know its length; give one with len() or samples, "
                "or say how many steps there are"
            )
        collections = made_tables()
        if not collections:
            raise OutsideJob("batches: there is no collection of tables; make the model first")
        self._optimizers = numbered_optimizers(collections)
        self._collections = collections
        tables, _ = bind_all(collections, self.config.optimizer_rule, self, self._device)
        kept = {**self._kept}
        for number, optimizer in enumerate(self._optimizers):
            kept.setdefault(f"tables.optimizer{number}", optimizer)
        self._keeper = Keeper(kept)
        self._dense = DenseGradients(kept, self.world_size, self.config.most_trainers)
        self._watch = OptimizerWatch(kept, self._dense.parameters)
        self._steps = batches.steps
        first = find_features(batches.batch(1), collections)
        declaration = Declaration(
            config=self.config.to_dict(),
            tables=[as_declared(table) for table in tables],
            steps=batches.steps,
            batch=batch_size * self.world_size,
            ids=sum(len(rows) for one in first for rows in one.rows),
            parameters=self._dense.size,
            kept=self._keeper.fingerprint(),
            state=str(digest(self._keeper.freeze())),
        )
        keep_what_is_there()
        self._join(self._declare(declaration))

    def _declare(self, declaration: Declaration) -> Assignment:
        self._line.send(encode(declaration))
        answer = self._line.recv(MOST_BYTES)
        if not answer:
            raise JobOver("whoever supervised this job has ended before it could start")
        reply = msgspec.json.decode(answer, type=Reply)
        if isinstance(reply, Assignment):
            return reply
        raise ConfigError(reply.why)

    def _join(self, part: Assignment) -> None:
        files = JobFiles(Path(part.folder))
        log_into(files.log(part.member))
        self._node = TrainerNode(
            files, part.member, self._line.fileno(), outlives=self._supervisor is not None
        )
        config = self.config = self._node.config
        self._dims = [arena.dim for arena in config.arenas]
        self._router = JobRouter(config)
        client = self._node.begin(part.rank, self._keeper.freeze(), digest, self._mean_loss)
        self.rank, self.step, state = client.start()
        self.world_size = self._dense.trainers = client.trainers
        if self._supervisor is None:  # a spare has none before, and others' variables are theirs
            os.environ["RANK"] = str(self.rank)
            if os.environ["LOCAL_RANK"] == "-1":
                local = self.rank if part.local_rank is None else part.local_rank
                os.environ["LOCAL_RANK"] = str(local)
        if self._node.beginning.restores or self.step or part.rank is None:
            self._keeper.thaw(state)
        self._client = client
        register_optimizer_step_pre_hook(self._before_optimizer)
        if self.world_size > 1:
            self._replicas.hold(state)
        if self.world_size > 1 or config.is_elastic:
            self._dense.on_backward(self._on_backward)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Any of this process is about to step."""
        if self._now is not None:
            self._now.check_backward()
            self._watch.before_step(optimizer)

    def _mean_loss(self) -> float | None:
        """Of the last steps, as far as the script has told."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    # ------------------------------------------------------------------ a step

    def _start_step(self, step: int, ahead: Ahead) -> None:
        """Hands out a batch whose rows are on their way, and asks for those of the next."""
        assert self._client is not None
        now = self._now = Step(step, SparseStep(_Lookups(self), self._dims))
        now.sparse.on_backward = self._on_backward
        if not ahead:
            ahead.look(self._collections, self._ask_ahead(step))
        if step < self._steps:
            ahead.look(self._collections, self._ask_ahead(step + 1))
        ahead.arrive(self._client_rows(step), now.sparse)
        # Last, so that no number is drawn by a dataset: a replacement reads other batches here.
        seed_torch(self.config.seed, step, self.rank)

    def _end_step(self) -> bool:
        """Whether there are as many trainers in the next one."""
        assert self._client is not None
        now = self._in_step("the end of a step")
        now.check_backward()
        if not now.pushed:
            self._sync()
        self._tell_of(now)
        self._client.sum(now.step)
        state = self._keeper.freeze()
        self._client.end_step(now.step, state)
        before, self.world_size = self.world_size, self._client.trainers
        self._dense.trainers = self.world_size
        if self.world_size > 1:
            self._replicas.hold(state)
        self.step = now.step
        return before == self.world_size

    def _tell_of(self, now: Step) -> None:
        loss, auc, entropy = now.figures
        self._node.line.tell(
            StepDone(
                rank=self.rank,
                step=now.step,
                rows=now.rows,
                loss=loss,
                auc=auc,
                normalized_entropy=entropy,
            )
        )

    def _on_backward(self) -> None:
        """Somewhere in a backward: at its end, the gradients leave."""
        now = self._in_step("backward")
        if now.called:
            return
        now.called = True
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        now = self._in_step("backward")
        now.called = False
        now.backwards += 1
        if not self._accumulating:
            self._sync()

    def _sync(self) -> None:
        assert self._client is not None
        now = self._in_step("backward")
        if now.pushed:
            raise OutsideJob(
                "a second backward in one step: do several of them within job.accumulate()"
            )
        now.pushed = True
        gradients = now.sparse.gradients()
        scale = np.float32(1 / self.world_size)
        per_arena = [own if self.world_size == 1 else own * scale for _, own in gradients]
        routed = self._router.route([rows for rows, _ in gradients], self._client.layout)
        alone = self.world_size == 1
        said = self._replicas.said
        dense = np.zeros(0, np.float32) if alone else self._dense.collect(self.rank, said)
        lrs = [self._lr(arena.optimizer.group, now.step) for arena in self.config.arenas]
        sparse = Gradients(routed.rows, routed.split(per_arena), lrs, routed.layout)
        self._client.push(now.step, sparse, dense)
        now.rows = routed.counts
        if not alone:
            total = self._client.sum(now.step)
            self._replicas.compare(self._dense.heard(total), now.step - 1)
            self._dense.spread(total)

    def _lr(self, group: int, step: int) -> float:
        """Of an optimizer by its number; 0: of tables without one of their own."""
        return float(self._optimizers[group - 1].lr) if group else self.config.lr(step)

    # ------------------------------------------------------------------ rows

    def _lookup(self, rows: Sequence[Index], *, exact: bool = False) -> list[Floats]:
        """Of now: before the gradients have left as of the step before, and then as of this one."""
        assert self._client is not None
        now = self._in_step("forward")
        routed = self._router.route(rows, self._client.layout)
        step = now.step + 1 if now.pushed else now.step
        part = next(self._parts)
        self._client.ask(step, part, routed.rows, routed.layout, exact=exact)
        return routed.gather(self._client.rows(step, part))

    def _ask_ahead(self, step: int) -> Callable[[list[Index]], Any]:
        def ask(rows: list[Index]) -> Any:
            assert self._client is not None
            routed = self._router.route(rows, self._client.layout)
            self._client.ask(step, 0, routed.rows, routed.layout)
            return routed

        return ask

    def _client_rows(self, step: int) -> Callable[[Any], list[Floats]]:
        def take(routed: Any) -> list[Floats]:
            assert self._client is not None
            found: list[Floats] = routed.gather(self._client.rows(step, 0))
            return found

        return take


class _Lookups:
    """What a SparseStep asks for rows that nobody has asked for before."""

    def __init__(self, job: Job, *, exact: bool = False) -> None:
        """exact: however rows travel otherwise, for these judge the model."""
        self._job = job
        self._exact = exact

    def lookup(self, rows: Sequence[Index]) -> list[Floats]:
        return self._job._lookup(rows, exact=self._exact)
