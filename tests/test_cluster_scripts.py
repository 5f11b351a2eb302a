"""A user's script as the trainers of a job: exact under kills, equal to plain torch, and ended as
its user means it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import wait_for_line
from cluster_jobs import Blow, leaving_nothing, processes_of_scripts
from script_jobs import (
    PLAIN,
    SCRIPTS,
    ScriptRun,
    run_script,
    started_script,
    undisturbed_script,
)

from planaria.control.children import FIRST_BATCH
from planaria.errors import ClusterError
from planaria.wire.control import Rebuilt, StepDone, Working

pytestmark = pytest.mark.torch

PROTECTED = ("servers=3", "parity=1")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder
        assert processes_of_scripts(SCRIPTS) == []


# ------------------------------------------------------------------ exact


def test_killing_a_server_the_trainer_and_the_coordinator_changes_no_bit() -> None:
    plan = [Blow(5, ("server:1",)), Blow(11, ("trainer:0",)), Blow(17, ("coordinator",))]
    run = ScriptRun("loop.py", sets=(*PROTECTED, "trainers=1"), plan=plan)
    assert run.wrong == ""
    assert run.digest == undisturbed_script("loop.py")
    assert run.said[-1] == "rank 0 is through after step 30"


def test_a_script_that_is_slow_to_start_replaces_one_that_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was killed as if it hung, where no spare was ready; and the job had stalled before."""
    monkeypatch.setattr("planaria.control.supervising.START_S", 6.0)
    monkeypatch.setattr("planaria.control.supervising.STALL_S", 1.0)
    monkeypatch.setattr("planaria.cluster.accounts.LOOK_S", 0.5)
    sets = (*PROTECTED, "trainers=1", "script.spares=0", "cluster.deadline_s=3")
    run = ScriptRun("loop.py", "slow=10", sets=sets, plan=[Blow(11, ("trainer:0",))])
    assert run.wrong == ""
    assert run.digest == undisturbed_script("loop.py")
    assert [one["who"] for one in run.report["failures"]] == ["trainer:0"]
    shown = {(member, at_work.what) for member, at_work in run.beaten.of(Working)}
    assert ("trainer-1", FIRST_BATCH) in shown


@pytest.mark.parametrize(("what", "trainers"), [("descriptors", 1), ("memory", 2)])
def test_a_script_that_lacks_memory_or_descriptors_is_replaced_first(
    what: str, trainers: int
) -> None:
    """One exception ended the job, though the next process had what this one lacked."""
    sets = (*PROTECTED, f"trainers={trainers}")
    run = ScriptRun("loop.py", f"lacks=6:{what}", sets=sets)
    assert run.digest == undisturbed_script("loop.py", trainers=trainers)
    [failure] = run.report["failures"]
    reason = {"descriptors": "OSError: [Errno 24] Too many open files", "memory": "MemoryError"}
    assert (failure["who"], failure["reason"]) == (
        "trainer:0",
        f"ended with code 1: {reason[what]}",
    )


def rebuilt_s(sleeps_s: float) -> tuple[float, float]:
    """How long a server's repair takes from its kill in step 10, whose batch takes so long; and how
    long before the end of that step it is done.
    """
    limits = ("trainers=1", "cluster.heartbeat_limit_ms=2000", "script.spares=0")
    plan = [Blow(9, ("server:1",), delay_ms=500 if sleeps_s else 0)]  # amid the batch
    words = [f"sleep=10:{sleeps_s}"] if sleeps_s else []
    run = ScriptRun("loop.py", *words, sets=(*PROTECTED, *limits), plan=plan)
    assert [one["who"] for one in run.report["failures"]] == ["server:1"]
    assert run.digest == undisturbed_script("loop.py")
    events = run.beaten.beating.events
    [whole] = [one.at for one in events if isinstance(one.what, Rebuilt)]
    after = [one.at for one in events if isinstance(one.what, StepDone) and one.what.step == 10]
    return whole - run.beaten.beating.struck_at, min(after) - whole


@pytest.mark.campaign
def test_a_batch_that_takes_long_is_no_death_and_a_server_is_repaired_meanwhile() -> None:
    """As fast as where no batch takes long."""
    took_s, before_s = rebuilt_s(20.0)
    otherwise_s, _ = rebuilt_s(0.0)
    print(f"repaired in {took_s:.2f} s, and in {otherwise_s:.2f} s where no batch takes long")
    assert before_s > 10.0, "the repair has waited for the batch"
    assert took_s < otherwise_s + 3.0


def test_what_the_last_step_changes_on_one_rank_alone_is_noticed() -> None:
    """The control: replicas that differ do not pass for one model."""
    with pytest.raises(ClusterError, match="the replicas of the dense network differ"):
        ScriptRun("loop.py", "unkept", "stop=1", "held", sets=(*PLAIN, "trainers=2"))


@pytest.mark.parametrize("kill", [[], ["--kill=trainer:1@6"]])
def test_a_step_that_one_rank_skips_is_noticed_in_the_next_one(
    tmp_path: Path, kill: list[str]
) -> None:
    """It was noticed at the end; and never, where the rank that had strayed was killed later."""
    sets = (*PROTECTED, "trainers=2")
    done = run_script(tmp_path, "loop.py", "skips=4", "say", sets=sets, options=kill)
    assert done.code == 1
    both = " ".join((done.out + done.error).split())
    assert "model is not the same on all ranks after step 4: it differs from rank 0's" in both
    assert "skip a batch on all ranks or on none" in both
    assert both.count("Traceback (most recent call last)") == 1
    said = {line.split()[-2] for line in done.out.splitlines() if "0x" in line}
    assert "4" in said
    assert "5" not in said


def test_one_trainer_learns_what_plain_torch_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent))
    run = ScriptRun("twin.py", sets=(*PLAIN, "trainers=1"))
    furthest = dict(line.split() for line in run.said[-8:])
    plain = ["adagrad", "adam", "momentum", "sgd"]
    assert {*furthest} == {*plain, *(f"{name}_weighted" for name in plain)}
    assert all(float(distance) < 1e-4 for distance in furthest.values()), furthest


# ------------------------------------------------------------------ how a job ends


@pytest.mark.campaign
def test_a_loop_that_is_left_ends_its_job_saved_and_is_gone_on_with_later(tmp_path: Path) -> None:
    sets = (*PLAIN, "trainers=1", f"checkpoint.path={tmp_path / 'saved'}")
    left = run_script(tmp_path, "loop.py", "stop=7", sets=sets)
    assert left.code == 0, left.error
    assert left.report["steps"] == 7
    assert [one["step"] for one in left.report["checkpoints"]] == [7]
    assert "rank 0 is through after step 7" in left.out
    resumed = run_script(tmp_path, "loop.py", sets=sets, options=["--resume"])
    assert resumed.code == 0, resumed.error
    assert resumed.report["resumed_from"] == 7
    assert resumed.report["digest"] == undisturbed_script("loop.py")


def test_an_exception_ends_the_job_with_its_traceback_once(tmp_path: Path) -> None:
    done = run_script(tmp_path, "loop.py", "raise=3", sets=(*PLAIN, "trainers=2"))
    assert done.code == 1
    both = done.out + done.error
    assert "RuntimeError: step 3 is one too many" in done.error
    assert both.count("Traceback (most recent call last)") == 1
    assert "site-packages" not in both
    assert "src/planaria" not in both


def test_a_script_that_lacks_memory_again_ends_the_job_with_its_traceback_once(
    tmp_path: Path,
) -> None:
    sets = (*PROTECTED, "trainers=1")
    done = run_script(tmp_path, "loop.py", "lacks=9:memory always", sets=sets)
    assert done.code == 1
    both = done.out + done.error
    # What it told last before it raised may not have left it: the supervisor knows an earlier step.
    said = " ".join(both.split())
    assert re.search(r"failed 2 times at step [6-9]: ended with code 1: MemoryError", said), said
    assert both.count("Traceback (most recent call last)") == 1


def test_an_interrupt_that_a_script_raises_is_an_exception_and_no_death(tmp_path: Path) -> None:
    done = run_script(tmp_path, "loop.py", "end=3:interrupt", sets=(*PLAIN, "trainers=1"))
    assert done.code == 1
    assert (done.out + done.error).count("Traceback (most recent call last)") == 1
    assert done.error.startswith("error: KeyboardInterrupt")


@pytest.mark.parametrize("held", [[], ["held"]])
@pytest.mark.parametrize(("given", "says"), [("bad data", "bad data"), ("3", "sys.exit(3)")])
def test_leaving_with_a_code_in_the_loop_is_no_end_of_the_job(
    tmp_path: Path, given: str, says: str, held: list[str]
) -> None:
    """The job counted as done."""
    done = run_script(tmp_path, "loop.py", f"end=4:{given}", *held, sets=(*PLAIN, "trainers=1"))
    assert done.code == 1
    assert done.error.startswith(f"error: {says}; ")
    assert says not in done.out
    assert done.report["failed"].startswith(says)


def test_leaving_without_a_code_in_the_loop_ends_it_as_break_does(tmp_path: Path) -> None:
    done = run_script(tmp_path, "loop.py", "end=4:0", sets=(*PLAIN, "trainers=1"))
    assert (done.code, done.report["steps"]) == (0, 4), done.error


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", "rank 1 was killed by SIGKILL after its loop"),
        ("5", "rank 1 ended with code 5 after its loop"),
    ],
)
def test_what_ends_a_rank_after_its_loop_is_told(tmp_path: Path, how: str, says: str) -> None:
    done = run_script(tmp_path, "loop.py", f"after={how}", sets=(*PLAIN, "trainers=2"))
    assert done.code == 1
    assert done.sentence == f"error: the job is done, but {says}"


def test_a_script_may_close_its_output(tmp_path: Path) -> None:
    done = run_script(tmp_path, "loop.py", "after=closed", sets=(*PLAIN, "trainers=1"))
    assert (done.code, done.error) == (0, "")
    assert "Traceback" not in done.out


def test_a_script_that_does_not_end_after_its_loop_is_interrupted_at_once() -> None:
    sets = (*PLAIN, "trainers=1")
    with started_script(SCRIPTS / "loop.py", "after=sleep", sets=sets) as job:
        wait_for_line(job, "sleeps after the loop")
        time.sleep(0.5)
        job.send_signal(signal.SIGINT)
        _, error = job.communicate(timeout=30)
    assert job.returncode == 130
    assert "interrupted after the last step: the scripts were stopped" in error


def test_a_rank_that_ends_without_a_word_has_no_last_words(tmp_path: Path) -> None:
    done = run_script(tmp_path, "loop.py", "end=4:abrupt", sets=(*PLAIN, "trainers=1"))
    assert done.code == 3
    [failure] = done.report["failures"]
    assert failure["reason"] == "ended with code 3"


@pytest.mark.parametrize("held", [[], ["held"]])
def test_ranks_that_leave_at_different_steps_are_told_at_once(held: list[str]) -> None:
    """They waited for one another until the job had stalled, for two minutes."""
    with pytest.raises(ClusterError, match="all ranks must leave their loops at the same step"):
        ScriptRun("loop.py", "apart=4", *held, sets=(*PLAIN, "trainers=2"))


# ------------------------------------------------------------------ bad use


def test_bad_use_in_the_loop_gets_a_sentence_and_training_goes_on() -> None:
    run = ScriptRun("misuse.py", sets=(*PLAIN, "trainers=1"))
    sentences = dict(line.split(": ", 1) for line in run.said if ": " in line)
    expected = {
        "a forward before connect's loop": "make collections before the first batch",
        "evaluate before the loop": "it needs a batch; use it in the loop",
        "keep in the loop": "the job has started; do this before the first batch",
        "batches in the loop": "a job has one loop; give it epochs",
        "a second backward": "do several of them within job.accumulate()",
        "a late collection": "make collections before the first batch",
        "an id in evaluation": "has no row",
        "an id of a feature": "table of_a has no row",
        "an optimizer that is not kept": "call job.keep(model=model, optimizer=optimizer)",
        "labels that do not fit": "labels and logits must both be [samples]",
        "a forward after the loop": "predict within job.evaluate()",
        "a second loop": "a job has one loop; give it epochs",
    }
    assert {what for what, says in expected.items() if says not in sentences.get(what, "")} == set()
    assert (run.wrong, run.report["steps"]) == ("", 4)
    assert run.report["loss"] == 0.5


def test_a_backward_that_has_raised_is_not_gone_on_with() -> None:
    """Its gradients are not averaged, and ranks would go different ways."""
    with pytest.raises(ClusterError, match="a backward of step 3 has raised"):
        ScriptRun("loop.py", "caught=3", sets=(*PLAIN, "trainers=2"))


def test_a_script_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with started_script(tmp_path / "no_such_script.py") as job:
        _, error = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "no_such_script.py: expected a Python file, but there is none" in " ".join(error.split())
