"""Jobs on several machines, here addresses of this one: hosts that join, die and leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_commands import LIMIT_S, MAIN, finished, started, train, wait_for_line
from cluster_jobs import children_of, leaving_nothing, undisturbed, wait_until
from host_jobs import JOB, Addresses, Cluster, cluster

from planaria.cluster.files import forget_old, home
from planaria.cluster.keyfile import new_key, write_key


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


def test_the_digest_is_that_of_one_machine(tmp_path: Path) -> None:
    with cluster(tmp_path, "--kill=server:1@20", servers=(3, 2)) as found:
        done = found.finished()
        assert found.codes() == [0, 0, 0]
    assert done.report["digest"] == undisturbed("steps=60")
    assert [one["who"] for one in done.report["failures"]] == ["server:1"]


def test_a_machine_that_dies_costs_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, "--freeze=trainer:0@20:1") as found:
        wait_for_line(found.job, "frozen")
        found.host_of("server-2").kill()
        done = found.finished()
        forget_old(home() / "jobs")  # as whoever starts next on that machine does
    assert done.report["digest"] == undisturbed("steps=60")
    assert [one["who"] for one in done.report["failures"]] == ["trainer:0", "server:2"]


def test_a_machine_with_several_servers_dies(tmp_path: Path) -> None:
    """Groups know machines: k = 2 and one parity on three of them, each with two servers."""
    words = ("servers=6", "cluster.require=host", "--freeze=trainer:0@20:1")
    with cluster(tmp_path, *words, servers=(3, 3, 3)) as found:
        said = wait_for_line(found.job, "frozen")
        assert any("any 1 host of 3 with all servers on it" in line for line in said)
        found.host_of("server-2").kill()
        done = found.finished()
        forget_old(home() / "jobs")
    assert done.report["digest"] == undisturbed("steps=60")
    lost = [one["who"] for one in done.report["failures"]]
    assert len([who for who in lost if who.startswith("server")]) == 2


def test_a_job_waits_for_as_many_hosts_as_it_requires(tmp_path: Path) -> None:
    """Though there is room enough on fewer: who joins first may not decide what it bears."""
    with cluster(tmp_path, "cluster.require=host", servers=(3, 3)) as found:
        for _ in found.hosts:
            wait_for_line(found.job, "has joined")
        found.join("server", "--count=1")
        wait_for_line(found.job, "any 1 host of 3 with all servers on it")
        done = found.finished()
    assert done.report["digest"] == undisturbed("steps=60")


def test_what_cannot_be_required_is_refused(tmp_path: Path) -> None:
    done = train(tmp_path, *JOB, "cluster.require=host", "cluster.domains=[a, a, b, b]")
    assert done.code == 2
    assert "cluster.require: host cannot be" in done.sentence


def test_a_machine_may_leave(tmp_path: Path) -> None:
    with cluster(tmp_path, "--freeze=trainer:0@20:1") as found:
        wait_for_line(found.job, "frozen")
        leaves = found.host_of("server-0")
        leaves.send_signal(signal.SIGTERM)
        assert leaves.wait(10) == 130
        done = found.finished()
    assert done.report["digest"] == undisturbed("steps=60")


def test_a_job_without_room_for_what_it_lost_waits_for_a_machine_that_joins(tmp_path: Path) -> None:
    """It stalled, ended healthy servers, and was lost."""
    words = ("servers=6", "cluster.require=host", "--freeze=trainer:0@20:1")
    with cluster(tmp_path, *words, servers=(3, 2, 2)) as found:  # room for one spare
        wait_for_line(found.job, "frozen")
        leaves = found.host_of("server-2")
        leaves.send_signal(signal.SIGTERM)
        wait_for_line(found.job, "the job stands still: no host has room for 1 server")
        found.join("server", "--count=2")
        done = found.finished()
    assert done.report["digest"] == undisturbed("steps=60")
    lost = {one["who"] for one in done.report["failures"]} - {"trainer:0"}
    assert len(lost) == 2


def test_machines_outlive_their_supervisor_only_briefly(tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = Cluster(tmp_path, stack, Addresses())
        found.train("steps=100000")
        host = found.join("server", "--count=5", "--wait=1")
        found.join("trainer", "--wait=1")
        assert wait_until(lambda: len(children_of(host.pid)) >= 5, LIMIT_S)
        found.job.kill()
        assert found.wait_until_empty(host, 20)
        assert found.codes() == [1, 1]
        assert "nobody has answered" in found.said_by(host)


def test_another_key_opens_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    write_key(other, new_key())
    with ExitStack() as stack:
        found = Cluster(tmp_path, stack, Addresses())
        found.train()
        stranger = found.join("server", "--wait=2", key=other)
        assert stranger.wait(30) == 1
        assert "nobody has answered" in found.said_by(stranger)
        wait_for_line(found.job, "were refused so far: they did not have the job's key")
        found.job.send_signal(signal.SIGINT)
        assert finished(found.job).code == 130


def test_a_job_goes_on_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    """The hosts of before wait for the next run of the command."""
    saved = (f"checkpoint.path={tmp_path / 'saved'}", "checkpoint.every_steps=10")
    with ExitStack() as stack:
        found = Cluster(tmp_path, stack, Addresses())
        found.train(*saved, "--freeze=trainer:0@25:2")
        port = found.address.rpartition(":")[2]
        found.join("server", "--count=5")
        found.join("trainer")
        wait_for_line(found.job, "frozen")
        found.job.kill()
        found.job.wait()
        found.train(*saved, "--resume", port=f":{port}")
        done = found.finished()
        assert found.codes() == [0, 0]
    assert done.report["digest"] == undisturbed("steps=60")
    assert done.report["resumed_from"] >= 10


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--on=none"], "give --listen and --key"),
        (["--key=some.key"], "has a meaning with --on none only"),
        (["--on=none", "--listen=0.0.0.0:1", "--key=k"], "an address that others can reach"),
        (["--on=none", "--listen=127.0.0.1:x", "--key=k"], "expected HOST or HOST:PORT"),
    ],
)
def test_wrong_options_get_a_sentence(options: list[str], sentence: str) -> None:
    with started(*options) as job:
        done = finished(job)
    assert done.code == 2
    assert sentence in done.sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--join=127.0.0.1:1", "--key=nowhere.key"], "cannot be read"),
        (["--join=elsewhere", "--key={key}"], "expected an address as"),
        (["--join=127.0.0.1:99999", "--key={key}"], "expected an address as"),
    ],
)
def test_hosts_with_wrong_options_get_a_sentence(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    write_key(tmp_path / "job.key", new_key())
    words = [option.format(key=tmp_path / "job.key") for option in options]
    ran = subprocess.run(
        [sys.executable, "-c", MAIN, "server", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "COLUMNS": "400"},
    )
    assert ran.returncode == 2, ran.stderr
    assert sentence in " ".join(ran.stderr.split())
