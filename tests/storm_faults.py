"""What a storm does to a process: six kinds of faults, and how each is undone.

Only processes of one job are ever struck. They are known by the job's home in their command line,
and by name from the log that they write to: trainers are forked, and look like their nursery.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster_jobs import children_of, processes_of

SUPERVISOR = "supervisor"
HANG = str(Path(__file__).with_name("storm_hang.py"))
PIDFD_GETFD = 438  # the system call
FEW = 12  # descriptors: all of these are in use, and poll() still takes what ZeroMQ gives it

Undo = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """One fault as it was drawn: what, to whom, for how long, and when."""

    kind: str
    role: str
    pick: float  # which one of that role, from 0 to 1
    seconds: float
    delay_s: float  # after the one before, or the start
    after_save: bool  # and after another checkpoint, so that faults do not hit a start alone

    def __str__(self) -> str:
        return f"{self.kind} {self.seconds:.1f} s" if self.seconds else self.kind


@dataclass(frozen=True)
class Victim:
    pid: int
    name: str  # "server-2", "coordinator-0", "supervisor"

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


def victims(home: Path, supervisor: int) -> list[Victim]:
    """All processes of a job that are there now."""
    found = [Victim(supervisor, SUPERVISOR)]
    for pid in {*processes_of(home), *children_of(supervisor)}:
        with suppress(OSError):  # it ended meanwhile
            log = Path(os.readlink(f"/proc/{pid}/fd/2"))
            found.append(Victim(pid, log.stem if home in log.parents else "nursery"))
    return sorted(found, key=lambda one: one.name)


def choose(fault: Fault, among: list[Victim]) -> Victim:
    """One of the role that was drawn; if there is none now, anybody."""
    fitting = [one for one in among if one.role == fault.role] or among
    return fitting[int(fault.pick * len(fitting))]


def strike(fault: Fault, victim: Victim, home: Path) -> Undo:
    """Raises OSError if the process has ended."""
    return KINDS[fault.kind](fault, victim, home)


# ------------------------------------------------------------------ the kinds


def _kill(fault: Fault, victim: Victim, home: Path) -> Undo:
    os.kill(victim.pid, signal.SIGKILL)
    return lambda: None


def _stop(fault: Fault, victim: Victim, home: Path) -> Undo:
    descriptor = os.pidfd_open(victim.pid)
    signal.pidfd_send_signal(descriptor, signal.SIGSTOP)

    def wake() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        os.close(descriptor)

    return wake


def _hang(fault: Fault, victim: Victim, home: Path) -> Undo:
    """In a process of its own: who traces is the first to be told of a death, and must pass it
    on; when it ends, the thread goes on.
    """
    command = [sys.executable, HANG, str(victim.pid), str(fault.seconds)]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def let_go() -> None:
        tracer.kill()
        tracer.wait()

    return let_go


def _limit(limit: int, value: int, victim: Victim, home: Path) -> Undo:
    _, hard = resource.prlimit(victim.pid, limit)
    before = resource.prlimit(victim.pid, limit, (value, hard))

    def restore() -> None:
        """For its children as well, which have inherited it."""
        everybody = victims(home, victim.pid) if victim.name == SUPERVISOR else [victim]
        for one in everybody:
            with suppress(OSError):
                resource.prlimit(one.pid, limit, before)

    return restore


def _fill_disk(fault: Fault, victim: Victim, home: Path) -> Undo:
    """No file of it grows; Python ignores the signal, so that writes fail."""
    return _limit(resource.RLIMIT_FSIZE, 0, victim, home)


def _take_descriptors(fault: Fault, victim: Victim, home: Path) -> Undo:
    return _limit(resource.RLIMIT_NOFILE, FEW, victim, home)


def _cut(fault: Fault, victim: Victim, home: Path) -> Undo:
    """Shuts one of its connections."""
    descriptor = os.pidfd_open(victim.pid)
    connected = []
    for number in sorted(map(int, os.listdir(f"/proc/{victim.pid}/fd"))):
        with suppress(OSError):
            if os.readlink(f"/proc/{victim.pid}/fd/{number}").startswith("socket:"):
                theirs = ctypes.CDLL(None).syscall(PIDFD_GETFD, descriptor, number, 0)
                connected += _if_connected(theirs)
    if connected:
        connected[int(fault.pick * len(connected))].shutdown(socket.SHUT_RDWR)
    for one in connected:
        one.close()
    os.close(descriptor)
    return lambda: None


def _if_connected(descriptor: int) -> list[socket.socket]:
    if descriptor < 0:
        return []
    found = socket.socket(fileno=descriptor)
    try:
        found.getpeername()
    except OSError:  # it listens
        found.close()
        return []
    return [found]


KINDS: dict[str, Callable[[Fault, Victim, Path], Undo]] = {
    "kill": _kill,
    "stop": _stop,
    "hang": _hang,
    "full disk": _fill_disk,
    "no descriptors": _take_descriptors,
    "cut": _cut,
}


# ------------------------------------------------------------------ drawing

HOW_OFTEN = {"kill": 6, "stop": 5, "hang": 3, "full disk": 3, "no descriptors": 2, "cut": 3}
WHO = {"server": 8, "trainer": 4, "coordinator": 4, SUPERVISOR: 3, "nursery": 1}


def draw_fault(draw: random.Random) -> Fault:
    kind = draw.choices(list(HOW_OFTEN), list(HOW_OFTEN.values()))[0]
    role = draw.choices(list(WHO), list(WHO.values()))[0]
    after_save = draw.random() < 0.6
    # The others come while the one before is being made good.
    delay_s = draw.uniform(0.0, 0.5) if after_save else draw.uniform(0.0, 3.0)
    return Fault(kind, role, draw.random(), _seconds(kind, draw), delay_s, after_save)


def _seconds(kind: str, draw: random.Random) -> float:
    """Mostly short, so that a campaign ends; now and then up to 90 s."""
    if kind in ("kill", "cut"):
        return 0.0
    if kind == "stop":
        longest = draw.choices([4.0, 15.0, 90.0], [7, 2, 1])[0]
        return draw.uniform(1.0, longest)
    return draw.uniform(1.0, 16.0 if kind == "hang" else 8.0)
