"""Reading ahead gives what was asked for, and always ends."""

from __future__ import annotations

import threading

import pytest

from planaria.data.ahead import Ahead
from planaria.errors import ArgumentError, DataError

LIMIT_S = 60


class Steps:
    """Prepares a step as ten times its number, and lets tests watch."""

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.changed = threading.Condition()

    def __call__(self, step: int) -> int:
        with self.changed:
            self.prepared.append(step)
            self.changed.notify_all()
        return 10 * step

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.prepared) >= count, LIMIT_S)


def test_steps_come_in_order_and_are_prepared_once() -> None:
    steps = Steps()
    with Ahead(steps, 1, 50, depth=3) as ahead:
        assert [ahead.get(step) for step in range(1, 51)] == list(range(10, 510, 10))
    assert steps.prepared == list(range(1, 51))


def test_no_more_than_its_depth_is_prepared_before_it_is_asked_for() -> None:
    steps = Steps()
    with Ahead(steps, 1, 50, depth=3) as ahead:
        steps.wait_for(3)
        assert ahead.get(1) == 10
        steps.wait_for(4)
        assert max(steps.prepared) <= 4
    assert max(steps.prepared) <= 4


def test_a_reader_moves_to_any_step() -> None:
    with Ahead(Steps(), 1, 100, depth=4) as ahead:
        asked = [1, 2, 50, 51, 3, 4, 4, 5, 100, 1, 2, 4]
        assert [ahead.get(step) for step in asked] == [10 * step for step in asked]


def test_a_step_that_was_begun_before_a_move_is_not_taken_for_another() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def prepare(step: int) -> int:
        if step == 1:
            begun.set()
            assert go_on.wait(LIMIT_S)
        return 10 * step

    with Ahead(prepare, 1, 100) as ahead:
        assert begun.wait(LIMIT_S)
        threading.Timer(0.01, go_on.set).start()
        assert ahead.get(60) == 600
        assert ahead.get(61) == 610


def test_an_exception_is_raised_for_its_step_and_the_others_go_on() -> None:
    broken = True

    def prepare(step: int) -> int:
        if step == 3 and broken:
            raise DataError("line 3 is wrong")
        return 10 * step

    with Ahead(prepare, 1, 10, depth=8) as ahead:
        assert [ahead.get(1), ahead.get(2)] == [10, 20]
        for _ in range(2):
            with pytest.raises(DataError, match="line 3 is wrong"):
                ahead.get(3)
        assert ahead.get(4) == 40
        broken = False
        assert [ahead.get(3), ahead.get(4)] == [30, 40]


def test_closing_ends_the_thread_wherever_it_is() -> None:
    for prepared in (0, 1, 2):
        steps = Steps()
        ahead = Ahead(steps, 1, 2, depth=2)
        steps.wait_for(prepared)
        ahead.close()
        ahead.close()
        assert not ahead._thread.is_alive()
        with pytest.raises(ArgumentError, match="closed"):
            ahead.get(1)


def test_closing_wakes_whoever_waits() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def prepare(step: int) -> int:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return step

    ahead = Ahead(prepare, 1, 2)
    said: list[str] = []

    def ask() -> None:
        try:
            ahead.get(1)
        except ArgumentError as error:
            said.append(str(error))

    waiting = threading.Thread(target=ask)
    waiting.start()
    assert begun.wait(LIMIT_S)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    waiting.join(LIMIT_S)  # although the step is still being prepared
    assert said == ["this reader is closed; nothing more can be read from it"]
    go_on.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()


def test_steps_that_there_are_not_are_refused() -> None:
    with Ahead(Steps(), 1, 3) as ahead:
        for step in (0, 4):
            with pytest.raises(ArgumentError, match="they are 1 to 3"):
                ahead.get(step)
        assert ahead.get(3) == 30
    with pytest.raises(ArgumentError, match="depth"):
        Ahead(Steps(), 1, 3, depth=0)
