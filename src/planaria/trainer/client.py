"""The trainer as a library: one thread talks, another computes.

A driver's thread owns the machine together with the threads that call `Client` here, under one
lock. The talker goes on with heartbeats, views, votes and retries while the caller computes, for
however long that takes. A caller gives what it has and waits for what it needs; it is woken once,
when that is there. Every wait ends: with the job, at the latest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from planaria.errors import JobOver
from planaria.kernels.types import Bytes, Floats
from planaria.layout import Layout
from planaria.trainer.job import Gradients
from planaria.trainer.machine import TrainerMachine
from planaria.trainer.rerouting import RowsByPlace

Found = TypeVar("Found")


class Start(NamedTuple):
    """Where a trainer begins: its rank, the committed step, and the dense state as of that."""

    rank: int
    step: int
    state: Bytes


class _Wait:
    """A caller that waits, and what for."""

    def __init__(self, look: Callable[[], object | None]) -> None:
        self.look = look
        self.found: object | None = None
        self.arrived = threading.Event()


class Client:
    """What the computing thread calls; `wake` makes the talker look after the machine's outbox."""

    def __init__(self, machine: TrainerMachine, wake: Callable[[], None]) -> None:
        self.machine = machine
        self.lock = threading.RLock()
        self.pause_after = 0  # the step that whoever calls rests after, until this is another one
        self._wake = wake
        self._waits: list[_Wait] = []
        self._over: BaseException | None = None
        self._resting = False  # the caller has nothing more to compute
        self._calls = 0  # that the caller has made
        self._seen = -1

    # ------------------------------------------------------------------ the caller's side

    def start(self) -> Start:
        """Waits until this trainer has a rank and the dense state, and may go on from it."""
        machine = self.machine

        def look() -> Start | None:
            paused = self.pause_after == machine.step - 1 > 0
            if machine.blank or machine.install is None or paused or not machine.goes_on():
                return None
            state = machine.state_of(machine.step - 1)
            assert state is not None
            return Start(machine.rank, machine.step - 1, state.copy())  # aligned, whatever came

        return self._wait_for(look)

    @property
    def layout(self) -> Layout:
        """By which rows are best named: who names them by an older one has them sorted again."""
        return self.machine.layout

    def ask(
        self,
        step: int,
        part: int,
        rows: RowsByPlace,
        layout: Layout | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """Rows that will be wanted: of this step, or of the next one. layout: whose places they are
        named by, if not that which the job began with. exact: bit for bit, to judge a model by.
        """
        with self._calling():
            self.machine.ask(step, part, rows, layout, exact=exact)

    def rows(self, step: int, part: int) -> dict[int, list[Floats]]:
        """Per place and arena, the rows that were asked for; as they were named."""
        return self._wait_for(lambda: self.machine.rows(step, part))

    def push(self, step: int, gradients: Gradients, dense: Floats) -> None:
        """Of a step. All arrays are the machine's from now on."""
        gradients = gradients.rounded(self.machine.job.rounding)
        with self._calling():
            self.machine.give_gradients(step, gradients, dense)

    def sum(self, step: int) -> Floats:
        """The dense gradient, summed over all trainers in rank order. Read it only."""
        return self._wait_for(lambda: self.machine.sum_of(step))

    def end_step(self, step: int, state: Bytes, *, last: bool = False) -> None:
        """The step is over, and this is the dense state after it. The next may have to wait, and
        then there may be another number of `trainers`: what was asked for ahead is forgotten.
        """
        with self._calling():
            self.machine.give_state(step, state)
        if not last:
            self._wait_for(lambda: (self.pause_after != step and self.machine.goes_on()) or None)

    @property
    def trainers(self) -> int:
        """How many there are in the step that this one is in."""
        return self.machine.reduction.trainers

    def finish(self) -> None:
        """There is no step after the last one."""
        with self._calling():
            self.machine.finish()

    def rest(self) -> None:
        """The caller has nothing more to compute, and cannot hang."""
        self._resting = True

    @property
    def over(self) -> BaseException:
        """Why the job is over."""
        return self._over or JobOver("the job is over")

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self.lock:
            self._calls += 1
            if self._over:
                raise self._over
            yield
            sends = bool(self.machine.outbox)
        if sends:
            self._wake()

    def _wait_for(self, look: Callable[[], Found | None]) -> Found:
        with self._calling():
            found = look()
            if found is not None:
                return found
            wait = _Wait(look)
            self._waits.append(wait)
        wait.arrived.wait()
        with self.lock:
            if self._over:
                raise self._over
            self._calls += 1
            return wait.found  # type: ignore[return-value]

    # ------------------------------------------------------------------ the talker's side

    def moved(self) -> None:
        """The machine may have moved: callers are woken if what they wait for is there."""
        with self.lock:
            for wait in list(self._waits):
                wait.found = wait.look()
                if wait.found is not None:
                    self._waits.remove(wait)
                    wait.arrived.set()

    def turns(self) -> bool:
        """Whether the caller has called since the last time, or waits: it does not hang."""
        with self.lock:
            moved = self._resting or bool(self._waits) or self._calls != self._seen
            self._seen = self._calls
            return moved

    @property
    def waits(self) -> int:
        """How many callers wait for something."""
        return len(self._waits)

    def end(self, why: BaseException | str) -> None:
        """Whoever waits here, or calls later, is told."""
        with self.lock:
            self._over = self._over or (why if isinstance(why, BaseException) else JobOver(why))
            for wait in self._waits:
                wait.arrived.set()
            self._waits.clear()
