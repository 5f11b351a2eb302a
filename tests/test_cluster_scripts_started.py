"""How a user's script is started: by a file, from elsewhere, with its rank, as a spare; and what it
may ask for in its loop."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cluster_jobs import Blow, leaving_nothing, processes_of_scripts
from script_jobs import PLAIN, SCRIPTS, ScriptRun, run_script, undisturbed_script

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import Watcher
from planaria.wire.control import StepDone

pytestmark = pytest.mark.torch

PROTECTED = ("servers=3", "parity=1")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder
        assert processes_of_scripts(SCRIPTS) == []


# ------------------------------------------------------------------ files and settings


def test_a_file_is_found_wherever_the_script_goes_and_a_frozen_server_changes_no_bit(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("servers: 3\nparity: 1\ntrainers: 1\nscript:\n  spares: 0\n")
    options = [f"--config={os.path.relpath(path)}", "--freeze=server:1@6:0.5"]
    done = run_script(tmp_path, "loop.py", "elsewhere", options=options)
    assert done.code == 0, done.error
    assert done.report["servers"] == 3
    [frozen] = done.report["failures"]
    assert (frozen["who"], frozen["step"], frozen["reason"]) == ("server:1", 6, "frozen for 0.5 s")
    assert done.report["digest"] == undisturbed_script("loop.py")


WANTED = {"reproducible": "portable", "threads": {"trainer": 2}, "script": {"spares": 2}}


def test_what_trainers_are_started_with_is_not_what_connect_says(tmp_path: Path) -> None:
    """The job said that its bits were portable, and its trainers lacked the variables for it."""
    given = f"given={json.dumps(WANTED)}"
    done = run_script(tmp_path, "loop.py", given, sets=("strategy=none", "servers=2", "trainers=1"))
    assert done.code == 2
    for key, wanted, had in (
        ("reproducible", "portable", "same"),
        ("threads.trainer", 2, 1),
        ("script.spares", 2, 1),
    ):
        says = f"{key}: the script wants {wanted}, but was started with {had}; start it with "
        assert f"{says}planaria run --set {key}={wanted}" in done.sentence


def test_what_connect_and_the_command_both_say_is_allowed(tmp_path: Path) -> None:
    sets = (*PLAIN, "trainers=1", "reproducible=portable", "threads.trainer=2")
    given = f"given={json.dumps(WANTED)}"  # the command line comes before it
    done = run_script(tmp_path, "loop.py", given, "stop=2", sets=sets)
    assert done.code == 0, done.error


# ------------------------------------------------------------------ ranks


def test_a_trainer_that_takes_a_place_finds_its_rank_and_is_shown_with_it() -> None:
    """RANK and LOCAL_RANK stayed those of a spare, -1, for ever."""
    plan = [Blow(5, ("trainer:1",))]
    run = ScriptRun("loop.py", "ranks", sets=(*PROTECTED, "trainers=2"), plan=plan)
    said = [re.fullmatch(r"\[rank (\d)\] step (\d+): (.*)", line) for line in run.said]
    found = {(one[1], int(one[2]), one[3]) for one in said if one}
    assert found == {
        (str(rank), step, f"{rank} {rank} 2 {rank} 2") for rank in range(2) for step in range(1, 16)
    }
    assert run.digest == undisturbed_script("loop.py", trainers=2)


# ------------------------------------------------------------------ in the loop


def test_ids_that_the_loop_maps_to_rows_first_may_be_any() -> None:
    """They were looked up before the loop had the batch, and refused."""
    run = ScriptRun("loop.py", "raw", sets=(*PLAIN, "trainers=1"))
    assert run.digest == undisturbed_script("loop.py")


def test_a_checkpoint_that_the_loop_asks_for_is_of_one_of_the_next_steps(tmp_path: Path) -> None:
    saved = f"checkpoint.path={tmp_path / 'saved'}"
    words = ("save=10", "pace=0.05")
    done = run_script(tmp_path, "loop.py", *words, sets=(*PLAIN, "trainers=1", saved))
    assert done.code == 0, done.error
    steps = [one["step"] for one in done.report["checkpoints"] if "failed" not in one]
    assert steps[-1] == 30
    assert any(10 <= step < 30 for step in steps), done.report["checkpoints"]
    assert done.report["digest"] == undisturbed_script("loop.py")


# ------------------------------------------------------------------ spares


def longest_gap_s(run: ScriptRun) -> float:
    """Between two steps of the job."""
    ends = [one.at for one in run.beaten.beating.events if isinstance(one.what, StepDone)]
    return max(later - earlier for earlier, later in pairwise(ends))


class FreezesTheSpare(Watcher):
    """It is stopped as soon as it waits at its first batch, for good."""

    def __init__(self) -> None:
        self.frozen = 0

    def on_tick(self, now: float, processes: Attempt) -> None:
        scripts = processes._scripts
        ready = [one for one in scripts._waiting if one.declared] if scripts else []
        if ready and not self.frozen:
            self.frozen = ready[0].pid
            os.kill(self.frozen, signal.SIGSTOP)


def test_a_frozen_spare_is_passed_over_and_holds_nobody_up_in_the_end() -> None:
    """It was given the place, was waited for in vain, and then again when all was done."""
    freezes = FreezesTheSpare()
    plan = [Blow(9, ("trainer:0",))]
    sets = (*PROTECTED, "trainers=1")
    run = ScriptRun("loop.py", "pace=0.05", sets=sets, plan=plan, observers=[freezes])
    assert freezes.frozen
    assert run.digest == undisturbed_script("loop.py")
    assert longest_gap_s(run) < 25.0  # not the thirty seconds of a deadline


@pytest.mark.campaign
def test_a_spare_takes_over_at_once_however_long_the_script_takes_to_start() -> None:
    words, plan = ("starts=5", "pace=0.1"), [Blow(20, ("trainer:0",))]
    gaps = {}
    for spares in (1, 0):
        sets = (*PROTECTED, "trainers=1", f"script.spares={spares}")
        run = ScriptRun("loop.py", *words, sets=sets, plan=plan)
        assert run.digest == undisturbed_script("loop.py")
        gaps[spares] = longest_gap_s(run)
    print(f"longest gaps with a spare and without one: {gaps[1]:.2f} s, {gaps[0]:.2f} s")
    assert gaps[1] < 2.0, gaps
    assert gaps[0] > 5.0, gaps  # the control: the script is run again
