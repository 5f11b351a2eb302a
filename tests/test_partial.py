"""Partial or full recovery: the decision before a job, and the count of what it loses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planaria.cluster.deciding import Costs, decide, expected_costs, settle
from planaria.config import Config
from planaria.control import losses as module
from planaria.control.losses import Losses
from planaria.wire.control import Reloaded, StepDone

HOUR, MINUTE = 3600.0, 60.0
PAPER = Costs(save=5.6 * MINUTE, repair=5.4 * MINUTE)  # CPR's overheads of a Criteo job


def cpr(*overrides: str) -> Config:
    needed = ["strategy=cpr", "checkpoint.path=saves", "checkpoint.every_steps=10"]
    return Config.load(None, [*needed, *overrides])


def test_the_papers_job_recovers_partially() -> None:
    decision = decide(cpr("servers=8", f"failures.mtbf_s={28 * HOUR}"), PAPER)
    assert decision.partial
    assert decision.interval_s == pytest.approx(44.8 * HOUR)
    assert "partial recovery would cost 0.53%" in decision.why
    assert "full recovery would cost 8.49%" in decision.why


def test_a_budget_too_small_for_partial_recovery_is_told_and_young_decides() -> None:
    config = cpr("servers=8", f"failures.mtbf_s={28 * HOUR}", "cpr.target_pls=0.0005")
    decision = decide(config, PAPER)
    assert not decision.partial
    assert decision.interval_s == pytest.approx((2 * 5.6 * MINUTE * 28 * HOUR) ** 0.5)
    assert "full recovery it is" in decision.why


def test_costs_are_as_configured_or_measured_in_the_folder(tmp_path: Path) -> None:
    given = cpr("failures.save_s=3", "failures.load_s=2", "failures.reschedule_s=5")
    assert expected_costs(given) == Costs(3, 7)
    small = cpr(f"checkpoint.path={tmp_path}", "model.rows=1000", "failures.reschedule_s=0")
    large = cpr(f"checkpoint.path={tmp_path}", "model.rows=100000", "failures.reschedule_s=0")
    assert 0 < expected_costs(small).save < expected_costs(large).save
    assert list(tmp_path.iterdir()) == []


def test_who_says_how_often_to_save_is_not_overruled() -> None:
    given = cpr("failures.save_s=336", "failures.load_s=24", f"failures.mtbf_s={28 * HOUR}")
    assert settle(given) == (given, "")
    erasure = Config()
    assert settle(erasure) == (erasure, "")
    asked = replace(given, checkpoint=replace(given.checkpoint, every_steps=0))
    settled, why = settle(asked)
    assert (settled.strategy, "partial recovery it is" in why) == ("cpr", True)
    assert settled.checkpoint.every_s == pytest.approx(2 * 0.1 * 6 * 28 * HOUR)
    strict = replace(asked, cpr=replace(asked.cpr, target_pls=0.0005))
    assert settle(strict)[0].strategy == "checkpoint"


# ------------------------------------------------------------------------ what was lost


def reloaded(place: int, step: int, saved: int) -> Reloaded:
    return Reloaded(place=place, step=step, saved=saved, rows=10, bytes=100, seconds=0.1)


def done(step: int, rank: int, *rows: int) -> StepDone:
    return StepDone(rank=rank, step=step, rows=list(rows), loss=0.5)


def test_pls_is_the_papers_and_the_budget_is_passed_once() -> None:
    losses = Losses(cpr("servers=4", "steps=100", "cpr.target_pls=0.1"))
    losses.on_reloaded(reloaded(1, 50, 30), 30, lacks=0)
    assert losses.pls == pytest.approx(20 / (100 * 4))
    assert not losses.passes_budget()
    line = losses.on_reloaded(reloaded(2, 80, 50), 50, lacks=0)
    assert losses.pls == pytest.approx(50 / 400)
    assert "its save of step 50, 30 steps ago" in line
    assert losses.passes_budget()
    assert not losses.passes_budget()


def test_what_priority_saves_have_does_not_count_as_saved() -> None:
    losses = Losses(cpr("servers=4", "steps=100"))
    line = losses.on_reloaded(reloaded(1, 50, 45), 30, lacks=0)
    assert losses.pls == pytest.approx(20 / 400)
    assert "5 steps ago (all rows had their turn by step 30)" in line
    assert "its initial values" in losses.on_reloaded(reloaded(1, 60, 0), 0, lacks=0)


def test_lost_updates_are_what_trainers_made_since_the_save_and_what_it_lacked() -> None:
    """Two servers, two trainers; in step n the trainers update n and 2 n rows of server 1."""
    losses = Losses(cpr("servers=2", "k=1", "trainers=2", "steps=100"))
    for step in range(1, 51):
        losses.on_step(done(step, 0, 100, step))
        losses.on_step(done(step, 1, 300, 2 * step))
    losses.on_reloaded(reloaded(1, 50, 30), 30, lacks=7)
    lost = 7 + 3 * sum(range(31, 51))
    made = sum(400 + 3 * step for step in range(1, 51))
    assert losses.reloads[0]["updates_lost"] == lost
    assert losses.pls_updates == losses.reloads[0]["pls_updates"]
    assert losses.pls_updates == pytest.approx(lost / (made / 50 * 100))
    before = losses.pls_updates
    losses.on_reloaded(reloaded(0, 50, 50), 50, lacks=0)  # nothing is lost by that
    assert losses.pls_updates == before
    assert losses.to_save() == {"pls": losses.pls, "pls_updates": losses.pls_updates}


def test_a_step_that_nobody_told_of_counts_as_the_mean_until_it_is_told() -> None:
    losses = Losses(cpr("servers=2", "k=1", "trainers=2", "steps=100"))
    for step in range(1, 11):
        losses.on_step(done(step, 0, 10, 30))
        if step != 10:  # rank 1 died when it had computed step 10
            losses.on_step(done(step, 1, 10, 50))
    losses.on_reloaded(reloaded(1, 10, 8), 8, lacks=0)
    [one] = losses.reloads
    assert one["updates_lost"] == pytest.approx(4 * (30 + 30 + 50) / 3)
    losses.on_step(done(10, 1, 10, 70))  # its successor computes it again
    losses.on_step(done(10, 1, 10, 70))  # twice, but it is the same step
    [one] = losses.reloads
    assert one["updates_lost"] == 30 + 30 + 50 + 70
    made = 10 * 40 + 9 * 60 + 80
    assert losses.pls_updates == pytest.approx(180 / (made / 20 * 2 * 100))


def test_a_resumed_job_goes_on_with_what_was_lost_before() -> None:
    losses = Losses(cpr("servers=2", "k=1", "steps=100"), 0.05, 0.04)
    assert losses.to_save() == {"pls": 0.05, "pls_updates": 0.04}
    losses.on_reloaded(reloaded(1, 60, 50), 50, lacks=0)
    assert losses.pls == pytest.approx(0.05 + 10 / 200)
    assert losses.pls_updates == 0.04  # no trainer has told of a step yet
    assert Losses(cpr()).to_save() == {}


def test_of_long_jobs_only_the_last_steps_are_known_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STEPS_KEPT", 10)
    losses = Losses(cpr("servers=2", "k=1", "trainers=1", "steps=100"))
    for step in range(1, 51):
        losses.on_step(done(step, 0, 10, 5))
    losses.on_reloaded(reloaded(1, 50, 0), 0, lacks=0)
    assert losses.reloads[0]["updates_lost"] == pytest.approx(50 * 5)  # as many as in the last ten
    assert losses.pls_updates == pytest.approx(50 * 5 / (15 * 100))
