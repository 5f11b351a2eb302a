"""What a supervisor does, and how its set of processes ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from planaria.wire.control import Orders
from planaria.wire.messages import Member


@dataclass(frozen=True)
class Start:
    """To do: start a process. number: the place or rank that it begins with, if any."""

    role: str
    member: Member
    number: int | None


@dataclass(frozen=True)
class Kill:
    """To do: end a process at once."""

    member: Member
    why: str


@dataclass(frozen=True)
class Send:
    """To do: tell a process its orders."""

    to: Member
    orders: Orders


Action: TypeAlias = Start | Kill | Send


@dataclass(frozen=True)
class Verdict:
    """The end of a set of processes. lost: more than the survivors can make good."""

    sentence: str | None  # None: the job is done
    lost: bool = False
