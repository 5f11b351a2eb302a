"""A job that is looked at, and ended, from another terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import (
    LIMIT_S,
    MAIN,
    PLAIN,
    finished,
    only_job,
    planaria,
    started,
    wait_for_line,
    whole_steps,
)
from cluster_jobs import leaving_nothing, wait_until
from host_jobs import cluster

from planaria.cluster.asking import running_jobs

ENDLESS = "steps=1000000"


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def test_a_job_is_listed_shown_and_stopped(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with started(*PLAIN, ENDLESS, f"checkpoint.path={saved}") as job:
        name = only_job().name
        listed = planaria("jobs")
        assert name in listed.stdout
        assert "1,000,000" in listed.stdout
        shown = planaria("status")
        for who in ("server:0", "server:1", "trainer:0", "coordinator"):
            assert who in shown.stdout
        assert "ready" in shown.stdout
        for who in ("server-0", "server:0"):
            assert "server-0 listens" in planaria("logs", name[:8], who).stdout
        assert planaria("stop", "").returncode == 2, "not every job"
        told = planaria("stop", name)
        assert f"{name} was told to end" in told.stdout
        done = finished(job)
    assert done.code == 130
    assert max(whole_steps(saved)) > 3
    assert planaria("jobs").stdout == "no job is running here\n"


def test_a_job_that_is_stopped_twice_still_saves(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with started(*PLAIN, ENDLESS, f"checkpoint.path={saved}") as job:
        name = only_job().name
        several = [subprocess.Popen([sys.executable, "-c", MAIN, "stop", name]) for _ in range(2)]
        done = finished(job)
        for one in several:
            one.wait(LIMIT_S)
    assert done.code == 130
    assert whole_steps(saved)


def test_hosts_are_named(tmp_path: Path, home: Path) -> None:
    with cluster(tmp_path, ENDLESS, servers=(5,)) as found:
        name = only_job().name
        shown = planaria("status").stdout
        lines = {line.split()[0]: line for line in shown.splitlines() if ":" in line.split()[0]}
        assert "/127.0.0.2" in lines["server:0"]
        assert "/127.0.0.3" in lines["trainer:0"]
        # The hosts' folders are on this machine, too, with names that begin alike.
        assert "coordinator" in planaria("logs", name[:4]).stdout
        none = planaria("logs", "nothing").stderr
        assert none.strip().endswith(f"known: {name}")
        (folder,) = home.glob("jobs/*/logs/server-0.log")
        assert "server-0 listens" in planaria("logs", folder.parent.parent.name, "server-0").stdout
        assert planaria("stop", name).returncode == 0
        assert finished(found.job).code == 130
        assert found.codes() == [0, 0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["status"], "no job is running here"),
        (["stop", "nothing"], "no job runs in 'nothing'"),
        (["logs", "nothing"], "no job runs in 'nothing'"),
    ],
)
def test_a_job_that_is_not_there_gets_a_sentence(words: list[str], sentence: str) -> None:
    done = planaria(*words)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_one_of_several_must_be_named() -> None:
    with started(*PLAIN, ENDLESS) as one, started(*PLAIN, ENDLESS) as other:
        for job in (one, other):
            wait_for_line(job, "job's folder")
        assert wait_until(lambda: len(running_jobs()) == 2, LIMIT_S)
        done = planaria("status")
        assert done.returncode == 2
        assert "name the job" in done.stderr
        for folder in running_jobs():
            assert planaria("stop", folder.name).returncode == 0
        assert [finished(job).code for job in (one, other)] == [130, 130]
