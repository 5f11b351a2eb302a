"""Saving when a job is to end, without any process: as often as promised, and never for ever."""

from __future__ import annotations

from pathlib import Path

from test_saving import config, pass_on, saved_by_all

from planaria.control.saving import TRIES, Publish, SaveMachine
from planaria.wire.control import PartFailed


def told_too_late(saves: SaveMachine, step: int, now: float) -> None:
    for place in (-1, 0, 1, 2):
        failed = PartFailed(step=step, place=place, why="it was told too late", late=True)
        saves.on_part_failed(failed, now)


def test_the_current_step_is_tried_some_times_each_further_ahead(tmp_path: Path) -> None:
    saves, now, ahead = SaveMachine(config(tmp_path), 0, 0.0), 0.0, []
    saves.save_now()
    for step in range(1, 100):
        now += 0.1
        saves.on_step(step, now)
        saves.tick(now)
        if saves.save_all and saves.saved_now is None:
            ahead.append(saves.save_at - step)
            told_too_late(saves, saves.save_at, now)
    assert len(ahead) == TRIES
    assert ahead == sorted({*ahead})
    assert saves.saved_now is False  # so that nobody waits for another


def walk_and_tell(saves: SaveMachine, first: int, last: int, *, late: bool) -> list[int]:
    """How far ahead steps were named, of which everybody tells the same at once."""
    ahead, named = [], saves.save_at
    for step in range(first, last + 1):
        saves.on_step(step, step / 10)
        saves.tick(step / 10)
        if saves.save_at == named:
            continue
        named = saves.save_at
        ahead.append(named - step)
        if late:
            told_too_late(saves, named, step / 10)
        else:
            for one in saved_by_all(saves.config, named).told:
                pass_on(saves, one)
            saves.on_published(named, step / 10)
    return ahead


def test_a_save_that_somebody_wants_is_tried_again_each_time_further_ahead(tmp_path: Path) -> None:
    """It was asked for once, and never came if somebody was told too late."""
    saves = SaveMachine(config(tmp_path), 0, 0.0)
    assert walk_and_tell(saves, 1, 19, late=True) == []
    saves.save_soon()
    ahead = walk_and_tell(saves, 20, 200, late=True)
    assert len(ahead) == TRIES
    assert ahead == sorted({*ahead})
    saves.save_soon()  # somebody wants another one
    assert len(walk_and_tell(saves, 201, 250, late=False)) == 1


def test_a_save_that_somebody_wants_and_that_was_made_late_is_made_once(tmp_path: Path) -> None:
    saves = SaveMachine(config(tmp_path), 0, 0.0)
    walk_and_tell(saves, 1, 19, late=True)
    saves.save_soon()
    assert len(walk_and_tell(saves, 20, 20, late=True)) == 1
    assert len(walk_and_tell(saves, 21, 200, late=False)) == 1
    assert saves.newest() == saves.save_at


def test_a_step_that_is_the_last_possible_one_is_not_tried_at_another(tmp_path: Path) -> None:
    saves = SaveMachine(config(tmp_path, "checkpoint.every_s=1", "checkpoint.every_steps=0"), 0, 0)
    for step in range(1, 10):
        saves.on_step(step, step / 10)
    saves.save_now(9)
    for now in (1.0, 2.0, 3.0):  # a save that is due by the clock does not come between
        saves.tick(now)
        assert (saves.save_at, saves.saved_now) == (9, None)
    told_too_late(saves, 9, 3.0)
    saves.tick(4.0)
    assert (saves.save_at, saves.saved_now) == (9, False)


def test_a_job_that_is_left_after_its_last_step_waits_for_the_save_of_that(tmp_path: Path) -> None:
    """It evaluates, so no step comes; to leave then was to say that nothing could be saved."""
    job = config(tmp_path)
    saves = SaveMachine(job, 0, 0.0)
    for step in range(1, job.steps + 1):
        saves.on_step(step, step / 10)
    saves.tick(job.steps / 10 + 60)
    saves.save_now()
    saves.tick(job.steps / 10 + 61)
    assert (saves.save_at, saves.saved_now) == (job.steps, None)
    for one in saved_by_all(job, job.steps).told:
        pass_on(saves, one)
    saves.on_published(job.steps, 100.0)
    assert saves.saved_now is True


def test_what_the_disk_never_publishes_is_reported_as_not_saved(tmp_path: Path) -> None:
    job = config(tmp_path)
    saves = SaveMachine(job, 0, 0.0)
    for one in saved_by_all(job, 5).told:
        pass_on(saves, one)
    (work,) = saves.take_work()
    assert isinstance(work, Publish)
    assert saves.busy
    saves.give_up_publishing("the disk does not answer")
    assert not saves.busy
    assert saves.published == [{"step": 5, "failed": "the disk does not answer"}]
    saves.on_published(5, 1.0)  # too late: it was said that it does not count
    assert saves.newest() == 0
