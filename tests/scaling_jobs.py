"""Jobs whose number of servers changes while they train, with blows in between and meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_jobs import BeatenRun
from script_jobs import declared

from planaria.cluster import asking
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.config import Config
from planaria.errors import PlanariaError
from planaria.wire.control import PartSaved, Rebuilt, StepDone, Viewed
from planaria.wire.messages import Member, Scaled

LIMIT_S = 120.0
# A move of a tiny job takes seconds: time to strike. What is asked for at once is not held back.
SLOW = ("rebuild.bytes_per_s=15000", "rebuild.chunk=16")


@dataclass(frozen=True)
class Move:
    """At this step, the job is to have so many servers. The job does not go on beyond the step
    before it was asked to, and what comes after a move waits for its end.
    """

    step: int
    servers: int
    without: tuple[str, ...] = ()  # "server:2": places
    strikes: tuple[str, ...] = ()  # killed as soon as the view that begins it is there
    then: tuple[str, ...] = ()  # killed when it is over
    scrubs: bool = True  # meanwhile, too, where nobody is killed


class Scaling(Watcher):
    """Asks for one move after the other, and verifies the parity."""

    def __init__(self, plan: Sequence[Move], steps: int, holds: bool = True) -> None:
        """steps: of the job. holds: it does not end before the last move is over."""
        self.plan = list(plan)
        self.answers: list[Scaled | PlanariaError] = []
        self.scrubbed: list[int] = []  # records verified, by scrub
        self.wrong = 0
        self.struck: list[Member] = []
        self.views: list[Viewed] = []
        self.saved_while_moving: list[int] = []
        self._last = steps - 5 if holds else 0
        self._step = 0
        self._move: Move | None = None
        self._begun = self._over = False
        self._threads: list[threading.Thread] = []
        self._awaited: set[Member] = set()  # struck, and in the view
        self._rebuilding: set[int] = set()

    @property
    def is_busy(self) -> bool:
        return self._move is not None or bool(self._awaited | self._rebuilding)

    def pauses_after(self) -> int:
        if self.plan:
            return self.plan[0].step
        return self._last if self.is_busy else 0

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        match event.what:
            case StepDone() as done:
                self._step = max(self._step, done.step)
            case Viewed() as viewed:
                self.views.append(viewed)
                self._awaited &= {*viewed.servers, *viewed.trainers}
                self._rebuilding = {*viewed.rebuilding}
                if viewed.moving and self._move and not self._begun:
                    self._begun = True
                    self._on_begun(processes, self._move)
            case PartSaved() as saved if self.views[-1].moving:
                self.saved_while_moving.append(saved.step)
            case Rebuilt() as rebuilt:
                self._rebuilding.discard(rebuilt.place)

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self._over and self._move:
            self._over, then = False, self._move.then
            self._move = None
            self._strike(processes, then)
        elif self.plan and not self.is_busy and self._step >= self.plan[0].step:
            self._move, self._begun, self._threads = self.plan.pop(0), False, []
            without = [self._member(processes, who) for who in self._move.without]
            self._in_background(self._ask, processes.folder, self._move, without)

    def _on_begun(self, processes: Attempt, move: Move) -> None:
        self._strike(processes, move.strikes)
        if move.scrubs and not move.strikes:
            self._in_background(self._scrub, processes.folder)

    def _ask(self, folder: Path, move: Move, without: Sequence[Member]) -> None:
        try:
            self.answers.append(asking.scale(folder, move.servers, without, LIMIT_S))
            for thread in self._threads[1:]:  # one scrub at a time: the newest would count
                thread.join(LIMIT_S)
            if move.scrubs:
                self._scrub(folder)
        except PlanariaError as error:
            self.answers.append(error)
        finally:
            self._over = True

    def _scrub(self, folder: Path) -> None:
        try:
            found = asking.scrub(folder, LIMIT_S)
        except PlanariaError as error:
            self.answers.append(error)
            return
        self.scrubbed.append(found.records)
        self.wrong += found.wrong

    def _strike(self, processes: Attempt, victims: Sequence[str]) -> None:
        for victim in victims:
            member = self._member(processes, victim)
            processes.signal(member)
            self.struck.append(member)
            self._awaited |= {member} if victim != "coordinator" else set()

    def _member(self, processes: Attempt, victim: str) -> Member:
        role, _, number = victim.partition(":")
        member = processes.member_of(role, int(number or 0))
        assert member is not None
        return member

    def _in_background(self, work: Callable[..., None], *words: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=words))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


class ScaledRun:
    """A job with these moves, and what became of them."""

    def __init__(self, config: Config, plan: Sequence[Move], **more: Any) -> None:
        self.scaling = Scaling(plan, config.steps)
        self.beaten = BeatenRun(config, observers=[self.scaling], **more)
        began = time.monotonic()
        try:
            self.report = self.beaten.run()
        finally:
            self.scaling.join()
        self.seconds = time.monotonic() - began
        assert self.scaling.plan == []
        failed = [one for one in self.scaling.answers if isinstance(one, PlanariaError)]
        assert not failed, failed
        self.states = [one.state for one in self.scaling.answers if isinstance(one, Scaled)]
        assert len(self.states) == len(plan)

    @property
    def digest(self) -> str:
        return str(self.report["digest"])

    @property
    def failed(self) -> list[str]:
        """Who has failed, as the report names them."""
        return [str(one["who"]) for one in self.report["failures"]]


def scaled_script(name: str, *words: str, sets: Sequence[str], plan: Sequence[Move]) -> ScaledRun:
    """The same, of a script's job."""
    with declared(name, *words, sets=sets) as (scripts, config, _):
        return ScaledRun(config, plan, scripts=scripts)
