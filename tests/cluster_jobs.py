"""Tiny jobs on real processes, blows at random instants, and a look at what they leave behind.

Only processes that a test started itself are ever signalled. They are known by the job's folder,
which stands in their command line.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planaria.cluster.resuming import FROM_THE_BEGINNING, Start
from planaria.cluster.run import JobRun
from planaria.cluster.supervisor import Event, Supervisor
from planaria.config import Config
from planaria.schedule import Event as Scheduled
from planaria.wire.messages import Member

TINY = (
    "batch=64",
    "model.rows=300",
    "model.tables=6",
    "model.dim=8",
    "model.bottom=[16]",
    "model.top=[16]",
    "data.test_samples=200",
    "trainers=1",
    "steps=100",
    # Processes that share two cores with a test run are late, not dead.
    "cluster.heartbeat_limit_ms=20000",
)
GONE_S = 5.0  # how long the processes of a job may take to leave


def tiny(*overrides: str) -> Config:
    return Config.load(None, [*TINY, *overrides])


@cache
def undisturbed(*overrides: str) -> str:
    """The digest of a job that nobody disturbs and nothing protects: what all others must give."""
    assert not any(key.startswith(("strategy", "parity", "k=", "servers")) for key in overrides)
    report = JobRun(tiny("strategy=none", "servers=2", "spares=0", *overrides)).run()
    assert report["failures"] == []
    return str(report["digest"])


@dataclass(frozen=True)
class Blow:
    """SIGKILL for all victims together, so long after the step was reported.

    It waits until what was struck before is whole again, so that the job never has more to bear
    than the victims of one blow.
    """

    step: int
    victims: tuple[str, ...]  # "server:2", "trainer:0" or "coordinator"
    delay_ms: float = 0.0


def blows(
    seed: int, victims: Sequence[tuple[str, ...]], first: int = 5, every: int = 12
) -> list[Blow]:
    """One blow after the other, at instants that have nothing to do with the steps."""
    draw = random.Random(seed)
    return [
        Blow(first + every * number, several, draw.uniform(0, 30))
        for number, several in enumerate(victims)
    ]


class BeatenRun(JobRun):
    """A run that takes blows, and remembers every event."""

    def __init__(
        self,
        config: Config,
        plan: Sequence[Blow] = (),
        *,
        schedule: Sequence[Scheduled] = (),
        replacements: int = 0,
        on_event: Callable[[Supervisor, Event], None] = lambda supervisor, event: None,
        start: Start = FROM_THE_BEGINNING,
    ) -> None:
        """replacements: so many are killed as soon as the view names them, while they rebuild."""
        super().__init__(config, schedule, start=start)
        self.plan = list(plan)
        self.replacements = replacements
        self.on_event = on_event
        self.events: list[Event] = []
        self.struck: list[Member] = []
        self.struck_at = 0.0
        self._awaited: set[Member] = set()  # struck, and still in the view
        self._rebuilding: set[int] = set()

    def of(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    @property
    def killed(self) -> list[Member]:
        """Who ended by SIGKILL before the job was over."""
        return [e.member for e in self.of("exit") if e.facts["code"] == -signal.SIGKILL]

    def _on_event(self, supervisor: Supervisor, event: Event) -> None:
        super()._on_event(supervisor, event)
        self.events.append(event)
        if event.name == "view":
            self._awaited &= {*event.facts["servers"], *event.facts["trainers"]}
            self._rebuilding = set(event.facts["rebuilding"])
            if self.replacements and self._rebuilding:
                self.replacements -= 1
                self._strike(supervisor, [self.progress.servers[min(self._rebuilding)]])
        elif event.name == "rebuilt":
            self._rebuilding.discard(event.facts["place"])
        elif event.name == "exit" and event.facts["role"] == "coordinator":
            self._awaited.discard(event.member)
        elif event.name == "step" and self._is_due(event.facts["step"]):
            blow = self.plan.pop(0)
            members = [self._member(supervisor, victim) for victim in blow.victims]
            self._awaited.update(members)
            timer = threading.Timer(blow.delay_ms / 1000, self._strike, (supervisor, members))
            timer.start()
        self.on_event(supervisor, event)

    def _is_due(self, step: int) -> bool:
        settled = not self._awaited and not self._rebuilding
        return bool(settled and self.plan and self.plan[0].step <= step)

    def _member(self, supervisor: Supervisor, victim: str) -> Member:
        role, _, number = victim.partition(":")
        if role == "coordinator":
            return supervisor.coordinator
        by_role = {"server": self.progress.servers, "trainer": self.progress.trainers}
        return by_role[role][int(number)]

    def _strike(self, supervisor: Supervisor, members: Sequence[Member]) -> None:
        self.struck_at = time.monotonic()
        for member in members:
            supervisor.kill(member)
        self.struck += members


def digest_after(config: Config, plan: Sequence[Blow], **more: Any) -> str:
    """The digest of a job under these blows, every one of which has really hit."""
    run = BeatenRun(config, plan, **more)
    victims = sum(len(blow.victims) for blow in plan) + run.replacements
    report = run.run()
    assert run.plan == []
    assert run.replacements == 0, "a replacement was to be killed, but there was none"
    assert sorted(run.killed) == sorted(run.struck)
    assert len(run.struck) == victims
    return str(report["digest"])


# ------------------------------------------------------------------------------- what is left


def processes_of(folder: Path) -> list[int]:
    """Those whose command line names the folder, or something in it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and bytes(folder) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return [number for number in found if number != os.getpid()]


def wait_until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether it comes to hold in time."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def leaving_nothing() -> Iterator[Path]:
    """Jobs inside have their folders in the one that this gives; in the end it must be empty."""
    before = tempfile.tempdir
    folder = Path(tempfile.mkdtemp(prefix="planaria-test-", dir="/tmp"))
    tempfile.tempdir = str(folder)
    try:
        yield folder
        assert wait_until(lambda: processes_of(folder) == [], GONE_S), processes_of(folder)
        assert [path.name for path in folder.rglob("*")] == []
    finally:
        tempfile.tempdir = before
        for number in processes_of(folder):
            os.kill(number, signal.SIGKILL)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
