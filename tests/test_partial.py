"""Partial or full recovery: the decision before a job, and the count of what it loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.cluster.partial import Costs, Losses, decide, expected_costs
from planaria.config import Config

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


def reloaded(place: int, step: int, saved: int) -> dict[str, Any]:
    return {"place": place, "step": step, "saved": saved, "seconds": 0.1}


def test_pls_is_the_papers_and_the_budget_is_passed_once() -> None:
    losses = Losses(cpr("servers=4", "steps=100", "cpr.target_pls=0.1"))
    losses.on_reloaded(reloaded(1, 50, 30), 30)
    assert losses.pls == pytest.approx(20 / (100 * 4))
    assert not losses.passes_budget()
    line = losses.on_reloaded(reloaded(2, 80, 50), 50)
    assert losses.pls == pytest.approx(50 / 400)
    assert "its save of step 50, 30 steps ago" in line
    assert losses.passes_budget()
    assert not losses.passes_budget()


def test_lost_updates_are_weighed_by_what_the_others_do_in_a_step() -> None:
    losses = Losses(cpr("servers=4", "steps=100"))
    for place in range(4):
        saves = {"30": [4600, 300]}  # 400 updates since, and 300 of before that it lacks
        losses.on_updates({"place": place, "steps": 50, "total": 5000, "saves": saves})
    losses.on_reloaded(reloaded(1, 50, 30), 30)
    assert losses.pls_updates == pytest.approx(700 / (100 * 4 * 100))
    losses.on_reloaded(reloaded(1, 52, 30), 30)  # it has said nothing since
    assert losses.reloads[1]["pls_updates"] == 0
