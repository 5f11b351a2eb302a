"""Jobs whose processes Ray starts, on four nodes of a cluster on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_commands import finished, only_job, planaria, started, wait_for_line
from cluster_jobs import leaving_nothing, undisturbed
from script_jobs import run_script, undisturbed_script

from planaria.cluster import asking
from planaria.cluster.files import forget_old, home

pytest.importorskip("ray", reason="Ray is not installed here")
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.campaign

JOB = ("servers=4", "k=2", "parity=1", "spares=1", "steps=60")
PAUSE = "--freeze=trainer:0@20:1"


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Four of them; their processes are ended with the test."""
    with leaving_nothing():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
        try:
            for _ in range(3):
                cluster.add_node(num_cpus=3)
            yield cluster
        finally:
            cluster.shutdown()
            forget_old(home() / "jobs")


def on_ray(nodes: Any) -> str:
    return f"--on=ray://{nodes.address}"


def pids_of(member: str) -> list[int]:
    """Who logs under that name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                log = os.readlink(entry / "fd" / "2")
            except OSError:
                continue  # it ended meanwhile
            if log.startswith(str(home())) and log.endswith(f"/{member}.log"):
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def node_of(nodes: Any, pid: int) -> Any:
    """Its process was started by an actor, and that by the node's raylet."""
    raylet = parent_of(parent_of(pid))
    (found,) = [
        node
        for node in nodes.list_all_nodes()
        if raylet in [info.process.pid for info in node.all_processes["raylet"]]
    ]
    return found


def servers_of(folder: Path) -> list[str]:
    return [one.who for one in asking.status(folder).processes if one.who.startswith("server:")]


def test_the_digest_on_ray_is_that_of_one_machine(nodes: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with started(*JOB, on_ray(nodes), "--kill=server:1@20", f"--report={report}") as job:
        done = finished(job, report)
    assert done.code == 0, done.error
    assert done.report["digest"] == undisturbed("steps=60")


def test_a_cluster_of_this_machine_has_room_for_every_job(tmp_path: Path) -> None:
    """More processes than there are cores, as without Ray."""
    report = tmp_path / "report.json"
    with leaving_nothing():
        with started("servers=8", "steps=60", "--on=ray", f"--report={report}") as job:
            done = finished(job, report)
        forget_old(home() / "jobs")
    assert done.code == 0, done.error
    assert done.report["digest"] == undisturbed("steps=60")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1"])
def test_a_cluster_that_is_not_there_gets_a_sentence(address: str) -> None:
    with started(f"--on=ray://{address}") as job:
        done = finished(job)
    assert done.code == 2
    assert f"no connection to {address}" in done.sentence


def test_a_script_on_ray_learns_what_it_does_on_one_machine(nodes: Any, tmp_path: Path) -> None:
    kills = ("--kill=server:0@3", "--kill=trainer:1@6")
    sets = ("servers=3", "spares=1", "trainers=2")
    done = run_script(tmp_path, "loop.py", sets=sets, options=(on_ray(nodes), *kills))
    assert done.code == 0, done.error
    assert done.report["digest"] == undisturbed_script("loop.py", trainers=2)
    assert [one["who"] for one in done.report["failures"]] == ["server:0", "trainer:1"]


def test_an_actor_that_is_killed_costs_nothing(nodes: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with started(*JOB, on_ray(nodes), PAUSE, f"--report={report}") as job:
        wait_for_line(job, "frozen")
        (server,) = pids_of("server-1")
        os.kill(parent_of(server), signal.SIGKILL)
        done = finished(job, report)
    assert done.code == 0, done.error
    assert done.report["digest"] == undisturbed("steps=60")
    assert [one["who"] for one in done.report["failures"]] == ["trainer:0", "server:1"]


def test_the_coordinators_actor_is_killed(nodes: Any, tmp_path: Path) -> None:
    """The next coordinator is beside the command; the one after it is an actor again."""
    report = tmp_path / "report.json"
    with started(*JOB, on_ray(nodes), PAUSE, f"--report={report}") as job:
        wait_for_line(job, "frozen")
        (coordinator,) = pids_of("coordinator-0")
        assert parent_of(coordinator) != job.pid
        os.kill(parent_of(coordinator), signal.SIGKILL)
        done = finished(job, report)
    assert done.code == 0, done.error
    assert done.report["digest"] == undisturbed("steps=60")
    assert "coordinator" in [one["who"] for one in done.report["failures"]]


def test_a_node_that_is_lost_costs_nothing(nodes: Any, tmp_path: Path) -> None:
    """With all that runs on it. Three servers of a group stand on three nodes."""
    report = tmp_path / "report.json"
    words = (*JOB, "cluster.require=host", "cluster.heartbeat_limit_ms=3000", PAUSE)
    with started(*words, on_ray(nodes), f"--report={report}") as job:
        wait_for_line(job, "frozen")
        trainer = node_of(nodes, *pids_of("trainer-0"))
        of_servers = [node_of(nodes, *pids_of(f"server-{place}")) for place in range(4)]
        others = [node for node in of_servers if node not in (trainer, nodes.head_node)]
        nodes.remove_node(others[0], allow_graceful=False)
        done = finished(job, report)
    assert done.code == 0, done.error
    assert done.report["digest"] == undisturbed("steps=60")


def test_a_job_goes_on_after_its_command_was_killed(nodes: Any, tmp_path: Path) -> None:
    """Ray ends the actors with it, and starts others for the one that goes on."""
    saves = (f"checkpoint.path={tmp_path / 'saves'}", "checkpoint.every_steps=20")
    with started(*JOB, *saves, on_ray(nodes), "--freeze=trainer:0@50:60") as job:
        wait_for_line(job, "frozen")
        job.kill()
        job.wait()
    report = tmp_path / "report.json"
    words = (*JOB, *saves, on_ray(nodes), "--resume", f"--report={report}")
    with started(*words) as job:
        done = finished(job, report)
    assert done.code == 0, done.error
    assert done.report["digest"] == undisturbed("steps=60")
    assert done.report["resumed_from"] in (20, 40)


def test_servers_come_as_actors_of_nodes_that_have_room(nodes: Any) -> None:
    """Those that no node has room for wait for one that joins."""
    with started(*JOB[:-1], "steps=1000000", on_ray(nodes)) as job:
        wait_for_line(job, "step")
        folder = only_job()
        done = planaria("scale", folder.name, "--servers=6", "--deadline=120")
        assert done.returncode == 0, done.stderr
        assert parent_of(pids_of("server-5")[0]) != job.pid
        late = planaria("scale", folder.name, "--servers=12", "--deadline=5")
        assert late.returncode == 1
        assert "more to start" in " ".join(late.stderr.split())
        nodes.add_node(num_cpus=9)
        done = planaria("scale", folder.name, "--servers=12", "--deadline=120")
        assert done.returncode == 0, done.stderr
        assert len(servers_of(folder)) == 12
        assert asking.scrub(folder, 60.0).wrong == 0
        asking.stop(folder)
        assert finished(job).code == 130
