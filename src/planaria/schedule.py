"""Failures on purpose: who is killed or frozen, and at which step.

    --kill WHO@STEP              server:2@100, server:any*2@100, coordinator@50
    --freeze WHO@STEP:SECONDS    trainer:1@100:5

WHO is ROLE:NUMBER, ROLE:any or ROLE:any*COUNT, where the role is server, trainer or spare, or it is
the coordinator. A trainer's number is its rank.
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
class Fault:
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
class Kill(Fault):
    """SIGKILL: the process is gone, and everything that it held."""


@dataclass(frozen=True)
class Freeze(Fault):
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


def resolve(schedule: Sequence[Fault], config: Config) -> list[Fault]:
    """The schedule with a number in place of each `any`, ordered by step.

    Everything is within the job, and no process stands twice at one step. Which processes `any`
    means is a function of the seed, the role, the step and who else is named at that step.
    """
    named: set[tuple[int, str, int | None]] = set()
    for fault in schedule:
        _check_range(fault, config)
        if fault.is_named:
            victim = (fault.step, fault.role, fault.number)
            if victim in named:
                _refuse_fault(fault, f"expected {fault.who} once at step {fault.step}, not twice")
            named.add(victim)
    resolved: list[Fault] = []
    for fault in schedule:
        if fault.is_named:
            resolved.append(fault)
            continue
        numbers = _in_random_order(fault, config)
        free = [n for n in numbers if (fault.step, fault.role, n) not in named]
        if len(free) < fault.count:
            _refuse_fault(fault, f"expected at most {len(free)}, for the others are named already")
        chosen = sorted(free[: fault.count])
        named.update((fault.step, fault.role, n) for n in chosen)
        resolved += [replace(fault, number=n, count=1) for n in chosen]
    return sorted(resolved, key=lambda fault: fault.step)


def processes(config: Config) -> dict[str, int]:
    """How many processes of each numbered role a job starts with."""
    return {"server": config.servers, "trainer": config.trainers, "spare": config.spares}


def _victims(option: str, text: str, match: re.Match[str]) -> tuple[str, int | None, int, int]:
    count = int(match[4] or 1)
    if count < 1:
        _refuse(option, text, "expected any*1 or more")
    return match[1] or match[2], None if match[3] is None else int(match[3]), count, int(match[5])


def _check_range(fault: Fault, config: Config) -> None:
    if not 1 <= fault.step <= config.steps:
        _refuse_fault(fault, f"expected a step from 1 to {config.steps}")
    if fault.role == "coordinator":
        return
    there = processes(config)[fault.role]
    if there == 0:
        _refuse_fault(fault, f"this job has no {fault.role}s")
    if fault.number is not None and fault.number >= there:
        _refuse_fault(fault, f"expected {fault.role}:0 to {fault.role}:{there - 1}")
    if fault.count > there:
        _refuse_fault(fault, f"expected at most {there} {fault.role}s")


def _in_random_order(fault: Fault, config: Config) -> list[int]:
    def draw(number: int) -> bytes:
        text = f"{config.seed} {fault.role} {fault.step} {number}"
        return hashlib.sha256(text.encode()).digest()

    return sorted(range(processes(config)[fault.role]), key=draw)


def _refuse(option: str, text: str, reason: str) -> NoReturn:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    raise ConfigError(f"{option} {shown}: {reason}")


def _refuse_fault(fault: Fault, reason: str) -> NoReturn:
    _refuse("--freeze" if isinstance(fault, Freeze) else "--kill", str(fault), reason)
