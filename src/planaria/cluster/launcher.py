"""Starts the processes of a job and tells of their end; nothing else.

Rows, views, keys and logs do not pass through it. A process's standard input is a pipe that nobody
writes to: its end is the end of the supervisor. Standard output and error are its log.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from planaria.cluster.accounts import OomKills, Works, name_of_signal
from planaria.cluster.files import HOME, JobFiles
from planaria.cluster.node import is_logged
from planaria.cluster.nursery import ERRORS, IMPORTS, Forked, Nursery, borrow, give_back
from planaria.cluster.script import ScriptProcess
from planaria.cluster.scripts import Scripts
from planaria.config import Config
from planaria.control.children import Ended
from planaria.exactness import environment
from planaria.trainer.declaring import Assignment
from planaria.wire.messages import Member

STOP_S = 2.0  # how long processes may take to leave before they are killed
LAST_LINES = 20


@dataclass
class Process:
    role: str
    handle: subprocess.Popen[bytes] | Forked | ScriptProcess
    descriptor: int  # becomes readable when it ends


class Launcher(ABC):
    """Use it as a context manager; leaving it leaves no process behind."""

    processes: dict[Member, Process]  # those on this machine

    @abstractmethod
    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def fileno(self) -> int:
        """Readable when there may be something for `ended`."""

    @abstractmethod
    def start(self, role: str, member: Member, number: int | None) -> None:
        """A process that cannot be started is one that has ended."""

    @abstractmethod
    def signal(self, member: Member, number: signal.Signals = signal.SIGKILL) -> None:
        """Nothing happens if the process has ended."""

    @abstractmethod
    def ended(self) -> list[tuple[Member, Ended]]:
        """Who has ended since the last call."""

    @abstractmethod
    def tend(self, ranks: Mapping[Member, int], now: float) -> list[tuple[Member, int]]:
        """Now and then, where trainers run scripts: shows what they print. ranks: who has which by
        now. Returns who was seen to work on the way to its first batch, and a number that grows.
        """

    @abstractmethod
    def see_out(self, is_interrupted: Callable[[], bool]) -> str:
        """The job is done: waits until scripts have ended; what is wrong with how, if anything."""

    @abstractmethod
    def close(self) -> None:
        """Ends every process, politely first."""

    def pid(self, member: Member) -> int:
        return self.processes[member].handle.pid

    def where(self, member: Member) -> str:
        """The name of its host, if that is not this machine."""
        return ""

    def domain(self, member: Member) -> str | None:
        """What dies together with it, by name; None: it is nowhere yet."""
        return ""

    def waiting(self) -> Collection[Member]:
        """Whom no machine has room for so far."""
        return ()


class LocalLauncher(Launcher):
    """Everything on this machine."""

    def __init__(
        self,
        config: Config,
        files: JobFiles,
        trainers: Scripts | None = None,
        nurseries: Collection[str] = tuple(IMPORTS),
    ) -> None:
        """trainers: where they run a user's script. nurseries: for these roles."""
        self._scripts = trainers
        self._forked = [role for role in nurseries if trainers is None or role != "trainer"]
        self.config = config
        self.files = files
        self.processes: dict[Member, Process] = {}
        self._by_descriptor: dict[int, Member] = {}
        self._epoll = select.epoll()
        self._nurseries: dict[str, Nursery] = {}  # by role
        self._unborn: list[tuple[str, Member, int | None]] = []  # who waits for a nursery
        self._failed: list[tuple[Member, Ended]] = []  # could not even be started
        self._oom_kills = OomKills(time.monotonic())
        self._works = Works()

    def __enter__(self) -> Self:
        for role in self._forked:
            with contextlib.suppress(OSError):  # without it, processes start the slow way
                self._nurseries[role] = borrow(role, self._environment(role))
                self._epoll.register(self._nurseries[role].fileno(), select.EPOLLIN)
        return self

    def fileno(self) -> int:
        """Also readable when a nursery is ready."""
        return self._epoll.fileno()

    # ------------------------------------------------------------------ starting

    def start(self, role: str, member: Member, number: int | None) -> None:
        if role == "trainer" and self._scripts is not None:
            part = Assignment(str(self.files.folder), member, number)
            try:
                self._keep(role, member, self._scripts.place(part, self.files.log(member)))
            except OSError as error:
                self._not_started(member, error)
        elif role in self._nurseries:
            self._unborn.append((role, member, number))
            self._bear()
        elif role != "coordinator" or not self._fork("server", role, member, number):
            self._spawn(role, member, number)

    def _environment(self, role: str) -> dict[str, str]:
        # A process is told its folder: one that jobs share must not seem to belong to one of them.
        inherited = {name: value for name, value in os.environ.items() if name != HOME}
        if role == "trainer":
            return {**inherited, **environment(self.config)}
        threads = str(self.config.threads.server)
        return {**inherited, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}

    def _spawn(self, role: str, member: Member, number: int | None) -> None:
        # -P: what lies in the user's folder must not pass for one of our modules.
        command = [sys.executable, "-P", "-m", "planaria.cluster", role, str(self.files.folder)]
        more = [] if number is None else [str(number)]
        variables = self._environment(role)
        try:
            with self.files.log(member).open("ab") as log, _our_errors(role) as errors:
                handle = subprocess.Popen(
                    [*command, member, *more],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**variables, ERRORS: " ".join(map(str, errors))},
                    pass_fds=errors,
                    start_new_session=True,  # Ctrl-C reaches the supervisor alone
                )
        except OSError as error:
            self._not_started(member, error)
            return
        self._keep(role, member, handle)

    def _not_started(self, member: Member, error: OSError) -> None:
        self._failed.append((member, Ended(1, f"it could not be started: {error}")))

    def _keep(
        self, role: str, member: Member, handle: subprocess.Popen[bytes] | Forked | ScriptProcess
    ) -> None:
        try:
            descriptor = os.pidfd_open(handle.pid)
        except OSError as error:  # nobody could tell of its end
            handle.kill()
            handle.wait()
            _close_input(handle)
            self._not_started(member, error)
            return
        self.processes[member] = Process(role, handle, descriptor)
        self._by_descriptor[descriptor] = member
        self._epoll.register(descriptor, select.EPOLLIN)

    def _bear(self) -> None:
        """Processes that wait for a nursery, as soon as it is ready."""
        ready = {role for role, nursery in self._nurseries.items() if nursery.ready()}
        for unborn in [one for one in self._unborn if one[0] in ready]:
            if not self._fork(unborn[0], *unborn):
                break
            self._unborn.remove(unborn)
        for role in [role for role, nursery in self._nurseries.items() if nursery.gone()]:
            self.close_nursery(role)

    def _fork(self, nursery: str, role: str, member: Member, number: int | None) -> bool:
        """Whether this nursery was ready, and has borne the process."""
        bears = self._nurseries.get(nursery)
        if bears is None or not bears.ready():
            return False
        newborn = (str(self.files.folder), role, member, number)
        with _our_errors(role) as errors:
            forked = bears.fork(newborn, self.files.log(member), errors)
        if forked is not None:
            self._keep(role, member, forked)
        return forked is not None

    def close_nursery(self, role: str) -> None:
        """Its processes start the slow way from here on."""
        nursery = self._nurseries.pop(role, None)
        if nursery is None:
            return
        with contextlib.suppress(OSError):
            self._epoll.unregister(nursery.fileno())
        nursery.close()
        unborn, self._unborn = self._unborn, []
        for newborn in unborn:
            self.start(*newborn)

    # ------------------------------------------------------------------ their end

    def signal(self, member: Member, number: signal.Signals = signal.SIGKILL) -> None:
        if process := self.processes.get(member):
            process.handle.send_signal(number)
        elif number == signal.SIGKILL and any(member == one[1] for one in self._unborn):
            self._unborn = [one for one in self._unborn if one[1] != member]
            self._failed.append((member, Ended(-signal.SIGKILL, "killed by SIGKILL")))

    def ended(self) -> list[tuple[Member, Ended]]:
        self._bear()
        self._oom_kills.tick(time.monotonic())
        found, self._failed = self._failed, []
        for descriptor, _ in self._epoll.poll(0):
            member = self._by_descriptor.get(descriptor)
            if member is not None:
                found.append((member, self._bury(member)))
        return found

    def _bury(self, member: Member) -> Ended:
        process = self.processes.pop(member)
        del self._by_descriptor[process.descriptor]
        self._epoll.unregister(process.descriptor)
        os.close(process.descriptor)
        code = process.handle.wait()
        _close_input(process.handle)
        with contextlib.suppress(OSError):
            (self.files.folder / f"{member}.ipc").unlink(missing_ok=True)
        raised = process.handle.raised if isinstance(process.handle, ScriptProcess) else ""
        last_line = (raised or self.log_of(member)).rstrip().rpartition("\n")[2]
        if is_logged(last_line):
            last_line = ""
        if code >= 0:
            return Ended(code, last_line)
        reason = self._name_signal(-code)
        if -code == signal.SIGABRT and last_line:  # libraries print why before they abort
            reason += f": {last_line}"
        return Ended(code, reason)

    def _name_signal(self, number: int) -> str:
        reason = f"killed by {name_of_signal(number)}"
        if number == signal.SIGKILL and self._oom_kills.explains_a_death():
            reason += "; the kernel says that memory ran out"
        return reason

    def log_of(self, member: Member) -> str:
        """The last lines of a process's log."""
        try:
            text = self.files.log(member).read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-LAST_LINES:])

    # ------------------------------------------------------------------ scripts

    def tend(self, ranks: Mapping[Member, int], now: float) -> list[tuple[Member, int]]:
        if self._scripts is None:
            return []
        members = {one.handle.pid: member for member, one in self.processes.items()}
        self._scripts.ranks({p: ranks[member] for p, member in members.items() if member in ranks})
        self._scripts.tend()
        seen = self._works.seen(self._scripts.starting(), now)
        return [(members[number], self._works.looks) for number in seen if number in members]

    def see_out(self, is_interrupted: Callable[[], bool]) -> str:
        return self._scripts.see_out(is_interrupted) if self._scripts else ""

    def close(self) -> None:
        for process in self.processes.values():
            _close_input(process.handle)
        self._unborn.clear()
        for nursery in self._nurseries.values():
            with contextlib.suppress(OSError):
                self._epoll.unregister(nursery.fileno())
            give_back(nursery)
        self._nurseries.clear()
        deadline = time.monotonic() + STOP_S
        for process in self.processes.values():
            try:
                process.handle.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.handle.kill()
                process.handle.wait()
            os.close(process.descriptor)
        self.processes.clear()
        self._epoll.close()


@contextlib.contextmanager
def _our_errors(role: str) -> Iterator[list[int]]:
    """This process's standard error, for the coordinator: if this process ends without a word, it
    speaks in its place.
    """
    try:
        copy = os.dup(2) if role == "coordinator" else None
    except OSError:  # it was closed
        copy = None
    try:
        yield [] if copy is None else [copy]
    finally:
        if copy is not None:
            os.close(copy)


def _close_input(handle: subprocess.Popen[bytes] | Forked | ScriptProcess) -> None:
    if handle.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            handle.stdin.close()
