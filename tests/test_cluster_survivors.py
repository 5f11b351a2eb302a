"""Survivors rebuild what a lost server held, and the job grows back: no bit changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_commands import whole_steps
from cluster_jobs import BeatenRun, Blow, leaving_nothing, tiny, undisturbed
from scaling_jobs import SLOW

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.resuming import find_start
from planaria.cluster.run import JobRun
from planaria.wire.control import PartSaved, Viewed

pytestmark = pytest.mark.torch

STEPS = 60
SEVEN = ("servers=7", "k=3", "parity=2", "spares=1", f"steps={STEPS}", "scrub.every_steps=7")
BY_SURVIVORS = (*SEVEN, "rebuild.by=survivors")


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


class Growing(Watcher):
    """The job does not end before it has grown back. Whoever is named dies meanwhile: as soon as
    others begin to take over, or as soon as it begins to grow back. waits_at: a step that is not
    passed before it does.
    """

    def __init__(self, taking_over: str = "", growing: str = "", waits_at: int = 0) -> None:
        self.views: list[Viewed] = []
        self._waits_at = waits_at
        self.saved_while_moving: list[int] = []
        self._victims = {True: taking_over, False: growing}

    @property
    def grown(self) -> bool:
        return self.views[-1].moving is None and len(self.views[-1].resizes) >= 2

    def pauses_after(self) -> int:
        if self._waits_at and not (self.views and self.views[-1].resizes):
            return self._waits_at
        return 0 if self.views and self.grown else STEPS - 5

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        match event.what:
            case Viewed() as viewed:
                self.views.append(viewed)
                if viewed.moving is not None:
                    victim = self._victims[viewed.moving.lost > 0]
                    self._victims[viewed.moving.lost > 0] = ""
                    self._strike(processes, victim)
            case PartSaved() as saved if self.views and self.views[-1].moving:
                self.saved_while_moving.append(saved.step)

    def _strike(self, processes: Attempt, victim: str) -> None:
        if victim:
            role, _, number = victim.partition(":")
            member = processes.member_of(role, int(number or 0))
            assert member is not None
            processes.signal(member)


def run(growing: Growing, *sets: str, lost: str = "server:2", **more: Any) -> dict[str, Any]:
    beaten = BeatenRun(tiny(*BY_SURVIVORS, *sets), [Blow(10, (lost,))], observers=[growing], **more)
    report = beaten.run()
    assert report["digest"] == undisturbed(f"steps={STEPS}")
    assert report["servers"] == 7
    assert report["scrubbed"]["wrong"] == 0
    assert report["scrubbed"]["rounds"] > 0
    return report


def test_others_take_over_what_was_lost_and_the_job_grows_back() -> None:
    growing = Growing()
    report = run(growing)
    assert [len(view.servers) for view in growing.views] == [7, 7, 6, 7, 7]
    assert [view.rebuilding for view in growing.views] == [[], [2], [], [], []]
    assert [resize.lost for resize in growing.views[-1].resizes] == [1, 0]
    (failure,) = report["failures"]
    assert failure["rebuilt_ms"] > 0, "they have told of it"


@pytest.mark.campaign
@pytest.mark.parametrize("victim", ["server:2", "server:0", "server:6", "trainer:0", "coordinator"])
@pytest.mark.parametrize("when", ["taking_over", "growing"])
def test_whoever_dies_meanwhile_changes_no_bit(victim: str, when: str) -> None:
    """server:2 answers for the lost place, and server:6 is the one that comes."""
    run(Growing(victim, "") if when == "taking_over" else Growing("", victim), *SLOW)


@pytest.mark.campaign
def test_the_server_that_keeps_the_dense_state_is_lost() -> None:
    run(Growing(taking_over="trainer:0"), *SLOW, lost="server:0")


@pytest.mark.campaign
def test_two_are_lost_at_once() -> None:
    growing = Growing()
    config = tiny(*BY_SURVIVORS, "servers=8", "spares=2")
    report = BeatenRun(config, [Blow(10, ("server:1", "server:5"))], observers=[growing]).run()
    assert report["digest"] == undisturbed(f"steps={STEPS}")
    assert report["servers"] == 8


@pytest.mark.campaign
def test_where_survivors_are_too_few_a_replacement_rebuilds() -> None:
    config = tiny(*BY_SURVIVORS, "servers=6", *SLOW)
    beaten = BeatenRun(config, [Blow(10, ("server:1", "server:4"))])
    report = beaten.run()
    assert report["digest"] == undisturbed(f"steps={STEPS}")
    views = [viewed for _, viewed in beaten.of(Viewed)]
    assert all(view.moving is None for view in views), (
        "four are left, and stripes have five records"
    )


@pytest.mark.campaign
def test_what_is_saved_meanwhile_is_resumed_from(tmp_path: Path) -> None:
    """While others take over there is no save: the replacement is not whole."""
    saved, growing = tmp_path / "saved", Growing(waits_at=30)
    saves = ("checkpoint.every_steps=3", "checkpoint.keep_last=99")
    slow = ("rebuild.bytes_per_s=5000", "rebuild.chunk=16")
    run(growing, *slow, *saves, f"checkpoint.path={saved}")
    meanwhile = [step for step in whole_steps(saved) if step in growing.saved_while_moving]
    assert meanwhile
    for step in {meanwhile[0], meanwhile[-1]}:
        copy = tmp_path / f"from-{step}"
        shutil.copytree(saved, copy)
        for later in whole_steps(copy):
            if later > step:
                shutil.rmtree(next(copy.glob(f"step-*{later}")))
        config = tiny(*BY_SURVIVORS, *saves, f"checkpoint.path={copy}")
        report = JobRun(config, start=find_start(config, resume=True)).run()
        assert report["resumed_from"] == step
        assert report["digest"] == undisturbed(f"steps={STEPS}")
