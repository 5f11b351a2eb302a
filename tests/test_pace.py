"""When saves are ordered and when they count, by a clock that the test turns and without a disk."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from planaria.checkpoints import DENSE, PartSummary
from planaria.cluster.parts import PartSaver
from planaria.config import Config
from planaria.control.pace import GIVEN_UP_S, MAX_MARGIN, STEPS_SEEN, Pace
from planaria.control.saving import TRIES, Discard, Prune, Publish, SaveMachine
from planaria.errors import ConfigError
from planaria.wire.control import Orders, PartFailed, PartSaved, SavedRows, Told

STEP_S = 0.05
STEPS = 400


class Clock:
    """A job whose steps take STEP_S, and the pace of its saves."""

    def __init__(self, *overrides: str) -> None:
        self.now = 1000.0
        self.step = 0
        self.said: list[str] = []
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


def test_saves_come_every_so_many_seconds_and_one_at_a_time() -> None:
    clock = Clock("checkpoint.every_s=2")
    assert clock.run(1.9) == []
    [first] = clock.run(3.0)  # it is not closed yet, so no other is ordered
    assert first == pytest.approx(2.0 / STEP_S + 0.3 / STEP_S, abs=3)
    clock.pace.on_published(0.4, clock.now)
    assert len(clock.run(0.1)) == 1  # it is due
    clock.pace.on_published(0.4, clock.now)
    assert len(clock.run(1.8)) == 0
    assert len(clock.run(0.4)) == 1
    assert clock.said == []
    assert clock.run(GIVEN_UP_S - 5) == []
    assert len(clock.run(10)) == 1


def test_whoever_is_told_too_late_gets_more_time() -> None:
    clock = Clock("checkpoint.every_s=100")
    clock.run(99.0)
    ahead = []
    for _ in range(14):
        [wanted] = clock.run(1.5)
        ahead.append(wanted - clock.step)
        clock.pace.on_given_up(late=True, now=clock.now)
    assert all(b > 1.5 * a for a, b in pairwise(ahead[2:10]))
    assert clock.pace._margin == MAX_MARGIN
    clock.pace.on_given_up(late=False, now=clock.now)  # a full disk: no reason to hurry
    [_] = clock.run(1.0)
    assert clock.run(90.0) == []


def test_a_stalled_job_and_one_that_ends_are_not_told_to_save() -> None:
    clock = Clock("checkpoint.every_s=1", "steps=40")
    clock.run(0.9)
    clock.now += 5.0
    assert clock.pace.next(clock.now) is None  # a recovery, say
    clock.step = 36
    assert clock.run(0.1) == []  # the next would be after the end


def test_auto_saves_early_and_then_as_young_says() -> None:
    clock = Clock("checkpoint.every_s=auto", "failures.mtbf_s=800")
    assert len(clock.run(STEP_S * STEPS_SEEN + 0.1)) == 1
    clock.pace.on_published(0.25, clock.now)
    assert clock.pace.interval_s == pytest.approx(math.sqrt(2 * 0.25 * 800))
    assert "a checkpoint every 20.0 s from here on: one takes 0.25 s, and 800 s" in clock.said[0]
    assert clock.run(19.0) == []
    assert len(clock.run(1.5)) == 1
    clock.pace.on_published(0.27, clock.now)  # little news
    assert len(clock.said) == 1
    clock.run(22.0)
    clock.pace.on_published(100.0, clock.now)
    assert clock.pace.interval_s == 500.0  # five saves, though Young would save more often
    assert len(clock.said) == 2


def test_without_a_figure_auto_goes_by_the_failures_that_it_sees() -> None:
    clock = Clock("checkpoint.every_s=auto")
    clock.run(1.0)
    clock.pace.on_published(0.01, clock.now)
    clock.run(199.0)
    clock.pace.on_published(0.01, clock.now)
    assert clock.pace.interval_s == pytest.approx(math.sqrt(2 * 0.01 * 200), rel=0.01)
    clock.pace.on_lost(2, clock.now)
    clock.pace.restart(clock.now)  # and a third, after which all rolled back
    assert clock.run(0.2) == []  # the time of a step is measured anew
    assert len(clock.run(2.0)) == 1
    clock.pace.on_published(0.01, clock.now)
    assert clock.pace.interval_s == pytest.approx(math.sqrt(2 * 0.01 * 202.2 / 4), rel=0.01)


def test_a_first_save_that_fails_is_not_tried_all_the_time() -> None:
    clock = Clock("checkpoint.every_s=auto", "failures.mtbf_s=100")
    [_] = clock.run(2.0)
    clock.pace.on_given_up(late=False, now=clock.now)
    assert len(clock.run(8.0)) <= 1


# ---------------------------------------------------------------------------- a process


def test_a_process_saves_the_step_that_it_is_told_or_says_that_it_is_too_late(
    tmp_path: Path,
) -> None:
    config = Config.load(None, [f"checkpoint.path={tmp_path}", "checkpoint.every_s=5"])
    said: list[Told] = []
    saver = PartSaver(config, said.append, 0)
    assert saver.due(3) is None
    orders = Orders(save_at=7)
    assert [saver.due(step, orders) for step in (4, 6, 7, 7, 8)] == [None, None, 7, None, None]
    orders = Orders(save_at=10)
    assert saver.due(12, orders) == 10
    saver.missed(10, 1)
    replacement = PartSaver(config, said.append, 0)
    assert replacement.due(0, orders) is None  # a spare
    assert replacement.due(12, orders) == 10
    replacement.missed(10, 1)
    too_late, replaced = said
    assert isinstance(too_late, PartFailed)
    assert isinstance(replaced, PartFailed)
    assert (too_late.step, too_late.late) == (10, True)
    assert (replaced.step, replaced.late) == (10, False)
    assert "told too late" in too_late.why
    assert "took the place of another" in replaced.why
    informed = PartSaver(config, said.append, 0)
    assert informed.due(12, Orders(save_at=10, saved=10)) is None  # it counts already


def test_what_the_job_starts_from_is_not_given_up(tmp_path: Path) -> None:
    """A server that was killed right after a resume was replaced at the step of the checkpoint.

    The replacement said that it could not save that step, and at the end the checkpoint went.
    """
    config = Config.load(None, [f"checkpoint.path={tmp_path}", "checkpoint.every_steps=10"])
    saves = SaveMachine(config, 40, 0.0)
    saves.on_part_failed(failed(40, 1), 0.0)
    saves.close(1.0)
    assert [one["step"] for one in saves.published] == [config.steps]
    assert saves.take_work() == []  # it is not removed, above all


def test_steps_and_seconds_exclude_each_other() -> None:
    both = ["checkpoint.path=job", "checkpoint.every_steps=5", "checkpoint.every_s=2"]
    with pytest.raises(ConfigError, match=r"every_s: expected null, because .*every_steps"):
        Config.load(None, both)
    with pytest.raises(ConfigError, match="every_steps: expected 1 or more, because strategy is"):
        Config.load(None, ["strategy=checkpoint", "checkpoint.path=job"])
    Config.load(None, ["strategy=checkpoint", "checkpoint.path=job", "checkpoint.every_s=auto"])


# ---------------------------------------------------------------------------- all processes


def job(*overrides: str) -> Config:
    needed = ["checkpoint.path=job", "checkpoint.every_steps=5", f"steps={STEPS}", "servers=3"]
    return Config.load(None, ["k=2", *needed, *overrides])


def part(step: int, place: int, base: int | None = None, rows: SavedRows = "all") -> PartSaved:
    """It took a tenth of a second."""
    summary = PartSummary(f"{place}.part", place, 100, 1, "", 32, 1, {})
    return PartSaved(
        step=step,
        place=place,
        part=summary,
        base=base,
        rows=rows,
        lacks=0,
        seconds=0.1,
        blocked_s=0.0,
        rested_s=0.0,
    )


def failed(step: int, place: int, late: bool = False) -> PartFailed:
    return PartFailed(step=step, place=place, why="it is being rebuilt", late=late)


def save(saves: SaveMachine, step: int, now: float, base: int | None = None) -> None:
    """All tell of their parts. base: those of the servers are differences from it."""
    rows: SavedRows = "all" if base is None else "priority"
    saves.on_part(part(step, DENSE), now)
    for place in saves.config.layout.places:
        saves.on_part(part(step, place, base, rows), now)


def publish(saves: SaveMachine, now: float) -> list[Publish]:
    """Does the work that there is, on no disk; returns what was published."""
    published = [work for work in saves.take_work() if isinstance(work, Publish)]
    for work in published:
        saves.on_published(work.step, now)
    return published


def test_nothing_is_published_before_the_work_is_done() -> None:
    saves = SaveMachine(job(), 0, 0.0)
    save(saves, 5, 10.0)
    assert saves.busy
    [work] = saves.take_work()
    assert isinstance(work, Publish)
    assert (work.step, work.base, work.rows, len(work.parts)) == (5, (), "all", 4)
    assert saves.take_work() == []
    assert saves.busy  # somebody is at it
    assert (saves.published, saves.newest()) == ([], 0)
    saves.on_part_failed(failed(5, 1), 11.0)  # all parts are there, whoever says what
    saves.close(11.0)  # what is being published may still come to count
    assert [one["step"] for one in saves.published] == [STEPS]
    saves.on_published(5, 12.0)
    assert saves.newest() == 5
    assert saves.published[-1]["seconds"] == pytest.approx(2.1)
    assert saves.take_work() == [Prune(5)]
    assert not saves.busy


def test_a_checkpoint_that_cannot_be_published_is_told_of_and_removed() -> None:
    saves = SaveMachine(job(), 0, 0.0)
    save(saves, 5, 1.0)
    saves.take_work()
    saves.on_publish_failed(5, "no room", 2.0)
    assert saves.published == [{"step": 5, "failed": "no room"}]
    assert saves.notes == ["no checkpoint of step 5: no room"]
    assert saves.take_work() == [Discard(5, ("-1.part", "0.part", "1.part", "2.part"))]
    save(saves, 10, 3.0)
    publish(saves, 3.0)
    assert saves.newest() == 10


def test_the_last_step_is_missing_until_it_is_saved() -> None:
    """A job can end well without its trained model: then the report has to say so."""
    saves = SaveMachine(job(), 0, 0.0)
    assert saves.waits_for() == {}
    saves.close(1.0)
    [last] = saves.published
    assert last["step"] == STEPS
    assert "the trainers, server:0, server:1, server:2 ended before it was saved" in last["failed"]
    assert saves.take_work() == []  # there is nothing to remove
    again = saves.after_rollback(job(), 5, 2.0)
    assert again.published == []  # it is still to come
    save(again, STEPS, 1000.0)
    publish(again, 1001.0)
    again.close(1002.0)
    [last] = again.published
    assert (last["step"], "failed" in last) == (STEPS, False)
    assert last["seconds"] == pytest.approx(1.1)  # not since the job began
    for nothing_to_save in (
        SaveMachine(job(), STEPS, 0.0),
        SaveMachine(job("checkpoint.last_step=if_due"), 0, 0.0),
    ):
        nothing_to_save.close(1.0)
        assert nothing_to_save.published == []


def test_a_last_step_that_was_published_stays_in_the_report_when_all_roll_back() -> None:
    saves = SaveMachine(job(), 0, 0.0)
    save(saves, STEPS, 1.0)
    publish(saves, 2.0)
    again = saves.after_rollback(job(), STEPS, 3.0)
    assert [one["step"] for one in again.published] == [STEPS]


def test_what_a_slow_disk_publishes_after_all_rolled_back_is_no_save_of_those_who_go_on() -> None:
    saves = SaveMachine(job(), 0, 0.0)
    save(saves, 5, 1.0)
    save(saves, 10, 2.0)
    assert len(saves.take_work()) == 1
    saves.close(3.0)
    again = saves.after_rollback(job(), 0, 700.0)  # nobody waits for a disk for ever
    again.on_published(5, 701.0)
    again.on_publish_failed(10, "no room", 702.0)
    assert (again.newest(), again.published, again.busy) == (0, [], False)


def test_a_priority_save_needs_the_one_that_is_being_published() -> None:
    """It adds to all before it: the rows of the one before may be in no other."""
    saves = SaveMachine(job("strategy=cpr", "cpr.variant=ssu"), 0, 0.0)
    save(saves, 5, 1.0)
    publish(saves, 1.0)
    assert saves.base.step == 5
    save(saves, 10, 2.0, base=5)  # slow storage
    save(saves, 15, 3.0, base=5)
    found = publish(saves, 4.0)
    while more := publish(saves, 4.0):
        found += more
    assert [(work.step, work.base) for work in found] == [(10, (5,)), (15, (5, 10))]


def test_a_priority_save_after_one_that_could_not_be_published_does_not_count() -> None:
    saves = SaveMachine(job("strategy=cpr", "cpr.variant=ssu"), 0, 0.0)
    save(saves, 5, 1.0)
    publish(saves, 1.0)
    save(saves, 10, 2.0, base=5)
    [first] = [work for work in saves.take_work() if isinstance(work, Publish)]
    save(saves, 15, 3.0, base=5)
    saves.on_publish_failed(first.step, "no room", 4.0)
    publish(saves, 5.0)
    assert saves.newest() == 5
    assert saves.base.step is None  # the next one has all rows


# ---------------------------------------------------------------------------- before a job is left


def walk(saves: SaveMachine, first: int, last: int) -> None:
    """A job whose steps take a tenth of a second each."""
    for step in range(first, last + 1):
        saves.on_step(step, step / 10)
        saves.tick(step / 10)


def test_saving_now_names_a_step_ahead_and_wants_all_rows_of_it() -> None:
    saves = SaveMachine(job(), 0, 0.0)
    walk(saves, 1, 20)
    assert (saves.save_at, saves.save_all) == (0, False)  # nobody has asked
    saves.save_now()
    assert saves.saved_now is None
    walk(saves, 21, 21)
    wanted = saves.save_at
    assert saves.save_all
    assert 21 < wanted < 30
    walk(saves, 22, wanted)
    assert (saves.save_at, saves.saved_now) == (wanted, None)
    save(saves, wanted, wanted / 10)
    assert saves.saved_now is None  # it is not published yet
    publish(saves, wanted / 10)
    assert saves.saved_now is True
    walk(saves, wanted + 1, wanted + 5)
    assert saves.save_at == wanted


def test_saving_now_is_tried_again_but_not_for_ever() -> None:
    saves = SaveMachine(job(), 0, 0.0)
    walk(saves, 1, 20)
    saves.save_now()
    asked: list[int] = []
    for step in range(21, 200):
        walk(saves, step, step)
        if saves.saved_now is False:
            break
        if saves.save_at not in asked:
            asked.append(saves.save_at)
            for place in (DENSE, 0, 1, 2):
                saves.on_part_failed(failed(saves.save_at, place, late=True), step / 10)
    assert saves.saved_now is False
    assert len(asked) == TRIES
    assert asked == sorted(asked)


def test_saving_now_where_everybody_stands_wants_that_step() -> None:
    """The data has ended: no step will come by which one further ahead could be named."""
    saves = SaveMachine(job(), 0, 0.0)
    walk(saves, 1, 7)
    saves.save_now(7)
    assert (saves.save_at, saves.save_all, saves.saved_now) == (7, True, None)
    saves.tick(100.0)
    assert saves.save_at == 7
    save(saves, 7, 100.0)
    publish(saves, 100.0)
    assert saves.saved_now is True
    resumed = SaveMachine(job(), 7, 0.0)
    resumed.save_now(7)  # not one step came since
    assert resumed.saved_now is True
