"""Failures on purpose: who is killed or frozen, and at which step.

    --kill WHO@STEP              server:2@100, server:any*2@100, coordinator@50
    --freeze WHO@STEP:SECONDS    trainer:1@100:5

WHO is ROLE:NUMBER, ROLE:any or ROLE:any*COUNT, where the role is server, trainer or spare, or it is
the coordinator. A trainer's number is its rank; shadows have the last ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from planaria.config import Config
from planaria.errors import ConfigError

MAX_SECONDS = 86_400

_WHO = r"(?:(coordinator)|(server|trainer|spare):(?:([0-9]{1,9})|any(?:\*([0-9]{1,9}))?))"
_KILL = re.compile(rf"{_WHO}@([0-9]{{1,15}})")
_FREEZE = re.compile(rf"{_WHO}@([0-9]{{1,15}}):([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)")
_WHO_IS = "WHO is server:2, server:any, server:any*2, trainer:1, spare:0 or coordinator"


@dataclass(frozen=True)
class Event:
    """What Kill and Freeze have in common.

    Without a number it is any `count` processes of the role, or the one coordinator. `str` gives
    the text that was parsed.
    """

    role: str
    number: int | None
    count: int
    step: int

    @property
    def is_named(self) -> bool:
        """Whether it says which processes, and not just how many."""
        return self.role == "coordinator" or self.number is not None

    @property
    def who(self) -> str:
        if self.role == "coordinator":
            return self.role
        if self.number is not None:
            return f"{self.role}:{self.number}"
        return f"{self.role}:any" + (f"*{self.count}" if self.count > 1 else "")

    def __str__(self) -> str:
        return f"{self.who}@{self.step}"


@dataclass(frozen=True)
class Kill(Event):
    """SIGKILL: the process is gone, and everything that it held."""


@dataclass(frozen=True)
class Freeze(Event):
    """SIGSTOP, and SIGCONT after so many seconds: the process misses heartbeats, then wakes."""

    seconds: float

    def __str__(self) -> str:
        return f"{super().__str__()}:{self.seconds:.9f}".rstrip("0").rstrip(".")


def parse_kill(text: str) -> Kill:
    match = _KILL.fullmatch(text)
    if not match:
        _refuse("--kill", text, f"expected WHO@STEP, as in server:2@100, where {_WHO_IS}")
    return Kill(*_victims("--kill", text, match))


def parse_freeze(text: str) -> Freeze:
    match = _FREEZE.fullmatch(text)
    if not match:
        _refuse(
            "--freeze", text, f"expected WHO@STEP:SECONDS, as in server:2@100:5, where {_WHO_IS}"
        )
    seconds = float(match[6])
    if not 0 < seconds <= MAX_SECONDS:
        _refuse("--freeze", text, f"expected more than 0 and at most {MAX_SECONDS} seconds")
    return Freeze(*_victims("--freeze", text, match), seconds)


def resolve(schedule: Sequence[Event], config: Config) -> list[Event]:
    """The schedule with a number in place of each `any`, ordered by step.

    Everything is within the job, and no process stands twice at one step. Which processes `any`
    means is a function of the seed, the role, the step and who else is named at that step.
    """
    named: set[tuple[int, str, int | None]] = set()
    for event in schedule:
        _check_range(event, config)
        if event.is_named:
            victim = (event.step, event.role, event.number)
            if victim in named:
                _refuse_event(event, f"expected {event.who} once at step {event.step}, not twice")
            named.add(victim)
    resolved: list[Event] = []
    for event in schedule:
        if event.is_named:
            resolved.append(event)
            continue
        numbers = _in_random_order(event, config)
        free = [n for n in numbers if (event.step, event.role, n) not in named]
        if len(free) < event.count:
            _refuse_event(event, f"expected at most {len(free)}, for the others are named already")
        chosen = sorted(free[: event.count])
        named.update((event.step, event.role, n) for n in chosen)
        resolved += [replace(event, number=n, count=1) for n in chosen]
    return sorted(resolved, key=lambda event: event.step)


def processes(config: Config) -> dict[str, int]:
    """How many processes of each numbered role a job starts with."""
    return {"server": config.servers, "trainer": config.ranks, "spare": config.spares}


def _victims(option: str, text: str, match: re.Match[str]) -> tuple[str, int | None, int, int]:
    count = int(match[4] or 1)
    if count < 1:
        _refuse(option, text, "expected any*1 or more")
    return match[1] or match[2], None if match[3] is None else int(match[3]), count, int(match[5])


def _check_range(event: Event, config: Config) -> None:
    if not 1 <= event.step <= config.steps:
        _refuse_event(event, f"expected a step from 1 to {config.steps}")
    if event.role == "coordinator":
        return
    there = processes(config)[event.role]
    if there == 0:
        _refuse_event(event, f"this job has no {event.role}s")
    if event.number is not None and event.number >= there:
        _refuse_event(event, f"expected {event.role}:0 to {event.role}:{there - 1}")
    if event.count > there:
        _refuse_event(event, f"expected at most {there} {event.role}s")


def _in_random_order(event: Event, config: Config) -> list[int]:
    def draw(number: int) -> bytes:
        text = f"{config.seed} {event.role} {event.step} {number}"
        return hashlib.sha256(text.encode()).digest()

    return sorted(range(processes(config)[event.role]), key=draw)


def _refuse(option: str, text: str, reason: str) -> NoReturn:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    raise ConfigError(f"{option} {shown}: {reason}")


def _refuse_event(event: Event, reason: str) -> NoReturn:
    _refuse("--freeze" if isinstance(event, Freeze) else "--kill", str(event), reason)
