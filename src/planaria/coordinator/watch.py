"""Who is silent, and who only beats: decided by the one clock of the process that watches.

No time of another process is ever compared with it: a beat carries an age, which is a duration on
its sender's own clock. Who slept itself says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.wire.messages import Member

LENIENT_S = 60.0  # for so long after somebody was given up
TOGETHER = 1 / 8  # of the limit: who fell silent within that of another has met the same fate
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
    those be that take their places. So every one that is given up doubles the limit for a while;
    but not for those that fell silent together with it, as all do on a machine that dies.
    """

    def __init__(self, limit_s: float, hang_s: float) -> None:
        self.base_s = limit_s
        self.hang_s = hang_s
        self._given_up: list[tuple[float, float]] = []  # of late: when, and last heard of when
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

    def gave_up(self, silence: Silence, now: float) -> None:
        """Somebody was given up because it was silent, for so long when that was found."""
        self._given_up = [*self._given_up, (now, now - silence.seconds)]

    def limit_s(self, heard_at: float) -> float:
        """For a member that was last heard of then."""
        earlier = [at for _, at in self._given_up if heard_at - at > TOGETHER * self.base_s]
        return self.base_s * (1 << min(len(earlier), MOST_DOUBLINGS))

    def tick(self, now: float) -> list[Silence]:
        """Everybody who is silent or hung now. Called at least four times per limit_s."""
        last, self._last_tick = self._last_tick, now
        self._given_up = [one for one in self._given_up if now - one[0] < LENIENT_S]
        if last is not None and now - last > self.base_s / 2:
            # It is this process that slept, and what the others sent is still on its way.
            self._heard = dict.fromkeys(self._heard, (now, 0.0))
            return []
        found = []
        for member, (at, age_s) in self._heard.items():
            if now - at > self.limit_s(at):
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
