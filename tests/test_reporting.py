"""What a reporter makes of the events of a job, and how a display shows it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from planaria.cluster.events import JobEvent, RolledBack
from planaria.cluster.reporting import Progress, Reporter
from planaria.config import Config
from planaria.control.acting import Start
from planaria.control.saving import SaveMachine
from planaria.control.supervising import SupervisorMachine
from planaria.display import QUIET_S, Display
from planaria.wire.control import Listening, Ready, StepDone, TrainerHolds, Viewed
from planaria.wire.messages import View

CONFIG = Config.load(None, ["servers=3", "trainers=2", "spares=1", "k=2"])


class Stage:
    """A reporter and the supervisor of processes that exist in name alone."""

    def __init__(self, start: int = 0) -> None:
        self.lines: list[str] = []
        self.reporter = Reporter(CONFIG, lambda line, progress: self.lines.append(line), start)
        self.processes: Any = SimpleNamespace(
            machine=SupervisorMachine(CONFIG, start, 0.0), saves=SaveMachine(CONFIG, start, 0.0)
        )
        self.now = 0.0

    def tell(self, member: str, what: Any) -> None:
        self.processes.machine.receive(member, what, self.now)
        self.reporter.on_event(JobEvent(self.now, member, what), self.processes)

    def tick(self) -> str:
        """Some seconds on: who is waited for."""
        self.now += 5.0
        self.reporter.on_tick(self.now, self.processes)
        return self.reporter.progress.waiting_for

    def step(self, step: int, rank: int = 0) -> int:
        """What is known to be committed once a trainer has computed a step."""
        self.tell(f"trainer-{rank}", StepDone(rank=rank, step=step, rows=[1, 1, 1], loss=0.5))
        return self.reporter.committed


def view(committed: int, *, first_server: int = 0) -> Viewed:
    servers = [f"server-{first_server + place}" for place in range(3)]
    trainers = ["trainer-0", "trainer-1"]
    return Viewed(
        view=View(1, 1 + first_server),
        committed=committed,
        servers=servers,
        trainers=trainers,
        rebuilding=[],
    )


# ---------------------------------------------------------------------------- how far it came


def test_a_step_counts_when_every_server_has_it_not_when_it_is_computed() -> None:
    """A job that died at step 1 reported 1 step, while its logs said that none was committed."""
    stage = Stage()
    assert [stage.step(1, rank=0), stage.step(1, rank=1)] == [0, 0]
    # With rows of all servers as of step 1, by whichever trainer.
    assert stage.step(2, rank=1) == 1
    assert stage.step(2, rank=0) == 1
    stage.tell("coordinator-0", view(2, first_server=1))
    assert stage.reporter.committed == 2
    stage.tell("", RolledBack(2, 0, "two at once"))
    assert stage.reporter.committed == 0
    holds = TrainerHolds(rank=0, digest=("1", "2"), loss=None)
    stage.tell("trainer-0", holds)  # behind the last step
    assert stage.reporter.committed == CONFIG.steps


def test_a_view_is_told_of_once_however_many_coordinators_tell_of_it() -> None:
    """The line of an old view, with its old step, looked as if steps had been lost."""
    stage = Stage()
    stage.tell("coordinator-0", view(0))
    stage.step(9)
    stage.tell("coordinator-1", view(0))
    assert (stage.reporter.committed, [line for line in stage.lines if "view" in line]) == (8, [])
    stage.tell("coordinator-1", view(8, first_server=1))
    assert "view (1, 2): committed step 8" in stage.lines[-1]


def test_a_resumed_job_begins_with_the_steps_that_it_has() -> None:
    stage = Stage(start=20)
    assert stage.reporter.committed == 20
    assert stage.step(21) == 20


# ---------------------------------------------------------------------------- who is waited for


def test_until_the_first_step_somebody_is_waited_for() -> None:
    """Nothing was said from the start of the processes to their first step, for up to 50 s."""
    stage = Stage()
    names = [one.member for one in stage.processes.machine.take() if isinstance(one, Start)]
    assert len(names) == 7
    assert stage.tick() == "waiting for the coordinator"
    stage.tell("coordinator-0", Listening(role="coordinator", address="here"))
    assert stage.tick() == "waiting for 2 trainers, 3 servers"
    for name in ("server-0", "server-2", "trainer-1"):
        stage.tell(name, Ready())
    assert stage.tick() == "waiting for 1 trainer, 1 server"
    for name in ("server-1", "trainer-0"):  # not the spare
        stage.tell(name, Ready())
    assert stage.tick() == "waiting for the first step"
    stage.step(1)
    assert stage.tick() == ""
    stage.tell("", RolledBack(1, 0, "two at once"))
    assert stage.tick() == "waiting for the first step"  # of others, whom this stage has not


@pytest.mark.parametrize("before", [[], [(7, 1.0)]])  # at the start; after a roll-back
def test_who_is_waited_for_is_a_line_where_there_is_no_terminal(
    before: list[tuple[int, float]],
) -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200), "training", CONFIG)
    progress = Progress(step=7, step_at=before, loss=0.5, waiting_for="waiting for 1 server")
    display("", progress)
    assert out.getvalue() == ""  # it has just begun
    display.said_at -= QUIET_S + 1
    display("", progress)
    display("", progress)
    assert out.getvalue().count("waiting for 1 server") == 1
    assert "starting" not in out.getvalue()
