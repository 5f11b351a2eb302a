"""Trainers that come and go in schedules, and controls for the rules of that.

As in test_rules.py: break one, and the simulator finds a schedule that fails.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from broken_rules import Control, assert_found, broken

from planaria.coordinator.machine import CoordinatorMachine
from planaria.coordinator.shifting import Crew, Shifting
from planaria.simulator.campaigns import run_seeds, schedule
from planaria.trainer.machine import TrainerMachine
from planaria.wire.messages import Hello, Install, Member, Promise

SEEDS = range(400)
WORKERS = min(os.cpu_count() or 1, 8)
ELASTIC: dict[str, Any] = {"elastic": True}
LOSSES: dict[str, Any] = {
    "elastic": True,
    "count": 8,
    "kinds": ("kill server", "kill trainer", "suspect trainer", "kill rebuilding"),
}
COORDINATORS: dict[str, Any] = {
    "elastic": True,
    "count": 6,
    "drop": 0.1,
    "kinds": ("kill coordinator", "pause coordinator", "kill trainer", "kill newborn"),
}


def test_trainers_come_and_go_in_four_hundred_schedules() -> None:
    outcomes = list(run_seeds(SEEDS, WORKERS, elastic=True))
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []
    shifts = [schedule(seed, elastic=True).job.shifts for seed in SEEDS]
    assert {len(of_one) for of_one in shifts} == {1, 2}
    assert {one.trainers for of_one in shifts for one in of_one} == {1, 2, 3, 4}


# ---------------------------------------------------------------- what each rule is for


class NeverRests(TrainerMachine):
    """Trainers rest after the step of a shift."""

    def goes_on(self) -> bool:
        self.between_steps = self.blank or self.install is None or self.frozen()
        return not self.between_steps


class KeepsWhatItAsked(TrainerMachine):
    """What was asked for ahead is of samples that are others' now."""

    def on_install(self, old: Install | None, new: Install) -> None:
        self.reduction.trainers = len(new.trainers)
        super().on_install(old, new)


class GoesOnFrozen(TrainerMachine):
    """Who waits between two steps while a view changes begins the next one in the new view."""

    def goes_on(self) -> bool:
        frozen_at, self.promised = self.promised, self.view
        try:
            return super().goes_on()
        finally:
            self.promised = frozen_at


class TakesBackTheRetired(CoordinatorMachine):
    """Who has left does not come back, however late its hello is."""

    def _on_hello(self, hello: Hello) -> None:
        retired, self.install.retired[:] = [*self.install.retired], []
        super()._on_hello(hello)
        self.install.retired[:] = retired


class AsksOnce(CoordinatorMachine):
    """Who has the dense state, and who rests, is asked again: what was said may be lost."""

    def _owes(self, member: Member) -> bool:
        return False


class _WithShifting(CoordinatorMachine):
    kind: type[Shifting]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.shifting.__class__ = self.kind


class _Hasty(Shifting):
    def next(
        self,
        install: Install,
        trainers: list[Member],
        promises: Mapping[Member, Promise],
        committed: int,
        spares: int,
    ) -> Crew:
        held = {who: _without_rest(promise, install) for who, promise in promises.items()}
        return super().next(install, trainers, held, committed, spares)

    def is_due(self, install: Install, resting: Sequence[Member], now: float) -> bool:  # type: ignore[override]
        return super().is_due(install, install.trainers, now)


def _without_rest(promise: Promise, install: Install) -> Promise:
    after = install.shift.after if install.shift else promise.held
    return Promise(
        view=promise.view,
        held=after,
        blank=promise.blank,
        whole=promise.whole,
        dense=promise.dense,
        rests=True,
    )


class ShiftsAtOnce(_WithShifting):
    """The number changes when everybody holds the step of the shift, and nothing after it."""

    kind = _Hasty


CONTROLS: list[Control] = [
    ("20: trainers do not rest", broken(NeverRests), 0, ELASTIC),
    ("20: what was asked for ahead is kept", broken(KeepsWhatItAsked), 0, ELASTIC),
    ("20: who waits goes on before the install", broken(GoesOnFrozen), 1, LOSSES),
    ("20: the retired come back", broken(TakesBackTheRetired), 22, ELASTIC),
    ("20: nobody is asked whether it rests", broken(AsksOnce), 9, COORDINATORS),
    ("20: the number changes at once", broken(ShiftsAtOnce), 0, ELASTIC),
]


@pytest.mark.parametrize(("rule", "world", "seed", "campaign"), CONTROLS, ids=lambda v: str(v)[:40])
def test_a_schedule_finds_each_broken_rule(
    rule: str, world: type[Any], seed: int, campaign: dict[str, Any]
) -> None:
    assert_found(world, seed, campaign)
