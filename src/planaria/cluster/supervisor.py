"""The local supervisor: it starts a job's processes on this machine and buries them.

It reads every process's events from a pipe; the end of that pipe is the end of the process, noticed
at once. It replaces what the coordinator asks for, restarts the coordinator, keeps spares, and
leaves nothing behind on any way out: when it dies itself, the processes see their standard input
close.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from planaria.cluster.files import JobFiles, write_atomically
from planaria.cluster.nursery import Forked, Nursery
from planaria.config import Config
from planaria.errors import ClusterError
from planaria.wire.messages import Member

STOP_S = 2.0  # how long processes may take to leave before they are killed
MAX_LINE = 1 << 26


@dataclass
class Child:
    member: Member
    role: str
    process: subprocess.Popen[bytes] | Forked
    address: str = ""
    buffer: bytearray = field(default_factory=bytearray)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=50))


@dataclass(frozen=True)
class Event:
    """Something that a process said, or that happened to it."""

    name: str
    member: Member
    at: float
    facts: dict[str, Any]


class Supervisor:
    """The processes of one job. Use it as a context manager; leaving it leaves nothing behind."""

    def __init__(self, config: Config, start: int = 0) -> None:
        """start: the step of the checkpoint that the job starts from; 0 for none."""
        self.config = config
        self.start = start
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="planaria-"))
        except OSError as error:
            raise ClusterError(
                f"no folder for the job could be made: {error}; set TMPDIR to one with room"
            ) from None
        self.files = JobFiles(self.folder)
        self.children: dict[Member, Child] = {}
        self.coordinator: Member = ""
        self.spares: list[Member] = []
        self.finished = False
        self._selector = selectors.DefaultSelector()
        self._names = {"server": config.servers, "trainer": config.ranks, "coordinator": 0}
        self._suspects: list[Member] = []
        self._standing: dict[str, Any] = {}  # orders that hold for whoever is started later, too
        self._nursery: Nursery | None = None

    def __enter__(self) -> Supervisor:
        try:
            encrypt = self.config.cluster.encrypted
            self.files.create(self.config.to_dict(), encrypt=encrypt, start=self.start)
            self._nursery = Nursery(
                self._command("nursery"), self._environment("trainer"), self.folder / "nursery.log"
            )
            self._start_coordinator()
            for place in range(self.config.servers):
                self._start("server", f"server-{place}", place)
            for rank in range(self.config.ranks):
                self._start("trainer", f"trainer-{rank}", rank)
            for _ in range(self.config.spares):
                self._start_spare()
        except OSError as error:
            self.close()
            raise ClusterError(f"the job could not be started in {self.folder}: {error}") from None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ starting

    def _command(self, role: str, *more: str) -> list[str]:
        # -P: what lies in the user's folder under the name of a library is not that library.
        return [sys.executable, "-P", "-m", "planaria.cluster", role, str(self.folder), *more]

    def _environment(self, role: str) -> dict[str, str]:
        threads = self.config.threads
        count = threads.trainer if role == "trainer" else threads.server
        return {
            **os.environ,
            "OMP_NUM_THREADS": str(count),
            "MKL_NUM_THREADS": str(count),
            "OMP_WAIT_POLICY": "passive",
        }

    def _spawn(
        self, role: str, member: Member, number: int | None
    ) -> subprocess.Popen[bytes] | Forked:
        path = self.folder / f"{member}.log"
        if role == "trainer" and self._nursery:
            if forked := self._nursery.fork((member, number), path):
                return forked
            self._close_nursery()
        more = [] if number is None else [str(number)]
        with path.open("wb") as log:
            return subprocess.Popen(
                self._command(role, member, *more),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(role),
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
            )

    def _close_nursery(self) -> None:
        if self._nursery:
            self._nursery.close()
            self._nursery = None

    def _start(self, role: str, member: Member, number: int | None = None) -> Child:
        process = self._spawn(role, member, number)
        child = Child(member, role, process)
        self.children[member] = child
        assert process.stdout is not None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)
        if self.coordinator and role != "coordinator":
            self._tell_coordinator_address(child)
        if self._standing:
            self._order(child, **self._standing)
        return child

    def _name(self, role: str) -> Member:
        number = self._names[role]
        self._names[role] += 1
        return f"{role}-{number}"

    def _start_coordinator(self) -> None:
        self.coordinator = self._name("coordinator")
        self._start("coordinator", self.coordinator)

    def _start_spare(self) -> None:
        member = self._name("server")
        self.spares.append(member)
        self._start("server", member)

    # ------------------------------------------------------------------ telling

    def _order(self, child: Child, **order: Any) -> None:
        assert child.process.stdin is not None
        try:
            os.write(child.process.stdin.fileno(), msgspec.json.encode(order) + b"\n")
        except OSError:
            # It has ended, which is noticed elsewhere, or it does not read: the last order holds.
            pass

    def order_all(self, **order: Any) -> None:
        """To every process, and to those that are started later; the last of each key holds."""
        self._standing.update(order)
        for child in self.children.values():
            self._order(child, **order)

    def _tell_coordinator_address(self, child: Child) -> None:
        coordinator = self.children.get(self.coordinator)
        if coordinator and coordinator.address:
            self._order(child, coordinator=coordinator.address)

    # ------------------------------------------------------------------ events

    def events(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits at most so long for something to happen."""
        found: list[Event] = []
        for key, _ in self._selector.select(timeout_s):
            found += self._read(key.data)
        try:
            for event in found:
                self._react(event)
        except OSError as error:
            raise ClusterError(
                f"the job in {self.folder} cannot go on: {error}; is the folder full, or gone?"
            ) from None
        return found

    def _read(self, child: Child) -> list[Event]:
        assert child.process.stdout is not None
        try:
            data = os.read(child.process.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return [self._bury(child)]
        child.buffer += data
        *lines, rest = bytes(child.buffer).split(b"\n")
        child.buffer = bytearray(rest)
        if len(rest) > MAX_LINE:
            raise ClusterError(f"{child.member} wrote a line of more than {MAX_LINE} bytes")
        return [self._parse(child, line) for line in lines if line]

    def _parse(self, child: Child, line: bytes) -> Event:
        facts = msgspec.json.decode(line)
        return Event(facts.pop("event"), child.member, facts.pop("at"), facts)

    def _bury(self, child: Child) -> Event:
        assert child.process.stdout is not None
        self._selector.unregister(child.process.stdout)
        code = child.process.wait()
        child.process.stdout.close()
        _close_input(child)
        del self.children[child.member]
        if child.member in self.spares:
            self.spares.remove(child.member)
        (self.folder / f"{child.member}.ipc").unlink(missing_ok=True)
        return Event("exit", child.member, time.monotonic(), {"code": code, "role": child.role})

    def _react(self, event: Event) -> None:
        child = self.children.get(event.member)
        if event.name == "listening" and child is not None:
            child.address = event.facts["address"]
            if event.member == self.coordinator:
                write_atomically(self.folder / "coordinator.address", child.address.encode())
                for other in self.children.values():
                    if other is not child:
                        self._tell_coordinator_address(other)
                for suspect in self._suspects:
                    self._order(child, suspect=suspect)
        elif event.name == "silent":  # should it wake up under another coordinator
            self._suspects.append(event.facts["member"])
        elif event.name == "finished":
            self.finished = True
        elif self.finished:
            return
        elif event.name == "exit":
            if event.facts["role"] == "coordinator":
                if event.member == self.coordinator:
                    self._start_coordinator()
                return
            self._suspects.append(event.member)
            if coordinator := self.children.get(self.coordinator):
                self._order(coordinator, suspect=event.member)
        elif event.name == "spawn":
            for _ in range(event.facts["count"]):
                self._start(event.facts["role"], self._name(event.facts["role"]))
        elif event.name == "view":
            taken = set(event.facts["servers"])
            self.spares = [spare for spare in self.spares if spare not in taken]
            while len(self.spares) < self.config.spares:
                self._start_spare()

    # ------------------------------------------------------------------ faults and the end

    def kill(self, member: Member, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal; returns when."""
        self.children[member].process.send_signal(number)
        return time.monotonic()

    def log_of(self, member: Member) -> str:
        """The last lines that a process wrote to standard error."""
        try:
            text = (self.folder / f"{member}.log").read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-20:])

    def close(self) -> None:
        """Ends every process, politely first, and removes the folder."""
        for child in self.children.values():
            _close_input(child)
        self._close_nursery()
        deadline = time.monotonic() + STOP_S
        for child in self.children.values():
            try:
                child.process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()
        self.children.clear()
        self._selector.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _close_input(child: Child) -> None:
    """Closing flushes, and what was still to be written meets nobody when the process is gone."""
    if child.process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()
