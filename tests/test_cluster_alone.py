"""A script that was started by itself: a job whose only trainer is that process, which may think
for as long as it likes, and takes everything with it when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from cluster_commands import LIMIT_S, wait_for_line
from cluster_jobs import leaving_nothing, processes_of, wait_until
from script_jobs import PATIENT, PLAIN, SCRIPTS, run_script

import planaria.torch
from planaria.checkpoints import list_checkpoints
from planaria.errors import ConfigError
from planaria.trainer.declaring import SETTINGS, Settings

pytestmark = pytest.mark.torch

PROTECTED = ("servers=3", "parity=1")
# Python ignores SIGINT where whoever started the tests did, as a shell does in the background.
MAIN = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


@contextmanager
def started_alone(
    *words: str,
    sets: Sequence[str] = PROTECTED,
    script: str = "loop.py",
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """`python script.py`, in a session of its own, as in a terminal of its own."""
    without_threads = {n: v for n, v in os.environ.items() if not n.endswith("_NUM_THREADS")}
    settings = msgspec.json.encode(Settings(None, [*PATIENT, *sets])).decode()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, str(SCRIPTS / script), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**without_threads, SETTINGS: settings},
        start_new_session=True,
        cwd=cwd,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def server_of(folder: Path, number: int) -> int:
    """The process of a server, by the name that it gives itself."""
    [found] = [
        pid
        for pid in processes_of(folder)
        if Path(f"/proc/{pid}/comm").read_text() == f"server-{number}\n"
    ]
    return found


def losses(text: str) -> list[str]:
    return re.findall(r"^\d+ -?0x\S+$", text, flags=re.MULTILINE)


def test_it_learns_what_it_learns_under_planaria_run_although_a_server_is_killed(
    folder: Path, tmp_path: Path
) -> None:
    under_run = run_script(tmp_path, "loop.py", "say", sets=(*PLAIN, "trainers=1"))
    with started_alone("say", "sleep=12:1") as process:
        before = wait_for_line(process, "step 12 takes long")
        os.kill(server_of(folder, 1), signal.SIGKILL)
        out, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, error) == (0, "")
    out = "".join(before) + out
    assert len(losses(out)) == 30
    assert losses(out) == losses(under_run.out)
    assert out.endswith("rank 0 is through after step 30\n")


def test_its_model_is_saved_where_it_was_started_wherever_it_goes(tmp_path: Path) -> None:
    """Servers, in another folder, took a relative path for another one, and nobody noticed."""
    saves = (*PROTECTED, "checkpoint.path=saved")
    with started_alone("move", sets=saves, cwd=tmp_path) as process:
        _, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, error) == (0, "")
    assert [one.step for one in list_checkpoints(tmp_path / "saved")] == [30]


@pytest.mark.campaign
def test_a_user_who_thinks_is_not_taken_for_hung() -> None:
    limits = ("cluster.hang_limit_s=1", "cluster.heartbeat_limit_ms=3000")
    with started_alone("sleep=5:6", sets=(*PROTECTED, *limits)) as process:
        out, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, error) == (0, "")
    assert out.endswith("rank 0 is through after step 30\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_its_end_is_the_end_of_every_process(folder: Path, number: signal.Signals) -> None:
    with started_alone("sleep=3:200") as process:
        wait_for_line(process, "step 3 takes long")
        assert len(processes_of(folder)) >= 4  # three servers and a coordinator
        process.send_signal(number)
        _, error = process.communicate(timeout=LIMIT_S)
    assert error.count("KeyboardInterrupt") == (number == signal.SIGINT)
    assert process.returncode == -number
    assert wait_until(lambda: processes_of(folder) == [], 10.0)


@pytest.mark.parametrize("held", [[], ["held"]])
def test_an_exception_shows_its_traceback_once(held: list[str]) -> None:
    """A loop with a name was closed when the interpreter was half gone, with a second traceback."""
    with started_alone("raise=3", *held) as process:
        out, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert (out + error).count("Traceback (most recent call last)") == 1
    assert "RuntimeError: step 3 is one too many" in error


def test_portable_bits_need_variables_that_only_a_new_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were promised, and not kept: torch had chosen its code before."""
    monkeypatch.delenv("MKL_CBWR", raising=False)
    with pytest.raises(ConfigError, match=r"planaria run, or with .*MKL_CBWR=COMPATIBLE"):
        planaria.torch.connect(reproducible="portable")
