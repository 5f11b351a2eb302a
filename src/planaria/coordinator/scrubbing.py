"""Verifications that somebody asked for: all servers verify, and what they find is added up."""

from __future__ import annotations

from dataclasses import dataclass, field

from planaria.wire.machine import Outbox
from planaria.wire.messages import Install, Member, Scrub, Scrubbed


@dataclass
class Scrubbing:
    """One of them: who asked, and what each place has found."""

    asked_by: Member
    number: int
    moves: int  # of the layout that it verifies
    found: dict[int, Scrubbed] = field(default_factory=dict)


class Scrubs:
    """One at a time; the newest counts."""

    def __init__(self) -> None:
        self._now: Scrubbing | None = None
        self._count = 0

    def start(self, asked_by: Member, install: Install) -> Outbox:
        if self._now and self._now.asked_by == asked_by:
            return []  # it is on its way; who asks again was only impatient
        self._count -= 1  # steps, which servers number their own rounds by, are positive
        self._now = Scrubbing(asked_by, self._count, install.moves)
        return self.ask(install)

    def ask(self, install: Install) -> Outbox:
        """Servers that have not answered. In another layout places are others', and hold other
        records: what was found in the last one says nothing of it.
        """
        now = self._now
        if now is None:
            return []
        if now.moves != install.moves:
            now.moves, now.found = install.moves, {}
        scrub = Scrub(view=install.view, round=now.number)
        return [(s, scrub) for place, s in enumerate(install.servers) if place not in now.found]

    def on_found(self, found: Scrubbed, install: Install) -> Outbox:
        now = self._now
        if now is None or found.round != now.number or now.moves != install.moves:
            return []
        now.found[found.place] = found
        if len(now.found) < len(install.servers):
            return []
        self._now = None
        total = Scrubbed(
            view=install.view,
            round=found.round,
            place=-1,
            records=sum(one.records for one in now.found.values()),
            wrong=sum(one.wrong for one in now.found.values()),
        )
        return [(now.asked_by, total)]
