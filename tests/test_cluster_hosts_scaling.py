"""Servers that come to machines, and machines that are freed of them, while a job trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import finished, only_job, planaria
from cluster_jobs import leaving_nothing, wait_until
from host_jobs import cluster

from planaria.cluster import asking
from planaria.cluster.files import forget_old, home

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

ENDLESS = "steps=1000000"
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


def stand(folder: Path) -> dict[str, list[str]]:
    """By host: its servers and spares. Others wait for room."""
    found: dict[str, list[str]] = {}
    for one in asking.status(folder).processes:
        if one.host and one.who.startswith(("server:", "spare")):
            found.setdefault(one.host, []).append(one.who)
    return found


def test_a_host_is_freed_and_gets_no_server_again(tmp_path: Path) -> None:
    words = (ENDLESS, "cluster.require=host", "spares=6")  # on three hosts there is no room
    with cluster(tmp_path, *words, servers=(3, 3, 3, 3)) as found:
        folder = only_job()
        host = next(h for h, servers in stand(folder).items() if "spare" in servers)
        done = planaria("drain", folder.name, f"--host={host}")
        assert (done.returncode, done.stdout) == (0, f"{folder.name} has 3 servers\n"), done.stderr
        assert wait_until(lambda: host not in stand(folder), LIMIT_S), stand(folder)
        assert planaria("scale", folder.name, "--servers=6").returncode == 0
        assert host not in stand(folder)
        assert asking.scrub(folder, LIMIT_S).wrong == 0
        refused = planaria("drain", folder.name, f"--host={next(iter(stand(folder)))}")
        assert refused.returncode == 1
        assert "fault domains" in " ".join(refused.stderr.split())
        assert len(stand(folder)) == 3, "nothing has happened"
        asking.stop(folder)
        assert finished(found.job).code == 130


def test_after_servers_have_come_a_host_may_die_with_all_of_them(tmp_path: Path) -> None:
    words = (ENDLESS, "servers=6", "cluster.require=host")
    with cluster(tmp_path, *words, servers=(3, 3, 3, 3)) as found:
        folder = only_job()
        done = planaria("scale", folder.name, "--servers=8")
        assert done.returncode == 0, done.stderr
        lost = found.host_of("server-2")
        lost_host = next(h for h, servers in stand(folder).items() if "server:2" in servers)
        at = asking.status(folder).step
        lost.kill()
        assert wait_until(lambda: asking.status(folder).step > at + 5, LIMIT_S)
        assert wait_until(lambda: lost_host not in stand(folder), LIMIT_S)
        assert asking.scrub(folder, LIMIT_S).wrong == 0
        asking.stop(folder)
        assert finished(found.job).code == 130
        forget_old(home() / "jobs")


def test_a_job_goes_on_without_the_servers_that_no_machine_has_room_for(tmp_path: Path) -> None:
    with cluster(tmp_path, ENDLESS, servers=(3, 2)) as found:
        folder = only_job()
        late = planaria("scale", folder.name, "--servers=8", "--deadline=4")
        assert late.returncode == 1
        assert "waiting for 3 more to start" in " ".join(late.stderr.split())
        waits = [one for one in asking.status(folder).processes if one.state == "waits for room"]
        assert len(waits) == 3, "and a spare is there"
        assert planaria("scale", folder.name, "--servers=4").returncode == 0, "as it is"
        found.join("server", "--count=1")
        assert planaria("scale", folder.name, "--servers=5").returncode == 0
        asking.stop(folder)
        assert finished(found.job).code == 130
