"""Trainers that come and go while a job trains, on real processes: 2, then 3, then 1."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from cluster_commands import LIMIT_S
from cluster_jobs import BeatenRun, Blow, tiny
from script_jobs import PLAIN, ScriptRun

from planaria.cluster import asking
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.wire.control import Viewed
from planaria.wire.messages import Scaled, Shift

ELASTIC = "trainer.elastic=on"
SHIFTS = (Shift(20, 3), Shift(50, 1))
SCRIPT_SHIFTS = (Shift(4, 3), Shift(9, 1))
PROTECTED = ("servers=4", "parity=2", "k=2", "spares=1")


class Shifts(Watcher):
    """Asks for one shift after the other; the job waits at each until all know of it, and soon
    after the last until whoever asks has heard that it is done.
    """

    def __init__(self, wanted: Sequence[Shift]) -> None:
        self.wanted = list(wanted)
        self.answers: list[Scaled] = []
        self._begun = 0
        self._asking: threading.Thread | None = None

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if isinstance(event.what, Viewed):
            viewed = event.what
            self._begun = max(self._begun, len(viewed.shifts) + (viewed.shift is not None))
            if self._asking is None:
                self._asking = threading.Thread(target=self._ask, args=(processes,), daemon=True)
                self._asking.start()

    def pauses_after(self) -> int:
        if self._begun < len(self.wanted):
            return self.wanted[self._begun].after
        return self.wanted[-1].after + 3 if len(self.answers) < len(self.wanted) else 0

    def _ask(self, processes: Attempt) -> None:
        for shift in self.wanted:
            found = asking.scale_trainers(processes.folder, shift.trainers, shift.after, 120.0)
            self.answers.append(found)
            if found.state == "refused":
                self._begun = len(self.wanted)  # nobody waits for the others


def shifted(sets: Sequence[str], plan: Sequence[Blow] = ()) -> dict[str, Any]:
    """The report of a job with these shifts, under these blows."""
    shifts = Shifts(SHIFTS)
    run = BeatenRun(tiny("trainers=2", *sets), plan, observers=[shifts])
    report = run.run()
    assert run.beating.plan == []
    assert [answer.state for answer in shifts.answers] == ["done", "done"]
    assert report["shifts"] == [list(shift) for shift in SHIFTS]
    assert report["trainers"] == 1
    return report


@cache
def undisturbed_shifts() -> str:
    report = shifted(("strategy=none", "servers=2", "spares=0", ELASTIC))
    assert report["failures"] == []
    return str(report["digest"])


def test_trainers_come_and_go_between_steps() -> None:
    fixed = BeatenRun(tiny("trainers=2", "strategy=none", "servers=2", "spares=0")).run()
    assert fixed["shifts"] == []
    # Sums of other parts round otherwise: that is why it must be asked for.
    assert undisturbed_shifts() != fixed["digest"]


@pytest.mark.parametrize("delay_ms", [0.0, 40.0])
def test_kills_while_trainers_change_alter_no_bit(delay_ms: float) -> None:
    """Right before, during and after both shifts: of servers, of trainers that stay, come and
    leave, and of the coordinator.
    """
    plan = [
        Blow(8, ("server:1", "trainer:1"), delay_ms),
        Blow(20, ("server:0", "coordinator"), delay_ms),
        Blow(28, ("trainer:2", "server:3"), delay_ms),
        Blow(50, ("trainer:0", "server:2"), delay_ms),
        Blow(70, ("trainer:0",), delay_ms),
    ]
    report = shifted((*PROTECTED, ELASTIC), plan)
    assert report["digest"] == undisturbed_shifts()
    assert len(report["failures"]) == 9


def test_a_job_that_is_not_elastic_keeps_its_trainers() -> None:
    shifts = Shifts((Shift(5, 3),))
    sets = ("trainers=2", "strategy=none", "servers=2", "spares=0", "steps=30")
    report = BeatenRun(tiny(*sets), observers=[shifts]).run()
    (answer,) = shifts.answers
    assert (answer.state, answer.trainers) == ("refused", 2)
    assert "trainer.elastic=on" in answer.why
    assert (report["trainers"], report["shifts"]) == (2, [])


def test_more_trainers_than_a_batch_can_feed_are_refused() -> None:
    shifts = Shifts((Shift(5, 17),))
    sets = ("trainers=2", "strategy=none", "servers=2", "spares=0", "steps=30", ELASTIC)
    BeatenRun(tiny(*sets), observers=[shifts]).run()
    assert shifts.answers[0].why == "it can have 1 to 16, not 17"


# ---------------------------------------------------------------------------- scripts


def shifted_script(sets: Sequence[str], plan: Sequence[Blow] = ()) -> ScriptRun:
    shifts = Shifts(SCRIPT_SHIFTS)
    run = ScriptRun("loop.py", "two_epochs", sets=sets, plan=plan, observers=[shifts])
    assert [answer.state for answer in shifts.answers] == ["done", "done"]
    assert run.report["trainers"] == 1
    assert run.wrong == ""
    return run


@cache
def undisturbed_script_shifts() -> str:
    run = shifted_script((*PLAIN, "trainers=2", ELASTIC))
    assert run.report["failures"] == []
    return run.digest


@pytest.mark.campaign
def test_kills_while_the_trainers_of_a_script_change_alter_no_bit() -> None:
    plan = [
        Blow(3, ("server:1",)),
        Blow(6, ("trainer:2", "server:0")),
        Blow(9, ("trainer:0",)),
        Blow(11, ("trainer:0",)),
    ]
    run = shifted_script((*PROTECTED, "trainers=2", "script.spares=1", ELASTIC), plan)
    assert run.digest == undisturbed_script_shifts()


# ---------------------------------------------------------------------------- the command


def scale(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "planaria", "scale", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "COLUMNS": "400"},
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_the_command_changes_trainers_and_says_so() -> None:
    """As a user does it: without a step, and while the job trains."""
    told: list[tuple[int, str]] = []

    def ask(name: str) -> None:
        told.append(scale(name, "--trainers", "3"))
        told.append(scale(name, "--trainers", "1", "--after", "1"))
        told.append(scale(name, "--trainers", "1"))

    asked: list[threading.Thread] = []

    def on_event(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, Viewed) and not asked:
            asked.append(threading.Thread(target=ask, args=(processes.folder.name,), daemon=True))
            asked[0].start()

    class Waits(Watcher):
        """The job has to train for as long as it is asked."""

        def pauses_after(self) -> int:
            return 400 if not asked or asked[0].is_alive() else 0

    sets = ("trainers=2", "strategy=none", "servers=2", "spares=0", "steps=420", ELASTIC)
    run = BeatenRun(tiny(*sets), on_event=on_event, observers=[Waits()])
    report = run.run()
    first, late, last = told
    assert first[0] == 0
    assert first[1].endswith("has 3 trainers")
    assert late[0] == 1
    assert late[1].endswith("keeps its 3 trainers: step 1 is over")
    assert last[0] == 0
    assert [trainers for _, trainers in report["shifts"]] == [3, 1]


def test_the_command_wants_one_number() -> None:
    for words in (("job",), ("job", "--servers", "3", "--trainers", "3")):
        code, said = scale(*words)
        assert (code, "name one number: --servers or --trainers" in said) == (2, True)
