"""A full disk and a lack of descriptors: what a process cannot write or open does not end the job,
and does not hide why it ended. A storm (tests/storm.py) found all of these.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoint_jobs import Model
from cluster_jobs import wait_until
from typer.testing import CliRunner

from planaria import Layout
from planaria.checkpoints import Lease
from planaria.cli import app
from planaria.cluster import files as job_files
from planaria.cluster.attempt import Attempt
from planaria.cluster.files import JobFiles
from planaria.cluster.launcher import LocalLauncher
from planaria.cluster.reporting import Reporter
from planaria.cluster.resuming import Resumption
from planaria.cluster.run import JobRun, _give_back
from planaria.cluster.server_node import resident_bytes
from planaria.config import Config
from planaria.control.supervising import SupervisorMachine
from planaria.errors import CheckpointError, ClusterError, LossError

FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ends_with(program: str, log: Path) -> int:
    """The exit code of a program whose standard error is a file on a full disk."""
    with log.open("wb") as file:
        return subprocess.run([sys.executable, "-c", FULL_DISK + program], stderr=file).returncode


def test_a_line_that_its_log_has_no_room_for_ends_no_process(tmp_path: Path) -> None:
    """A server wrote a line at every view; on a full disk that was the end of all servers."""
    program = "from planaria.cluster.node import log; log('view 2'); import os; os._exit(0)"
    assert ends_with(program, tmp_path / "log") == 0


def test_last_words_that_find_no_room_keep_nobody_from_leaving(tmp_path: Path) -> None:
    """The exception while its traceback was printed took the way through the interpreter's end,
    where a process that still beats may wait for its sockets.
    """
    program = "from planaria.cluster.__main__ import _end; _end(7, 'no such file')"
    assert ends_with(program, tmp_path / "log") == 7


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("OSError(24, 'Too many open files')", 1),
        ("OSError(5, 'Input/output error')", 1),
        ("FileNotFoundError(2, 'No such file or directory')", 7),
        ("EOFError('cut off')", 7),
        ("gzip.BadGzipFile('no gzip file')", 7),
        ("None", 7),
    ],
)
def test_data_that_one_process_cannot_read_is_read_by_another_first(
    tmp_path: Path, cause: str, code: int
) -> None:
    """A trainer without a descriptor left said that the file was wrong, which ended the job."""
    program = (
        "import gzip; from planaria.cluster import __main__ as one, built_in\n"
        "from planaria.errors import DataError\n"
        "def run(*_): raise DataError('cannot read it') from " + cause + "\n"
        "built_in.run = run; one._end_with_the_supervisor = print\n"
        "one.supervisor_is_gone = lambda: False\n"
        f"one.work({str(tmp_path)!r}, 'trainer', 'trainer-0', 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "cannot read it\n")


def test_what_killed_processes_left_is_removed_by_the_next_job_but_for_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor and its coordinator, which cleans up for it, were killed within 0.2 s: keys and
    sockets stayed until twenty more jobs had run.
    """
    monkeypatch.setenv("PLANARIA_HOME", str(tmp_path))
    left = left_by_a_killed_supervisor()
    running = JobFiles.fresh()
    running.create(Config(), job_files.Beginning("ab" * 16))
    assert running.running()
    assert not left.running()
    being_made = JobFiles.fresh()  # nothing is in it yet
    JobFiles.fresh()
    assert [path.name for path in left.folder.iterdir()] == ["logs"]
    assert left.log("server-0").exists()
    assert (running.folder / "keys").exists()
    assert being_made.folder.exists()
    running.remove()


SUPERVISOR = """
import sys, time
from planaria.cluster.files import Beginning, JobFiles
from planaria.config import Config
files = JobFiles.fresh()
files.create(Config(), Beginning("ab" * 16))
files.log("server-0").write_text("killed")
print(files.folder, flush=True)
sys.stdin.read()
"""


def left_by_a_killed_supervisor(*command: str) -> JobFiles:
    """command: what to start it with, which may hide it from others."""
    with supervised(*command) as (files, process):
        process.kill()
        process.wait()
        return files


@contextmanager
def supervised(*command: str) -> Iterator[tuple[JobFiles, subprocess.Popen[str]]]:
    with subprocess.Popen(
        [*command, sys.executable, "-c", SUPERVISOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield JobFiles(Path(process.stdout.readline().strip())), process
        process.stdin.close()


@pytest.mark.parametrize("keep_logs", [True, False])
def test_a_removal_that_is_cut_short_is_gone_on_with_by_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keep_logs: bool
) -> None:
    """A supervisor was killed while it cleared up. What told the next job that there was something
    to remove was removed before the rest.
    """
    monkeypatch.setenv("PLANARIA_HOME", str(tmp_path))
    unlink = Path.unlink

    def cut_short(after: int) -> Callable[[Path], None]:
        left = iter(range(after))

        def remove(path: Path) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt  # an end that nobody catches
            unlink(path)

        return remove

    for after in range(8):
        files = left_by_a_killed_supervisor()
        for member in range(3):
            (files.folder / f"server-{member}.ipc").touch()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", cut_short(after))
            with contextlib.suppress(KeyboardInterrupt):
                files.remove(keep_logs=keep_logs)
        JobFiles.fresh()
        there = list(files.folder.iterdir()) if files.folder.exists() else []
        assert [path.name for path in there if path.name != "logs"] == []


def test_the_files_of_a_job_in_another_container_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor was known by its number, which means another process there, or none: the next
    job removed the files of one that was running.
    """
    monkeypatch.setenv("PLANARIA_HOME", str(tmp_path))
    elsewhere: tuple[str, ...] = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        elsewhere = ()  # not allowed here: another process must do
    with supervised(*elsewhere) as (files, _):
        JobFiles.fresh()
        assert (files.folder / "keys").exists()
        assert files.running()
    assert wait_until(lambda: not files.running(), 10)
    JobFiles.fresh()
    assert not (files.folder / "keys").exists()


def test_jobs_that_clear_up_at_the_same_moment_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One found that a folder was gone which it had just seen, and could not start."""
    monkeypatch.setenv("PLANARIA_HOME", str(tmp_path))
    program = (
        "from planaria.cluster.files import JobFiles\n"
        "for _ in range(150):\n"
        "    files = JobFiles.fresh()\n"
        "    (files.folder / 'supervisor').touch()\n"
        "    files.remove(keep_logs=_ % 2 == 0)\n"
    )
    several = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [one.wait(120) for one in several] == [0, 0, 0]


def test_a_process_whose_end_nobody_could_see_is_one_that_could_not_be_started(
    tmp_path: Path,
) -> None:
    """The supervisor ran out of descriptors between starting a process and watching it, and ended
    with a traceback.
    """
    (tmp_path / "logs").mkdir()
    launcher = LocalLauncher(Config(), JobFiles(tmp_path))
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    with no_descriptors():
        launcher._keep("server", "server-9", child)
    assert child.returncode == -signal.SIGKILL
    ((member, ended),) = launcher.ended()
    assert member == "server-9"
    assert "could not be started" in ended.last_words
    assert "Too many open files" in ended.last_words


def test_a_figure_that_cannot_be_read_ends_no_server() -> None:
    """A server that had done all its steps, and had no descriptor left to ask for its memory,
    ended with an exception: without parity, all was lost.
    """
    assert resident_bytes() > 0
    with no_descriptors():
        assert resident_bytes() == 0


def test_an_error_of_the_supervisor_itself_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = object.__new__(Attempt)
    attempt.machine = SupervisorMachine(Config(), 0, 0.0)

    def turn() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(attempt, "_turn", turn)
    verdict = attempt.run()
    assert not verdict.lost
    assert verdict.sentence == ("the supervisor could not go on: [Errno 24] Too many open files")


def test_a_lease_that_cannot_be_given_back_does_not_spoil_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was done, and ended with an error about LEASE.json."""
    lease = Lease(tmp_path, "ab" * 16, owner="me")
    lease.acquire(0.0)

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(type(lease._root), "remove_if", refuse)
    with pytest.raises(CheckpointError):
        lease.release()
    again = Lease(tmp_path / "other", "ab" * 16, owner="me")
    again.acquire(0.0)
    _give_back(again)


def test_a_report_that_cannot_be_written_does_not_hide_why_the_job_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was lost on a full disk said that the run was done, but for its report."""

    def lose(self: JobRun) -> None:
        raise LossError("server:1 was lost; go on from the checkpoint of step 20 with --resume")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobRun, "run", lose)
    monkeypatch.setattr("planaria.running.write_atomically", refuse)
    result = CliRunner().invoke(app, ["train", "--report", str(tmp_path / "report.json")])
    assert result.exit_code == 3
    assert result.stderr == (
        "error: server:1 was lost; go on from the checkpoint of step 20 with --resume; its report "
        "could not be written: [Errno 28] No space left on device\n"
    )


def test_output_that_finds_no_room_neither_ends_a_job_nor_changes_its_exit_code(
    tmp_path: Path,
) -> None:
    """`planaria train > file` ended without a word when the disk was full: the line about a
    checkpoint could not be printed.
    """
    program = (
        "import sys; from planaria import cli; from planaria.cluster.reporting import Progress; "
        "from planaria.config import Config; from planaria.display import Display; "
        "show = Display(cli.console, 'training', Config()); "
        "cli.app = lambda: [show('a line', Progress()) for _ in range(2)]; "
        "cli.main()"
    )
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK + program], stdout=out, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_way_back_is_named_whatever_ends_a_resumed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the lease, and of starting again after a loss, did not name it."""
    monkeypatch.setenv("PLANARIA_HOME", os.devnull)  # no folder
    Model().save(tmp_path / "saves", 20, Layout.fresh(3, 1))
    job = Config.load(None, [f"checkpoint.path={tmp_path / 'saves'}"])
    with pytest.raises(ClusterError) as failure:
        JobRun(job, start=Resumption(20)).run()
    assert str(failure.value).endswith("; go on from the checkpoint of step 20 with --resume")


def test_a_digest_that_nobody_could_tell_is_said_to_be_unknown() -> None:
    """A server was killed after the last step, before a supervisor that slept had heard from it
    what it holds: a KeyError.
    """
    reporter = Reporter(Config(), lambda line, progress: None, 0)
    reporter.progress.servers, reporter.progress.trainers = ["server-0"], ["trainer-0"]
    with pytest.raises(ClusterError, match=r"server-0, trainer-0 ended before .* is not known"):
        reporter.result()
