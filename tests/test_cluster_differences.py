"""Differential checkpoints on real processes: killed, rolled back, resumed, the same digest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import BeatenRun, Blow, leaving_nothing, tiny, undisturbed

from planaria.checkpoints import latest
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import Watcher
from planaria.cluster.resuming import find_start
from planaria.cluster.run import JobRun
from planaria.config import Config

pytestmark = pytest.mark.torch

SHAPE = ("steps=60", "model.rows=3000")
EVERY = 6
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with leaving_nothing():
        yield


def saving(folder: Path, policy: str, *overrides: str) -> Config:
    save = (f"checkpoint.path={folder}", f"checkpoint.policy={policy}", "checkpoint.keep_last=100")
    return tiny(*SHAPE, *save, f"checkpoint.every_steps={EVERY}", *overrides)


class Patience(Watcher):
    """Right after every save the job waits until it is published, or has failed: on a slow disk,
    too, there is something to make a difference from. It does not wait for ever.
    """

    def __init__(self) -> None:
        self._ended, self._since = 0, 0.0

    def pauses_after(self) -> int:
        return EVERY * (self._ended + 1) + 1

    def on_tick(self, now: float, processes: Attempt) -> None:
        ended = len(processes.saves.published)
        if ended > self._ended or processes.step < self.pauses_after():
            self._since = now
        self._ended = max(self._ended, ended)
        if now - self._since > PATIENCE_S:
            self._ended, self._since = self._ended + 1, now


class AfterADifference(Patience):
    """Kills a server as soon as a difference is published."""

    struck = False

    def on_tick(self, now: float, processes: Attempt) -> None:
        super().on_tick(now, processes)
        victim = processes.member_of("server", 1)
        differences = [one for one in processes.saves.published if one.get("base")]
        if victim and differences and not self.struck:
            self.struck = True
            processes.signal(victim)


def test_a_killed_and_a_resumed_job_lose_no_bit_with_differences_alone(tmp_path: Path) -> None:
    shape = ("servers=4", "parity=1", "k=2", "spares=1")
    config = saving(tmp_path / "job", "consecutive", *shape)
    run = BeatenRun(config, [Blow(22, ("server:1",))], observers=[Patience()])
    report = run.run()
    assert len(run.killed) == 1
    assert report["digest"] == undisturbed(*SHAPE)
    whole = [one for one in report["checkpoints"] if "failed" not in one]
    first, *differences = whole
    assert first["base"] == []
    assert any(len(one["base"]) > 1 for one in differences)
    # The replacement's first part is a full one, a quarter of all records.
    smaller = [one for one in differences if one["base"] and one["bytes"] < 0.5 * first["bytes"]]
    assert len(smaller) >= 3, whole
    # Where processes were replaced more often, the chain may have grown too long, and begun anew.
    newest = max(one["step"] for one in differences if one["base"] and one["step"] < 60)
    for later in (tmp_path / "job").glob("step-*"):
        if int(later.name.removeprefix("step-")) > newest:
            shutil.rmtree(later)
    start = find_start(config, resume=True)
    found = latest(tmp_path / "job", verify=True).checkpoint
    assert found is not None
    assert len(found.chain) > 1
    assert start.step == found.step == newest
    again = JobRun(config, start=start).run()
    assert again["digest"] == report["digest"]
    assert again["checkpoints"][0]["base"] == []  # nothing is known of what changed before


def test_a_job_rolls_back_to_a_difference_and_loses_no_bit(tmp_path: Path) -> None:
    plain = ("strategy=checkpoint", "servers=2", "spares=0")
    config = saving(tmp_path / "job", "one-shot", *plain)
    after = AfterADifference()
    report = JobRun(config, observers=[after]).run()
    assert after.struck
    assert report["digest"] == undisturbed(*SHAPE)
    [rollback] = report["rollbacks"]
    bases = {one["step"]: one["base"] for one in report["checkpoints"] if "failed" not in one}
    back = rollback["to_step"]
    [base] = bases[back]
    assert bases[base] == []
    assert bases[min(step for step in bases if step > back)] == []  # new processes
