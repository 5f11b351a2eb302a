"""Scripts on several machines, here addresses of this one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster_commands import finished, train, wait_for_line
from cluster_jobs import leaving_nothing
from host_jobs import Addresses, Cluster
from script_jobs import PATIENT, SCRIPTS, undisturbed_script

from planaria.cluster.files import forget_old, home

LOOP = SCRIPTS / "loop.py"
SERVERS = ("servers=3", "k=2", "parity=1", "spares=1")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


@contextmanager
def hosts(
    folder: Path,
    *words: str,
    trainers: Sequence[int] = (1, 1),
    options: Sequence[str] = (),
    script: Path = LOOP,
) -> Iterator[Cluster]:
    """A script's job with one spare trainer. trainers: for how many there is room on each machine.

    words: the script's arguments.
    """
    count = sum(trainers) - 1
    with ExitStack() as stack:
        found = Cluster(folder, stack, Addresses())
        found.run(script, *words, options=(*PATIENT, *SERVERS, f"trainers={count}", *options))
        for room in (2, 2):
            found.join("server", "--count", str(room))
        for room in trainers:
            found.join("trainer", "--count", str(room))
        yield found


def test_kills_change_no_bit_and_what_ranks_print_is_shown(tmp_path: Path) -> None:
    kills = ("--kill=server:1@3", "--kill=trainer:1@6")
    with hosts(tmp_path, "say", trainers=(2, 1), options=kills) as found:
        done = found.finished()
        assert found.codes() == [0, 0, 0, 0]
    assert done.report["digest"] == undisturbed_script("loop.py", "say", trainers=2)
    assert [one["who"] for one in done.report["failures"]] == ["server:1", "trainer:1"]
    lines = done.out.splitlines()
    for rank in range(2):
        assert any(line.startswith(f"[rank {rank}] ") for line in lines), done.out


def test_a_machine_that_trains_dies(tmp_path: Path) -> None:
    with hosts(tmp_path, options=("--freeze=server:0@5:1",)) as found:
        wait_for_line(found.job, "frozen")
        trains = next(host for host in found.hosts if "trainer-0 starts" in found.said_by(host))
        trains.kill()
        done = found.finished()
        forget_old(home() / "jobs")
    assert done.report["digest"] == undisturbed_script("loop.py")
    assert "trainer:0" in [one["who"] for one in done.report["failures"]]


def test_a_machine_that_trains_dies_before_the_first_batch(tmp_path: Path) -> None:
    """Its rank runs on another from the start."""
    with hosts(tmp_path, "starts=3", options=("script.spares=0",)) as found:
        wait_for_line(found.job, "127.0.0.5 has joined")
        found.hosts[2].kill()
        done = found.finished()
    assert done.report["digest"] == undisturbed_script("loop.py")


def test_an_exception_is_shown_once(tmp_path: Path) -> None:
    with hosts(tmp_path, "raise=4", trainers=(2, 1)) as found:
        out, error = found.job.communicate(timeout=120)
        assert found.job.returncode == 1
        assert found.codes() == [0, 0, 0, 0]
    assert out.count("Traceback") == 1, out
    assert "step 4 is one too many" in error


def test_an_exception_before_the_first_batch_is_shown_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('begins')\nraise ValueError('of its own')\n")
    with hosts(tmp_path, script=script) as found:
        out, error = found.job.communicate(timeout=120)
        assert found.job.returncode == 1
    assert "begins" in out
    assert "ValueError: of its own" in out
    assert "has raised an exception before its first batch" in error


def test_a_script_that_is_not_there_gets_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    shutil.copy(LOOP, script)
    with ExitStack() as stack:
        found = Cluster(tmp_path, stack, Addresses())
        found.run(script, options=(*SERVERS, "trainers=1", "script.spares=0"))
        script.unlink()
        host = found.join("trainer")
        done = finished(found.job)
        assert host.wait(30) == 1
    assert done.code == 1
    assert "the script and what it imports must be on every host that trains" in done.sentence


def test_how_a_script_ends_after_its_loop_is_told(tmp_path: Path) -> None:
    with hosts(tmp_path, "after=3") as found:
        done = finished(found.job)
    assert done.code == 1
    assert "the job is done, but rank 0 ended with code 3 after its loop" in done.sentence


def test_a_named_model_is_trained_on_hosts(tmp_path: Path) -> None:
    words = ("model.name=deepfm", "script.spares=0", "steps=60")
    with ExitStack() as stack:
        found = Cluster(tmp_path, stack, Addresses())
        found.train(*words)
        for room in (3, 2):
            found.join("server", "--count", str(room))
        found.join("trainer")
        done = found.finished()
    alone = train(tmp_path, *words, "strategy=none", "servers=2", "spares=0")
    assert alone.code == 0, alone.error
    assert done.report["digest"] == alone.report["digest"]
