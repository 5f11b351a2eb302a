"""Blows on purpose strike right after the step that they name, however late the supervisor is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from cluster_jobs import leaving_nothing, tiny, undisturbed

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.files import Beginning
from planaria.cluster.injecting import Injector
from planaria.cluster.run import JobRun
from planaria.control.losses import Losses
from planaria.control.saving import SaveMachine
from planaria.schedule import Fault, parse_kill
from planaria.wire.control import StepDone, Viewed

pytestmark = pytest.mark.torch

PROTECTED = ("servers=3", "parity=1")
LATE_S = 0.3  # many steps


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


class Late(Watcher):
    """Something holds the supervisor up shortly before each blow. Where the job was then shows in
    the next view."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._late_at = [fault.step - 2 for fault in faults]
        self.committed: list[int] = []  # of each view

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        match event.what:
            case StepDone(step=step) if step in self._late_at:
                self._late_at.remove(step)
                time.sleep(LATE_S)
            case Viewed():
                self.committed.append(event.what.committed)


def struck_at(faults: Sequence[Fault], hold: Callable[[], bool] | None = None) -> list[int]:
    """The steps that were committed when the blows fell."""
    late = Late(faults)
    report = JobRun(tiny(*PROTECTED), injector=Injector(faults, hold), observers=[late]).run()
    assert report["digest"] == undisturbed()
    return late.committed[1:]


def test_a_blow_strikes_right_after_its_step_although_the_supervisor_is_late() -> None:
    """It struck at whatever step the job had got to, or found that it was over."""
    faults = [parse_kill(text) for text in ("server:1@7", "trainer:0@60", "server:0@100")]
    found = struck_at(faults)
    # The step itself may still be on its way to those who protect it.
    for committed, fault in zip(found, faults, strict=True):
        assert fault.step - 1 <= committed <= fault.step


def test_who_lets_the_job_go_on_meanwhile_strikes_later() -> None:
    """A control: the same lateness, in a job that does not wait."""
    [committed] = struck_at([parse_kill("server:1@7")], hold=lambda: False)
    assert committed > 7


def test_a_blow_before_the_first_step_of_a_resumed_job_stops_nobody() -> None:
    injector = Injector([parse_kill("server:1@3"), parse_kill("server:2@8")])
    assert injector.pauses_after() == 3
    for start, pauses in ((0, 3), (2, 3), (3, 0), (8, 0)):
        beginning = Beginning("job", start)
        config = tiny(*PROTECTED)
        saves = SaveMachine(config, start, 0.0)
        attempt = Attempt(config, beginning, saves, None, Losses(config), [injector, Watcher()])
        assert attempt._pauses_after() == pauses
