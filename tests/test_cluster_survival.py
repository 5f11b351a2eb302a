"""Want of memory, of descriptors, of disk, of time: one process fails, and the job goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_hangs import (
    NO_STOCK,
    at_step,
    exists,
    full_disk,
    no_more_files,
    no_more_memory,
    pid_of,
)
from cluster_jobs import BeatenRun, leaving_nothing, tiny, undisturbed

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.files import home
from planaria.config import Config
from planaria.errors import ClusterError, LossError
from planaria.wire.control import Listening, Ready, StepDone, TrainerHolds, Working

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

SHAPE = ("servers=3", "parity=1", "cluster.heartbeat_limit_ms=2000")
WANTS_MEMORY = ("batch=256", "model.dim=32", "model.rows=3000", "steps=60")
# As NumPy, torch, the kernel and C++ say it. Some of what torch calls does not look whether it got
# memory, and ends with a signal instead, which is then the reason.
OUT_OF_MEMORY = re.compile(r"[Mm]emory|bad_alloc|killed by SIG(SEGV|ABRT|BUS)")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def failures_of(report: dict[str, Any], who: str) -> list[str]:
    return [one["reason"] for one in report["failures"] if one["who"] == who]


# ---------------------------------------------------------------------------- one process fails


@pytest.mark.parametrize(("member", "who"), [("server-1", "server:1"), ("trainer-0", "trainer:0")])
def test_a_process_that_runs_out_of_memory_is_replaced_and_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch, member: str, who: str
) -> None:
    for name, value in NO_STOCK.items():
        monkeypatch.setenv(name, value)
    pids: list[int] = []

    def strike(processes: Attempt) -> None:
        pids.append(pid_of(processes, member))
        no_more_memory(pids[0])

    run = BeatenRun(tiny(*SHAPE, *WANTS_MEMORY), on_event=at_step(20, strike))
    report = run.run()
    assert report["digest"] == undisturbed(*WANTS_MEMORY)
    [why] = failures_of(report, who)
    assert OUT_OF_MEMORY.search(why), why
    assert not exists(pids[0])


def test_a_spare_that_runs_out_of_memory_when_it_takes_a_place_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in NO_STOCK.items():
        monkeypatch.setenv(name, value)

    def strike(processes: Attempt) -> None:
        [spare] = processes.machine.spares
        no_more_memory(pid_of(processes, spare))
        processes.signal("server-1")

    run = BeatenRun(tiny(*SHAPE, *WANTS_MEMORY), on_event=at_step(20, strike))
    report = run.run()
    assert report["digest"] == undisturbed(*WANTS_MEMORY)
    reasons = failures_of(report, "server:1")
    assert any(map(OUT_OF_MEMORY.search, reasons)), reasons


def test_a_spare_that_ends_is_never_fatal() -> None:
    ended: list[str] = []

    def strike(processes: Attempt, event: JobEvent) -> None:
        for spare in processes.machine.spares:
            if spare not in ended and processes.step >= 5:
                ended.append(spare)
                processes.signal(spare, signal.SIGTERM)

    run = BeatenRun(tiny(*SHAPE), on_event=strike)
    assert run.run()["digest"] == undisturbed()
    assert ended


def test_a_place_that_fails_again_at_the_same_step_ends_the_job_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever takes the place of server 1 finds no memory."""
    for name, value in NO_STOCK.items():
        monkeypatch.setenv(name, value)

    def starve(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, Ready) and event.member in processes.machine.spares:
            no_more_memory(pid_of(processes, event.member))
        strike(processes, event)

    strike = at_step(20, lambda processes: processes.signal("server-1"))
    saves = (f"checkpoint.path={tmp_path / 'saves'}", "checkpoint.every_steps=5")
    run = BeatenRun(tiny(*SHAPE, *WANTS_MEMORY, *saves), on_event=starve)
    with pytest.raises(ClusterError) as raised:
        run.run()
    said = str(raised.value)
    assert re.search(r"server:1 failed \d times at step \d+: .*(Memory|memory)", said), said
    assert re.search(r"go on from the checkpoint of step \d+ with --resume", said), said
    check_logs(said, "server-1")


def check_logs(said: str, member: str) -> None:
    """They are where the sentence says, and something is in them."""
    found = re.search(r"logs are in ([^\s;]+)", said)
    assert found, said
    assert (Path(found[1]) / f"{member}.log").read_text().strip()


def test_the_logs_of_a_lost_job_are_where_its_last_sentence_says() -> None:
    def strike(processes: Attempt) -> None:
        for member in ("server-0", "server-1"):
            processes.signal(member)

    run = BeatenRun(tiny(*SHAPE, "k=2", "spares=0"), on_event=at_step(20, strike))
    with pytest.raises(LossError) as raised:
        run.run()
    check_logs(str(raised.value), "server-0")


# ---------------------------------------------------------------------------- files and disks


@pytest.mark.parametrize("want", [no_more_files, full_disk])
@pytest.mark.parametrize("member", ["server-0", "trainer-0", "coordinator-0"])
def test_a_process_that_can_open_or_write_no_file_is_survived_also_when_a_server_dies(
    member: str, want: Callable[[int], None]
) -> None:
    """A view change makes it write its log, connect to whoever is new, or save the view.

    It may end of that, as ZeroMQ does that cannot accept a connection: then it is one more to
    replace.
    """

    def strike(processes: Attempt) -> None:
        want(pid_of(processes, member))
        processes.signal("server-1")

    run = BeatenRun(tiny(*SHAPE, "servers=4", "parity=2"), on_event=at_step(20, strike))
    report = run.run()
    assert report["digest"] == undisturbed()
    assert "killed by SIGKILL" in failures_of(report, "server:1")


def test_a_disk_that_is_full_for_everybody_costs_no_server() -> None:
    """Their logs are all that servers and trainers write; without room for a line they ended."""

    def strike(processes: Attempt) -> None:
        for member in processes.launcher.processes:
            if not member.startswith("coordinator"):
                full_disk(pid_of(processes, member))
        processes.signal("server-1")

    run = BeatenRun(tiny(*SHAPE), on_event=at_step(20, strike))
    report = run.run()
    assert report["digest"] == undisturbed()
    assert {one["who"] for one in report["failures"]} == {"server:1"}


@pytest.mark.parametrize("and_then", ["nothing", "a server dies", "the coordinator dies"])
def test_a_job_whose_folder_is_cleaned_out_ends_and_says_what_happened(
    folder: Path, and_then: str
) -> None:
    """The coordinator may not speak of what it cannot save; the others go on until it must."""

    def strike(processes: Attempt) -> None:
        shutil.rmtree(processes.folder)
        if and_then != "nothing":
            processes.signal("server-1" if "server" in and_then else "coordinator-0")

    run = BeatenRun(tiny(*SHAPE), on_event=at_step(20, strike))
    with pytest.raises(ClusterError, match=r"somebody has removed the job's folder") as raised:
        run.run()
    assert str(folder) in str(raised.value)


def test_jobs_have_their_folders_where_nobody_cleans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANARIA_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere/state")
    assert home() == Path("/somewhere/state/planaria")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/of/a/user")
    monkeypatch.setenv("TMPDIR", "/cleaned")
    assert home() == Path("/home/of/a/user/.local/state/planaria")
    monkeypatch.setenv("PLANARIA_HOME", os.devnull)  # so that the fixture finds it again


# ---------------------------------------------------------------------------- long work


PERIOD_S = 1.0


class Slowed(Watcher):
    """Lets a process run for a share of the time only, from one event to another.

    limit_s: after so long it runs as it likes, or a busy machine would take for ever.
    """

    def __init__(
        self,
        member: str,
        share: float,
        limit_s: float,
        begins: Callable[[Any], bool],
        ends: type[Any],
    ) -> None:
        self.member = member
        self.run_s = share * PERIOD_S
        self.limit_s = limit_s
        self.begins = begins
        self.ends = ends
        self.began: float | None = None
        self.took_s: float | None = None
        self.told: list[str] = []

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if event.member != self.member or self.took_s is not None:
            return
        if self.began is None and self.begins(event.what):
            self.began = event.at
        if self.began is not None and isinstance(event.what, self.ends):
            self.took_s = event.at - self.began
            processes.signal(self.member, signal.SIGCONT)
        if isinstance(event.what, Working):
            self.told.append(event.what.what)

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self.began is not None and self.took_s is None:
            so_far_s = now - self.began
            runs = so_far_s % PERIOD_S < self.run_s or so_far_s > self.limit_s + 1
            processes.signal(self.member, signal.SIGCONT if runs else signal.SIGSTOP)


def slowed_run(monkeypatch: pytest.MonkeyPatch, config: Config, slowed: Slowed) -> dict[str, Any]:
    """The limit is what cluster.deadline_s and the patience beyond it come to."""
    patience_s = slowed.limit_s - config.cluster.deadline_s
    monkeypatch.setattr("planaria.control.supervising.STALL_S", patience_s)
    monkeypatch.setattr("planaria.cluster.attempt.POLL_MS", 10)
    run = BeatenRun(config)
    run.job.observers.append(slowed)
    report = run.run()
    assert slowed.took_s is not None
    assert slowed.took_s > slowed.limit_s  # a control: it was longer than all limits
    assert slowed.member not in run.killed
    return report


def test_a_start_that_takes_longer_than_every_limit_is_waited_for_while_it_tells_of_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """26 GB per server took more than the 60 s after which it was killed."""
    large = ("model.rows=600000", "model.dim=16", "steps=3")
    config = tiny("servers=3", "parity=1", *large, "cluster.deadline_s=4", "cluster.hang_limit_s=8")
    slowed = Slowed("server-1", 0.01, 8.0, lambda told: isinstance(told, Listening), Ready)
    report = slowed_run(monkeypatch, config, slowed)
    assert report["digest"] == undisturbed(*large)
    assert "filling its records" in slowed.told


def test_an_evaluation_that_takes_longer_than_every_limit_finishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 M samples were one message, and nothing was heard while they were read and judged."""
    many = ("data.test_samples=600000", "steps=10")
    config = tiny("servers=3", "parity=1", *many, "cluster.deadline_s=4", "cluster.hang_limit_s=8")

    def is_last(told: Any) -> bool:
        return isinstance(told, StepDone) and told.step == config.steps

    slowed = Slowed("trainer-0", 0.03, 8.0, is_last, TrainerHolds)
    report = slowed_run(monkeypatch, config, slowed)
    assert report["digest"] == undisturbed(*many)
    assert report["test_samples"] == 600_000
    assert "evaluating" in slowed.told


# ---------------------------------------------------------------------------- retries

COUNTER = """
import os
from planaria.cluster import node
from planaria.wire.messages import Push

post = node.Node.post

def counted(self, outbox):
    for to, message in outbox:
        if isinstance(message, Push):
            line = f"{message.step} {to} {message.array_bytes()}\\n"
            with open(os.environ["COUNTED_PUSHES"], "a") as file:
                file.write(line)
    post(self, outbox)

node.Node.post = counted
"""


class LongSteps(Watcher):
    """One server stops for so long in every step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.wakes_at: float | None = None

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if isinstance(event.what, StepDone) and event.what.rank == 0 and self.wakes_at is None:
            self.wakes_at = processes.signal("server-1", signal.SIGSTOP) + self.seconds

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self.wakes_at is not None and now > self.wakes_at:
            processes.signal("server-1", signal.SIGCONT)
            self.wakes_at = None


def test_steps_longer_than_retry_ms_push_no_gradient_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With steps of 0.55 to 1 s and retry_ms 500, pushes were 120 MB a step instead of 45."""
    counts = tmp_path / "pushes"
    (tmp_path / "sitecustomize.py").write_text(COUNTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COUNTED_PUSHES", str(counts))
    run = BeatenRun(tiny("servers=3", "parity=1", "batch=512", "model.rows=5000", "steps=8"))
    run.job.observers.append(LongSteps(0.8))
    run.run()
    sent: dict[tuple[str, ...], int] = {}
    total = 0
    for line in counts.read_text().splitlines():
        step, to, size = line.split()
        sent[step, to] = max(int(size), sent.get((step, to), 0))
        total += int(size)
    steps = [event.at for event in run.beating.events if isinstance(event.what, StepDone)]
    assert steps[-1] - steps[0] > 6 * 0.5  # a control: steps were long
    once = sum(sent.values())
    print(f"{total} bytes of pushes, {once} would do")
    assert once > 8 * 3 * 1000
    assert total <= 1.1 * once
