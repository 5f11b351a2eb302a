"""Processes on other machines: what a host does of what is wanted of it.

A host is a command that has joined the job and offers room for some processes. Supervisor and host
tell each other standing states, not a stream of requests: all that is wanted, all that has ended.
The newest holds, and is sent again and again, so that nothing depends on any one message arriving.
Each side takes the other's silence for its end: the supervisor gives the processes of a silent host
up, and a host without a supervisor ends its processes, which nobody can tell apart from others'.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from planaria.control.children import Ended
from planaria.wire.control import Gone, Hosted, Hosting, Rehearsal, Unfit, Wanted
from planaria.wire.messages import Member

BEAT_S = 0.5  # between two times that either side says the same
SILENT_S = 10.0  # without a word for so long, the other side is gone
MOST_LINES = 200  # of what scripts print, in one message
MOST_CHARS = 1 << 18  # in one message, and in one of them
LAST_WORDS = 1 << 12  # characters of them


@dataclass(frozen=True)
class Enter:
    """To do: end what runs, and begin with a job's folder of these files; none: with nothing."""

    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Prepare:
    """To do: have so many processes run a script, up to its first batch."""

    script: Rehearsal


@dataclass(frozen=True)
class Run:
    """To do: start a process."""

    process: Hosted


@dataclass(frozen=True)
class Signal:
    """To do: send a signal to a process."""

    member: Member
    number: signal.Signals


HostAction: TypeAlias = Enter | Prepare | Run | Signal


class HostMachine:
    """A host. `over` and `lost` say that it has nothing more to do: for good, or for this
    supervisor.
    """

    def __init__(
        self, name: str, offers: Mapping[str, int], now: float, run: int = 1, domain: str = ""
    ) -> None:
        """run: how often this host has begun anew, after it has lost a supervisor. domain: what it
        shares with other hosts that may die with it.
        """
        self.offers = dict(offers)
        self.over = self.lost = False
        # What the driver knows of scripts: as in Hosting.
        self.declared: dict[int, bytes] = {}
        self.works: dict[Member, int] = {}
        self.unfit: Unfit | None = None  # see refuse
        self._lines: list[str] = []
        self._line = 0  # how many lines came before these
        self._by = ""  # the run of a supervisor that it follows
        self._name, self._run, self._domain = name, run, domain
        self._wanted = Wanted(by="", number=0)
        self._sent: dict[Member, int] = {}  # of what runs: how many of its signals it was sent
        self._ended: dict[Member, Gone] = {}
        self._actions: list[HostAction] = []
        self._heard_at = self._ticked = now

    def take(self) -> list[HostAction]:
        actions, self._actions = self._actions, []
        return actions

    def says(self) -> Hosting:
        printed = self._next_lines()
        all_said = len(printed) == len(self._lines)  # who hears of an end has heard what came first
        return Hosting(
            name=self._name,
            offers=self.offers,
            domain=self._domain,
            run=self._run,
            by=self._by,
            obeyed=self._wanted.number,
            folder=self._wanted.folder,
            ended=[*self._ended.values()] if all_said else [],
            declared={} if self._wanted.folder else self.declared,
            unfit=self.unfit if all_said else None,
            works={member: at for member, at in self.works.items() if member in self._sent},
            printed=printed,
            line=self._line,
        )

    def _next_lines(self) -> list[str]:
        """As many as one message takes."""
        chars = 0
        for count, line in enumerate(self._lines[:MOST_LINES]):
            chars += len(line)
            if chars > MOST_CHARS:
                return self._lines[:count]
        return self._lines[:MOST_LINES]

    def print(self, line: str) -> None:
        """Something that a script has printed."""
        self._lines.append(line if len(line) <= MOST_CHARS else f"{line[: MOST_CHARS - 3]}...")

    @property
    def behind(self) -> bool:
        """Whether no more should be printed for now."""
        return len(self._lines) >= MOST_LINES

    @property
    def ranks(self) -> dict[Member, int]:
        """Of the trainers here, as far as they have one."""
        return {
            one.member: one.number
            for one in self._wanted.processes
            if one.role == "trainer" and one.number is not None
        }

    def receive(self, wanted: Wanted, now: float) -> None:
        if self._by not in ("", wanted.by):
            self.lost = True  # another supervisor is in its place, and knows nothing of this host
            return
        self._heard_at, self._by = now, wanted.by
        heard = max(wanted.heard - self._line, 0)
        del self._lines[:heard]
        self._line += heard
        if wanted.number <= self._wanted.number:
            return
        if wanted.folder not in ("", self._wanted.folder) and not wanted.files:
            return  # they come with the next
        if wanted.script not in (None, self._wanted.script):
            assert wanted.script is not None
            self._actions.append(Prepare(wanted.script))
        if wanted.folder != self._wanted.folder:
            self._sent.clear()
            self._ended.clear()
            self.works.clear()
            self._actions.append(Enter(wanted.files))
        self._wanted, self.over = wanted, wanted.over
        self._follow({one.member: one for one in wanted.processes})

    def _follow(self, wanted: dict[Member, Hosted]) -> None:
        self._ended = {member: gone for member, gone in self._ended.items() if member in wanted}
        for member in self._sent.keys() - wanted.keys():
            self._actions.append(Signal(member, signal.SIGKILL))
        for member, process in wanted.items():
            if member in self._ended:
                continue
            if member not in self._sent:
                self._sent[member] = 0
                self._actions.append(Run(process))
            for number in process.signals[self._sent[member] :]:
                self._actions.append(Signal(member, signal.Signals(number)))
            self._sent[member] = len(process.signals)

    def on_exit(self, member: Member, ended: Ended) -> None:
        if self._sent.pop(member, None) is None:
            return
        if any(member == one.member for one in self._wanted.processes):
            words = ended.last_words[-LAST_WORDS:]
            self._ended[member] = Gone(member=member, code=ended.code, last_words=words)

    def refuse(self, why: str, *, given: bool = False) -> None:
        """It cannot run the script. given: the settings are wrong."""
        self.unfit = Unfit(why=why, given=given)
        self.offers["trainer"] = 0

    def leave(self) -> None:
        """It has room for nobody any more, and ends what runs."""
        self.offers = dict.fromkeys(self.offers, 0)
        self._actions += [Signal(member, signal.SIGKILL) for member in self._sent]

    @property
    def joined(self) -> bool:
        """Whether a supervisor has answered."""
        return self._by != ""

    @property
    def empty(self) -> bool:
        """Whether nothing runs, and the supervisor knows so."""
        return not self._sent and not self._ended

    def tick(self, now: float) -> None:
        if now - self._ticked > SILENT_S / 2:  # it slept itself
            self._heard_at = now
        self._ticked = now
        if self.joined and now - self._heard_at > SILENT_S:
            self.lost = True
