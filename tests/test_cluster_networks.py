"""Networks that misbehave: machines are namespaces, their links are cut, muted and slowed down.

Whatever happens, the digest is that of an undisturbed job, or a sentence says what was lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import finished, wait_for_line
from cluster_jobs import leaving_nothing, undisturbed
from host_jobs import Network, can_make_networks, cluster

from planaria.cluster.files import forget_old, home

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not can_make_networks(), reason="needs root, ip and tc"),
]

STEPS = "steps=400"
LIMIT = "cluster.heartbeat_limit_ms=2000"
PAUSE = "--freeze=trainer:0@50:1"  # the job stands still meanwhile, and says so
AT = "frozen"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(8) as found:
        yield found


def test_hosts_in_namespaces_give_the_digest(tmp_path: Path, network: Network) -> None:
    words = ("--kill=server:1@50", "--kill=coordinator@100", "--kill=trainer:0@150", STEPS)
    with cluster(tmp_path, *words, machines=network) as found:
        done = found.finished()
        assert found.codes() == [0] * 6
    assert done.report["digest"] == undisturbed(STEPS)
    assert len(done.report["failures"]) == 3


def test_a_machine_that_is_cut_off_is_replaced(tmp_path: Path, network: Network) -> None:
    """After it is back it is told that what it runs is not wanted, and ends it."""
    with cluster(tmp_path, STEPS, LIMIT, PAUSE, machines=network) as found:
        wait_for_line(found.job, AT)
        number = found.number_of("server-1")
        network.cut(number)
        wait_for_line(found.job, "server:1")
        network.heal(number)
        done = found.finished()
        assert found.codes() == [0] * 6
    assert done.report["digest"] == undisturbed(STEPS)


def test_a_machine_that_stays_cut_off_ends_what_it_runs(tmp_path: Path, network: Network) -> None:
    with cluster(tmp_path, STEPS, LIMIT, PAUSE, machines=network) as found:
        wait_for_line(found.job, AT)
        number = found.number_of("server-1")
        lost = found.host_of("server-1")
        network.cut(number)
        assert found.wait_until_empty(lost, 20)
        done = found.finished()
    assert done.report["digest"] == undisturbed(STEPS)


def test_a_machine_that_hears_but_cannot_speak(tmp_path: Path, network: Network) -> None:
    with cluster(tmp_path, STEPS, LIMIT, PAUSE, machines=network) as found:
        wait_for_line(found.job, AT)
        number = found.number_of("server-1")
        network.mute(number)
        wait_for_line(found.job, "server:1")
        network.unmute(number)
        done = found.finished()
    assert done.report["digest"] == undisturbed(STEPS)


def test_the_trainer_s_machine_is_cut_off(tmp_path: Path, network: Network) -> None:
    with cluster(tmp_path, STEPS, LIMIT, "--freeze=server:0@50:1", machines=network) as found:
        found.join("trainer")
        wait_for_line(found.job, AT)
        lost = found.host_of("trainer-0")
        network.cut(found.number_of("trainer-0"))
        done = found.finished()
        assert [host.wait(30) for host in found.hosts if host is not lost] == [0] * 6
    assert done.report["digest"] == undisturbed(STEPS)


@pytest.mark.parametrize("how", ["cut", "part"])
def test_the_coordinator_s_machine_is_cut_off(tmp_path: Path, network: Network, how: str) -> None:
    """From everybody; or from the members alone: it does not take all of them for lost then. It may
    have given up the first one by the time that it knows.
    """
    words = (STEPS, LIMIT, PAUSE, "--kill=server:1@300")
    with cluster(tmp_path, *words, coordinators=1, machines=network) as found:
        wait_for_line(found.job, AT)
        getattr(network, how)(found.number_of("coordinator-0"))
        wait_for_line(found.job, "coordinator")
        done = found.finished()
    forget_old(home() / "jobs")
    assert done.report["digest"] == undisturbed(STEPS)
    lost = {one["who"] for one in done.report["failures"]}
    assert {"coordinator", "server:1"} <= lost
    assert len(lost) <= 4


def test_a_cut_that_is_short_changes_nothing(tmp_path: Path, network: Network) -> None:
    with cluster(tmp_path, STEPS, LIMIT, PAUSE, machines=network) as found:
        wait_for_line(found.job, AT)
        number = found.number_of("server-1")
        network.cut(number)
        time.sleep(0.5)
        network.heal(number)
        done = found.finished()
    assert done.report["digest"] == undisturbed(STEPS)


def test_everybody_is_cut_off_from_the_job(tmp_path: Path, network: Network) -> None:
    """More than the parity bears: a sentence, and nobody is left running."""
    with cluster(tmp_path, STEPS, LIMIT, PAUSE, machines=network) as found:
        wait_for_line(found.job, AT)
        for number in range(1, 7):
            network.cut(number)
        done = finished(found.job, found.report)
        assert done.code in (1, 3), done.error
        assert done.sentence.startswith("error: ")
        for host in found.hosts:
            assert found.wait_until_empty(host, 20)
    forget_old(home() / "jobs")  # hosts were killed


def test_slow_links_give_the_digest(tmp_path: Path, network: Network) -> None:
    network.slow_down(100)
    with cluster(tmp_path, STEPS, "--kill=server:1@50", machines=network) as found:
        done = found.finished()
    assert done.report["digest"] == undisturbed(STEPS)


def test_messages_that_take_long_and_are_lost(tmp_path: Path, network: Network) -> None:
    """50 ms from any machine to any other, and one packet of a hundred is lost."""
    network.relay(0.05, 0.01)
    words = ("steps=40", "--kill=server:1@10", "--kill=trainer:0@25")
    with cluster(tmp_path, *words, machines=network) as found:
        done = found.finished()
        assert found.codes() == [0] * 6
    assert done.report["digest"] == undisturbed("steps=40")
    step_ms = 1000 * 64 / done.report["samples_per_s"]
    assert step_ms > 100  # a control: rows come from afar


def test_connections_of_which_one_side_is_gone(tmp_path: Path, network: Network) -> None:
    """A machine dies while it is cut off: nobody is told, and its connections seem to be there."""
    with cluster(tmp_path, STEPS, LIMIT, PAUSE, machines=network) as found:
        wait_for_line(found.job, AT)
        number, lost = found.number_of("server-1"), found.host_of("server-1")
        network.cut(number)
        lost.kill()
        done = found.finished()
        network.heal(number)
    forget_old(home() / "jobs")  # as whoever starts next on that machine does
    assert done.report["digest"] == undisturbed(STEPS)
    assert "server:1" in [one["who"] for one in done.report["failures"]]
