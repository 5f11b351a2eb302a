"""Saves by the clock, on real processes: one step for everybody, whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import BeatenRun, Blow, leaving_nothing, tiny, undisturbed

from planaria.checkpoints import latest
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Note
from planaria.cluster.resuming import find_start
from planaria.cluster.run import JobRun

pytestmark = pytest.mark.torch

STEPS = "steps=400"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with leaving_nothing():
        yield


def whole(report: dict[str, Any]) -> list[int]:
    return [one["step"] for one in report["checkpoints"] if "failed" not in one]


def test_servers_trainers_and_coordinators_come_and_go_and_saves_go_on(tmp_path: Path) -> None:
    shape = ("servers=4", "parity=1", "k=2", "spares=1", STEPS)
    save = (f"checkpoint.path={tmp_path / 'job'}", "checkpoint.every_s=0.2")
    config = tiny(*shape, *save, "checkpoint.keep_last=100")
    plan = [Blow(40, ("coordinator",)), Blow(80, ("server:2",)), Blow(120, ("trainer:0",))]
    run = BeatenRun(config, plan)
    report = run.run()
    assert len(run.killed) == 3
    assert report["digest"] == undisturbed(STEPS)
    steps = whole(report)
    # How many there are is a matter of speed; some are, after all blows and before the end.
    assert any(120 < step < config.steps for step in steps), report["checkpoints"]
    assert latest(tmp_path / "job", verify=True).checkpoint is not None
    start = find_start(config, resume=True)
    assert start.step == steps[-1]
    again = JobRun(config, start=start).run()
    assert again["digest"] == report["digest"]


def test_auto_measures_a_save_chooses_and_rolls_back_to_it(tmp_path: Path) -> None:
    save = (f"checkpoint.path={tmp_path / 'job'}", "checkpoint.every_s=auto")
    config = tiny("strategy=checkpoint", "servers=2", "spares=0", STEPS, *save)

    def kill_when_saved(processes: Attempt, event: JobEvent) -> None:
        if whole({"checkpoints": processes.saves.published}) and not run.struck:
            run.beating.strike(processes, [run.progress.servers[1]])

    run = BeatenRun(config, on_event=kill_when_saved)
    report = run.run()
    assert report["digest"] == undisturbed(STEPS)
    [rollback] = report["rollbacks"]
    assert rollback["to_step"] in whole(report)
    lines = [note.line for _, note in run.of(Note)]
    assert any("a checkpoint every" in line and "between failures" in line for line in lines)
