"""What `connect` makes of a file, of keys, of the command line and of variables that others set."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planaria.config import Config
from planaria.errors import ConfigError
from planaria.torch import Job, connect, connecting
from planaria.trainer.declaring import SETTINGS, SOCKET, Settings

pytestmark = pytest.mark.torch

# As a script's process finds them: how many run it, and what the command line sets.
Started = Callable[..., None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Makes this process one that `planaria run` has started."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(trainers: int, *sets: str, rank: int = 0) -> None:
        monkeypatch.setenv(SOCKET, str(os.dup(theirs.fileno())))
        monkeypatch.setenv("WORLD_SIZE", str(trainers))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv(SETTINGS, msgspec.json.encode(Settings(None, [*sets])).decode())

    with ours, theirs:
        yield start
        for job in connecting._given:
            job._line.close()
        connecting._given.clear()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is started for a job of this process's own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(connecting, "start_alone", lambda config: (theirs, object()))
    with ours, theirs:
        yield
        connecting._alone.clear()


@pytest.fixture(params=["str", "path", "dict"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The same few keys in all ways in which they can be given."""
    text = "servers: 4\noptimizer:\n  lr: 0.25\nrebuild:\n"
    path = tmp_path / "job.yaml"
    path.write_text(text)
    keys = {"servers": 4, "optimizer": {"lr": 0.25}, "rebuild": None}
    return {"str": str(path), "path": path, "dict": keys}[request.param]


def settings_of(job: Job) -> tuple[int, int, float]:
    return job.config.trainers, job.config.servers, job.config.optimizer.lr


@pytest.mark.parametrize("trainers", [1, 3])
def test_what_a_file_does_not_name_is_up_to_the_command(
    started: Started, given: Any, trainers: int
) -> None:
    """A file without trainers wanted two of them."""
    started(trainers)
    assert settings_of(connect(given)) == (trainers, 4, 0.25)


def test_a_file_is_enough_for_a_job_of_ones_own(alone: None, given: Any) -> None:
    assert settings_of(connect(given)) == (1, 4, 0.25)


def test_keys_come_before_the_file_and_the_command_line_before_both(
    started: Started, given: Any
) -> None:
    started(1, "servers=5")
    job = connect(given, servers=2, optimizer={"name": "adam"})
    assert settings_of(job) == (1, 5, 0.25)
    assert job.config.optimizer.name == "adam"


def test_a_file_that_names_another_number_of_trainers_is_refused(
    started: Started, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("trainers: 3\n")
    started(2)
    with pytest.raises(ConfigError, match=r"the script wants 3, but 2 run it.*--set trainers=3"):
        connect(path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"config": 5}, "expected the path of a YAML file, or a dict, got int"),
        ({"config": [("servers", 3)]}, "or a dict, got list"),
        ({"trainers": "3"}, "the script wants 3, but 2 run it"),
    ],
)
def test_what_is_no_setting_is_refused(started: Started, given: Any, says: str) -> None:
    started(2)
    with pytest.raises(ConfigError, match=says):
        connect(**given)


def test_a_key_of_a_file_that_is_unknown_is_named(alone: None, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("severs: 3\n")
    with pytest.raises(ConfigError, match="severs: unknown key; did you mean servers"):
        connect(path)


@pytest.mark.parametrize(("rank", "world_size"), [("1", "4"), ("none", "many")])
def test_ranks_that_another_launcher_has_set_are_not_this_jobs(
    alone: None, monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str
) -> None:
    """A script that is started by itself is its job's only trainer, wherever it is started."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    job = connect()
    assert (job.rank, job.world_size, job.config.trainers) == (0, 1, 1)
    with pytest.raises(ConfigError, match="the script wants 4, but 1 run it"):
        connect(trainers=4)


def test_a_trainer_knows_its_rank_and_their_number(started: Started) -> None:
    started(3, rank=2)
    job = connect()
    assert (job.rank, job.world_size) == (2, 3)
    assert job.config == Config.load(None, ["trainers=3"])
