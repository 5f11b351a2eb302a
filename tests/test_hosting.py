"""Placing processes on hosts: the real machines of both sides over a network that loses, delays and
cuts, with hosts and supervisors that die.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from planaria.control import hosting
from planaria.control.children import Ended
from planaria.control.hosting import SILENT_S, Enter, HostMachine, PlacingMachine, Run, Signal
from planaria.wire.control import Gone, Hosted, Hosting, Wanted

OFFERS = {"server": 2, "trainer": 1}
TURN_S = 0.1
FILES = {"config.json": b"{}"}


@dataclass
class Machine:
    """One host, as its driver has it: what the machine says, and what really runs."""

    name: str
    runs: int = 0
    host: HostMachine = field(init=False)
    folder: bool = False
    running: dict[str, int] = field(default_factory=dict)  # and signals that came through

    @property
    def address(self) -> str:
        return f"{self.name}-{self.runs}"

    def join(self, now: float) -> None:
        """As a command that was just started, or has lost its supervisor."""
        self.runs += 1
        self.running.clear()
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
        self.placing.start(role, member, None)

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
        for member, _ in self.placing.ended:
            self.told[member] += 1
            self.wanted.pop(member, None)
        self.placing.ended.clear()

    def _turn_of(self, machine: Machine) -> None:
        machine.host.tick(self.now)
        for action in machine.host.take():
            match action:
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


@pytest.mark.parametrize("block", range(20))
def test_two_thousand_schedules(block: int) -> None:
    for seed in range(100 * block, 100 * (block + 1)):
        World(seed).run()


def broken(change: Callable[[pytest.MonkeyPatch], None]) -> bool:
    """Whether any of these schedules notices."""
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        for seed in range(300):
            try:
                World(seed).run()
            except (AssertionError, KeyError):
                return True
    return False


def no_change(patch: pytest.MonkeyPatch) -> None:
    """The rules as they are."""


def hosts_do_not_know_supervisors(patch: pytest.MonkeyPatch) -> None:
    receive = HostMachine.receive

    def careless(self: HostMachine, wanted: Wanted, now: float) -> None:
        wanted.by = "any"
        receive(self, wanted, now)

    patch.setattr(HostMachine, "receive", careless)


def hosts_that_begin_anew_are_as_before(patch: pytest.MonkeyPatch) -> None:
    receive = PlacingMachine.receive

    def careless(self: PlacingMachine, sender: str, said: Hosting, now: float) -> bool:
        said.run = 1
        return receive(self, sender, said, now)

    patch.setattr(PlacingMachine, "receive", careless)


def old_folders_count(patch: pytest.MonkeyPatch) -> None:
    receive = PlacingMachine.receive

    def careless(self: PlacingMachine, sender: str, said: Hosting, now: float) -> bool:
        said.folder = self._folder
        return receive(self, sender, said, now)

    patch.setattr(PlacingMachine, "receive", careless)


def what_is_not_wanted_goes_on(patch: pytest.MonkeyPatch) -> None:
    follow = HostMachine._follow

    def careless(self: HostMachine, wanted: dict[str, Hosted]) -> None:
        self._sent = {member: n for member, n in self._sent.items() if member in wanted}
        follow(self, wanted)

    patch.setattr(HostMachine, "_follow", careless)


def silent_hosts_are_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hosting, "SILENT_S", 1e9)


def ends_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    says = HostMachine.says

    def careless(self: HostMachine) -> Hosting:
        said = says(self)
        self._ended.clear()  # told once, on a network that loses it
        return said

    patch.setattr(HostMachine, "says", careless)


def old_news_count(patch: pytest.MonkeyPatch) -> None:
    receive = HostMachine.receive

    def careless(self: HostMachine, wanted: Wanted, now: float) -> None:
        self._wanted.number = 0
        receive(self, wanted, now)

    patch.setattr(HostMachine, "receive", careless)


@pytest.mark.parametrize(
    "rule",
    [
        hosts_do_not_know_supervisors,
        hosts_that_begin_anew_are_as_before,
        old_folders_count,
        what_is_not_wanted_goes_on,
        silent_hosts_are_trusted,
        ends_are_forgotten,
        old_news_count,
    ],
)
def test_every_rule_is_needed(rule: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert broken(rule)


def test_the_rules_hold_where_none_is_broken() -> None:
    assert not broken(no_change)


# ---------------------------------------------------------------------------- one thing at a time


def joined(placing: PlacingMachine, name: str, now: float = 0.0, **offers: int) -> None:
    placing.receive(name, Hosting(name=name, offers=offers), now)


def placed(placing: PlacingMachine, now: float = 0.0) -> dict[str, list[str]]:
    return {to: [one.member for one in wanted.processes] for to, wanted in placing.take(now)}


def test_servers_spread_over_hosts() -> None:
    placing = PlacingMachine("run", 0.0)
    joined(placing, "a", server=3)
    joined(placing, "b", server=3, trainer=1)
    placing.begin("folder", FILES)
    for number in range(4):
        placing.start("server", f"server-{number}", number)
    placing.start("trainer", "trainer-0", 0)
    found = placed(placing)
    assert sorted(found["a"]) == ["server-0", "server-2"]
    assert sorted(found["b"]) == ["server-1", "server-3", "trainer-0"]


def test_servers_stand_in_the_domains_that_were_named() -> None:
    """Also if room came and went meanwhile."""
    placing = PlacingMachine("run", 0.0)
    for name, domain in (("a", "x"), ("b", "x"), ("c", "y")):
        placing.receive(name, Hosting(name=name, offers={"server": 2}, domain=domain), 0.0)
    assert placing.spread(5) == ["x", "x", "x", "y", "x"]
    placing.receive("d", Hosting(name="d", offers={"server": 9}, domain="z"), 0.0)
    placing.begin("folder", FILES)
    for number in range(5):
        placing.start("server", f"server-{number}", number)
    placing.start("server", "server-5", None)
    found = placed(placing)
    assert sorted(found["a"] + found["b"]) == ["server-0", "server-1", "server-2", "server-4"]
    assert (found["c"], found["d"]) == (["server-3"], ["server-5"])


def test_who_finds_no_room_waits_for_it() -> None:
    placing = PlacingMachine("run", 0.0)
    placing.begin("folder", FILES)
    placing.start("server", "server-0", 0)
    assert placing.room("server") == 0
    joined(placing, "a", server=1)
    assert placed(placing) == {"a": ["server-0"]}


def test_a_host_of_another_supervisor_has_no_room_until_it_begins_anew() -> None:
    placing = PlacingMachine("run", 0.0)
    assert placing.receive("a", Hosting(name="a", offers={"server": 1}, by="another"), 0.0)
    assert placing.room("server") == 0
    ((to, wanted),) = placing.take(0.0)
    assert to == "a"
    host = HostMachine("a", OFFERS, 0.0)
    host.receive(Wanted(by="another", number=7), 0.0)
    host.receive(wanted, 0.1)
    assert host.lost


def test_who_waits_in_vain_has_ended() -> None:
    placing = PlacingMachine("run", 0.0)
    placing.begin("folder", FILES)
    placing.start("server", "server-0", 0)
    placing.signal("server-0", signal.SIGKILL)
    assert placing.ended == [("server-0", Ended(1, "no host has had room for it"))]
    joined(placing, "a", server=1)
    assert placed(placing) == {"a": []}


def test_the_end_of_a_host_is_one_event() -> None:
    placing = PlacingMachine("run", 0.0)
    joined(placing, "a", server=2)
    placing.begin("folder", FILES)
    placing.start("server", "server-0", 0)
    placing.start("server", "server-1", 1)
    placing.notes.clear()
    for tenth in range(1, 102):
        placing.tick(tenth / 10)
    assert [member for member, _ in placing.ended] == ["server-0", "server-1"]
    assert {ended.reason for _, ended in placing.ended} == {"its host, a, is gone"}
    assert placing.notes == ["host a is silent for 10 s; it had server-0, server-1"]


def test_a_supervisor_that_slept_blames_nobody() -> None:
    placing = PlacingMachine("run", 0.0)
    joined(placing, "a", server=1)
    placing.tick(100.0)
    placing.tick(100.1)
    assert placing.room("server") == 1


def test_a_host_that_slept_blames_nobody() -> None:
    host = HostMachine("a", OFFERS, 0.0)
    host.receive(Wanted(by="run", number=1), 0.0)
    host.tick(100.0)
    assert not host.lost
    for tenth in range(1001, 1102):
        host.tick(tenth / 10)
    assert host.lost


def test_files_are_sent_until_they_are_there() -> None:
    placing = PlacingMachine("run", 0.0)
    joined(placing, "a", server=1)
    placing.begin("folder", FILES)
    ((_, wanted),) = placing.take(0.0)
    assert wanted.files == FILES
    placing.receive("a", Hosting(name="a", offers={"server": 1}, folder="folder"), 0.1)
    ((_, wanted),) = placing.take(1.0)
    assert wanted.files == {}


def test_a_host_that_leaves_is_not_waited_for() -> None:
    placing = PlacingMachine("run", 0.0)
    joined(placing, "a", server=1)
    placing.begin("folder", FILES)
    placing.start("server", "server-0", 0)
    gone = Gone(member="server-0", code=-9, last_words="")
    leaving = Hosting(name="a", offers={"server": 0}, folder="folder", ended=[gone])
    placing.receive("a", leaving, 0.2)
    assert [member for member, _ in placing.ended] == ["server-0"]
    assert placing.settled
    assert placing.take(9.0) == []
