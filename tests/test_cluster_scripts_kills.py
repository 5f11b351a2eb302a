"""A user's loop under kills at random instants: the undisturbed digest, for any number of trainers
and of parities; and scripts that are interrupted, and go on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import LIMIT_S, wait_for_checkpoint
from cluster_jobs import blows, leaving_nothing, processes_of_scripts
from script_jobs import (
    PLAIN,
    SCRIPTS,
    ScriptRun,
    run_script,
    started_script,
    undisturbed_script,
)

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

LOOP = ("loop.py", "two_epochs")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder
        assert processes_of_scripts(SCRIPTS) == []


@pytest.mark.parametrize(
    ("trainers", "servers", "parity", "victims"),
    [
        (1, 3, 1, [("server:0",), ("trainer:0",), ("coordinator",), ("server:2",)]),
        (1, 5, 2, [("server:1", "server:3"), ("trainer:0", "server:0"), ("coordinator",)]),
        (3, 3, 1, [("trainer:1",), ("server:1",), ("coordinator",), ("trainer:0",)]),
        (3, 5, 2, [("server:4", "server:0"), ("trainer:2", "trainer:0"), ("coordinator",)]),
    ],
)
def test_a_users_loop_under_kills_ends_with_the_undisturbed_digest(
    trainers: int, servers: int, parity: int, victims: list[tuple[str, ...]]
) -> None:
    sets = (f"trainers={trainers}", f"servers={servers}", f"parity={parity}")
    every = 10 if trainers == 1 else 4  # of 60 steps, or of 20
    plan = blows(10 * trainers + parity, victims, first=3, every=every)
    run = ScriptRun(*LOOP, sets=sets, plan=plan)
    assert run.wrong == ""
    assert run.digest == undisturbed_script(*LOOP, trainers=trainers)


def test_a_script_that_was_interrupted_goes_on_to_the_undisturbed_digest(tmp_path: Path) -> None:
    saved, report = tmp_path / "saved", tmp_path / "first.json"
    sets = (*PLAIN, "trainers=2", f"checkpoint.path={saved}", "checkpoint.every_steps=4")
    options = [f"--report={report}"]
    # It sleeps in step 9 until the interrupt has come.
    script = SCRIPTS / LOOP[0]
    with started_script(script, *LOOP[1:], "sleep=9:5", sets=sets, options=options) as job:
        wait_for_checkpoint(saved)
        job.send_signal(signal.SIGINT)
        _, error = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130, error
    assert "Traceback" not in error
    assert "failed" in json.loads(report.read_text())
    # As many trainers as before: nobody has to say so.
    others = [one for one in sets if not one.startswith("trainers=")]
    resumed = run_script(tmp_path, *LOOP, sets=others, options=["--resume"])
    assert resumed.code == 0, resumed.error
    assert resumed.report["resumed_from"] >= 4
    assert resumed.report["digest"] == undisturbed_script(*LOOP, trainers=2)
