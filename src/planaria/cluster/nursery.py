"""Processes that start at once: they are forked off one that has imported what they need.

Importing PyTorch takes seconds of a core, and when a trainer is replaced, everybody waits for that;
what a server imports takes half a second, for each of them. So a job has two processes that
import, once, and then do nothing but fork: one for trainers, one for servers. A nursery has no
threads, one socket, and no part in the job: without it, processes start the slow way, as the first
coordinator does, which is there from the first moment to clean up. Those that replace it come from
the servers' nursery: they would take a core from the job for several steps.

What it forks becomes a child of the supervisor, as if it had been started by it: the process in
between ends while the supervisor is the one that orphans below it are given to, which it is for no
longer than that takes. So a nursery may die, and nobody notices.

Whoever runs several jobs in one process, as a comparison does, lets them share: see `sharing`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from planaria.collecting import collect_rarely, keep_what_is_there

IMPORT_S = 60.0  # within which it must be ready
FORK_S = 2.0  # within which a process must be there
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
READY = b"ready"
ERRORS = "PLANARIA_ERRORS"  # a variable of the coordinator's: where its supervisor's errors go
STANDARD_FILES = 3

IMPORTS = {
    "trainer": ["planaria.cluster.built_in"],
    "server": ["planaria.cluster.server_node", "planaria.cluster.coordinator_node"],
}
"""By role that a nursery is for: the modules that bring all that is needed, and rehearse it."""

Newborn = tuple[str, str, str, int | None]
"""Its job's folder, role and member, and the place or rank that it has from the start, if any."""

_one_at_a_time = threading.Lock()  # who reaps is known to the kernel by process, not by job


class Forked:
    """A child of this process that it has not started itself; what Popen offers of one."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self._descriptor = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; raises TimeoutExpired."""
        if self._code is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # somebody else in this process has taken it, as with Popen
                self._code = 0
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

    def __init__(self, role: str, environment: dict[str, str]) -> None:
        self.surroundings = _surroundings(role, environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False
        self._began = time.monotonic()
        with theirs:
            self._process = subprocess.Popen(
                # -P: what lies in the user's folder must not pass for one of our modules.
                [sys.executable, "-P", "-m", "planaria.cluster", "nursery", role],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,  # what it cannot do, the slow way will tell
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when it is ready, or gone."""
        return self._socket.fileno()

    def ready(self) -> bool:
        """Whether a process can be forked by now."""
        if not self._ready:
            try:
                said = self._socket.recv(64, socket.MSG_DONTWAIT)
                self._ready, self._broken = said == READY, said != READY
            except BlockingIOError:
                pass
            except OSError:  # the connection was cut
                self._broken = True
        return self._ready

    def gone(self) -> bool:
        """Whether it has ended, or takes too long to be of any use."""
        late = not self._ready and time.monotonic() - self._began > IMPORT_S
        return late or self._broken or self._process.poll() is not None

    def fork(self, newborn: Newborn, log: Path, errors: Sequence[int] = ()) -> Forked | None:
        """A new process; None if there is no nursery any more. It must be ready.

        errors: descriptors that it finds by the variable ERRORS.
        """
        try:
            orders, stdin = os.pipe()
        except OSError:  # out of descriptors
            self._broken = True
            return None
        lifeline = os.fdopen(stdin, "wb", buffering=0)
        pid = None
        try:
            with log.open("ab") as out:
                pid = self._ask(newborn, [orders, out.fileno(), out.fileno(), *errors])
            return Forked(pid, lifeline)
        except OSError:
            self._broken = True
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            lifeline.close()
            return None
        finally:
            os.close(orders)

    _broken = False

    def _ask(self, newborn: Newborn, descriptors: list[int]) -> int:
        """The number of a process that is now a child of this one."""
        self._socket.settimeout(FORK_S)
        with _given_orphans():
            socket.send_fds(self._socket, [msgspec.json.encode(newborn)], descriptors)
            answer = self._socket.recv(64)
        if not answer:
            raise ConnectionError("the nursery has ended")
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _given_orphans() -> Iterator[None]:
    """Meanwhile, orphans below this process become its children."""
    libc, was = ctypes.CDLL(None), ctypes.c_int(0)
    with _one_at_a_time:
        libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, was.value)


_shared: list[Nursery] | None = None  # that no job uses now; None: they are not shared
_sharing = threading.Lock()


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """The jobs that this process runs meanwhile, one after the other, share their nurseries."""
    global _shared
    with _sharing:
        outermost = _shared is None
        _shared = _shared or []
    try:
        yield
    finally:
        if outermost:
            with _sharing:
                unused, _shared = _shared or [], None
            for nursery in unused:
                nursery.close()


def borrow(role: str, environment: dict[str, str]) -> Nursery:
    """One that was given back and would start the same now, or a new one."""
    wanted = _surroundings(role, environment)
    with _sharing:
        for nursery in list(_shared or ()):
            if nursery.surroundings == wanted:
                assert _shared is not None
                _shared.remove(nursery)
                if not nursery.gone():
                    return nursery
                nursery.close()
    return Nursery(role, environment)


def give_back(nursery: Nursery) -> None:
    with _sharing:
        if _shared is not None and nursery.ready() and not nursery.gone():
            _shared.append(nursery)
            return
    nursery.close()


def _surroundings(role: str, environment: dict[str, str]) -> object:
    """All that a process has from the one that starts it."""
    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT")}
    return (
        role,
        sorted(environment.items()),
        str(Path.cwd()),
        sorted((name, resource.getrlimit(limit)) for name, limit in limits.items()),
    )


def serve(role: str, run: Callable[[str, str, str, int | None], int]) -> None:
    """The nursery itself, until the other end of standard input closes.

    run: what a process does until its end; returns its exit code.
    """
    collect_rarely()
    for module in IMPORTS[role]:
        importlib.import_module(module).rehearse()
    keep_what_is_there()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whatever was inherited
    with socket.socket(fileno=os.dup(0)) as supervisor:
        supervisor.send(READY)
        while True:
            request, descriptors, _, _ = socket.recv_fds(supervisor, 4096, STANDARD_FILES + 1)
            if not request:
                return
            between = os.fork()
            if not between:
                newborn = msgspec.json.decode(request, type=Newborn)
                _leave_the_nursery(supervisor, descriptors)
                sys.exit(run(*newborn))  # not at once: the last messages must go out
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)


def _leave_the_nursery(supervisor: socket.socket, descriptors: list[int]) -> None:
    """Returns in a child of the supervisor, with the first of these as its standard files."""
    os.setsid()
    between = os.getpid()
    if os.fork():
        os._exit(0)
    for standard, descriptor in enumerate(descriptors[:STANDARD_FILES]):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ[ERRORS] = " ".join(map(str, descriptors[STANDARD_FILES:]))
    while os.getppid() == between:  # whose end is not the supervisor's
        time.sleep(0.0005)
    supervisor.send(str(os.getpid()).encode())
    supervisor.close()
