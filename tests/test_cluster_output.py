"""A job ends as it would have ended, whatever becomes of its output; and what it says then."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import LIMIT_S, MAIN, PLAIN, command, whole_steps
from cluster_jobs import leaving_nothing, wait_until
from test_cluster_promises import criteo
from typer.testing import CliRunner

from planaria.cli import app
from planaria.cluster.reporting import counted

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def shell(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A line of the shell in which "$@" is these words."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


# ---------------------------------------------------------------------------- nobody reads


@pytest.mark.parametrize(
    "line", ['set -o pipefail; "$@" | head -1', '"$@" >&-', '"$@" <&- >&- 2>&-', '"$@" >/dev/full']
)
def test_a_job_whose_output_nobody_reads_goes_on_to_its_end(tmp_path: Path, line: str) -> None:
    report, saved = tmp_path / "report.json", tmp_path / "saved"
    done = shell(
        line, *command(*PLAIN, "steps=20", f"checkpoint.path={saved}", f"--report={report}")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(report.read_text())["steps"] == 20
    assert whole_steps(saved) == [20]


def test_a_terminal_that_goes_away_is_an_interrupt_with_a_report(tmp_path: Path) -> None:
    report, saved, errors = tmp_path / "report.json", tmp_path / "saved", tmp_path / "errors"
    ours, theirs = pty.openpty()
    words = (f"checkpoint.path={saved}", "checkpoint.every_steps=5", "steps=1000000")
    with errors.open("w") as file:
        job = subprocess.Popen(
            command(*PLAIN, *words, f"--report={report}"),
            stdin=theirs,
            stdout=theirs,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        assert wait_until(lambda: bool(drained(ours) is not None and whole_steps(saved)), LIMIT_S)
    finally:
        os.close(ours)  # the job's first news of it is SIGHUP
    try:
        assert job.wait(LIMIT_S) == 130, errors.read_text()
    finally:
        job.kill()
    sentence = " ".join(errors.read_text().split())
    assert sentence.startswith("error: interrupted; what was trained so far was saved first; ")
    assert json.loads(report.read_text())["failed"] in sentence


def drained(terminal: int) -> bytes:
    """What the job has printed: it would stand still if nobody took it."""
    try:
        return os.read(terminal, 1 << 16)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('"$@" version >&-', 0),
        ('"$@" version >/dev/full', 1),
        ('"$@" --version >/dev/full', 1),
        ('"$@" train --set foo 2>/dev/full', 2),
    ],
)
def test_a_command_that_cannot_print_ends_with_a_sentence_at_most(line: str, code: int) -> None:
    done = shell(line, sys.executable, "-c", MAIN)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == (code == 1)
    if code == 1:
        assert done.stderr.startswith("error: some lines could not be printed: ")


# ---------------------------------------------------------------------------- what is said


def test_an_interrupt_of_the_start_says_that_nothing_was_saved(tmp_path: Path) -> None:
    program = f"""
import os, signal
from planaria.display import Display
shown = Display.__call__
def show(self, line, progress):
    shown(self, line, progress)
    if "start; the job's folder is" in line:  # no process has said anything yet
        os.kill(os.getpid(), signal.SIGTERM)
Display.__call__ = show
{MAIN}
"""
    python, dash_c, _, *words = command(*PLAIN, f"checkpoint.path={tmp_path / 'saved'}")
    done = shell('"$@"', python, dash_c, program, *words)
    assert done.returncode == 130, done.stderr
    sentence = "error: interrupted; nothing was trained so far; nothing was saved\n"
    assert done.stderr == sentence


def test_a_comparison_that_fails_leaves_no_empty_folder_and_names_the_logs(tmp_path: Path) -> None:
    data = ("data.source=criteo", f"data.path={criteo(tmp_path / 'day.tsv', 300)}")
    options = [word for word in command(*data, "model.tables=26", "steps=60") if word != "train"]
    out, existing = tmp_path / "new" / "folder", tmp_path / "existing"
    existing.mkdir()
    for folder in (out, existing):
        done = shell(
            '"$@"', *options[:3], "compare", *options[3:], "--failures=1", f"--out={folder}"
        )
        assert done.returncode == 1, done.stdout
        assert "the undisturbed run did not reach its end" in done.stderr
        assert "; logs are in " in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day.tsv", "existing"]


def test_a_wrong_command_imports_and_starts_nothing_that_it_does_not_need() -> None:
    program = f"""
import atexit, os, sys
def look():
    heavy = [name for name in ("torch", "matplotlib", "fsspec") if name in sys.modules]
    children = open(f"/proc/self/task/{{os.getpid()}}/children").read()
    print("left:", heavy, children)
atexit.register(look)
{MAIN}
"""
    done = shell('"$@"', sys.executable, "-c", program, "train", "--set", "foo")
    assert done.returncode == 2, done.stderr
    assert done.stdout == "left: [] \n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "nothing", "model"], "the folder 'nothing' does not exist"),
        (["export", "nothing", "/"], "'/' exists; name a folder that does not"),
        (["scrub"], "no job is running here"),
        (["scrub", "nothing"], "no job runs in 'nothing'"),
    ],
)
def test_wrong_arguments_are_named_with_exit_code_2(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())


def test_numbers_agree_with_their_nouns() -> None:
    assert [counted(n, "spare") for n in (0, 1, 2)] == ["0 spares", "1 spare", "2 spares"]


def test_the_help_flows_and_loses_no_word() -> None:
    def help_of(name: str) -> list[str]:
        output = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
        return [line.strip() for line in output.splitlines()]

    train, export = help_of("train"), help_of("export")
    (start,) = (n for n, line in enumerate(train) if line.startswith("Servers, trainers and"))
    assert all(len(line) > 60 for line in train[start : start + 2])
    assert "the job's parity" in " ".join(train)
    assert "float32[rows, dim]" in " ".join(export)
    assert " ".join(train).replace("│", "").count("given several") == 3
