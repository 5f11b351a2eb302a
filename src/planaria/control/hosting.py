"""Processes on other machines: what a host does of what is wanted of it, and who wants what where.

A host is a command that has joined the job and offers room for some processes. Supervisor and host
tell each other standing states, not a stream of requests: all that is wanted, all that has ended.
The newest holds, and is sent again and again, so that nothing depends on any one message arriving.
Each side takes the other's silence for its end: the supervisor gives the processes of a silent host
up, and a host without a supervisor ends its processes, which nobody can tell apart from others'.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from planaria.control.children import Ended
from planaria.wire.control import Gone, Hosted, Hosting, Wanted
from planaria.wire.messages import Member

BEAT_S = 0.5  # between two times that either side says the same
SILENT_S = 10.0  # without a word for so long, the other side is gone


@dataclass(frozen=True)
class Enter:
    """To do: end what runs, and begin with a job's folder of these files; none: with nothing."""

    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Run:
    """To do: start a process."""

    process: Hosted


@dataclass(frozen=True)
class Signal:
    """To do: send a signal to a process."""

    member: Member
    number: signal.Signals


HostAction: TypeAlias = Enter | Run | Signal


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
        return Hosting(
            name=self._name,
            offers=self.offers,
            domain=self._domain,
            run=self._run,
            by=self._by,
            obeyed=self._wanted.number,
            folder=self._wanted.folder,
            ended=[*self._ended.values()],
        )

    def receive(self, wanted: Wanted, now: float) -> None:
        if self._by not in ("", wanted.by):
            self.lost = True  # another supervisor is in its place, and knows nothing of this host
            return
        self._heard_at, self._by = now, wanted.by
        if wanted.number <= self._wanted.number:
            return
        if wanted.folder != self._wanted.folder:
            if wanted.folder and not wanted.files:
                return  # they come with the next
            self._sent.clear()
            self._ended.clear()
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
            self._ended[member] = Gone(member=member, code=ended.code, last_words=ended.last_words)

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
        return not self._sent

    def tick(self, now: float) -> None:
        if now - self._ticked > SILENT_S / 2:  # it slept itself
            self._heard_at = now
        self._ticked = now
        if self.joined and now - self._heard_at > SILENT_S:
            self.lost = True


@dataclass
class _Host:
    """What the supervisor knows of one."""

    name: str
    domain: str
    run: int
    heard_at: float
    offers: dict[str, int] = field(default_factory=dict)
    processes: dict[Member, Hosted] = field(default_factory=dict)
    number: int = 0  # of what is wanted of it
    obeyed: int = 0
    folder: str = ""  # whose files it has
    sent: tuple[int, float] = (0, 0.0)  # what it was sent last, and when

    def free(self, role: str) -> int:
        used = Counter(one.role for one in self.processes.values())
        return self.offers.get(role, 0) - used[role]


class PlacingMachine:
    """The supervisor's side: which host runs what. A process that finds no room waits for it."""

    def __init__(self, by: str, now: float) -> None:
        """by: a name that no other run of a supervisor has."""
        self.ended: list[tuple[Member, Ended]] = []  # new ones, for whoever takes them
        self.notes: list[str] = []
        self._by = by
        self._hosts: dict[Member, _Host] = {}
        self._waiting: list[Hosted] = []
        self._folder, self._files = "", dict[str, bytes]()
        self._domains: list[str] = []  # by place of a server, where it is known
        self._strangers: list[Member] = []  # who follow another supervisor
        self._number = 1
        self._over = False
        self._ticked = now

    # ------------------------------------------------------------------ for the launcher

    def begin(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Another set of processes; what there is of the last one ends. No files: nothing runs."""
        self._folder, self._files = folder, dict(files)
        self._waiting.clear()
        self.ended.clear()
        for host in self._hosts.values():
            host.processes.clear()
            self._change(host)

    def start(self, role: str, member: Member, number: int | None) -> None:
        self._waiting.append(Hosted(role=role, member=member, number=number))
        self._place()

    def signal(self, member: Member, number: int) -> None:
        """Nothing happens if the process has ended."""
        for host in self._hosts.values():
            if process := host.processes.get(member):
                process.signals.append(number)
                self._change(host)
        if number == signal.SIGKILL and any(one.member == member for one in self._waiting):
            self._waiting = [one for one in self._waiting if one.member != member]
            self.ended.append((member, Ended(1, "no host has had room for it")))

    def close(self) -> None:
        """Nothing more will be wanted."""
        self._over = True
        self.begin("", {})

    @property
    def settled(self) -> bool:
        """Whether every host has done what is wanted of it."""
        return all(host.obeyed >= host.number for host in self._hosts.values())

    def room(self, role: str) -> int:
        """For how many processes there is room, or was before some took it."""
        return sum(host.offers.get(role, 0) for host in self._hosts.values())

    def spread(self, servers: int) -> list[str]:
        """The domains of so many servers, by place, which they are placed in from here on. There is
        room for them. Domains take turns, by how much room there is.
        """
        left = Counter[str]()
        for host in self._hosts.values():
            left[host.domain] += host.offers.get("server", 0)
        self._domains = []
        for _ in range(servers):
            roomiest = max(left, key=lambda name: left[name])
            left[roomiest] -= 1
            self._domains.append(roomiest)
        return self._domains

    def where(self, member: Member) -> str:
        """The name of the host that runs it."""
        names = [host.name for host in self._hosts.values() if member in host.processes]
        return names[0] if names else ""

    def _place(self) -> None:
        """Each in its domain if it has one, and where there is most room: so they spread."""
        for process in list(self._waiting):
            role, place = process.role, process.number
            hosts = [host for host in self._hosts.values() if host.free(role) > 0]
            if role == "server" and place is not None and place < len(self._domains):
                at_home = [host for host in hosts if host.domain == self._domains[place]]
                hosts = at_home or hosts
            if hosts:
                host = max(hosts, key=lambda host: host.free(role))
                self._waiting.remove(process)
                host.processes[process.member] = process
                self._change(host)

    def _change(self, host: _Host) -> None:
        self._number += 1
        host.number = self._number

    # ------------------------------------------------------------------ hosts

    def receive(self, sender: Member, said: Hosting, now: float) -> bool:
        """Whether it is news of a host, and not something late."""
        if said.by not in ("", self._by):
            self._strangers.append(sender)
            return True
        host = self._hosts.get(sender)
        if host is not None and said.run != host.run:
            if said.run < host.run:
                return False
            self._give_up(self._hosts.pop(sender), "has begun anew")
            host = None
        if host is None:
            if not any(said.offers.values()):
                return False  # it leaves
            host = self._hosts[sender] = _Host(said.name, said.domain, said.run, now)
            self._change(host)
            self.notes.append(f"host {said.name} has joined: {_rooms(said.offers)}")
        host.heard_at, host.offers = now, said.offers
        host.obeyed, host.folder = said.obeyed, said.folder
        for gone in said.ended if said.folder == self._folder else ():
            if host.processes.pop(gone.member, None):
                self._change(host)
                self.ended.append((gone.member, Ended(gone.code, gone.last_words)))
        if not any(said.offers.values()) and not host.processes:
            del self._hosts[sender]
            self.notes.append(f"host {host.name} leaves")
        self._place()
        return True

    def tick(self, now: float) -> None:
        slept = now - self._ticked > SILENT_S / 2
        self._ticked = now
        for sender, host in list(self._hosts.items()):
            if slept:
                host.heard_at = now
            elif now - host.heard_at > SILENT_S:
                del self._hosts[sender]
                self._give_up(host, f"is silent for {now - host.heard_at:.0f} s")

    def _give_up(self, host: _Host, why: str) -> None:
        """If it comes back, it is as one that has never been here, and ends what it runs."""
        self.notes.append(f"host {host.name} {why}; it had {', '.join(host.processes) or 'nobody'}")
        ended = Ended(-signal.SIGKILL, f"its host, {host.name}, is gone")
        self.ended += [(member, ended) for member in host.processes]

    def take(self, now: float) -> list[tuple[Member, Wanted]]:
        """What to send, and to whom: news at once, and all of it now and then."""
        due = [(sender, Wanted(by=self._by, number=0)) for sender in self._strangers]
        self._strangers.clear()
        for sender, host in self._hosts.items():
            number, at = host.sent
            if number < host.number or now - at >= BEAT_S:
                host.sent = (host.number, now)
                due.append((sender, self._wanted_of(host)))
        return due

    def _wanted_of(self, host: _Host) -> Wanted:
        return Wanted(
            by=self._by,
            number=host.number,
            folder=self._folder,
            files={} if host.folder == self._folder else self._files,
            processes=[*host.processes.values()],
            over=self._over,
        )


def _rooms(offers: Mapping[str, int]) -> str:
    named = [f"{count} {role}{'s' * (count != 1)}" for role, count in sorted(offers.items())]
    return f"room for {' and '.join(named)}" if named else "no room"
