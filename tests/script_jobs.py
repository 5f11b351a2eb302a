"""Jobs whose trainers run the scripts in tests/scripts, here or as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from cluster_commands import LIMIT_S, MAIN, Done
from cluster_jobs import BeatenRun, Blow

from planaria.cluster.scripts import Scripts, environment_of, job_of
from planaria.config import Config
from planaria.trainer.declaring import Settings

SCRIPTS = Path(__file__).parent / "scripts"
# Processes that share two cores with a test run are late, not dead.
PATIENT = ("cluster.heartbeat_limit_ms=20000",)
PLAIN = ("strategy=none", "servers=2", "spares=0", "script.spares=0")


@contextmanager
def declared(
    name: str, *words: str, sets: Sequence[str] = ()
) -> Iterator[tuple[Scripts, Config, list[str]]]:
    """A script's trainers at their first batch, the job that they declare, and what they print.

    words: the script's arguments."""
    given = Config.load(None, [*PATIENT, *sets])
    variables = environment_of(given, Settings(None, [*PATIENT, *sets]))
    command, said = [str(SCRIPTS / name), *words], []  # type: list[str], list[str]
    with Scripts(command, given.trainers, given.script.spares, variables, said.append) as scripts:
        yield scripts, Config.from_dict(job_of(scripts.declare())), said


class ScriptRun:
    """A script's job under blows, and what became of it."""

    def __init__(
        self,
        name: str,
        *words: str,
        sets: Sequence[str] = (),
        plan: Sequence[Blow] = (),
        **more: Any,
    ) -> None:
        with declared(name, *words, sets=sets) as (scripts, config, self.said):
            self.beaten = BeatenRun(config, plan, scripts=scripts, **more)
            self.report = self.beaten.run()
            self.wrong = self.beaten.job.scripts_wrong
        assert self.beaten.beating.plan == [], "the job was over before the last blow"
        assert sorted(self.beaten.killed) == sorted(self.beaten.struck)

    @property
    def digest(self) -> str:
        return str(self.report["digest"])


@cache
def undisturbed_script(name: str, *words: str, trainers: int = 1) -> str:
    """The digest of a script's job that nobody disturbs and nothing protects."""
    run = ScriptRun(name, *words, sets=(*PLAIN, f"trainers={trainers}"))
    assert run.report["failures"] == []
    assert run.wrong == ""
    return run.digest


# ---------------------------------------------------------------------------- the command


@contextmanager
def started_script(
    path: Path, *words: str, sets: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`planaria run`, as a user starts it. It is ended with the block."""
    pairs = [word for pair in (*PATIENT, *sets) for word in ("--set", pair)]
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "run", *pairs, *options, str(path), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
    ) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGKILL)


def run_script(
    folder: Path, name: str, *words: str, sets: Sequence[str] = (), options: Sequence[str] = ()
) -> Done:
    """The command from start to end. folder: where it can leave its report."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    options = (*options, f"--report={report}")
    with started_script(SCRIPTS / name, *words, sets=sets, options=options) as job:
        out, error = job.communicate(timeout=LIMIT_S)
    found = json.loads(report.read_text()) if report.exists() else {}
    return Done(job.returncode, out, error, found)
