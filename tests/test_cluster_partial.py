"""Partial recovery on real processes: what is lost is one server's work since its last save."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_jobs import BeatenRun, leaving_nothing, tiny

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent
from planaria.cluster.resuming import find_start
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.data import Synthetic
from planaria.schedule import parse_kill, resolve

pytestmark = pytest.mark.torch

SHAPE = ("steps=150", "servers=3", "trainers=1", "spares=1")


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # made before a test looks for what was left behind
    with leaving_nothing():
        yield


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return str(JobRun(tiny(*SHAPE, "strategy=none")).run()["digest"])


def cpr(folder: Path, *overrides: str) -> Config:
    return tiny(*SHAPE, "strategy=cpr", f"checkpoint.path={folder}", *overrides)


def run_killed(config: Config, *kills: str, **more: Any) -> JobRun:
    return JobRun(config, resolve([parse_kill(kill) for kill in kills], config), **more)


def updates_by_place(config: Config, step: int) -> list[int]:
    """How many rows a step updates on which server, worked out from the data."""
    source = Synthetic(config.model.table_rows, seed=config.seed, exponent=config.data.zipf)
    batch = source.read((step - 1) * config.batch, config.batch)
    first_rows = np.cumsum([0, *config.model.table_rows[:-1]])
    rows = np.unique(batch.ids + first_rows)
    places, _ = config.layout.arena(sum(config.model.table_rows)).locate(rows)
    return [int(count) for count in np.bincount(places, minlength=config.servers)]


def test_a_kill_right_after_a_save_loses_nothing(tmp_path: Path) -> None:
    """Steps are long and saves are short: there is time to kill before the next step is applied."""
    slow = ("steps=5", "batch=8000", "model.top=[512,512]")
    undisturbed = JobRun(tiny(*SHAPE, *slow, "strategy=none")).run()["digest"]

    def kill_when_saved(processes: Attempt, event: JobEvent) -> None:
        if processes.saves.published and not run.struck:
            run.beating.strike(processes, [run.progress.servers[1]])

    for attempt in range(4):  # a machine with other work may be too late
        saves = ("checkpoint.every_steps=4", "checkpoint.mode=sync")  # as soon as can be
        config = cpr(tmp_path / str(attempt), *slow, *saves)
        run = BeatenRun(config, on_event=kill_when_saved)
        report = run.run()
        found = [(reload["step"], reload["saved_step"]) for reload in report["reloads"]]
        in_time = found == [(4, 4)]
        if found:  # else it came after the last step
            assert (report["digest"] == undisturbed) == in_time
        if in_time:
            assert report["pls"] == 0
            return
    pytest.fail("a step was always applied between the save and the kill")


def test_what_was_not_saved_is_lost_and_counted(undisturbed: str, tmp_path: Path) -> None:
    config = cpr(tmp_path, "checkpoint.every_steps=20", "cpr.target_pls=0.5")
    report = run_killed(config, "server:0@10", "server:2@50").run()
    assert report["digest"] != undisturbed  # the control: a loss is seen
    assert report["rollbacks"] == []
    first, second = report["reloads"]
    assert first["saved_step"] == 0  # its initial values
    assert 0 < second["saved_step"] <= second["step"]  # a disk may be slow
    for reload in (first, second):
        lost = reload["step"] - reload["saved_step"]
        assert reload["pls"] == pytest.approx(lost / (150 * 3))
    assert report["pls"] == pytest.approx(first["pls"] + second["pls"])
    made = [updates_by_place(config, step) for step in range(1, config.steps + 1)]
    for reload in (first, second):
        lost = sum(step[reload["place"]] for step in made[reload["saved_step"] : reload["step"]])
        assert reload["updates_lost"] == lost
        assert reload["pls_updates"] == pytest.approx(lost / sum(map(sum, made)))
    assert report["pls_updates"] == first["pls_updates"] + second["pls_updates"]
    assert all(failure["gap_ms"] > 0 for failure in report["failures"])


def test_beyond_the_budget_all_roll_back_also_under_a_new_coordinator(tmp_path: Path) -> None:
    config = cpr(tmp_path, "checkpoint.every_steps=20", "cpr.target_pls=0.01")
    kills = ("server:0@10", "coordinator@25", "server:1@50", "server:2@110")
    lines: list[str] = []
    report = run_killed(config, *kills, observe=lambda line, _: lines.append(line)).run()
    assert len(report["reloads"]) == 1
    assert len(report["rollbacks"]) == 2  # and at every failure after that
    assert all(rollback["to_step"] % 20 == 0 for rollback in report["rollbacks"])
    assert any("passed the budget" in line for line in lines)
    assert any("all roll back from step" in line for line in lines)
    longer = replace(config, steps=200)
    resumed = JobRun(longer, start=find_start(longer, resume=True))
    assert resumed.config.strategy == "checkpoint"  # the budget stays passed
    assert resumed.saves.extra["pls"] == report["pls"]


def test_half_of_the_servers_and_a_trainer_may_go_at_once(tmp_path: Path) -> None:
    shape = ("servers=4", "trainers=2", "checkpoint.every_steps=10", "cpr.target_pls=1")
    report = run_killed(cpr(tmp_path, *shape), "server:any*2@30", "trainer:1@30").run()
    assert len(report["reloads"]) == 2
    assert report["rollbacks"] == []
    assert report["steps"] == 150


@pytest.mark.parametrize("variant", ["mfu", "scar"])
def test_priority_saves_are_small_and_add_to_those_before(tmp_path: Path, variant: str) -> None:
    sets = ("steps=200", "checkpoint.every_steps=40", f"cpr.variant={variant}", "model.rows=3000")
    config = cpr(tmp_path, *sets, "cpr.target_pls=1", "checkpoint.keep_last=1")
    report = run_killed(config, "server:1@50").run()
    saved = [one for one in report["checkpoints"] if "failed" not in one]
    assert saved[0]["rows"] == "all"
    later = [one for one in saved if one["rows"] in ("priority", "interval")]
    assert len(later) >= 5
    # A server that was told late, or replaced, writes all of its records.
    assert statistics.median(one["bytes"] for one in later) < saved[0]["bytes"] / 4
    assert all(one["base"] for one in later)
    last = saved[-1]  # the trained model
    assert (last["step"], last["rows"], last["base"]) == (200, "all", [])
    (reload,) = report["reloads"]
    assert 0 < reload["saved_step"] <= reload["step"]
    assert reload["pls"] > 0


def test_the_job_decides_before_it_starts_and_then_saves_by_the_clock(tmp_path: Path) -> None:
    costs = ("failures.mtbf_s=5", "failures.save_s=0.05", "failures.load_s=0.05")
    config = cpr(tmp_path, "steps=600", "cpr.target_pls=0.02", *costs)
    run = JobRun(config)
    assert run.config.checkpoint.every_s == pytest.approx(2 * 0.02 * 3 * 5)
    assert "partial recovery it is" in run.decision
    report = run.run()
    assert report["strategy"] == "cpr"
    assert report["decision"] == run.decision
    assert len(report["checkpoints"]) >= 1
    few = JobRun(cpr(tmp_path, "cpr.target_pls=0.0001", *costs))
    assert few.config.strategy == "checkpoint"
    assert "full recovery it is" in few.decision
