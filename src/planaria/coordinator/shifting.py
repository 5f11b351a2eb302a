"""Trainers that come and go: what is wanted, and what the next view makes of it.

A shift takes two views. The first names it: from then on trainers rest after its step, which is one
that nobody is past. When all of them have said that they rest there, and that all servers hold that
step, the second one has the new number of trainers, provided that nobody has anything of a later
step: so nothing has to be taken back, and from the next step on samples are shared anew. Those of
the last ranks leave; who comes is blank, and takes the dense state from the others.

Servers that have once kept the dense state keep it for good: so there are r + 1 copies at all
times, also while somebody who has come is still without one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from planaria.coordinator.moving import ASKED_SINCE, FORGOTTEN_S, waiting_for
from planaria.dense import keepers
from planaria.wire.messages import Install, Member, Promise, Scaled, ScaleTrainers, Shift

NOT_ELASTIC = (
    "its number of trainers is fixed, because results depend on when it changes; start a job with "
    "trainer.elastic=on to change it"
)


class Crew(NamedTuple):
    """What a view makes of the trainers."""

    trainers: list[Member]  # by rank; behind them, those that come
    come: int
    retire: Sequence[Member]
    shifts: list[Shift]
    shift: Shift | None
    keepers: int


class Shifting:
    """The shifts of a job, as its coordinator sees them."""

    def __init__(self, parity: int, most: int, deadline_s: float) -> None:
        """most: so many trainers there may be; 0: their number is fixed. deadline_s: so long may
        trainers rest, once all do.
        """
        self.wanted: Shift | None = None  # and not begun
        self._parity, self._most, self._deadline_s = parity, most, deadline_s
        self._given_up: tuple[int, str] | None = None  # how many were wanted, and why there are not
        self._rest_since: float | None = None
        self._asked_at = 0.0  # for what is wanted
        self._number = 0  # of the request for it

    def on_scale(
        self, scale: ScaleTrainers, install: Install, spares: int = 0, now: float = 0.0
    ) -> Scaled:
        """The answer to whoever wants it, which asks until it is done. spares: that could come."""
        if scale.number > self._number:
            self._number, self.wanted = scale.number, None
            if install.shift is None:
                self._given_up = None  # it was about another request
        state, why = "moving", ""
        under_way = install.shift or self.wanted
        if not self._most:
            state, why = "refused", NOT_ELASTIC
        elif under_way is not None and under_way.trainers == scale.trainers:
            self._asked_at = now
            why = waiting_for(self.comes(install) - spares)
        elif install.shift is not None:
            state = "refused"
            why = f"the job is changing to {install.shift.trainers} trainers; wait for that"
        elif self._given_up is not None and self._given_up[0] == scale.trainers:
            state, why = "given up", self._given_up[1]
            self._given_up = None
        elif scale.trainers == len(install.trainers):
            state = "done"
        elif scale.number < self._number:
            state, why = "refused", ASKED_SINCE
        elif not 1 <= scale.trainers <= self._most:
            state, why = "refused", f"it can have 1 to {self._most}, not {scale.trainers}"
        else:
            self.wanted, self._asked_at = Shift(scale.after, scale.trainers), now
        have = len(install.trainers)
        return Scaled(
            view=install.view, servers=len(install.servers), trainers=have, state=state, why=why
        )

    def forget(self, now: float) -> None:
        """What nobody asks for any more, and has not begun."""
        if now - self._asked_at > FORGOTTEN_S:
            self.wanted = None

    def is_due(self, install: Install, resting: Collection[Member], now: float) -> bool:
        """Whether a view is wanted, given that everybody is in this one. resting: trainers."""
        if install.shift is None:
            self._rest_since = None
            return self.wanted is not None
        if not set(install.trainers) <= set(resting):
            return False
        self._rest_since = now if self._rest_since is None else self._rest_since
        if now - self._rest_since > self._deadline_s:
            self._give_up(install.shift, "not everything was there for it in time")
        return True

    def comes(self, install: Install) -> int:
        """How many spares the next view needs for that."""
        shift = install.shift or self.wanted
        if shift is None or self._is_given_up(shift):
            return 0
        return max(shift.trainers - len(install.trainers), 0)

    def next(
        self,
        install: Install,
        trainers: list[Member],
        promises: Mapping[Member, Promise],
        committed: int,
        spares: int,
    ) -> Crew:
        """install: of the last view; trainers: those of its ranks, now; committed: the step of the
        next one; spares: that are left.
        """
        shift = install.shift
        if shift is None and self.wanted is not None and spares >= self.comes(install):
            found = [promises[one] for one in trainers if one in promises]
            first = max([committed, *(one.held + (not one.rests) for one in found)])
            shift, self.wanted = self._begun(self.wanted, first), None
        elif shift is not None and self._is_given_up(shift):
            shift = None
        elif shift is not None and spares >= self.comes(install):
            if _all_rest(shift, install, trainers, promises):
                stay, retire = trainers[: shift.trainers], trainers[shift.trainers :]
                come, done = self.comes(install), [*install.shifts, shift]
                return Crew(stay, come, retire, done, None, install.keepers)
        kept = install.keepers
        if shift is not None:
            kept = max(kept, keepers(self._parity, shift.trainers))
        return Crew(trainers, 0, [], install.shifts, shift, kept)

    def _begun(self, wanted: Shift, first: int) -> Shift | None:
        """first: nobody is past the end of this step, so that everybody comes to it."""
        if 0 < wanted.after < first:
            self._give_up(wanted, f"step {wanted.after} is over")
            return None
        return Shift(max(wanted.after, first), wanted.trainers)

    def _give_up(self, shift: Shift, why: str) -> None:
        self._given_up = (shift.trainers, why)

    def _is_given_up(self, shift: Shift) -> bool:
        return self._given_up is not None and self._given_up[0] == shift.trainers


def _all_rest(
    shift: Shift,
    install: Install,
    trainers: Sequence[Member],
    promises: Mapping[Member, Promise],
) -> bool:
    """Whether everybody holds the step of the shift, and nobody anything of a later one. Whoever is
    to have the dense state has it, for those that leave take theirs with them.
    """
    dense = [*trainers, *install.keeping()]
    return all(one in promises and promises[one].dense for one in dense) and all(
        promise.rests and promise.held == shift.after
        for promise in promises.values()
        if not promise.blank
    )
