"""A trainer as a process: a thread talks, while whoever called computes (trainer/client.py)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable

from planaria.checkpoints import DENSE
from planaria.cluster.files import JobFiles
from planaria.cluster.lookups import bound_rule
from planaria.cluster.node import IDLE_MS, MemberNode, log
from planaria.cluster.parts import PartSaver, SavedDense, read_dense
from planaria.cluster.tracing import Tracer, trace_member
from planaria.dense import DenseCopies
from planaria.exactness import measure
from planaria.kernels.types import Bytes
from planaria.server.digest import Digest
from planaria.trainer.client import Client
from planaria.trainer.job import TrainerJob
from planaria.trainer.machine import TrainerMachine
from planaria.wire.coding import Coding
from planaria.wire.control import Ready, Refused, TrainerHolds, Waiting, Working
from planaria.wire.messages import NO_VIEW, Member, Message

WAITED_S = 5.0  # before a trainer says whom it waits for


class TrainerNode(MemberNode):
    """`begin` starts the thread that talks; `client` is what the caller computes with."""

    client: Client
    trainer: TrainerMachine

    def __init__(
        self, files: JobFiles, member: Member, lifeline: int = 0, *, outlives: bool = False
    ) -> None:
        """outlives: whether this process was there before the job, and goes on when whoever
        supervises that is gone: a notebook, say."""
        self.outlives = outlives
        super().__init__(files, member, "trainer", lifeline)
        self.beginning = files.beginning()
        start = self.beginning.step
        self.saver = PartSaver(self.config, self.line.tell, start, files.job())
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.transport.watch(self._wakes)
        self._moved = (0, time.monotonic())  # the step that it is at, and since when
        self._computed = 0  # so often it was said that whoever calls computes
        self._told_in = NO_VIEW  # the view in which it told what it holds
        self._thread = threading.Thread(target=self._talk, name="planaria", daemon=True)

    def begin(
        self,
        rank: int | None,
        state: Bytes,
        digest: Callable[[Bytes], Digest],
        loss: Callable[[], float | None] = lambda: None,
    ) -> Client:
        """rank: with which it starts the job, if it does; state: its dense state before any step.

        digest, loss: what the end of the job is told with.
        """
        config = self.config
        self._digest, self._loss = digest, loss
        dense = DenseCopies()
        if rank is not None:
            job_id, start = self.beginning.job, self.beginning.step
            saved = read_dense(config, job_id, start) if self.beginning.restores else None
            dense.put(start, state if saved is None else saved)
        job = TrainerJob(
            config.layout,
            [arena.rows for arena in config.arenas],
            [arena.dim for arena in config.arenas],
            config.cluster.retry_ms / 1000,
            Coding.of_job(config),
            bound_rule(config),
            config.wire.gradients,
        )
        self.trainer = TrainerMachine(self.member, job, dense, fresh_rank=rank)
        self.machine = self.trainer
        self.client = Client(self.trainer, lambda: os.eventfd_write(self._wakes, 1))
        self.client.pause_after = self.beginning.pause_after
        self.guard = self.client.lock
        self._trace()
        self.line.tell(Ready(fingerprint=measure(config.reproducible)))
        self._thread.start()
        return self.client

    def _trace(self) -> None:
        tracer = Tracer(self.files, self.member, lambda: self.trainer.step)
        tracer.watch(self.client, "ask", "lookup")
        tracer.watch(self.client, "rows", "wait for rows")
        tracer.watch(self.client, "push", "push")
        tracer.watch(self.client, "sum", "wait for the sum")
        tracer.watch(self.client, "end_step", "end step")
        tracer.between(self.client, "rows", "push", "compute")
        trace_member(tracer, self.transport, self.trainer)

    def join(self) -> str:
        """Waits for the end of the job; returns its reason, or raises what kept this one from it.

        Whoever calls this has nothing more to compute.
        """
        self.client.rest()
        self._thread.join()
        if self.stopped is None:
            raise self.client.over
        return self.stopped

    # ------------------------------------------------------------------ the thread

    def _talk(self) -> None:
        try:
            self.client.end(self.run())
        except BaseException as error:
            log(traceback.format_exc().rstrip())
            self.client.end(error)

    def _orphaned(self) -> None:
        if not self.outlives:
            super()._orphaned()
        self.stopped = self.stopped or "the job's supervisor has ended; its last words say why"
        os.eventfd_write(self._wakes, 1)

    def poll(self, wait_ms: int) -> None:
        self.transport.poll(wait_ms)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakes)

    def on_orders(self) -> None:
        self.client.pause_after = self.orders.pause_after

    def turn(self) -> None:
        """The thread that computes is what must not hang; this one only talks. A process that
        nobody could replace does not hang: its user thinks."""
        if self.client.turns() or self.outlives:
            super().turn()

    def _handle(self, sender: Member, address: str, message: Message) -> None:
        super()._handle(sender, address, message)
        self._save_if_due()

    def _save_if_due(self) -> None:
        """The dense state of a step that is due, which may be one step ago."""
        trainer = self.trainer
        if trainer.rank != 0 or trainer.blank:
            return
        if trainer.last is not None:
            self.saver.end_at(trainer.last)
        step = self.saver.due(trainer.dense.step, self.orders)
        if step is None:
            return
        state = trainer.dense.as_of(step)
        if state is not None:
            self.saver.save(step, DENSE, lambda: SavedDense(state))
        else:
            self.saver.missed(step, DENSE)

    def work(self) -> int:
        with self.guard:
            outbox = self.trainer.take_outbox()
            errors, self.trainer.arrivals.errors = self.trainer.arrivals.errors, []
        self.post(outbox)
        for error in errors:
            self.line.tell(Refused(what=error))
        self.client.moved()
        self._save_if_due()
        if self.trainer.done and not self.trainer.left:
            self._leave_when_saved()
        else:
            self._say_what_takes_long()
        return IDLE_MS

    def _say_what_takes_long(self) -> None:
        """Now and then: whom it waits for, so that a stalled job can name them; or that whoever
        calls computes, which is no stall."""
        trainer, now = self.trainer, time.monotonic()
        if self._moved[0] != trainer.step:
            self._moved = (trainer.step, now)
        elif now - self._moved[1] > WAITED_S and not trainer.blank:
            self._moved = (trainer.step, now)
            if self.client.waits:
                what, places = trainer.waits_for()
                self.line.tell(Waiting(step=trainer.step, places=places, what=what))
            else:
                self._computed += 1
                at_work = Working(what="computing", done=self._computed, of=self._computed + 1)
                self.line.tell(at_work)

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
        state = self.trainer.dense.as_of(self.trainer.dense.step)
        assert state is not None
        digest = self._digest(state)
        holds = TrainerHolds(
            rank=self.trainer.rank,
            digest=(str(digest.first), str(digest.second)),
            loss=self._loss(),
            sent=self.sent,
        )
        self.line.tell(holds)
