"""Tiny jobs on real processes, blows at random instants, and a look at what they leave behind.

Only processes that a test started itself are ever signalled. They are known by the job's folder,
which stands in their command line or has their log.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import Exited, JobEvent, Observer, Watcher
from planaria.cluster.reporting import Progress
from planaria.cluster.resuming import FROM_THE_BEGINNING, Resumption
from planaria.cluster.run import JobRun
from planaria.cluster.scripts import Scripts
from planaria.config import Config
from planaria.schedule import Fault
from planaria.wire.control import Rebuilt, StepDone, Viewed
from planaria.wire.messages import Member

OnEvent = Callable[[Attempt, JobEvent], None]
T = TypeVar("T")

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
    than the victims of one blow; and the job waits for it after that step.
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


class Beating(Watcher):
    """Deals blows to a job's processes, and remembers every event."""

    def __init__(self, plan: Sequence[Blow], replacements: int, on_event: OnEvent) -> None:
        self.plan = list(plan)
        self.replacements = replacements
        self.events: list[JobEvent] = []
        self.struck: list[Member] = []
        self.struck_at = 0.0
        self._on_event = on_event
        self._step = 0  # the last one that was heard of
        self._due: list[tuple[float, list[Member]]] = []  # blows whose delay is not over
        self._awaited: set[Member] = set()  # struck, and still in the view
        self._rebuilding: set[int] = set()

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        self.events.append(event)
        match event.what:
            case Viewed() as viewed:
                self._step = max(self._step, viewed.committed)
                self._awaited &= {*viewed.servers, *viewed.trainers}
                self._rebuilding = set(viewed.rebuilding)
                if self.replacements and self._rebuilding:
                    self.replacements -= 1
                    self.strike(processes, [viewed.servers[min(self._rebuilding)]])
            case Rebuilt() as rebuilt:
                self._rebuilding.discard(rebuilt.place)
            case Exited(role="coordinator"):
                self._awaited.discard(event.member)
            case StepDone() as done:
                self._step = max(self._step, done.step)
        self._on_event(processes, event)

    def pauses_after(self) -> int:
        return self.plan[0].step if self.plan else 0

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self._is_due(processes):
            blow = self.plan.pop(0)
            members = [self._member(processes, victim) or "" for victim in blow.victims]
            self._awaited.update(members)
            self._due.append((now + blow.delay_ms / 1000, members))
        for at, members in list(self._due):
            if now >= at:
                self._due.remove((at, members))
                self.strike(processes, members)

    def strike(self, processes: Attempt, members: Sequence[Member]) -> None:
        self.struck_at = time.monotonic()
        for member in members:
            processes.signal(member)
        self.struck += members

    def _is_due(self, processes: Attempt) -> bool:
        if self._awaited or self._rebuilding or not self.plan or self.plan[0].step > self._step:
            return False
        return all(self._member(processes, victim) for victim in self.plan[0].victims)

    def _member(self, processes: Attempt, victim: str) -> Member | None:
        role, _, number = victim.partition(":")
        return processes.member_of(role, int(number or 0))


class BeatenRun:
    """A job under blows, and what became of it."""

    def __init__(
        self,
        config: Config,
        plan: Sequence[Blow] = (),
        *,
        schedule: Sequence[Fault] = (),
        replacements: int = 0,
        on_event: OnEvent = lambda processes, event: None,
        start: Resumption = FROM_THE_BEGINNING,
        scripts: Scripts | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """replacements: so many are killed as soon as the view names them, while they rebuild."""
        self.beating = Beating(plan, replacements, on_event)
        observers = [self.beating, *observers]
        self.job = JobRun(config, schedule, start=start, observers=observers, scripts=scripts)
        self.config = config

    def run(self) -> dict[str, Any]:
        return self.job.run()

    @property
    def progress(self) -> Progress:
        return self.job.progress

    @property
    def struck(self) -> list[Member]:
        return self.beating.struck

    def of(self, kind: type[T]) -> list[tuple[Member, T]]:
        """Who told it, and what, of all events of a kind."""
        events = self.beating.events
        return [(e.member, e.what) for e in events if isinstance(e.what, kind)]

    @property
    def killed(self) -> list[Member]:
        """Who ended by SIGKILL before the job was over."""
        return [m for m, exited in self.of(Exited) if exited.code == -signal.SIGKILL]


def digest_after(config: Config, plan: Sequence[Blow], **more: Any) -> str:
    """The digest of a job under these blows, every one of which has really hit."""
    run = BeatenRun(config, plan, **more)
    victims = sum(len(blow.victims) for blow in plan) + run.beating.replacements
    report = run.run()
    assert run.beating.plan == []
    assert run.beating.replacements == 0, "a replacement was to be killed, but there was none"
    assert sorted(run.killed) == sorted(run.struck)
    assert len(run.struck) == victims
    return str(report["digest"])


# ------------------------------------------------------------------------------- what is left


def processes_of(folder: Path) -> list[int]:
    """Those whose command line names the folder or something in it, or that log to there."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            log = os.readlink(entry / "fd" / "2").encode()
            if bytes(folder) in (entry / "cmdline").read_bytes() or log.startswith(bytes(folder)):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def processes_of_scripts(folder: Path) -> list[int]:
    """Those that run a script in the folder for a test of this process: others run them as well."""
    worker = f"PYTEST_XDIST_WORKER={os.environ.get('PYTEST_XDIST_WORKER', '')}".encode()
    found = []
    for number in processes_of(folder):
        with contextlib.suppress(OSError):  # it ended meanwhile
            variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
            if worker in variables or "PYTEST_XDIST_WORKER" not in os.environ:
                found.append(number)
    return found


def children_of(parent: int) -> list[int]:
    """Its processes, nurseries too, which belong to no job's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(stat[1]) == parent and stat[0] != "Z":
                found.append(int(entry.name))
    return found


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
    """Jobs inside have their folders in the one that this gives; in the end there may be logs."""
    before = os.environ.get("PLANARIA_HOME")
    folder = Path(tempfile.mkdtemp(prefix="planaria-test-", dir="/tmp"))
    os.environ["PLANARIA_HOME"] = str(folder)
    try:
        yield folder
        assert wait_until(lambda: processes_of(folder) == [], GONE_S), processes_of(folder)
        assert left_behind(folder) == []
    finally:
        if before is None:
            del os.environ["PLANARIA_HOME"]
        else:
            os.environ["PLANARIA_HOME"] = before
        for number in processes_of(folder):
            os.kill(number, signal.SIGKILL)
        shutil.rmtree(folder)


def left_behind(folder: Path) -> list[Path]:
    """Files that are no logs."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "logs"]
