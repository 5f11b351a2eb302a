"""Processes that no host has room for: the job waits for one that joins, and ends nobody."""

from __future__ import annotations

import pytest

from planaria.config import Config
from planaria.control.acting import Kill, Start
from planaria.control.children import Ended
from planaria.control.supervising import SupervisorMachine
from planaria.coordinator.moving import Moving
from planaria.layout import Layout
from planaria.wire.control import Ready, Viewed, WantMore
from planaria.wire.messages import NO_VIEW, Install, Member, Scale, View

COORDINATOR = "coordinator-0"


class Scarce:
    """A job whose hosts are full: whoever is started later waits."""

    def __init__(self, *sets: str, tells: bool = True) -> None:
        """tells: whether the supervisor knows it, or takes them for processes that hang."""
        config = Config.load(None, ["servers=4", "k=2", "trainers=1", "spares=0", *sets])
        self.machine = SupervisorMachine(config, 0, 0.0)
        self.tells = tells
        self.waiting: list[Member] = []
        self.notes: list[str] = []
        self.killed: list[Member] = []
        self.second = 0
        self.act()
        self.waiting.clear()
        for member in list(self.machine.children):
            self.machine.receive(member, Ready(), 0.0)
        self.view(1, [f"server-{place}" for place in range(4)])

    def view(self, number: int, servers: list[Member]) -> None:
        self.machine.receive(
            COORDINATOR,
            Viewed(
                view=View(1, number),
                committed=0,
                servers=servers,
                trainers=["trainer-0"],
                rebuilding=[],
            ),
            float(self.second),
        )

    def act(self) -> None:
        for action in self.machine.take():
            if isinstance(action, Start):
                self.waiting.append(action.member)
            elif isinstance(action, Kill):
                self.killed.append(action.member)
        self.notes += self.machine.notes
        self.machine.notes.clear()

    def pass_time(self, seconds: int, asked: WantMore) -> None:
        """The coordinator asks every 30 s."""
        for second in range(self.second + 1, self.second + seconds + 1):
            self.second, now = second, float(second)
            self.machine.heard(COORDINATOR, now)
            if second % 30 == 1:
                self.machine.receive(COORDINATOR, asked, now)
            self.act()
            self.machine.on_waiting(self.waiting if self.tells else (), now)
            self.machine.tick(now)
            if not asked.grows:
                continue
            for member in self.machine.children:  # steps go on
                self.machine.children[member].heard_at = now
            self.machine._moved()


def test_servers_that_are_to_come_wait_for_room_and_the_job_goes_on() -> None:
    """Five that had waited for two minutes each were taken for servers that cannot start, and the
    job ended; meanwhile others were started beside them every 30 s.
    """
    job = Scarce()
    job.pass_time(3600, WantMore(role="server", count=2, grows=True))
    assert job.machine.verdict is None
    assert (job.waiting, job.killed) == (["server-4", "server-5"], [])


def test_a_lost_server_without_room_is_waited_for_and_nobody_is_blamed() -> None:
    job = Scarce()
    job.machine.on_exit("server-3", Ended(-9), 0.0)
    job.pass_time(590, WantMore(role="server", count=1))
    assert (job.machine.verdict, job.machine.orders.again, job.killed) == (None, 0, [])
    assert job.waiting == ["server-4"]
    assert [one for one in job.notes if "the job stands still" in one] == [
        "the job stands still: no host has room for 1 server in place of what was lost; it waits "
        "600 s at most for one that joins (cluster.join_s)"
    ]
    job.waiting.clear()  # a host has joined
    job.machine.receive("server-4", Ready(), float(job.second))
    job.view(2, ["server-0", "server-1", "server-2", "server-4"])
    job.pass_time(60, WantMore(role="server", count=0))
    assert job.machine.verdict is None


@pytest.mark.parametrize("limit_s", [50, 600])
def test_it_is_not_waited_for_for_ever(limit_s: int) -> None:
    job = Scarce(f"cluster.join_s={limit_s}")
    job.machine.on_exit("server-3", Ended(-9), 0.0)
    job.pass_time(limit_s + 5, WantMore(role="server", count=1))
    assert job.machine.verdict is not None
    assert f"no host has had room for 1 server within {limit_s} s" in str(job.machine.verdict)


def test_a_process_that_starts_and_says_nothing_is_still_ended() -> None:
    """A control: waiting for room is no excuse for whoever has it."""
    job = Scarce(tells=False)
    job.machine.on_exit("server-3", Ended(-9), 0.0)
    job.pass_time(130, WantMore(role="server", count=1))
    assert "server-4" in job.killed
    assert job.machine.orders.again == 1


# ---------------------------------------------------------------------------- who asks for what


def test_a_later_request_takes_the_place_of_one_that_waits() -> None:
    layout = Layout.fresh(6, 1, 2)
    install = Install(
        view=NO_VIEW,
        committed=0,
        servers=[f"server-{place}" for place in range(6)],
        trainers=["trainer-0"],
        rebuilding=[],
    )
    moving = Moving()

    def ask(servers: int, number: int) -> str:
        wanted = Scale(view=NO_VIEW, servers=servers, number=number)
        return moving.on_scale(wanted, install, layout, False, 1.0).state

    assert ask(8, 1) == "moving"
    assert moving.comes(install) == 2
    assert ask(8, 2) == "moving"
    assert ask(8, 1) == "moving", "two want the same"
    assert ask(6, 3) == "done"
    assert moving.comes(install) == 0, "it was withdrawn"
    assert ask(8, 1) == "refused", "whoever asked before does not bring it back"
    assert ask(7, 4) == "moving"
    assert moving.comes(install) == 1
