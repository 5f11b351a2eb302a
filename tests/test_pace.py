"""When saves are ordered, by a clock that the test turns."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planaria.cluster.pace import GIVEN_UP_S, MAX_MARGIN, STEPS_SEEN, Pace
from planaria.cluster.saves import Saves
from planaria.cluster.saving import PartSaver
from planaria.config import Config
from planaria.errors import ConfigError

STEP_S = 0.05


class Clock:
    """A job whose steps take STEP_S, and the pace of its saves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.now = 1000.0
        self.step = 0
        self.said: list[str] = []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        config = Config.load(None, ["checkpoint.path=job", "steps=1000000", *overrides])
        self.pace = Pace(config, self.said.append)

    def run(self, seconds: float) -> list[int]:
        """The steps that were ordered meanwhile, each with the one that the job was at."""
        ordered = []
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.step += 1
            self.pace.on_step(self.step, self.now)
            if (wanted := self.pace.next(self.now)) is not None:
                assert wanted >= self.step + 2
                ordered.append(wanted)
        return ordered


def test_saves_come_every_so_many_seconds_and_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "checkpoint.every_s=2")
    assert clock.run(1.9) == []
    [first] = clock.run(3.0)  # it is not closed yet, so no other is ordered
    assert first == pytest.approx(2.0 / STEP_S + 0.3 / STEP_S, abs=3)
    clock.pace.on_published(0.4)
    assert len(clock.run(0.1)) == 1  # it is due
    clock.pace.on_published(0.4)
    assert len(clock.run(1.8)) == 0
    assert len(clock.run(0.4)) == 1
    assert clock.said == []
    assert clock.run(GIVEN_UP_S - 5) == []
    assert len(clock.run(10)) == 1


def test_whoever_is_told_too_late_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "checkpoint.every_s=100")
    clock.run(99.0)
    ahead = []
    for _ in range(14):
        [wanted] = clock.run(1.5)
        ahead.append(wanted - clock.step)
        clock.pace.on_given_up(late=True)
    assert all(b > 1.5 * a for a, b in pairwise(ahead[2:10]))
    assert clock.pace._margin == MAX_MARGIN
    clock.pace.on_given_up(late=False)  # a full disk: no reason to hurry
    [_] = clock.run(1.0)
    assert clock.run(90.0) == []


def test_a_stalled_job_and_one_that_ends_are_not_told_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "checkpoint.every_s=1", "steps=40")
    clock.run(0.9)
    clock.now += 5.0
    assert clock.pace.next(clock.now) is None  # a recovery, say
    clock.step = 36
    assert clock.run(0.1) == []  # the next would be after the end


def test_auto_saves_early_and_then_as_young_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "checkpoint.every_s=auto", "failures.mtbf_s=800")
    assert len(clock.run(STEP_S * STEPS_SEEN + 0.1)) == 1
    clock.pace.on_published(0.25)
    assert clock.pace.interval_s == pytest.approx(math.sqrt(2 * 0.25 * 800))
    assert "a checkpoint every 20.0 s from here on: one takes 0.25 s, and 800 s" in clock.said[0]
    assert clock.run(19.0) == []
    assert len(clock.run(1.5)) == 1
    clock.pace.on_published(0.27)  # little news
    assert len(clock.said) == 1
    clock.run(22.0)
    clock.pace.on_published(100.0)
    assert clock.pace.interval_s == 500.0  # five saves, though Young would save more often
    assert len(clock.said) == 2


def test_without_a_figure_auto_goes_by_the_failures_that_it_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "checkpoint.every_s=auto")
    clock.run(1.0)
    clock.pace.on_published(0.01)
    clock.run(199.0)
    clock.pace.on_published(0.01)
    assert clock.pace.interval_s == pytest.approx(math.sqrt(2 * 0.01 * 200), rel=0.01)
    clock.pace.on_lost(2)
    clock.pace.restart()  # and a third, after which all rolled back
    assert clock.run(0.2) == []  # the time of a step is measured anew
    assert len(clock.run(2.0)) == 1
    clock.pace.on_published(0.01)
    assert clock.pace.interval_s == pytest.approx(math.sqrt(2 * 0.01 * 202.2 / 4), rel=0.01)


def test_a_first_save_that_fails_is_not_tried_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "checkpoint.every_s=auto", "failures.mtbf_s=100")
    [_] = clock.run(2.0)
    clock.pace.on_given_up(late=False)
    assert len(clock.run(8.0)) <= 1


# ---------------------------------------------------------------------------- a process


def test_a_process_saves_the_step_that_it_is_told_or_says_that_it_is_too_late(
    tmp_path: Path,
) -> None:
    config = Config.load(None, [f"checkpoint.path={tmp_path}", "checkpoint.every_s=5"])
    said: list[dict[str, Any]] = []
    told: dict[str, Any] = {}
    saver = PartSaver(config, lambda event, **facts: said.append(facts), 0, told=told)
    assert saver.due(3) is None
    told["save_at"] = 7
    assert [saver.due(step) for step in (4, 6, 7, 7, 8)] == [None, None, 7, None, None]
    told["save_at"] = 10
    assert saver.due(12) == 10
    saver.missed(10, 1)
    replacement = PartSaver(config, lambda event, **facts: said.append(facts), 0, told=told)
    assert replacement.due(0) is None  # a spare
    assert replacement.due(12) == 10
    replacement.missed(10, 1)
    assert [(facts["step"], facts["late"]) for facts in said] == [(10, True), (10, False)]
    assert "told too late" in said[0]["why"]
    assert "took the place of another" in said[1]["why"]


def test_what_the_job_starts_from_is_not_given_up(tmp_path: Path) -> None:
    """A server that was killed right after a resume was replaced at the step of the checkpoint.

    The replacement said that it could not save that step, and at the end the checkpoint went.
    """
    config = Config.load(None, [f"checkpoint.path={tmp_path}", "checkpoint.every_steps=10"])
    saves = Saves(config, lambda line: None, start=40)
    (tmp_path / "step-00000040").mkdir()
    saves.on_failed({"step": 40, "place": 1, "why": "it is being rebuilt", "late": False})
    saves.close()
    assert saves.found == []
    assert (tmp_path / "step-00000040").exists()


def test_steps_and_seconds_exclude_each_other() -> None:
    both = ["checkpoint.path=job", "checkpoint.every_steps=5", "checkpoint.every_s=2"]
    with pytest.raises(ConfigError, match=r"every_s: expected null, because .*every_steps"):
        Config.load(None, both)
    with pytest.raises(ConfigError, match="every_steps: expected 1 or more, because strategy is"):
        Config.load(None, ["strategy=checkpoint", "checkpoint.path=job"])
    Config.load(None, ["strategy=checkpoint", "checkpoint.path=job", "checkpoint.every_s=auto"])
