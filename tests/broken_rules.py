"""Worlds in which a rule is broken, and the campaigns that find that out."""

from __future__ import annotations

from itertools import chain
from typing import Any

from planaria.coordinator.watch import Watch
from planaria.server.machine import ServerMachine
from planaria.simulator import World
from planaria.simulator.campaigns import run_seed
from planaria.simulator.disk import Disk
from planaria.trainer.machine import TrainerMachine

SEARCH = range(200)

HARD: dict[str, Any] = {
    "servers": 5,
    "k": 2,
    "r": 2,
    "keep_steps": 1,
    "network": "uneven",
    "count": 8,
    "spares": 2,
    "kinds": ("kill server", "kill rebuilding", "kill trainer", "suspect server"),
}
COORDINATORS: dict[str, Any] = {
    "count": 6,
    "pause_s": 0.3,
    "kinds": (
        "kill server",
        "kill coordinator",
        "pause coordinator",
        "kill coordinator saving",
    ),
}
TWO_COORDINATORS: dict[str, Any] = {"count": 6, "kinds": ("kill server", "two coordinators")}
SEVERAL_PAUSED: dict[str, Any] = {"count": 2, "kinds": ("pause several",)}
FROZEN_SPARES: dict[str, Any] = {
    "steps": 25,  # a spare must have been forgotten before it is needed
    "network": "ragged",
    "drop": 0.0,
    "count": 6,
    "spares": 1,
    "kinds": ("freeze spare", "kill server"),
}
FENCE: dict[str, Any] = {
    **HARD,
    "servers": 4,
    "k": 1,
    "r": 3,
    "trainers": 1,
    "steps": 6,
    "network": "echoing",
    "drop": 0.0,
    "count": 8,
    "spares": 3,
    "kinds": ("kill server", "suspect server"),
}
TRAINERS_FENCE: dict[str, Any] = {**FENCE, "trainers": 3, "kinds": ("suspect server",)}
LATE: dict[str, Any] = {
    "steps": 12,
    "network": "echoing",
    "drop": 0.0,
    "duplicate": 0.5,
    "count": 2,
    "kinds": ("kill trainer", "suspect trainer"),
}
AHEAD: dict[str, Any] = {
    "network": "ragged",
    "drop": 0.0,
    "trainers": 3,
    "count": 4,
    "kinds": ("kill server",),
}
OVER: dict[str, Any] = {
    "count": 8,
    "within_budget": False,
    "kinds": ("kill server", "kill trainer", "kill rebuilding", "kill coordinator", "pause server"),
}

Control = tuple[str, type[World], int, dict[str, Any]]
"""A rule, a world without it, a seed that failed there, and the campaign."""


def broken(*machines: type[Any], kind: type[World] = World) -> type[World]:
    """A world in which these machines take the place of the right ones."""
    attributes: dict[str, Any] = {}
    for machine in machines:
        if issubclass(machine, ServerMachine):
            attributes["server_class"] = machine
        elif issubclass(machine, TrainerMachine):
            attributes["trainer_class"] = machine
        elif issubclass(machine, Disk):
            attributes["disk_class"] = machine
        elif issubclass(machine, Watch):
            attributes["watch_class"] = machine
        else:
            attributes["coordinator_class"] = machine
    return type("Broken", (kind,), attributes)


def assert_found(world: type[World], seed: int, campaign: dict[str, Any]) -> None:
    """A schedule fails in this world, and holds in the one that it was made of."""
    seeds = chain([seed], SEARCH)
    found = next((seed for seed in seeds if run_seed(seed, world, **campaign).failed), None)
    assert found is not None, "the simulator does not notice that this is broken"
    assert run_seed(found, world.__bases__[0], **campaign).failed is None
