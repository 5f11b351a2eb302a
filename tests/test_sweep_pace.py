"""A sweep that is paced leaves training nine tenths of its speed, and still comes to its end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from planaria.server.pace import CALM, PRIORITIES, URGENT, Manner, Pace, is_paced
from planaria.simulator import Faults, ToyJob, World
from planaria.wire.messages import Install, Member, Message, View

CALM_S = 0.1


class Training:
    """Steps and pieces of a sweep that share a machine: while a piece is worked on, steps take so
    many times as long. Everything moves in ticks."""

    TICK_S = 0.001

    def __init__(
        self, pace: Pace, slower: float, piece_s: float = 0.02, scatters: float = 0.0
    ) -> None:
        """scatters: by so much, up or down, a step takes longer or shorter for other reasons."""
        self.pace = pace
        self.random, self.scatters, self.luck = Random(1), scatters, 1.0
        self.slower, self.piece_s = slower, piece_s
        self.now = 0.0
        self.steps = 0.0
        self.piece: float | None = None  # what is left of it
        self.pieces = 0

    def run(self, seconds: float) -> tuple[float, int]:
        """How fast training was meanwhile, 1 being its own speed; and the pieces that were done."""
        end, steps, pieces = self.now + seconds, self.steps, self.pieces
        while self.now < end:
            self.pace.look(self.now, int(self.steps), works=self.piece is not None)
            if self.piece is None and self.pace.pieces(2):
                self.piece = self.piece_s
            self.now += self.TICK_S
            speed = 1.0
            if self.piece is not None:
                speed = 1 / self.slower
                self.piece -= self.TICK_S
                if self.piece <= 0:
                    self.piece, self.pieces = None, self.pieces + 1
            step = int(self.steps)
            self.steps += speed * self.luck * self.TICK_S / CALM_S
            if int(self.steps) > step:
                self.luck = 1 / (1 + self.random.uniform(-self.scatters, self.scatters))
        return (self.steps - steps) * CALM_S / seconds, self.pieces - pieces


@pytest.mark.parametrize("manner", [URGENT, CALM])
@pytest.mark.parametrize("slower", [1.5, 2.0, 4.0])
def test_training_keeps_its_speed_and_the_sweep_moves(slower: float, manner: Manner) -> None:
    training = Training(Pace(CALM_S, manner), slower)
    training.run(5.0)
    speed, pieces = training.run(60.0)
    assert speed > manner.kept_speed - 0.05
    assert pieces > 60
    unpaced, most = Training(Pace(0.0), slower).run(60.0)
    assert unpaced < manner.kept_speed - 0.1  # control
    assert pieces < most


def test_a_sweep_that_hurts_nobody_soon_goes_as_fast_as_it_can() -> None:
    training = Training(Pace(CALM_S), slower=1.0)
    training.run(2.0)
    assert training.pace.share == 1.0
    assert training.pace.pieces(2) == 2
    assert training.pace.rests_s == 0.0


def test_steps_that_scatter_do_not_stop_a_sweep_that_hurts_nobody() -> None:
    """Each of the fastest steps was taken for what a step takes, and all others were slow."""
    training = Training(Pace(CALM_S), slower=1.0, scatters=0.2)
    _, pieces = training.run(20.0)
    assert pieces > 0.5 * 20.0 / training.piece_s
    believing = Pace(CALM_S, URGENT._replace(believes=1.0))  # control
    _, fewer = Training(believing, slower=1.0, scatters=0.2).run(20.0)
    assert fewer < 0.8 * pieces


@pytest.mark.parametrize("slower", [1.2, 1.5, 2.0, 4.0])
def test_steps_that_scatter_do_not_let_it_hurt(slower: float) -> None:
    training = Training(Pace(CALM_S), slower, scatters=0.2)
    own, _ = Training(Pace(CALM_S), 1.0, scatters=0.2).run(60.0)
    speed, _ = training.run(60.0)
    assert speed / own > URGENT.kept_speed - 0.05


def test_where_something_else_makes_steps_slow_the_sweep_goes_on() -> None:
    """Other programs may have come meanwhile: it had crept to its end for their sake."""
    pace = Pace(CALM_S / 3)
    training = Training(pace, slower=1.0)
    training.run(5.0)
    assert pace.share == 1.0
    training = Training(Pace(CALM_S / 3), slower=2.0)
    training.run(5.0)
    speed, pieces = training.run(60.0)
    assert speed > URGENT.kept_speed - 0.1  # of what the others leave
    assert pieces > 60


def test_a_sweep_never_stops() -> None:
    pace = Pace(CALM_S)
    training = Training(pace, slower=1000.0)
    training.run(1.0)
    _, pieces = training.run(60.0)
    assert pace.share < 0.5
    assert pieces > 60.0 / training.piece_s * URGENT.least_share / 2


def test_records_that_only_move_yield_more_than_those_that_are_lost() -> None:
    (urgent, more), (calm, fewer) = (
        Training(Pace(CALM_S, manner), slower=2.0).run(60.0) for manner in (URGENT, CALM)
    )
    assert calm > urgent
    assert fewer < more


def test_who_does_not_know_how_long_a_step_took_does_not_hold_back() -> None:
    assert Pace(0.0).pieces(3) == 3
    assert Pace(0.0).rests_s == 0.0
    training = Training(Pace(0.0), slower=4.0)
    _, pieces = training.run(10.0)
    assert pieces > 0.9 * 10.0 / training.piece_s


def test_redundancy_comes_first_when_no_further_loss_can_be_borne() -> None:
    def paced(r: int, lost: int) -> list[bool]:
        return [is_paced(priority, r, lost) for priority in PRIORITIES]

    assert paced(r=2, lost=1) == [True, True, False]
    assert paced(r=2, lost=2) == [True, False, False]
    assert paced(r=1, lost=1) == [True, False, False]


class Struck(World):
    """One server is killed in the middle of the job, and later its replacement."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # By view: who was rebuilt, and how long steps took.
        self.said: dict[View, tuple[list[int], float]] = {}
        self.shares: set[float] = set()

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if self.delivered == 200:
            self.kill("server-2")
        if isinstance(message, Install) and to == "server-1":
            is_new = message.view not in self.said
            self.said[message.view] = (message.rebuilding, message.step_s)
            if is_new and len(self.said) == 2:
                self.kill(message.servers[1])
        for process in self.processes.values():
            rebuilder = getattr(process.machine, "rebuilder", None)
            if rebuilder is not None:
                self.shares.add(rebuilder._pace.share)


@pytest.mark.parametrize("priority", ["training", "redundancy"])
def test_a_view_says_how_long_steps_took_while_all_were_whole(priority: str) -> None:
    job = ToyJob(steps=8, rebuild_priority=priority)
    world = Struck(job, 0, Faults(count=0))
    world.run()
    (_, first), (lost, then), (again, still) = world.said.values()
    assert first == 0.0  # nobody had made a step
    assert lost == again == [1]
    assert then > 0.0
    assert still == then  # not what they take while somebody is rebuilt
    assert (min(world.shares) < 1.0) == (priority == "training")
