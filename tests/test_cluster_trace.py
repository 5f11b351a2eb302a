"""`planaria trace`: what the processes of a real job do, as a browser reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_commands import LIMIT_S, MAIN
from cluster_jobs import leaving_nothing

from planaria.cluster.files import Beginning, JobFiles
from planaria.cluster.trace import Trace
from planaria.cluster.tracing import Tracer
from planaria.config import Config
from planaria.errors import ClusterError

pytestmark = pytest.mark.torch

SMALL = ("--set", "model.rows=2000", "--set", "servers=3", "--set", "k=2", "--set", "trainers=1")
CPR = ("--set=strategy=cpr", "--set=checkpoint.path=unused", "--set=checkpoint.every_steps=5")
STEP = {"lookup", "wait for rows", "compute", "push", "apply", "answer", "delta out", "delta in"}
RECOVERY = {"detect", "prepare", "install", "take place", "ask mates", "decode"}


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "trace", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "COLUMNS": "400"},
        check=False,
    )


class Read:
    """A trace, as its reader sees it."""

    def __init__(self, path: Path) -> None:
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        self.processes = {
            event["pid"]: event["args"]["name"]
            for event in events
            if event["name"] == "process_name"
        }
        self.spans = [event for event in events if event["ph"] == "X"]
        self.moments = [event for event in events if event["ph"] == "i"]

    def of(self, member: str, name: str) -> list[dict[str, Any]]:
        return [
            span
            for span in self.spans
            if self.processes[span["pid"]] == member and span["name"] == name
        ]


def test_a_recovery_is_seen_from_the_kill_to_the_end(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = run(*SMALL, "--kill", "server:1@12", "--steps", "6", "--out", str(out))
    assert done.returncode == 0, done.stderr
    trace = Read(out)
    assert f"processes: {out}" in done.stdout.replace("\n", "")
    assert {"coordinator-0", "server-0", "server-1", "server-3", "trainer-0"} <= {
        *trace.processes.values()
    }
    assert {span["name"] for span in trace.spans} >= STEP | RECOVERY
    steps = {span["args"]["step"] for span in trace.spans}
    assert steps == {-1, *range(10, 16)}
    [killed] = [moment for moment in trace.moments if moment["name"] == "server-1: killed"]
    [whole] = [moment for moment in trace.moments if moment["name"].endswith("whole again")]
    # One clock: what follows from something comes after it, also in other processes.
    [taken] = trace.of("server-3", "take place")
    assert killed["ts"] < trace.of("coordinator-0", "detect")[0]["ts"] < taken["ts"]
    decoded = trace.of("server-3", "decode")
    assert taken["ts"] < decoded[0]["ts"] < whole["ts"]
    assert trace.of("server-1", "apply")  # what it did until then is there
    assert max(span["ts"] for span in trace.of("server-1", "apply")) <= killed["ts"] + 1e6
    for span in trace.spans:
        assert span["ts"] >= 0
        assert span["dur"] >= 0


def test_a_model_that_a_script_trains_ends_with_its_trace(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    job = ("model.name=wide_and_deep", "script.spares=0", "strategy=none")
    named = [word for setting in job for word in ("--set", setting)]
    done = run(*SMALL, *named, "--at", "3", "--steps", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert {span["args"]["step"] for span in Read(out).of("trainer-0", "compute")} == {3, 4}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--at", "400"), "--at: the job has 400 steps, so step 400 is too late"),
        (("--at", "5", "--kill", "server:1@90"), "the job ends with step 10; raise --steps"),
        (("--kill", "server:99@30"), "server:99"),
        (("--out", "/nowhere/trace.json"), "--out: the folder of /nowhere/trace.json"),
        (CPR, "expected erasure or none for a trace"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_anything_starts(
    words: tuple[str, ...], says: str
) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert says in done.stderr.replace("\n", " ")


def test_a_job_that_ends_badly_has_its_trace_as_well(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    unprotected = ("--set", "strategy=none", "--set", "k=1", "--kill", "server:1@12")
    done = run(*SMALL, *unprotected, "--steps", "6", "--out", str(out))
    assert done.returncode == 3, done.stderr
    assert "server-1: killed" in [moment["name"] for moment in Read(out).moments]


# ---------------------------------------------------------------------------- its parts


class Counting:
    step = 0

    def work(self, add: int) -> int:
        self.step += add
        return self.step


def traced(folder: Path, first: int, steps: int) -> tuple[JobFiles, Counting]:
    files = JobFiles(folder)
    (folder / "logs").mkdir(parents=True)
    trace = Trace(first, steps)
    files.create(Config(), Beginning("ab" * 16, trace=trace.window))
    counting = Counting()
    Tracer(files, "server-0", lambda: counting.step).watch(counting, "work", "work")
    return files, counting


def test_only_the_steps_that_are_wanted_are_written(home: Path, tmp_path: Path) -> None:
    files, counting = traced(home / "jobs" / "a", 3, 2)
    assert [counting.work(1) for _ in range(9)] == [*range(1, 10)]
    trace = Trace(3, 2)
    trace.gather(files)
    files.remove()
    trace.write(tmp_path / "out.json")
    assert [span["args"]["step"] for span in Read(tmp_path / "out.json").spans] == [3, 4]


def test_a_process_that_is_not_traced_is_left_alone(home: Path) -> None:
    files, counting = traced(home / "jobs" / "a", 0, 0)
    assert "work" not in vars(counting)
    assert not files.trace("server-0").exists()
    files.remove()


def test_a_full_disk_ends_the_trace_and_not_the_job(home: Path) -> None:
    files, counting = traced(home / "jobs" / "a", 1, 9)
    counting.work(1)
    files.trace("server-0").unlink()
    files.trace("server-0").symlink_to("/dev/full")
    tracer = Tracer(files, "server-0", lambda: counting.step)
    tracer.watch(counting, "work", "again")
    assert [counting.work(1), counting.work(1)] == [2, 3]
    files.remove()


def test_a_line_that_was_cut_short_by_a_kill_is_passed_over(home: Path, tmp_path: Path) -> None:
    files, counting = traced(home / "jobs" / "a", 1, 5)
    counting.work(1)
    with files.trace("server-0").open("ab") as file:
        file.write(b'["work","MainThr')
    trace = Trace(1, 5)
    trace.gather(files)
    files.remove()
    assert trace.spans == 1


def test_a_job_that_ends_too_early_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="nothing was traced: the job has ended before step 7"):
        Trace(7, 2).write(tmp_path / "out.json")
