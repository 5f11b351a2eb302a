"""Processes that stand still, one or all, for a while or for good: nothing is lost by it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_hangs import at_step, exists, hung, pid_of
from cluster_jobs import (
    TINY,
    BeatenRun,
    leaving_nothing,
    processes_of,
    tiny,
    undisturbed,
)

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import Exited, Watcher
from planaria.cluster.trainer_node import WAITED_S
from planaria.control.children import Failure
from planaria.errors import LossError
from planaria.wire.control import Silent, WaitedFor, Waiting

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

DEFAULTS = "cluster.heartbeat_limit_ms=2000"  # what users have


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


@pytest.fixture
def hangs() -> Iterator[ExitStack]:
    """Threads that hang until the end of the test."""
    with ExitStack() as stack:
        yield stack


# ---------------------------------------------------------------------------- the coordinator


@pytest.mark.parametrize("how", ["frozen", "hung"])
def test_a_coordinator_that_stands_still_is_replaced_and_a_server_killed_meanwhile_is_no_loss(
    how: str, hangs: ExitStack
) -> None:
    """It was never replaced: one server killed after it, and the job was lost after 60 s."""
    pids: list[int] = []

    def strike(processes: Attempt) -> None:
        pids.append(pid_of(processes, "coordinator-0"))
        if how == "frozen":
            processes.signal("coordinator-0", signal.SIGSTOP)
        else:
            hangs.enter_context(hung(pids[0]))
        processes.signal("server-1")

    run = BeatenRun(tiny("servers=3", "parity=1", DEFAULTS), on_event=at_step(20, strike))
    assert run.run()["digest"] == undisturbed()
    assert dict(run.of(Exited))["coordinator-0"].code == -signal.SIGKILL
    assert not exists(pids[0])
    assert {"coordinator", "server:1"} <= {failure.who for _, failure in run.of(Failure)}


def test_a_coordinator_that_is_frozen_before_it_ever_spoke_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("planaria.control.supervising.START_S", 15.0)
    frozen: list[str] = []

    def freeze(now: float, processes: Attempt) -> None:
        if not frozen:
            frozen.append(processes.machine.coordinator)
            processes.signal(frozen[0], signal.SIGSTOP)

    run = BeatenRun(tiny("servers=3", "parity=1", DEFAULTS))
    run.beating.on_tick = freeze  # type: ignore[method-assign]
    assert run.run()["digest"] == undisturbed()
    assert dict(run.of(Exited))["coordinator-0"].code == -signal.SIGKILL


# ---------------------------------------------------------------------------- hung main threads


@pytest.mark.parametrize("member", ["server-1", "trainer-0"])
def test_a_process_whose_main_thread_hangs_while_its_heart_beats_is_replaced_and_killed(
    member: str, hangs: ExitStack
) -> None:
    """Its heart beat on in another thread, so it was never suspected."""
    pids: list[int] = []

    def strike(processes: Attempt) -> None:
        pids.append(pid_of(processes, member))
        hangs.enter_context(hung(pids[0]))

    config = tiny("servers=3", "parity=1", "cluster.hang_limit_s=10")
    run = BeatenRun(config, on_event=at_step(20, strike))
    report = run.run()
    assert report["digest"] == undisturbed()
    assert [told.hung for _, told in run.of(Silent) if told.member == member] == [True]
    assert dict(run.of(Exited))[member].code == -signal.SIGKILL
    assert not exists(pids[0])
    who = member.replace("-", ":")
    reasons = [one["reason"] for one in report["failures"] if one["who"] == who]
    assert any("its main loop hangs" in words for words in reasons), report["failures"]


# ---------------------------------------------------------------------------- more than r asleep

TWO_OF_ONE_GROUP = ("servers=3", "parity=1", "k=2", "cluster.heartbeat_limit_ms=1000")


class Sleep:
    """Servers are stopped together and woken together, by the supervisor's clock."""

    def __init__(self, seconds: float, *members: str) -> None:
        self.seconds = seconds
        self.members = members or ("server-0", "server-1")
        self.at: float | None = None
        self.woken = False

    def strike(self, processes: Attempt) -> None:
        for member in self.members:
            self.at = processes.signal(member, signal.SIGSTOP)

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self.at is not None and now > self.at + self.seconds and not self.woken:
            self.woken = True
            for member in self.members:
                processes.signal(member, signal.SIGCONT)


def asleep(sleep: Sleep, *more: str) -> BeatenRun:
    run = BeatenRun(tiny(*TWO_OF_ONE_GROUP, *more), on_event=at_step(20, sleep.strike))
    run.job.observers.append(_Ticks(sleep.on_tick))
    return run


class _Ticks(Watcher):
    def __init__(self, on_tick: Callable[[float, Attempt], None]) -> None:
        self._on_tick = on_tick

    def on_tick(self, now: float, processes: Attempt) -> None:
        self._on_tick(now, processes)


def test_two_servers_that_sleep_for_three_seconds_with_one_parity_are_waited_for() -> None:
    """They were given up as lost after one second, though they came back with everything."""
    run = asleep(Sleep(3.0))
    report = run.run()
    assert report["digest"] == undisturbed()
    # One may be found silent a beat before the other: then it alone is replaced, which is no loss.
    assert len({"server-0", "server-1"} & set(run.killed)) <= 1


def test_a_trainer_says_after_some_seconds_which_server_it_waits_for() -> None:
    """So that a stalled job can name it. Without parity servers do not wait for one another."""
    run = asleep(
        Sleep(WAITED_S + 3, "server-1"), "strategy=none", "cluster.heartbeat_limit_ms=20000"
    )
    assert run.run()["digest"] == undisturbed()
    waiting = run.of(Waiting)
    assert waiting
    for member, what in waiting:
        assert (member, what.places, what.step >= 20) == ("trainer-0", [1], True)
        assert what.what in ("rows", "votes")  # as it was stopped before its vote, or after it


def test_two_servers_that_sleep_beyond_the_deadline_are_named() -> None:
    run = asleep(Sleep(600.0), "cluster.deadline_s=3")
    with pytest.raises(LossError, match=r"places \[0, 1\] are gone"):
        run.run()
    # One of them alone, if the other was found silent a beat before it, and given up.
    waited_for = {member for _, what in run.of(WaitedFor) for member in what.members}
    assert waited_for, "somebody who looks on should know"
    assert waited_for <= {"server-0", "server-1"}


# ---------------------------------------------------------------------------- all of it

# STALL_S has no key: it is the patience beyond all others.
DRIVER = """
import json, signal, sys
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.control import supervising
supervising.STALL_S = 4.0
job = JobRun(Config.load(None, sys.argv[1:]), (), lambda line, at: print(at.step, flush=True))
print(json.dumps(job.run()), flush=True)
"""
SHORT = ("cluster.heartbeat_limit_ms=2000", "cluster.deadline_s=8", "cluster.hang_limit_s=8")
LONGER_THAN_ALL_S = 13.0


@pytest.mark.parametrize("who", ["all", "the supervisor"])
def test_a_job_that_was_frozen_for_longer_than_every_limit_goes_on(folder: Path, who: str) -> None:
    """A paused container, a laptop's lid, Ctrl-Z: it was ended on waking."""
    overrides = [*TINY, "servers=3", "parity=1", "steps=400", *SHORT]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PLANARIA_HOME": str(folder)},
    ) as driver:
        assert driver.stdout is not None
        while (line := driver.stdout.readline()) and int(line) < 10:
            pass
        assert line, driver.communicate()
        frozen = [driver.pid]
        if who != "the supervisor":
            frozen += processes_of(folder)
            random.Random(who).shuffle(frozen)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LONGER_THAN_ALL_S)
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)
        out, errors = driver.communicate(timeout=120)
    assert driver.returncode == 0, errors
    assert json.loads(out.splitlines()[-1])["digest"] == undisturbed("steps=400")
