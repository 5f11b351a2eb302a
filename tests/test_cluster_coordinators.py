"""Jobs whose coordinator runs on another machine, here an address of this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import LIMIT_S, finished, only_job, planaria, wait_for_line
from cluster_jobs import children_of, leaving_nothing, undisturbed, wait_until
from host_jobs import Cluster, cluster

from planaria.cluster import asking
from planaria.cluster.files import forget_old, home

PAUSE = "--freeze=trainer:0@20:1"  # the job stands still meanwhile, and says so
AT = "frozen"
ENDLESS = "steps=1000000"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


def beside(found: Cluster, member: str) -> list[int]:
    """The process of that name, where the job's command runs."""
    children = children_of(found.job.pid)
    return [one for one in children if Path(f"/proc/{one}/comm").read_text().strip() == member]


def test_the_digest_is_that_of_one_machine(tmp_path: Path) -> None:
    with cluster(tmp_path, "--kill=server:1@20", servers=(5,), coordinators=1) as found:
        done = found.finished()
        assert found.codes() == [0, 0, 0]
        assert "coordinator-0 starts" in found.said_by(found.hosts[0])
    assert done.report["digest"] == undisturbed("steps=60")
    assert [one["who"] for one in done.report["failures"]] == ["server:1"]


def test_a_coordinator_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """Beside the command: what ended it may be that machine, and there is no other."""
    words = ("--kill=coordinator@20", "--kill=server:1@30")
    with cluster(tmp_path, *words, servers=(5,), coordinators=1) as found:
        done = found.finished()
        assert found.codes() == [0, 0, 0]
        assert "coordinator-1 starts" not in found.said_by(found.hosts[0])
    assert done.report["digest"] == undisturbed("steps=60")
    assert [one["who"] for one in done.report["failures"]] == ["coordinator", "server:1"]


@pytest.mark.parametrize("coordinators", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_the_coordinators_machine_dies(tmp_path: Path, coordinators: int) -> None:
    """The next one is on another machine that has room for it, or else beside the command; and it
    knows the view that was in force.
    """
    words = ("--kill=server:1@10", PAUSE, "--kill=server:2@40")
    with cluster(tmp_path, *words, servers=(5,), coordinators=coordinators) as found:
        wait_for_line(found.job, AT)
        dies = found.host_of("coordinator-0")
        dies.kill()
        done = found.finished()
        others = [found.said_by(one) for one in found.hosts[:coordinators] if one is not dies]
        assert all("coordinator-1 starts" in said for said in others)
        forget_old(home() / "jobs")  # as whoever starts next on that machine does
    assert done.report["digest"] == undisturbed("steps=60")
    lost = [one["who"] for one in done.report["failures"]]
    assert sorted(lost) == ["coordinator", "server:1", "server:2", "trainer:0"]


@pytest.mark.campaign
def test_the_coordinators_machine_may_leave_and_come_back(tmp_path: Path) -> None:
    """Then it is one more that has room for the next coordinator."""
    with cluster(tmp_path, ENDLESS, servers=(5,), coordinators=1) as found:
        folder = only_job()
        found.hosts[0].send_signal(signal.SIGTERM)
        assert found.hosts[0].wait(10) == 130
        again = found.join("coordinator")
        wait_for_line(found.job, "room for 1 coordinator")
        assert wait_until(lambda: beside(found, "coordinator-1") != [], LIMIT_S)
        os.kill(beside(found, "coordinator-1")[0], signal.SIGKILL)
        assert wait_until(lambda: "coordinator-2 starts" in found.said_by(again), LIMIT_S)
        at = asking.status(folder).step
        assert wait_until(lambda: asking.status(folder).step > at, LIMIT_S)
        assert asking.scrub(folder, LIMIT_S).wrong == 0
        asking.stop(folder)
        assert finished(found.job).code == 130


@pytest.mark.campaign
def test_it_is_looked_at_asked_and_stopped_as_any_other(tmp_path: Path) -> None:
    with cluster(tmp_path, ENDLESS, servers=(5,), coordinators=1) as found:
        folder = only_job()
        shown = planaria("status").stdout
        (line,) = [line for line in shown.splitlines() if line.split()[:1] == ["coordinator"]]
        assert "/127.0.0.2" in line
        assert asking.scrub(folder, LIMIT_S).wrong == 0
        scaled = planaria("scale", folder.name, "--servers=5")
        assert scaled.returncode == 0, scaled.stderr
        assert planaria("stop", folder.name).returncode == 0
        assert finished(found.job).code == 130
        assert found.codes() == [0, 0, 0]
