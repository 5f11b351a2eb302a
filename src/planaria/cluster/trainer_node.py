"""A trainer as a process: this thread talks, the one of its loop computes (trainer/client.py)."""

from __future__ import annotations

import os
import threading
import time

import torch
import zmq

from planaria import kernels
from planaria.checkpoints import DENSE
from planaria.cluster.files import JobFiles
from planaria.cluster.node import IDLE_MS, MemberNode
from planaria.cluster.parts import PartSaver, SavedDense, read_dense
from planaria.dense import DenseCopies, keepers
from planaria.exactness import measure
from planaria.kernels.types import Bytes
from planaria.tables import make_arenas
from planaria.trainer.client import Client
from planaria.trainer.machine import TrainerJob, TrainerMachine
from planaria.trainer.training import Training
from planaria.wire.control import Ready, TrainerHolds, Waiting
from planaria.wire.messages import NO_VIEW, Member, Message

WAITED_S = 5.0  # before a trainer says whom it waits for


class TrainerNode(MemberNode):
    def __init__(self, files: JobFiles, member: Member, rank: int | None) -> None:
        super().__init__(files, member, "trainer")
        config = self.config
        torch.set_num_threads(config.threads.trainer)
        kernels.set_threads(config.threads.trainer)
        self.training = Training(config, self.line)
        start = files.start()
        dense = DenseCopies()
        if rank is not None:
            dense.put(start, self._first_state(start))
        job = TrainerJob(
            config.servers,
            [arena.dim for arena in make_arenas(config.tables, config.optimizer_rule)],
            config.trainers,
            keepers(config.r, config.trainers),
            config.cluster.retry_ms / 1000,
        )
        self.trainer = TrainerMachine(member, job, dense, fresh_rank=rank)
        self.machine = self.trainer
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.client = Client(self.trainer, lambda: os.eventfd_write(self._wakes, 1))
        self.guard = self.client.lock
        self._poller = zmq.Poller()
        self._poller.register(self.transport.incoming, zmq.POLLIN)
        self._poller.register(self._wakes, zmq.POLLIN)
        self.saver = PartSaver(config, self.line.tell, start, files.job())
        self._moved = (0, time.monotonic())  # the step that it is at, and since when
        self._told_in = NO_VIEW  # the view in which it told what it holds
        self._loop = threading.Thread(target=self._compute, name="loop", daemon=True)
        self._failed: BaseException | None = None  # of the loop
        self.line.tell(Ready(fingerprint=measure(config.reproducible)))

    def _first_state(self, start: int) -> Bytes:
        if start:
            return read_dense(self.config, start)
        return self.training.dense.export()

    # ------------------------------------------------------------------ two threads

    def run(self) -> str:
        self._loop.start()
        try:
            reason = super().run()
        except BaseException as error:
            self.client.end(error)
            raise
        self.client.end(reason)
        return reason

    def _compute(self) -> None:
        try:
            self.training.run(self.client)
        except BaseException as error:
            self._failed = error
            os.eventfd_write(self._wakes, 1)

    def poll(self, wait_ms: int) -> None:
        for ready, _ in self._poller.poll(wait_ms):
            if ready == self._wakes:
                os.eventfd_read(self._wakes)

    def turn(self) -> None:
        """The loop's thread is what must not hang; this one only talks."""
        if self.client.turns() or not self._loop.is_alive():
            super().turn()

    # ------------------------------------------------------------------ between messages

    def _handle(self, sender: Member, address: str, message: Message) -> None:
        super()._handle(sender, address, message)
        self._save_if_due()

    def _save_if_due(self) -> None:
        """The dense state of a step that is due, which may be one step ago."""
        trainer = self.trainer
        if trainer.rank != 0 or trainer.blank:
            return
        step = self.saver.due(trainer.dense.step, self.orders)
        if step is None:
            return
        state = trainer.dense.as_of(step)
        if state is not None:
            self.saver.save(step, DENSE, lambda: SavedDense(state))
        else:
            self.saver.missed(step, DENSE)

    def work(self) -> int:
        if self._failed is not None and not self.stopped:
            raise self._failed
        with self.guard:
            outbox = self.trainer.take_outbox()
        self.post(outbox)
        self.client.moved()
        self._save_if_due()
        if self.trainer.done and not self.trainer.left:
            self._leave_when_saved()
        else:
            self._say_whom_it_waits_for()
        return IDLE_MS

    def _say_whom_it_waits_for(self) -> None:
        """Now and then, so that a stalled job can name them."""
        trainer, now = self.trainer, time.monotonic()
        if self._moved[0] != trainer.step:
            self._moved = (trainer.step, now)
        elif now - self._moved[1] > WAITED_S and self.client.waits and not trainer.blank:
            self._moved = (trainer.step, now)
            waiting = trainer.waits_for()
            what = "rows" if waiting else "gradients"
            self.line.tell(Waiting(step=trainer.step, places=waiting, what=what))

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
        digest = self.training.dense.digest()
        holds = TrainerHolds(
            rank=self.trainer.rank,
            digest=(str(digest.first), str(digest.second)),
            loss=self.training.loss,
        )
        self.line.tell(holds)
