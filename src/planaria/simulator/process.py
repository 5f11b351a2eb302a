"""One process of a schedule, and the times that all of them keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planaria.coordinator.watch import Pulse, Watch

START_S = 1000.0
TICK_S = 0.1
RETRY_S = 0.2
BEAT_S = 0.2
LIMIT_S = 2.0  # of silence
DEADLINE_S = 5.0
SPAWN_S = 0.02
PULSE_S = 0.1  # how often the oracle looks
CLAIM_S = 0.05  # the longest that a coordinator takes to claim an epoch, or to load a state
SAVES_S = (0.0, 0.0, 0.0, 0.01, 0.2)  # how long saving takes
SETTLED_S = 1.0  # after that, whoever comes back has been heard of


@dataclass
class Process:
    role: str  # server, trainer or coordinator
    machine: Any
    pulse: Pulse
    watch: Watch | None = None  # of a coordinator
    paused_until: float = 0.0
    beats: bool = True  # also while it is paused: then it hangs
    at_risk_until: float = 0.0  # until then it may be taken for dead
    driver: Any = None  # of a trainer
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
