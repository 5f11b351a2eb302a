"""Beyond what the survivors can make good, all roll back to a checkpoint; the digest stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import leaving_nothing, tiny

from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.errors import LossError
from planaria.schedule import parse_kill, resolve

pytestmark = pytest.mark.torch

SHAPE = ("steps=60", "servers=3", "trainers=1", "spares=1", "checkpoint.every_steps=20")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    tmp_path_factory.getbasetemp()  # made before a test looks for what was left behind
    return str(JobRun(tiny("steps=60", "servers=3", "trainers=1", "strategy=none")).run()["digest"])


def run_killed(config: Config, *kills: str) -> JobRun:
    return JobRun(config, resolve([parse_kill(kill) for kill in kills], config))


def test_strategy_checkpoint_redoes_what_was_lost_and_loses_no_bit(
    undisturbed: str, tmp_path: Path
) -> None:
    config = tiny(*SHAPE, "strategy=checkpoint", f"checkpoint.path={tmp_path}")
    report = run_killed(config, "server:1@10", "server:0@50").run()
    assert report["digest"] == undisturbed
    first, second = report["rollbacks"]
    assert first["to_step"] == 0  # nothing was saved yet
    assert 10 <= first["from_step"] < 20
    assert second["to_step"] in (20, 40)  # a disk may be slow
    assert [failure["who"] for failure in report["failures"]] == ["server:1", "server:0"]
    assert all(failure["gap_ms"] > 0 for failure in report["failures"])


def test_erasure_falls_back_to_a_checkpoint_beyond_r_losses(
    undisturbed: str, tmp_path: Path
) -> None:
    config = tiny(*SHAPE, "parity=1", "k=2", f"checkpoint.path={tmp_path}")
    report = run_killed(config, "server:1@10", "server:any*2@50").run()
    assert report["digest"] == undisturbed
    (rollback,) = report["rollbacks"]  # the first kill needed none
    assert rollback["to_step"] in (20, 40)


def test_without_a_checkpoint_erasure_says_what_is_lost(tmp_path: Path) -> None:
    config = tiny(*SHAPE, "parity=1", "k=2", f"checkpoint.path={tmp_path}")
    with pytest.raises(LossError, match="group"):
        run_killed(config, "server:any*2@5").run()
