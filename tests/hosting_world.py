"""Hosts and their supervisor, over a network that loses, delays and cuts; both may die."""

from __future__ import annotations

import random
import signal
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from planaria.control.children import Ended
from planaria.control.hosting import SILENT_S, Enter, HostMachine, Prepare, Run, Signal
from planaria.control.placing import PlacingMachine
from planaria.wire.control import Hosting, Rehearsal, Wanted

OFFERS = {"server": 2, "trainer": 1}
TURN_S = 0.1
FILES = {"config.json": b"{}"}
SCRIPT = Rehearsal(command=["script.py"], folder="", variables={}, trainers=2, spares=1)


@dataclass
class Machine:
    """One host, as its driver has it: what the machine says, and what really runs."""

    name: str
    runs: int = 0
    host: HostMachine = field(init=False)
    folder: bool = False
    running: dict[str, int] = field(default_factory=dict)  # and signals that came through
    ready: set[int] = field(default_factory=set)  # ranks that run a script, up to its first batch

    @property
    def address(self) -> str:
        return f"{self.name}-{self.runs}"

    def join(self, now: float) -> None:
        """As a command that was just started, or has lost its supervisor."""
        self.runs += 1
        self.running.clear()
        self.ready.clear()
        self.folder = False
        self.host = HostMachine(self.name, OFFERS, now, self.runs)


class World:
    """Two thousand of these run in a few seconds, so they are small: four hosts, 250 turns of
    faults, and then as long as it takes to come to rest.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.supervisors = self.folders = self.members = 0
        self.started: Counter[str] = Counter()  # how often each process was, ever
        self.wanted: dict[str, str] = {}  # by member, its role: not told to have ended so far
        self.told: Counter[str] = Counter()
        self.printed: Counter[str] = Counter()  # lines, by process
        self.shown: dict[str, list[int]] = {}
        self.has_script = self.draw.random() < 0.5
        self.flying: list[tuple[float, str, str, bytes]] = []  # when, from, to, what
        self.addresses: dict[str, str] = {}
        self.cut: set[str] = set()
        self.mute: set[str] = set()  # who hears, and is not heard
        self.dead: set[str] = set()
        self.lossy = True
        self.machines = [Machine(f"h{number}") for number in range(4)]
        for machine in self.machines:
            machine.join(self.now)
        self._supervise()

    def _supervise(self) -> None:
        self.supervisors += 1
        self.placing = PlacingMachine(f"run-{self.supervisors}", self.now)
        self.ranks = [*range(SCRIPT.trainers)] if self.has_script else []  # that wait to begin
        self.shown.clear()
        if self.has_script:
            self.placing.rehearse(msgspec.structs.replace(SCRIPT))
        self._begin()

    def _begin(self) -> None:
        self.folders += 1
        self.wanted.clear()
        self.placing.begin(f"folder-{self.folders}", FILES)

    # ------------------------------------------------------------------ faults

    def disturb(self) -> None:
        draw, machine = self.draw, self.draw.choice(self.machines)
        match draw.randrange(40):
            case 0:
                self.cut.add(machine.name)
            case 1 | 2:
                self.cut.discard(machine.name)
            case 12:
                self.mute.add(machine.name)
            case 13:
                self.mute.discard(machine.name)
            case 3:
                self.dead.add(machine.name)
                machine.running.clear()
            case 4 | 5:
                if machine.name in self.dead:
                    self.dead.discard(machine.name)
                    machine.join(self.now)
            case 6:
                if draw.random() < 0.2:
                    self._supervise()
                elif draw.random() < 0.3:
                    self._begin()
            case 7 | 8 | 9 if machine.running:
                self._exit(machine, draw.choice([*machine.running]), -signal.SIGSEGV)
            case 10 | 11 if self.wanted:
                victim = draw.choice([*self.wanted])
                self.placing.signal(victim, draw.choice([signal.SIGKILL, signal.SIGCONT]))
            case number if number > 25:
                self._start(draw.choice(["server", "server", "trainer"]))

    def _start(self, role: str) -> None:
        if sum(one == role for one in self.wanted.values()) >= OFFERS[role] * 3:
            return
        self.members += 1
        member = f"{role}-{self.members}"
        self.wanted[member] = role
        begins = role == "trainer" and self.ranks
        self.placing.start(role, member, self.ranks.pop() if begins else None)

    def _exit(self, machine: Machine, member: str, code: int) -> None:
        del machine.running[member]
        machine.host.on_exit(member, Ended(code))

    # ------------------------------------------------------------------ turns

    def turn(self) -> None:
        self.now += TURN_S
        due = [one for one in self.flying if one[0] <= self.now]
        self.flying = [one for one in self.flying if one[0] > self.now]
        for _, sender, to, data in due:
            self._deliver(sender, to, data)
        for machine in self.machines:
            if machine.name not in self.dead:
                self._turn_of(machine)
        self.placing.tick(self.now)
        for to, wanted in self.placing.take(self.now):
            self._send("door", self.addresses[to], msgspec.msgpack.encode(wanted))
        for line in self.placing.printed:
            member, number = line.split()
            self.shown.setdefault(member, []).append(int(number))
        self.placing.printed.clear()
        for member, ended in self.placing.ended:
            if ended.code == -signal.SIGSEGV:
                shown = len(self.shown.get(member, []))
                assert shown == self.printed[member], "an end was told before the last words"
            self.told[member] += 1
            self.wanted.pop(member, None)
        self.placing.ended.clear()

    def _turn_of(self, machine: Machine) -> None:
        machine.host.tick(self.now)
        for action in machine.host.take():
            match action:
                case Prepare():
                    machine.ready.update(action.script.ranks)
                case Enter():
                    machine.running.clear()
                    machine.folder = bool(action.files)
                case Run(process=one):
                    assert machine.folder
                    self.started[one.member] += 1
                    machine.running[one.member] = 0
                case Signal() if action.member in machine.running:
                    machine.running[action.member] += 1
                    if action.number == signal.SIGKILL:
                        self._exit(machine, action.member, -action.number)
        if machine.host.lost:
            machine.join(self.now)
        for rank in machine.ready:
            machine.host.declared[rank] = b"declared"
        for member in machine.running:
            if self.has_script and self.draw.random() < 0.1 and not machine.host.behind:
                for _ in range(self.draw.randrange(1, 5)):
                    machine.host.print(f"{member} {self.printed[member]}")
                    self.printed[member] += 1
        self._send(machine.address, "door", msgspec.msgpack.encode(machine.host.says()))

    def _send(self, sender: str, to: str, data: bytes) -> None:
        if not self.lossy:
            self.flying.append((self.now, sender, to, data))
        elif self.draw.random() > 0.2:
            late_s = self.draw.choice([0.0, 0.0, 0.3, 1.5])
            self.flying.append((self.now + late_s, sender, to, data))

    def _deliver(self, sender: str, to: str, data: bytes) -> None:
        if {sender.partition("-")[0], to.partition("-")[0]} & (self.cut | self.dead):
            return
        if sender.partition("-")[0] in self.mute:
            return
        if to == "door":
            said = msgspec.msgpack.decode(data, type=Hosting)
            if self.placing.receive(sender.partition("-")[0], said, self.now):
                self.addresses[sender.partition("-")[0]] = sender
        for machine in self.machines:
            if machine.address == to:
                wanted = msgspec.msgpack.decode(data, type=Wanted)
                machine.host.receive(wanted, self.now)

    # ------------------------------------------------------------------ a schedule, and its end

    def run(self) -> None:
        for _ in range(250):
            self.disturb()
            self.turn()
        self.lossy = False
        self.cut.clear()
        self.mute.clear()
        for name in sorted(self.dead)[1:]:  # one of them stays dead: the others have room for all
            self.machines[int(name[1:])].join(self.now)
            self.dead.discard(name)
        for _ in range(round(2.5 * SILENT_S / TURN_S)):
            self.turn()
        self.check()

    def check(self) -> None:
        assert self.placing.settled
        assert max(self.started.values(), default=1) == 1, "a process was started twice"
        assert max(self.told.values(), default=1) == 1, "an end was told twice"
        running = [member for machine in self.machines for member in machine.running]
        assert sorted(running) == sorted(self.wanted), "others run than are wanted"
        for machine in self.machines:
            roles = Counter(member.partition("-")[0] for member in machine.running)
            assert all(roles[role] <= OFFERS[role] for role in roles), "a host is too full"
        for numbers in self.shown.values():
            assert numbers == [*range(len(numbers))], "a line is missing, or was shown twice"
        self._check_seats()

    def _check_seats(self) -> None:
        """Whoever waits to begin waits in one place, and no host is too full with them."""
        seats, hosts = Counter[int](), self.placing._hosts
        for host in hosts.values():
            seats.update(host.ranks)
            assert host.free("trainer") >= 0
        trainers = sum(role == "trainer" for role in self.wanted.values())
        room = OFFERS["trainer"] * len(hosts) - trainers
        seated = min(len(self.ranks), room)
        assert seats.total() == len(seats) == seated, "a rank waits nowhere, or twice"
        assert sum(host.spares for host in hosts.values()) == min(
            SCRIPT.spares * self.has_script, room - seated
        )
