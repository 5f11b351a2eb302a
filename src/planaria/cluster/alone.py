"""The supervisor of a job whose only trainer is a process that was there before: a script that was
started by itself, or a notebook. It says nothing unless something goes wrong, and ends with either.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from planaria.cluster.resuming import find_start
from planaria.cluster.run import JobRun
from planaria.cluster.script import ScriptProcess
from planaria.cluster.scripts import Scripts, job_of
from planaria.config import Config
from planaria.errors import ClusterError, PlanariaError

EXIT_FAILED = 1


class Attached(ScriptProcess):
    """The process that has started this one. It is nobody's to end."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        super().__init__(line, rank=0)
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        readable, _, _ = select.select([self._descriptor], [], [], 0)
        return 0 if readable else None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


class OnlyScript(Scripts):
    """It cannot be run again: when it is gone, so is the job."""

    def __init__(self, process: Attached) -> None:
        super().__init__(["this script"], 1, 0, {}, lambda line: None)
        self._process = process

    def _start(self, rank: int) -> ScriptProcess:
        if self._placed:
            raise ClusterError("the script was the job's only trainer, and has ended")
        self._waiting.append(self._process)
        return self._process

    def see_out(self, is_interrupted: Callable[[], bool]) -> str:
        return ""


def supervise(number: int, pid: int) -> int:
    """number: the descriptor of the line to the trainer; returns the exit code."""
    with OnlyScript(Attached(socket.socket(fileno=number), pid)) as script:
        try:
            config = Config.from_dict(job_of(script.declare()))
            resume = config.script.resume == "on"
            run = JobRun(config, start=find_start(config, resume=resume), scripts=script)
            if problem := run.unsaved(run.run()):
                raise ClusterError(problem)
        except PlanariaError as error:
            script.refuse(str(error))
            print(f"planaria: {error}", file=sys.stderr, flush=True)
            return EXIT_FAILED
    return 0


def main(arguments: Sequence[str]) -> int:
    number, pid = map(int, arguments)
    os.chdir(Path.home())  # nothing of the user's folder is meant for this process
    return supervise(number, pid)
