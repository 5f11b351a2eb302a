"""Ways to harm one process of a job for real, and no hooks for them in the product.

Only processes that a test's own job has started are ever touched.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_jobs import OnEvent

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent
from planaria.wire.control import StepDone

PTRACE_CONT = 7
PTRACE_DETACH = 17
PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
WALL = 0x40000000  # __WALL: the thread of another process, too
# poll, ppoll, futex, epoll_wait and epoll_pwait, on x86-64 and on arm64: a server's main thread
# waits for messages, a trainer's for the one that talks.
WAITS = {"7", "271", "73", "202", "98", "232", "281", "22"}
TRY_S = 60.0
LITTLE_S = 0.002


def at_step(step: int, strike: Callable[[Attempt], object]) -> OnEvent:
    """Once, when the job has come to a step."""
    struck: list[int] = []

    def on_event(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, StepDone) and event.what.step >= step and not struck:
            struck.append(event.what.step)
            strike(processes)

    return on_event


def pid_of(processes: Attempt, member: str) -> int:
    return processes.launcher.pid(member)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# ------------------------------------------------------------------------------- hung threads


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """The main thread of a process stands still, and its other threads go on.

    It is stopped where it waits: elsewhere it might have Python's lock, and the others could not go
    on. Who traces a process is a thread, so the same one must leave this.
    """
    _trace(PTRACE_SEIZE, pid)
    deadline = time.monotonic() + TRY_S
    while True:
        _trace(PTRACE_INTERRUPT, pid)
        os.waitpid(pid, WALL)
        if Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()[0] in WAITS:
            break
        assert time.monotonic() < deadline, f"process {pid} never waits"
        _trace(PTRACE_CONT, pid)
        time.sleep(LITTLE_S)
    try:
        yield
    finally:
        if exists(pid):
            _trace(PTRACE_DETACH, pid)


def _trace(request: int, pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, pid, None, None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# ------------------------------------------------------------------------------- want of anything


def no_more_memory(pid: int) -> None:
    """Whatever a process asks the kernel for from now on, it does not get.

    What malloc has in stock it can still give out: see `NO_STOCK`.
    """
    resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))


NO_STOCK = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0"}
"""An environment in which malloc asks the kernel for everything that is not small."""


def no_more_files(pid: int) -> None:
    """It can open no file and no connection that it does not have yet."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, hard))


def full_disk(pid: int) -> None:
    """Every write to a file fails, as on a full disk; sockets and pipes go on."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
