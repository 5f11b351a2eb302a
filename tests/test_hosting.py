"""Placing processes on hosts: the real machines of both sides in two thousand schedules."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hosting_world import FILES, OFFERS, SCRIPT, World

from planaria.control import hosting, placing
from planaria.control.children import Ended
from planaria.control.hosting import HostMachine
from planaria.control.placing import HostRecord, PlacingMachine
from planaria.wire.control import Gone, Hosted, Hosting, Unfit, Wanted


@pytest.mark.parametrize("block", range(20))
def test_two_thousand_schedules(block: int) -> None:
    for seed in range(100 * block, 100 * (block + 1)):
        World(seed).run()


@pytest.fixture(autouse=True)
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    for side in (hosting, placing):
        monkeypatch.setattr(side, "MOST_LINES", 3)


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
    for side in (hosting, placing):
        patch.setattr(side, "SILENT_S", 1e9)


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


def lines_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    says = HostMachine.says

    def careless(self: HostMachine) -> Hosting:
        said = says(self)
        self._lines.clear()
        return said

    patch.setattr(HostMachine, "says", careless)


def lines_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    receive = PlacingMachine._on_scripts

    def careless(self: PlacingMachine, host: HostRecord, said: Hosting) -> None:
        said.line = host.heard
        receive(self, host, said)

    patch.setattr(PlacingMachine, "_on_scripts", careless)


def ends_overtake_last_words(patch: pytest.MonkeyPatch) -> None:
    says = HostMachine.says

    def careless(self: HostMachine) -> Hosting:
        said = says(self)
        said.ended = [*self._ended.values()]
        return said

    patch.setattr(HostMachine, "says", careless)


def seats_go_with_their_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlacingMachine, "_unseat", lambda self, host: None)


def seats_take_no_room(patch: pytest.MonkeyPatch) -> None:
    def careless(self: HostRecord, role: str) -> int:
        used = sum(one.role == role for one in self.processes.values())
        return self.offers.get(role, 0) - used

    patch.setattr(HostRecord, "free", careless)


@pytest.mark.parametrize(
    "rule",
    [
        lines_are_forgotten,
        lines_are_not_counted,
        ends_overtake_last_words,
        seats_go_with_their_host,
        seats_take_no_room,
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
    assert placing.spread(5) == ["x", "y", "x", "y", "x"]
    placing.receive("d", Hosting(name="d", offers={"server": 9}, domain="z"), 0.0)
    placing.begin("folder", FILES)
    for number in range(5):
        placing.start("server", f"server-{number}", number)
    placing.start("server", "server-5", None)
    found = placed(placing)
    assert sorted(found["a"] + found["b"]) == ["server-0", "server-2", "server-4"]
    assert (sorted(found["c"]), found["d"]) == (["server-1", "server-3"], ["server-5"])


def test_a_domain_with_much_room_gets_no_more_servers_than_it_must() -> None:
    placing = PlacingMachine("run", 0.0)
    for name, room in (("a", 9), ("b", 1), ("c", 2)):
        placing.receive(name, Hosting(name=name, offers={"server": room}, domain=name), 0.0)
    assert placing.domains == 3
    assert placing.spread(6) == ["a", "c", "b", "a", "c", "a"]


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


def test_a_coordinator_is_never_where_the_last_one_was_and_waits_for_nobody() -> None:
    placing = PlacingMachine("run", 0.0)
    placing.begin("folder", FILES)
    assert not placing.coordinate("coordinator-0")  # beside the supervisor, then
    joined(placing, "a", coordinator=1)
    joined(placing, "c", server=3)
    assert placing.coordinate("coordinator-1")
    placing.receive("a", ended_there("a", "coordinator-1"), 0.0)
    assert not placing.coordinate("coordinator-2")
    assert placing.coordinate("coordinator-3")
    joined(placing, "b", coordinator=1)
    assert placing.coordinate("coordinator-4")  # though nobody has told of the end of the last
    assert placed(placing) == {"a": ["coordinator-3"], "b": ["coordinator-4"], "c": []}
    assert not placing.coordinate("coordinator-5")


def ended_there(host: str, member: str) -> Hosting:
    gone = Gone(member=member, code=-9, last_words="")
    return Hosting(name=host, offers={"coordinator": 1}, folder="folder", ended=[gone])


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
    ((_, farewell),) = placing.take(0.3)
    assert placing.take(9.0) == []
    host = HostMachine("a", OFFERS, 0.0)
    one = Hosted(role="server", member="server-0", number=0)
    host.receive(Wanted(by="run", number=1, folder="folder", files=FILES, processes=[one]), 0.1)
    host.leave()
    host.on_exit("server-0", Ended(-9))
    assert not host.empty
    host.receive(farewell, 0.3)
    assert host.empty


# ---------------------------------------------------------------------------- scripts


def trains(name: str, **more: Any) -> Hosting:
    return Hosting(name=name, offers={"trainer": 2}, **more)


def rehearsing(*names: str) -> PlacingMachine:
    """Two ranks and a spare, on hosts with room for two each."""
    placing = PlacingMachine("run", 0.0)
    for name in names:
        placing.receive(name, trains(name), 0.0)
    placing.rehearse(msgspec.structs.replace(SCRIPT))
    return placing


def scripts(placing: PlacingMachine, now: float = 0.0) -> dict[str, tuple[list[int], int]]:
    wanted = {to: one.script for to, one in placing.take(now)}
    return {to: (one.ranks, one.spares) for to, one in wanted.items() if one}


def test_a_spare_that_is_needed_is_replaced_where_there_is_room() -> None:
    placing = rehearsing("a", "b")
    assert scripts(placing) == {"a": ([0], 1), "b": ([1], 0)}
    placing.begin("folder", FILES)
    for rank in range(2):
        placing.start("trainer", f"trainer-{rank}", rank)
    gone = Gone(member="trainer-1", code=-9, last_words="")
    placing.receive("b", trains("b", folder="folder", ended=[gone]), 0.2)
    placing.start("trainer", "trainer-2", None)
    assert placed(placing)["a"] == ["trainer-0", "trainer-2"]
    assert scripts(placing, 1.0) == {"a": ([], 0), "b": ([], 1)}


def test_what_is_printed_fits_in_messages_and_comes_before_the_end() -> None:
    host = HostMachine("a", {"trainer": 1}, 0.0)
    one = Hosted(role="trainer", member="trainer-0", number=0)
    host.receive(Wanted(by="run", number=1, folder="f", files=FILES, processes=[one]), 0.0)
    for _ in range(3):
        host.print("x" * hosting.MOST_CHARS * 2)
    host.on_exit("trainer-0", Ended(1, "y" * (1 << 20)))
    for heard in range(3):
        said = host.says()
        assert [len(line) for line in said.printed] == [hosting.MOST_CHARS]
        assert bool(said.ended) == (heard == 2)
        host.receive(Wanted(by="run", number=1, heard=heard + 1), 0.1)
    assert len(said.ended[0].last_words) == hosting.LAST_WORDS


def test_lines_that_nobody_shows_wait_on_their_host() -> None:
    placing = rehearsing("a")
    for number in range(20):
        heard = placing._hosts["a"].heard
        placing.receive("a", trains("a", printed=["line"] * 3, line=heard), 0.1 * number)
    assert len(placing.printed) <= 2 * 3


def test_who_worked_in_another_set_is_seen_to_work_in_this_one() -> None:
    placing = rehearsing("a")
    for folder in ("first", "second"):
        placing.begin(folder, FILES)
        placing.start("trainer", "trainer-0", 0)
        placing.receive("a", trains("a", folder=folder, works={"trainer-0": 7}), 0.1)
        assert placing.working == [("trainer-0", 7)]


def test_a_host_that_cannot_run_the_script_ends_a_job_only_before_it_has_begun() -> None:
    unfit = Unfit(why="there is no script", given=False)
    placing = rehearsing("a", "b")
    placing.receive("b", Hosting(name="b", offers={"trainer": 0}, unfit=unfit), 0.1)
    assert placing.unfit == unfit
    placing = rehearsing("a", "b")
    placing.agree(b"declared")
    placing.receive("c", trains("c"), 0.1)
    placing.notes.clear()
    placing.receive("c", Hosting(name="c", offers={"trainer": 0}, unfit=unfit), 0.2)
    assert placing.unfit is None
    assert placing.notes == ["host c runs no trainers: there is no script", "host c leaves"]
