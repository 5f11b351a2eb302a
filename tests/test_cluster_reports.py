"""Failures are all seen, figures are right: what a job says of itself, whoever strikes it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cluster_commands import LIMIT_S, PLAIN, command, train
from cluster_jobs import BeatenRun, leaving_nothing, tiny, undisturbed

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent
from planaria.cluster.run import JobRun
from planaria.control.children import Failure
from planaria.schedule import Kill
from planaria.wire.control import Rebuilt, StepDone

pytestmark = pytest.mark.torch

PARITY = ("servers=3", "parity=1", "k=2", "spares=1")
COLUMNS = 80
FIRST_WORD_CPU_S = 3.0  # 0.9 s of computing before the first word, on two cores that are shared


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


# ---------------------------------------------------------------------------- whoever strikes


class Struck:
    """A job whose server, and then coordinator, somebody else kills: not with --kill."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.config = tiny(*PARITY, "steps=400")
        self._waiting = [("server", 1), ("coordinator", 0)]
        self._at_rest = True
        self.run = BeatenRun(self.config, on_event=self._on_event)
        self.run.job.reporter._observe = lambda line, progress: self.lines.append(line)
        self.report = self.run.run()

    def _on_event(self, processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, Rebuilt):
            self._at_rest = True
        if isinstance(event.what, StepDone) and event.what.step >= 10 and self._at_rest:
            if self._waiting:
                member = processes.member_of(*self._waiting.pop(0))
                assert member is not None
                os.kill(processes.launcher.pid(member), signal.SIGKILL)
                self._at_rest = False

    def next_step_after(self, who: str) -> float:
        """In ms, by the clock of the events."""
        events = self.run.beating.events
        gone = [e.at for e in events if isinstance(e.what, Failure) and e.what.who == who]
        steps = [e.at for e in events if isinstance(e.what, StepDone) and e.at > gone[0]]
        return (steps[0] - gone[0]) * 1000


def test_a_kill_from_outside_is_seen_like_one_on_purpose(home: Path) -> None:
    job = Struck()
    server, coordinator = job.report["failures"]
    for failure, who in ((server, "server:1"), (coordinator, "coordinator")):
        assert failure["who"] == who
        assert failure["step"] >= 10
        assert failure["reason"] == "killed by SIGKILL"
        assert failure["on_purpose"] is False
        assert failure["gap_ms"] > 0
    assert server["rebuilt_ms"] > 0
    assert server["rows_rebuilt"] > 0
    assert coordinator["gap_ms"] == pytest.approx(job.next_step_after("coordinator"))
    assert any(line.startswith("server:1 is whole again after ") for line in job.lines)
    assert "server:1 (server-1) is gone: killed by SIGKILL" in job.lines
    assert "coordinator (coordinator-0) is gone: killed by SIGKILL" in job.lines
    assert job.report["digest"] == undisturbed("steps=400")
    # Somebody may want to know why, so what they printed is kept.
    (log,) = home.glob("jobs/*/logs/server-1.log")
    assert "server-1 listens" in log.read_text()

    lines: list[str] = []
    told = lambda line, progress: lines.append(line)  # noqa: E731
    meant = JobRun(job.config, [Kill("server", 1, 1, 10)], told).run()["failures"]
    assert [one.keys() for one in meant] == [server.keys()]
    assert meant[0]["on_purpose"] is True
    assert "server:1 (server-1) is gone: killed by SIGKILL" in lines
    assert any(line.startswith("server:1 is whole again after ") for line in lines)
    assert len(list(home.glob("jobs/*"))) == 1  # a control: what was meant leaves no logs


# ---------------------------------------------------------------------------- equal runs


def without_times(out: str) -> tuple[list[str], list[str]]:
    """What a run says at tenths of its steps, in order, and what else it says."""
    out = re.sub(r"^ *[\d.]+ s  ", "", out, flags=re.MULTILINE)
    out = re.sub(r", [\d,]+/s, [\d.]+ (s|min|h) left", "", out)
    out = re.sub(r"in [\d.]+ s, nobody held up for more than [\d.]+ ms", "", out)
    out = re.sub(r"samples/s +[\d,]+", "", out)
    out = re.sub(r"folder is .*", "", out)
    steps, others = [], []
    for line in map(str.strip, out.splitlines()):
        step = re.match(r"step (\d+) of 100", line)
        if step is None:
            others.append(line)
        elif int(step[1]) % 10 == 0:  # others only show that it lives, when nothing else is said
            steps.append(line)
    # How long the processes take to start is nobody's promise.
    clock = ("starting", "waiting for")
    return steps, sorted(line for line in others if line and not line.startswith(clock))


def test_equal_runs_say_equal_things_and_report_what_was_run(tmp_path: Path) -> None:
    said, reports = [], []
    for name in "ab":
        saves = (f"checkpoint.path={tmp_path / name}", "checkpoint.every_steps=25")
        done = train(tmp_path, *PLAIN, *saves)
        assert done.code == 0, done.error
        said.append(without_times(done.out))
        reports.append(done.report)
    assert said[0] == said[1]
    assert len(said[0][0]) == 10
    assert all(" AUC 0." in line for line in said[0][0])
    for report in reports:
        curve = report["loss_curve"]
        assert [step for step, _ in curve] == list(range(1, 101))
        assert f"loss {curve[9][1]:.4f}" in said[0][0][0]
        assert report["config"]["steps"] == 100
        assert report["config"]["optimizer"]["name"] == "adagrad"  # the defaults as well
    assert reports[0]["loss_curve"] == reports[1]["loss_curve"]
    assert reports[0]["auc"] == reports[1]["auc"]


# ---------------------------------------------------------------------------- on a terminal


class Terminal:
    """A command on a terminal of 80 columns, and everything that it writes there."""

    def __init__(self, *words: str) -> None:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        variables = {name: os.environ[name] for name in os.environ if name != "COLUMNS"}
        self.text, self.first_word_cpu_s = "", 0.0
        with subprocess.Popen(
            command(*words),
            stdout=follower,
            stderr=follower,
            stdin=follower,
            env={**variables, "TERM": "xterm"},
            start_new_session=True,
        ) as job:
            os.close(follower)
            self._read(leader, job)
            self.code = job.wait(LIMIT_S)
        os.close(leader)

    def _read(self, leader: int, job: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # nobody is at the other end any more
                return
            if not self.text:
                self.first_word_cpu_s = cpu_s(job.pid)
            self.text += piece.decode(errors="replace")
        job.kill()

    @property
    def rows(self) -> list[str]:
        """Without colours and movements of the cursor."""
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text)
        return [row for row in re.split(r"[\r\n]+", plain) if row.strip()]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_terminal_shows_at_once_and_on_few_lines_how_far_a_job_is(tmp_path: Path) -> None:
    saves = (f"checkpoint.path={tmp_path / 'saved'}", "checkpoint.every_steps=50")
    shown = Terminal(*PLAIN, *saves, "steps=400")
    assert shown.code == 0, shown.text
    assert "training: starting" in shown.rows[0]
    assert shown.first_word_cpu_s < FIRST_WORD_CPU_S
    panels = [
        rows
        for rows in zip(shown.rows, shown.rows[1:], shown.rows[2:], strict=False)
        if rows[0].startswith("training") and "MB of records and parity" in rows[0]
    ]
    assert len(panels) > 3, shown.rows
    assert all(len(row) <= COLUMNS for rows in panels for row in rows)
    running = [rows for rows in panels if re.match(r"step \d+ of 400, loss ", rows[1])]
    assert any(re.search(r"/s, \d+ s left", rows[1]) for rows in running)
    assert all(rows[2].startswith("1 trainer, 2 servers all whole") for rows in running)
    saved = [int(m[1]) for rows in running if (m := re.search(r", step (\d+) is saved", rows[2]))]
    assert saved
    assert all(one <= later and one % 50 == 0 for one, later in pairwise([*saved, saved[-1]]))
