"""No model is lost or replaced in silence: jobs on real processes and real files.

Each starts some processes, which takes seconds, so a story has as few jobs as it can.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import (
    PLAIN,
    finished,
    slow_sync,
    started,
    train,
    wait_for_checkpoint,
    wait_for_line,
    whole_steps,
)
from cluster_jobs import (
    GONE_S,
    BeatenRun,
    leaving_nothing,
    left_behind,
    processes_of,
    tiny,
    undisturbed,
    wait_until,
)

from planaria.checkpoints import latest
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, RolledBack
from planaria.wire.control import StepDone

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

ENDLESS = "steps=1000000"
LONG = "steps=20000"  # so that the first tenth of it is soon said, and the last not before long
PARITY = ("servers=3", "parity=1", "k=2", "spares=1")


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what slows the disk down is compiled to."""
    return tmp_path_factory.mktemp("library")


def saved_to(folder: Path, *more: str) -> tuple[str, ...]:
    return (f"checkpoint.path={folder / 'saved'}", *more)


def job_of(folder: Path) -> str:
    found = latest(folder).checkpoint
    assert found is not None
    return found.manifest.job


# ---------------------------------------------------------------------------- the last save


def test_the_last_save_is_waited_for_beyond_the_deadline(tmp_path: Path, library: Path) -> None:
    slow = slow_sync(library, ".part", 5)
    saves = saved_to(tmp_path, "steps=20", "cluster.deadline_s=2")
    done = train(tmp_path, *PLAIN, *saves, **slow)
    assert done.code == 0, done.error
    assert whole_steps(tmp_path / "saved") == [20]
    (save,) = done.report["checkpoints"]
    assert save["seconds"] >= 5  # a control: it really took longer than the deadline
    assert done.report["digest"] == undisturbed("steps=20")


@pytest.mark.parametrize("stuck", [".part", "MANIFEST"])
def test_a_last_save_that_stands_still_is_never_success(
    tmp_path: Path, library: Path, stuck: str
) -> None:
    slow = slow_sync(library, stuck, 12)
    saves = saved_to(tmp_path, "steps=20", "checkpoint.stall_s=1")
    done = train(tmp_path, *PLAIN, *saves, **slow)
    assert done.code == 1, done.out
    assert "the trained model was not saved: " in done.sentence
    assert "(checkpoint.stall_s)" in done.sentence
    assert done.report["digest"] == undisturbed("steps=20")  # all the same


def test_a_server_killed_while_the_last_step_is_saved_costs_nothing(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have saved and wait; the one that was killed had not."""
    for name, value in slow_sync(library, "place-00001", 4).items():
        monkeypatch.setenv(name, value)
    step = tmp_path / "saved" / "step-00000020"

    class Striking(BeatenRun):
        def look(self, processes: Attempt) -> None:
            if not self.struck and list(step.glob("place-00001-*")):
                member = processes.member_of("server", 1)
                assert member is not None
                self.beating.strike(processes, [member])

    run = Striking(tiny(*PARITY, *saved_to(tmp_path, "steps=20")))
    run.beating.on_tick = lambda now, processes: run.look(processes)  # type: ignore[method-assign]
    report = run.run()
    assert run.killed == run.struck == ["server-1"]
    assert [one["step"] for one in report["checkpoints"] if "failed" not in one] == [20]
    assert whole_steps(tmp_path / "saved") == [20]
    assert report["digest"] == undisturbed("steps=20")
    # What was saved is what was trained: judged again, it is the same.
    again = train(tmp_path, *PLAIN, *saved_to(tmp_path, "steps=20"), "--resume")
    assert again.code == 0, again.error
    assert again.report["digest"] == undisturbed("steps=20")


# ---------------------------------------------------------------------------- one folder, two jobs


def test_a_second_job_on_a_folder_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    saves = saved_to(tmp_path, "checkpoint.every_steps=10")
    folder = tmp_path / "saved"
    with started(*PLAIN, *saves, ENDLESS) as first:
        step = wait_for_checkpoint(folder)
        second = train(tmp_path, *PLAIN, *saves, ENDLESS, "--resume")
        assert second.code == 2, second.error
        assert f"belong to job {job_of(folder)}" in second.sentence
        assert f"end process {first.pid}, which runs, first" in second.sentence
        assert "start; the job's folder is" not in second.out  # nothing was started
        assert wait_for_checkpoint(folder, max(whole_steps(folder))) > step  # nor disturbed
        job = job_of(folder)
        first.send_signal(signal.SIGKILL)
        first.communicate()
    step = max(whole_steps(folder))
    third = train(tmp_path, *PLAIN, *saves, f"steps={step + 20}", "--resume")
    assert third.code == 0, third.error
    assert third.report["resumed_from"] == step
    assert job_of(folder) == job  # it is the same job


def test_a_roll_back_never_takes_another_jobs_checkpoint(tmp_path: Path) -> None:
    other = train(tmp_path, *PLAIN, *saved_to(tmp_path / "other", "steps=120"), "seed=7")
    assert other.code == 0, other.error
    theirs = tmp_path / "other" / "saved" / "step-00000120"
    ours = tmp_path / "saved"
    slow = ("steps=100", "batch=1024")  # so that a save counts long before the end
    saves = saved_to(tmp_path, *slow, "checkpoint.every_steps=10", "strategy=checkpoint")

    def intrude(processes: Attempt, event: JobEvent) -> None:
        if not isinstance(event.what, StepDone) or run.struck:
            return
        if whole_steps(ours):
            shutil.copytree(theirs, ours / theirs.name)
            member = processes.member_of("server", 0)
            assert member is not None
            run.beating.strike(processes, [member])

    run = BeatenRun(tiny(*saves, "servers=2", "spares=0"), on_event=intrude)
    report = run.run()
    (back,) = (what for _, what in run.of(RolledBack))
    assert 10 <= back.to_step < 100
    assert report["digest"] == undisturbed(*slow)
    assert whole_steps(ours)[-1] == 120  # nor has it removed what is not its own
    assert (ours / theirs.name / "MANIFEST.json").read_bytes() == (
        theirs / "MANIFEST.json"
    ).read_bytes()


# ---------------------------------------------------------------------------- being told to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_told_to_stop_saves_the_current_step_first(
    tmp_path: Path, number: signal.Signals
) -> None:
    saves, report = saved_to(tmp_path, "checkpoint.every_steps=5"), tmp_path / "report.json"
    with started(*PARITY, *saves, ENDLESS, f"--report={report}") as job:
        wait_for_line(job, "checkpoint of step ")
        job.send_signal(number)
        done = finished(job, report)
    assert done.code == 130, done.error
    step = max(whole_steps(tmp_path / "saved"))
    assert "the current step is saved first; once more to leave at once" in done.out
    assert (
        "interrupted; what was trained so far was saved first; go on from the checkpoint of step "
        f"{step} with --resume" in done.sentence
    )
    assert done.report["failed"] in done.sentence
    assert done.report["steps"] >= step > 0
    if number == signal.SIGTERM:
        return
    again = train(tmp_path, *PLAIN, *saves, f"steps={step + 10}", "--resume")
    assert again.code == 0, again.error
    assert again.report["resumed_from"] == step
    assert again.report["digest"] == undisturbed(f"steps={step + 10}")


@pytest.mark.parametrize("kills", [(), ("--kill=coordinator@3",)], ids=["first", "replaced"])
def test_a_command_that_is_killed_leaves_somebody_to_name_the_way_back(
    tmp_path: Path, kills: tuple[str, ...]
) -> None:
    """Out of memory, or of descriptors where a library aborts: it ended without a word. A
    coordinator that was forked off a nursery speaks as the first one would.
    """
    saves = saved_to(tmp_path, "checkpoint.every_steps=5")
    with started(*PLAIN, *saves, ENDLESS, *kills) as job:
        if kills:
            wait_for_line(job, "view ")  # the one that replaces it has begun
        wait_for_line(job, "checkpoint of step ")
        job.kill()
        done = finished(job)
    step = max(whole_steps(tmp_path / "saved"))
    assert done.code == -signal.SIGKILL
    assert done.sentence.startswith("error: the command that ran this job has ended without a word")
    assert done.sentence.endswith(f"; go on from the checkpoint of step {step} with --resume")


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path, library: Path, home: Path) -> None:
    slow = slow_sync(library, ".part", 60)
    with started(*PLAIN, *saved_to(tmp_path), LONG, **slow) as job:
        wait_for_line(job, "step ")
        job.send_signal(signal.SIGINT)
        wait_for_line(job, "once more to leave at once")
        began = time.monotonic()
        job.send_signal(signal.SIGINT)
        done = finished(job)
        assert time.monotonic() - began < 30  # far from what the disk takes
    assert done.code == 130, done.error
    assert "interrupted; all processes were stopped" in done.sentence
    assert whole_steps(tmp_path / "saved") == []
    assert wait_until(lambda: processes_of(home) == [], GONE_S)
    assert left_behind(home) == []


def test_a_slow_disk_does_not_cost_whoever_stops_the_current_step(
    tmp_path: Path, library: Path
) -> None:
    slow = slow_sync(library, ".part", 5)
    saves = saved_to(tmp_path, "cluster.deadline_s=2")
    with started(*PLAIN, *saves, LONG, **slow) as job:
        wait_for_line(job, "step ")
        job.send_signal(signal.SIGINT)
        done = finished(job)
    assert done.code == 130, done.error
    (step,) = whole_steps(tmp_path / "saved")
    assert f"saved first; go on from the checkpoint of step {step} " in done.sentence


def test_without_a_folder_for_checkpoints_a_job_that_is_told_to_stop_just_stops() -> None:
    with started(*PLAIN, LONG) as job:
        wait_for_line(job, "step ")
        job.send_signal(signal.SIGINT)
        done = finished(job)
    assert done.code == 130, done.error
    assert done.sentence == "error: interrupted"


# ---------------------------------------------------------------------------- data that ends early


def criteo(path: Path, lines: int) -> str:
    numbers = "\t".join(map(str, range(13)))
    words = "\t".join(f"{word:08x}" for word in range(26))
    path.write_text("".join(f"{n % 2}\t{numbers}\t{words}\n" for n in range(lines)))
    return str(path)


@pytest.mark.parametrize("trainers", [1, 2])
def test_data_that_ends_early_saves_the_last_step_that_it_suffices_for(
    tmp_path: Path, trainers: int
) -> None:
    data = (
        "data.source=criteo",
        f"data.path={criteo(tmp_path / 'day.tsv', 64 * 9 + 40)}",
        "model.tables=26",
        f"trainers={trainers}",
    )
    saves = saved_to(tmp_path)
    done = train(tmp_path, *PLAIN, *data, *saves, "steps=30")
    assert done.code == 1, done.out
    assert "its 616 suffice for 9 steps; lower steps or batch; " in done.sentence
    assert "what was trained so far was saved first" in done.sentence
    assert "go on from the checkpoint of step 9 with --resume" in done.sentence
    assert whole_steps(tmp_path / "saved") == [9]
    assert done.report["steps"] == 9
    again = train(tmp_path, *PLAIN, *data, *saves, "steps=9", "--resume")
    assert again.code == 0, again.error
    assert again.report["resumed_from"] == again.report["steps"] == 9
    if trainers == 2:
        whole = train(tmp_path, *PLAIN, *data, "steps=9")
        assert again.report["digest"] == whole.report["digest"]


def test_data_that_does_not_suffice_for_one_step_says_so(tmp_path: Path) -> None:
    data = ("data.source=criteo", f"data.path={criteo(tmp_path / 'day.tsv', 40)}")
    done = train(tmp_path, *PLAIN, *data, *saved_to(tmp_path), "model.tables=26")
    assert done.code == 1, done.out
    assert "its 40 suffice for 0 steps; lower steps or batch" in done.sentence
    assert "was saved" not in done.sentence


# ---------------------------------------------------------------------------- before it starts


def test_what_cannot_work_is_found_before_anything_starts_all_at_once(
    tmp_path: Path, home: Path
) -> None:
    (tmp_path / "saved").write_text("a file, where a folder should be")
    done = train(tmp_path, *saved_to(tmp_path), "model.rows=2000000000", "servers=3")
    assert done.code == 2, done.error
    assert "model.rows: the job needs " in done.sentence
    assert "checkpoint.path: " in done.sentence
    assert list(home.rglob("*")) == []  # no job has ever had a folder


def test_a_job_says_what_k_became_and_what_that_costs(tmp_path: Path) -> None:
    done = train(tmp_path, "servers=3", "steps=2")
    assert done.code == 0, done.error
    assert "k = 1, parity 1: every record is kept twice (memory x 2.00)" in done.out


# ---------------------------------------------------------------------------- exactness


def test_who_would_compute_other_bits_is_refused_unless_that_is_wanted(tmp_path: Path) -> None:
    saves = saved_to(tmp_path)
    assert train(tmp_path, *PLAIN, *saves, "steps=5").code == 0
    more = (*PLAIN, *saves, "steps=10", "threads.trainer=3", "--resume")
    refused = train(tmp_path, *more)
    assert refused.code == 1, refused.out
    assert "trainer-0: this trainer would not compute the same bits as the job did" in (
        refused.sentence
    )
    assert "set threads.trainer=1" in refused.sentence
    assert whole_steps(tmp_path / "saved") == [5]
    taken = train(tmp_path, *more, "reproducible=off")
    assert taken.code == 0, taken.error
    assert "torch has 3 threads, had 1" in taken.out


def test_portable_jobs_have_one_digest_whatever_the_cpu_can_do(tmp_path: Path) -> None:
    job = (*PLAIN, "steps=10", "reproducible=portable")
    digests = {
        train(tmp_path, *job, ATEN_CPU_CAPABILITY=level).report["digest"]
        for level in ("default", "avx2")
    }
    assert len(digests) == 1
