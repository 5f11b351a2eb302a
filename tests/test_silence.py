"""Silence, sleep and hangs in the simulator, each with its control."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.coordinator.watch import Silence, Watch
from planaria.simulator import Failure, Faults, ToyJob, World
from planaria.simulator.campaigns import schedule
from planaria.simulator.process import DEADLINE_S, LIMIT_S, START_S
from planaria.wire.messages import Member, Message


class TakesItsSleepForSilence(Watch):
    """Who slept itself gives everybody a fresh start."""

    def tick(self, now: float) -> list[Silence]:
        self._last_tick = None
        return super().tick(now)


class TrustsEveryBeat(Watch):
    """A beat beside a main loop that hangs is no sign of life."""

    def heard(self, member: Member, now: float, age_s: float = 0.0) -> None:
        super().heard(member, now)


@pytest.mark.parametrize("watch", [Watch, TakesItsSleepForSilence])
def test_a_job_that_was_frozen_as_a_whole_loses_nobody(watch: type[Watch]) -> None:
    frozen: dict[str, Any] = {"count": 1, "kinds": ("pause all",), "drop": 0.0}
    kind = type("Watched", (World,), {"watch_class": watch})
    worlds = [schedule(seed, **frozen).world(kind).run() for seed in range(30)]
    given_up = [world.given_up for world in worlds if world.given_up]
    assert bool(given_up) == (watch is not Watch)  # the second one is the control


class Hangs(World):
    """One server's main loop stops for good in the middle of the job, and its heart does not."""

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if self.delivered == 100:
            self.processes["server-1"].paused_until = float("inf")


def test_a_server_that_only_beats_is_replaced() -> None:
    for seed in range(5):
        assert Hangs(ToyJob(), seed, Faults(count=0)).run().given_up == {"server-1"}
    with pytest.raises(Failure, match="hangs"):
        type("Control", (Hangs,), {"watch_class": TrustsEveryBeat})(
            ToyJob(), 0, Faults(count=0)
        ).run()


class Vanish(World):
    """Two servers are silent from some moment on, and not known to be gone."""

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if self.delivered == 100:
            for member in ("server-1", "server-2"):
                self.pause(member, 100.0)


def test_who_is_needed_and_does_not_come_back_is_named_after_the_deadline() -> None:
    world = Vanish(ToyJob(), 0, Faults(count=0, within_budget=False)).run()
    assert world.failure is not None
    assert "places [0, 1] are gone" in world.failure
    assert DEADLINE_S < world.now - START_S < LIMIT_S + DEADLINE_S + 2 + 3
