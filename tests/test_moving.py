"""Servers that come and go, as their coordinator decides: who stays, and whom it tells what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from planaria.config import Config
from planaria.control.placing import PlacingMachine
from planaria.coordinator.machine import RETIRED, CoordinatorMachine
from planaria.coordinator.state import first_state
from planaria.wire.control import Hosting
from planaria.wire.machine import Outbox
from planaria.wire.messages import (
    NO_VIEW,
    Heartbeat,
    Hello,
    Installed,
    Member,
    Promise,
    Scale,
    Scaled,
    Scrub,
    Scrubbed,
    Stop,
)

TRAINER = "trainer-0"
ASKER = "client"


class Job:
    """A coordinator, and members that say at once what it wants to hear."""

    def __init__(self, servers: int, k: int, parity: int) -> None:
        keys = {"servers": servers, "k": k, "parity": parity, "trainers": 1}
        self.layout = Config.from_dict(keys).layout
        members = [f"server-{place}" for place in range(servers)]
        state = first_state(1, members, [TRAINER])
        self.machine = CoordinatorMachine(state, self.layout, epoch=1, now=0.0)
        for member in [*members, TRAINER]:
            self.hello(member)
        self.settle()

    def hello(self, member: Member) -> None:
        hello = Hello(view=NO_VIEW, member=member, role=member[:-2], address=f"at {member}")
        self.machine.receive(member, hello, 1.0)

    def settle(self) -> None:
        """Until nothing is under way any more that members could hold up."""
        for _ in range(10):
            machine = self.machine
            if machine.gathering:
                promise = Promise(
                    view=machine.gathering.view,
                    held=0,
                    blank=False,
                    whole=True,
                    dense=True,
                    moves=machine.install.moves,
                )
                for member in sorted(machine.gathering.waiting):
                    machine.receive(member, promise, 1.0)
            view = machine.install.view
            for member in machine.members:
                machine.receive(member, Installed(view=view, whole=True, dense=True), 1.0)

    def scale(self, servers: int | None, *without: Member) -> Scaled:
        scale = Scale(view=NO_VIEW, servers=servers, without=[*without])
        return self.answer(self.machine.receive(ASKER, scale, 1.0))

    def answer(self, outbox: Outbox) -> Scaled:
        (found,) = [message for _, message in outbox if isinstance(message, Scaled)]
        return found


def test_who_is_named_leaves_and_nobody_comes_for_it() -> None:
    job = Job(6, 2, 1)
    assert job.scale(None, "server-1").state == "moving"
    assert job.scale(None, "server-1").state == "moving"
    assert job.scale(None, "server-2").state == "refused", "another is leaving"
    job.settle()
    assert job.machine.install.servers == [f"server-{n}" for n in (0, 2, 3, 4, 5)]
    assert job.scale(None, "server-1") == Scaled(
        view=job.machine.install.view, servers=5, state="done"
    )


def test_a_coordinator_that_takes_over_knows_who_is_retired() -> None:
    """Else they would stay until somebody loses patience: nobody else tells them to leave."""
    job = Job(6, 2, 1)
    job.scale(5)
    job.settle()
    before = job.machine
    after = CoordinatorMachine(before.state, job.layout, epoch=2, now=2.0)
    for machine in (before, after):
        sent = machine.receive("server-5", Heartbeat(view=NO_VIEW), 3.0)
        stop = Stop(view=machine.install.view, reason=RETIRED)
        assert [one for one in sent if isinstance(one[1], Stop)] == [("server-5", stop)]
    assert after.receive("server-4", Heartbeat(view=NO_VIEW), 3.0) == []


def test_a_scrub_does_not_count_what_was_found_in_another_layout() -> None:
    job = Job(6, 2, 1)
    job.machine.receive(ASKER, Scrub(view=NO_VIEW, round=0), 1.0)

    def found(places: Sequence[int]) -> Outbox:
        view, sent = job.machine.install.view, []
        for place in places:
            scrubbed = Scrubbed(view=view, round=-1, place=place, records=1, wrong=0)
            sent += job.machine.receive(f"server-{place}", scrubbed, 1.0)
        return [one for one in sent if one[0] == ASKER]

    assert found([2, 3, 4, 5]) == []
    job.scale(4)
    job.settle()
    asked = [to for to, message in job.machine.tick(9.0) if isinstance(message, Scrub)]
    assert asked == ["server-0", "server-1", "server-2", "server-3"]
    assert found([0, 1, 2]) == []
    ((_, total),) = found([3])
    assert isinstance(total, Scrubbed)
    assert total.records == 4


# ---------------------------------------------------------------------------- fault domains


def racks(*labels: str) -> dict[Member, str]:
    return {f"server-{number}": label for number, label in enumerate(labels)}


def test_those_that_come_are_kept_apart_from_who_dies_with_them() -> None:
    job = Job(6, 2, 1)
    domains = racks(*"aabbcc", "a", "a")
    job.machine.moving.domains = domains
    job.hello("server-6")
    job.hello("server-7")
    assert job.scale(8).state == "moving"
    job.settle()
    servers, groups = job.machine.install.servers, job.machine.layout.groups
    assert servers == [f"server-{number}" for number in range(8)]
    labels = np.array([domains[member] for member in servers])[groups]
    assert all(len({*group}) == 3 for group in labels.tolist())
    assert {*np.unique(groups).tolist()} == {*range(8)}


def test_nothing_begins_before_it_is_known_where_everybody_stands() -> None:
    job = Job(6, 2, 1)
    job.machine.moving.domains = racks(*"aabbcc")
    job.hello("server-6")
    assert job.scale(7).state == "moving"
    view = job.machine.install.view
    job.settle()
    assert job.machine.install.view == view, "no view is changed in vain"
    job.machine.moving.domains = racks(*"aabbcca")
    job.machine.tick(2.0)
    job.settle()
    assert len(job.machine.install.servers) == 7


@pytest.mark.parametrize(("servers", "without"), [(None, ["server-4", "server-5"]), (4, [])])
def test_too_few_domains_are_refused_before_anything_moves(
    servers: int | None, without: list[Member]
) -> None:
    job = Job(6, 2, 1)
    job.machine.moving.domains = racks(*"aabbcc")
    found = job.scale(servers, *without)
    assert found.state == "refused"
    assert "fault domains" in found.why
    assert job.machine.install.moves == 0


def test_newcomers_in_the_wrong_domains_are_refused_to_who_asks_again() -> None:
    job = Job(4, 2, 1)
    job.machine.moving.domains = racks(*"aabc", "a")
    job.hello("server-4")
    assert job.scale(4, "server-3").state == "moving"
    job.settle()
    found = job.scale(4, "server-3")
    assert found.state == "refused"
    assert "fault domains" in found.why
    assert job.machine.install.servers[3] == "server-3"
    assert job.scale(4, "server-3").state == "moving", "another time it may be possible"


# ---------------------------------------------------------------------------- hosts


def test_a_host_that_is_drained_gets_no_more_servers() -> None:
    placing = PlacingMachine("supervisor", 0.0)

    def say(member: str, name: str, now: float, run: int = 1) -> None:
        said = Hosting(name=name, offers={"server": 3}, run=run, domain=name)
        placing.receive(member, said, now)

    say("host-1", "a", 0.0)
    say("host-2", "b", 0.0)
    placing.start("server", "server-0", 0)
    assert placing.where("server-0") == placing.domain("server-0") == "a"
    placing.drain("a")
    assert placing.room("server") == 3
    for number in range(1, 5):
        placing.start("server", f"server-{number}", None)
    assert [placing.where(f"server-{n}") for n in range(5)] == ["a", "b", "b", "b", ""]
    assert placing.domain("server-4") is None
    for now in range(30):  # a is silent, and comes back
        say("host-2", "b", float(now))
        placing.tick(float(now))
    say("host-1", "a", 30.0, run=2)
    assert placing.where("server-4") == ""
    say("host-3", "a", 30.0)
    assert placing.where("server-4") == "a", "who starts the command again offers the host again"
