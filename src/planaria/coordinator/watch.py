"""Who is silent, and who only beats: decided by the one clock of the process that watches.

No time of another process is ever compared with it: a beat carries an age, which is a duration on
its sender's own clock. Who slept itself says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.wire.messages import Member

LENIENT_S = 60.0  # for so long after somebody was given up
MOST_DOUBLINGS = 3


@dataclass(frozen=True)
class Silence:
    """For how long nothing came from a member, or (hung) its main loop has not turned."""

    member: Member
    seconds: float
    hung: bool


class Watch:
    """Expects something from everybody it has heard of, until it is told to forget them.

    limit_s: without a sign for so long, a member is silent. hang_s: a member whose beats say that
    its main loop has not turned for so long is hung.

    Where a machine is short of time, members are silent that only wait for their turn, and so would
    those be that take their places. So every one that is given up doubles the limit for a while.
    """

    def __init__(self, limit_s: float, hang_s: float) -> None:
        self.base_s = limit_s
        self.hang_s = hang_s
        self._given_up: list[float] = []  # when, of late
        self._heard: dict[Member, tuple[float, float]] = {}  # when, and the age that it told
        self._last_tick: float | None = None

    def heard(self, member: Member, now: float, age_s: float = 0.0) -> None:
        """A beat with its sender's age, or any other message: its main loop has just turned."""
        self._heard[member] = (now, age_s)

    def expect(self, members: Iterable[Member], now: float) -> None:
        """They must show themselves from now on, though some have said nothing so far."""
        for member in members:
            self._heard.setdefault(member, (now, 0.0))

    def forget(self, member: Member) -> None:
        self._heard.pop(member, None)

    def gave_up(self, now: float) -> None:
        """Somebody was given up because it was silent."""
        self._given_up = [*self._given_up, now][-MOST_DOUBLINGS:]

    @property
    def limit_s(self) -> float:
        return self.base_s * (1 << len(self._given_up))

    def tick(self, now: float) -> list[Silence]:
        """Everybody who is silent or hung now. Called at least four times per limit_s."""
        last, self._last_tick = self._last_tick, now
        self._given_up = [at for at in self._given_up if now - at < LENIENT_S]
        if last is not None and now - last > self.base_s / 2:
            # It is this process that slept, and what the others sent is still on its way.
            self._heard = dict.fromkeys(self._heard, (now, 0.0))
            return []
        found = []
        for member, (at, age_s) in self._heard.items():
            if now - at > self.limit_s:
                found.append(Silence(member, now - at, hung=False))
            elif age_s > self.hang_s:
                found.append(Silence(member, age_s, hung=True))
        return found


class Pulse:
    """The age that a process's beats carry: for how long its main loop has not turned.

    Beats come from a thread of their own, so they would go on beside a main loop that hangs.
    """

    def __init__(self, beat_s: float, now: float) -> None:
        self.beat_s = beat_s
        self._turned = self._last_beat = now

    def turn(self, now: float) -> None:
        """The main loop turns."""
        self._turned = now

    def beat(self, now: float) -> int:
        """The age in ms, for Heartbeat.age_ms. A process that slept as a whole did not hang."""
        slept_s = now - self._last_beat - self.beat_s
        self._last_beat = now
        if slept_s > self.beat_s:
            self._turned = min(self._turned + slept_s, now)
        return round(1000 * (now - self._turned))
