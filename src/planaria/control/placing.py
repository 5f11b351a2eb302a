"""Processes on other machines: which host runs what, as the supervisor wants it.

`control.hosting` is the other side, and says what the two tell each other.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from planaria.control.children import Ended
from planaria.control.hosting import BEAT_S, MOST_LINES, SILENT_S
from planaria.wire.control import Hosted, Hosting, Rehearsal, Unfit, Wanted
from planaria.wire.messages import Member

QUIET_BEATS = 4
SCARCE_S = 2.0  # after which it is said that a process waits for room


@dataclass
class HostRecord:
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
    ranks: list[int] = field(default_factory=list)  # whose scripts wait there for the job to begin
    spares: int = 0  # scripts that wait there to be needed
    declared: dict[int, bytes] = field(default_factory=dict)  # by rank
    heard: int = 0  # lines that scripts have printed there
    unfit: bool = False
    drained: bool = False  # it gets no more servers

    def free(self, role: str) -> int:
        if role == "server" and self.drained:
            return 0
        used = Counter(one.role for one in self.processes.values())
        used["trainer"] += len(self.ranks) + self.spares
        return self.offers.get(role, 0) - used[role]


class PlacingMachine:
    """The supervisor's side: which host runs what. A process that finds no room waits for it."""

    def __init__(self, by: str, now: float, how_to_join: str = "") -> None:
        """by: a name that no other run of a supervisor has. how_to_join: a sentence."""
        self.ended: list[tuple[Member, Ended]] = []  # new ones, for whoever takes them
        self.notes: list[str] = []
        self.printed: list[str] = []  # by scripts
        # Who was seen to work on the way to its first batch, and a number that grows.
        self.working: list[tuple[Member, int]] = []
        self.unfit: Unfit | None = None
        self._script: Rehearsal | None = None
        self._unseated: list[int] = []  # ranks whose scripts wait for room
        self._spares = 0  # scripts that would wait to be needed, if there were room
        self._worked: dict[Member, int] = {}
        self._by = by
        self._hosts: dict[Member, HostRecord] = {}
        self._heard: dict[tuple[Member, int], int] = {}  # of those that are gone, and may come back
        self._drained: set[Member] = set()
        self._coordinates: Member = ""  # the host that was given the last coordinator, if one was
        self._how_to_join = how_to_join
        self._waiting: list[Hosted] = []
        self._unsaid: dict[Member, float] = {}  # when those began to wait of whom nothing was said
        self._folder, self._files = "", dict[str, bytes]()
        self._domains: list[str] = []  # by place of a server, where it is known
        self._strangers: list[Member] = []  # who follow another supervisor
        self._farewells: list[tuple[Member, Wanted]] = []  # to those that leave: all was heard
        self._number = 1
        self._over = False
        self._ticked = now

    # ------------------------------------------------------------------ for the launcher

    def begin(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Another set of processes; what there is of the last one ends. No files: nothing runs."""
        self._folder, self._files = folder, dict(files)
        self._waiting.clear()
        self.ended.clear()
        self.working.clear()
        self._worked.clear()
        for host in self._hosts.values():
            host.processes.clear()
            self._change(host)

    def start(self, role: str, member: Member, number: int | None) -> None:
        self._waiting.append(Hosted(role=role, member=member, number=number))
        self._unsaid[member] = self._ticked
        self._place()

    @property
    def waiting(self) -> list[Member]:
        """Whom no host has room for."""
        return [one.member for one in self._waiting]

    def needed(self, role: str) -> int:
        """For how many processes hosts must have room, with what they have and may not use."""
        needed = sum(one.role == role for one in self._waiting)
        for host in self._hosts.values():
            needed += host.offers.get(role, 0) - max(host.free(role), 0)
        return needed + (len(self._unseated) + self._spares if role == "trainer" else 0)

    def coordinate(self, member: Member) -> bool:
        """Whether a host runs the job's next coordinator; it does not wait for one. Not the host of
        the last: what ended that may be the machine, or its links.
        """
        role, last = "coordinator", self._coordinates
        free = {one: host.free(role) for one, host in self._hosts.items() if one != last}
        chosen = self._coordinates = max(+Counter(free), key=lambda one: free[one], default="")
        if chosen:
            self._hosts[chosen].processes[member] = Hosted(role=role, member=member)
            self._change(self._hosts[chosen])
        return bool(chosen)

    def rehearse(self, script: Rehearsal) -> None:
        """All its ranks run it up to its first batch, and so do some spares."""
        self._script, self._spares = script, script.spares
        self._unseated = [*range(script.trainers)]
        self._place()

    @property
    def rehearses(self) -> bool:
        """Whether trainers run a script."""
        return self._script is not None

    def declarations(self) -> dict[int, bytes]:
        """By rank: what scripts say at their first batch."""
        return {
            rank: host.declared[rank]
            for host in self._hosts.values()
            for rank in host.ranks
            if rank in host.declared
        }

    @property
    def unseated(self) -> list[int]:
        """Ranks that have no host to run their script."""
        return self._unseated

    def agree(self, declared: bytes) -> None:
        """All have declared this; whoever comes later must do the same."""
        assert self._script is not None
        self._script.declared = declared
        for host in self._hosts.values():
            self._change(host)

    def ranks(self, trainers: Mapping[Member, int]) -> None:
        """Who has which rank by now."""
        for host in self._hosts.values():
            for member in host.processes.keys() & trainers.keys():
                if host.processes[member].number != trainers[member]:
                    host.processes[member].number = trainers[member]
                    self._change(host)

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
        hosts = [one for one in self._hosts.values() if role != "server" or not one.drained]
        return sum(host.offers.get(role, 0) for host in hosts)

    def spread(self, servers: int) -> list[str]:
        """The domains of so many servers, by place, which they are placed in from here on. There is
        room for them. Domains take turns, those with most room first, so that none has more of them
        than it must.
        """
        left = self._room_by_domain()
        taken = Counter[str]()
        self._domains = []
        for _ in range(servers):
            domain = max(+left, key=lambda name: (-taken[name], left[name]))
            left[domain] -= 1
            taken[domain] += 1
            self._domains.append(domain)
        return self._domains

    @property
    def domains(self) -> int:
        """In how many of them there is room for servers, or was."""
        return len(self._room_by_domain())

    def _room_by_domain(self) -> Counter[str]:
        room = Counter[str]()
        for host in self._hosts.values():
            room[host.domain] += 0 if host.drained else host.offers.get("server", 0)
        return +room

    def where(self, member: Member) -> str:
        """The name of the host that runs it."""
        names = [host.name for host in self._hosts.values() if member in host.processes]
        return names[0] if names else ""

    def domain(self, member: Member) -> str | None:
        """That of the host that runs it; None: it waits for room."""
        domains = [host.domain for host in self._hosts.values() if member in host.processes]
        return domains[0] if domains else None

    def drain(self, name: str) -> None:
        """No more servers there, until its command is started anew."""
        for sender, host in self._hosts.items():
            if host.name == name:
                host.drained = True
                self._drained.add(sender)

    def _place(self) -> None:
        for rank in list(self._unseated):
            if host := self._roomiest("trainer"):
                self._unseated.remove(rank)
                host.ranks.append(rank)
                self._change(host)
        for process in list(self._waiting):
            trains = process.role == "trainer"
            if host := self._seat(process.number) if trains else self._server_room(process.number):
                self._waiting.remove(process)
                host.processes[process.member] = process
                self._change(host)
        while self._spares and (host := self._roomiest("trainer")):
            self._spares -= 1
            host.spares += 1
            self._change(host)

    def _roomiest(self, role: str, domain: str | None = None) -> HostRecord | None:
        """Where there is most room: so they spread."""
        hosts = [
            host
            for host in self._hosts.values()
            if host.free(role) > 0 and domain in (None, host.domain)
        ]
        # Who has been quiet for some beats may be gone: others come first.
        awake = [host for host in hosts if self._ticked - host.heard_at < QUIET_BEATS * BEAT_S]
        return max(awake or hosts, key=lambda host: host.free(role), default=None)

    def _server_room(self, place: int | None) -> HostRecord | None:
        """In its domain, if it has one with room."""
        at_home = None
        if place is not None and place < len(self._domains):
            at_home = self._roomiest("server", self._domains[place])
        return at_home or self._roomiest("server")

    def _seat(self, rank: int | None) -> HostRecord | None:
        """Where a script waits for this rank, or for any."""
        for host in self._hosts.values():
            if rank in host.ranks:
                host.ranks.remove(rank)
                return host
        if rank in self._unseated:
            self._unseated.remove(rank)
        for host in self._hosts.values():
            if host.spares:
                host.spares -= 1
                self._spares += 1  # another, where there is room
                return host
        return self._roomiest("trainer")

    def _change(self, host: HostRecord) -> None:
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
            host = self._hosts[sender] = HostRecord(said.name, said.domain, said.run, now)
            host.heard = self._heard.get((sender, said.run), 0)
            host.drained = sender in self._drained
            self._change(host)
            self.notes.append(f"host {said.name} has joined: {_rooms(said.offers)}")
        host.heard_at, host.offers = now, said.offers
        host.obeyed, host.folder = said.obeyed, said.folder
        if len(self.printed) > MOST_LINES:  # they are to be shown first; it says the same again
            return True
        self._on_scripts(host, said)
        if not said.offers.get("trainer"):
            self._unseat(host)
        for gone in said.ended if said.folder == self._folder else ():
            if host.processes.pop(gone.member, None):
                self._change(host)
                self.ended.append((gone.member, Ended(gone.code, gone.last_words)))
        if not any(said.offers.values()) and not host.processes:
            del self._hosts[sender]
            self._farewells.append((sender, self._wanted_of(host)))
            self.notes.append(f"host {host.name} leaves")
        self._place()
        return True

    def _on_scripts(self, host: HostRecord, said: Hosting) -> None:
        host.declared = host.declared | said.declared
        if said.unfit is not None and not host.unfit:
            host.unfit = True
            if self._script is not None and self._script.declared:  # others can
                self.notes.append(f"host {host.name} runs no trainers: {said.unfit.why}")
            else:
                self.unfit = said.unfit
        new = said.printed[max(host.heard - said.line, 0) :]
        if new:
            host.heard += len(new)
            self.printed += new
            host.sent = (host.sent[0], -math.inf)  # more may wait there
        for member, at in said.works.items() if said.folder == self._folder else ():
            if at > self._worked.get(member, -1):
                self._worked[member] = at
                self.working.append((member, at))

    def tick(self, now: float) -> None:
        slept = now - self._ticked > SILENT_S / 2
        self._ticked = now
        for sender, host in list(self._hosts.items()):
            if slept:
                host.heard_at = now
            elif now - host.heard_at > SILENT_S:
                del self._hosts[sender]
                self._heard[sender, host.run] = host.heard
                self._give_up(host, f"is silent for {now - host.heard_at:.0f} s")
        self._say_who_waits(now)

    def _say_who_waits(self, now: float) -> None:
        waiting = self.waiting
        self._unsaid = {one: since for one, since in self._unsaid.items() if one in waiting}
        late = [one for one, since in self._unsaid.items() if now - since > SCARCE_S]
        if late:
            self._unsaid.clear()
            self.notes.append(f"no host has room for {', '.join(late)}; {self._how_to_join}")

    def _give_up(self, host: HostRecord, why: str) -> None:
        """If it comes back, it is as one that has never been here, and ends what it runs."""
        had = [*host.processes, *(f"the script of rank {rank}" for rank in host.ranks)]
        had += ["a spare trainer"] * host.spares
        self.notes.append(f"host {host.name} {why}; it had {', '.join(had) or 'nobody'}")
        ended = Ended(-signal.SIGKILL, f"its host, {host.name}, is gone")
        self.ended += [(member, ended) for member in host.processes]
        self._unseat(host)

    def _unseat(self, host: HostRecord) -> None:
        """Its scripts wait elsewhere."""
        self._unseated += host.ranks
        self._spares += host.spares
        host.ranks, host.spares = [], 0

    def take(self, now: float) -> list[tuple[Member, Wanted]]:
        """What to send, and to whom: news at once, and all of it now and then."""
        due, self._farewells = self._farewells, []
        due += [(sender, Wanted(by=self._by, number=0)) for sender in self._strangers]
        self._strangers.clear()
        for sender, host in self._hosts.items():
            number, at = host.sent
            if number < host.number or now - at >= BEAT_S:
                host.sent = (host.number, now)
                due.append((sender, self._wanted_of(host)))
        return due

    def _wanted_of(self, host: HostRecord) -> Wanted:
        return Wanted(
            by=self._by,
            number=host.number,
            folder=self._folder,
            files={} if host.folder == self._folder else self._files,
            processes=[*host.processes.values()],
            script=self._script_on(host),
            heard=host.heard,
            over=self._over,
        )

    def _script_on(self, host: HostRecord) -> Rehearsal | None:
        if self._script is None or "trainer" not in host.offers:
            return None
        return msgspec.structs.replace(self._script, ranks=[*host.ranks], spares=host.spares)


def _rooms(offers: Mapping[str, int]) -> str:
    named = [f"{count} {role}{'s' * (count != 1)}" for role, count in sorted(offers.items())]
    return f"room for {' and '.join(named)}" if named else "no room"
