"""Trainers that start at once: they are forked off a process that has imported PyTorch.

Importing it takes seconds of a core, and when a trainer is replaced, everybody waits for that. So
one process of the job imports it, once, and then does nothing but fork. It has no threads, one
socket, and no part in the job: without it, trainers start the slow way.

What it forks becomes a child of the supervisor, like all other processes of the job: the process in
between ends, and the supervisor is the one that orphans below it are given to. So the nursery may
die, and no trainer notices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

IMPORT_S = 120.0  # within which the first trainer must be there
FORK_S = 10.0  # within which any other one must
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37

Trainer = tuple[str, int | None]
"""Its member, and its rank if it has one from the start."""


class Forked:
    """A child of this process that it has not started itself; what Popen offers of one."""

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._descriptor = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; raises TimeoutExpired."""
        if self._code is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("trainer", timeout or 0.0)
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
            os.close(self._descriptor)
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The supervisor's side."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        """arguments: the command that ends in `serve`."""
        self._was_reaper = _is_reaper()
        _set_reaper(1)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._limit_s = IMPORT_S
        with theirs, log.open("wb") as errors:
            self._process = subprocess.Popen(
                arguments,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, trainer: Trainer, log: Path) -> Forked | None:
        """A new trainer; None if there is no nursery any more."""
        orders, stdin = os.pipe()
        stdout, events = os.pipe()
        ends: list[Any] = [
            os.fdopen(stdin, "wb", buffering=0),
            os.fdopen(stdout, "rb", buffering=0),
        ]
        try:
            with log.open("wb") as errors:
                given = [orders, events, errors.fileno()]
                self._socket.settimeout(self._limit_s)
                socket.send_fds(self._socket, [msgspec.json.encode(trainer)], given)
                answer = self._socket.recv(64)
            if not answer:
                raise ConnectionError
            self._limit_s = FORK_S
            return Forked(int(answer), *ends)
        except OSError:
            for end in ends:
                end.close()
            return None
        finally:
            os.close(orders)
            os.close(events)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
        _set_reaper(self._was_reaper)


def _is_reaper() -> int:
    found = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
    return found.value


def _set_reaper(on: int) -> None:
    """Whether orphans below this process become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, on)


def serve(run: Callable[[str, int | None], int]) -> None:
    """The nursery itself, until the other end of standard input closes.

    run: what a trainer does until its end; returns its exit code.
    """
    import planaria.cluster.trainer_node  # noqa: F401

    with socket.socket(fileno=os.dup(0)) as supervisor:
        while True:
            request, descriptors, _, _ = socket.recv_fds(supervisor, 4096, 3)
            if not request:
                return
            between = os.fork()
            if not between:
                _become_a_trainer(supervisor, msgspec.json.decode(request), descriptors, run)
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)


def _become_a_trainer(
    supervisor: socket.socket,
    trainer: Trainer,
    descriptors: list[int],
    run: Callable[[str, int | None], int],
) -> NoReturn:
    os.setsid()
    between = os.getpid()
    if pid := os.fork():
        supervisor.send(str(pid).encode())
        os._exit(0)
    supervisor.close()
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    while os.getppid() == between:  # whose end is not the supervisor's
        time.sleep(0.0005)
    sys.exit(run(*trainer))  # not at once: the last messages must go out
