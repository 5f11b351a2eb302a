"""What the kernel tells of processes: what ended them, and whether they work."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

LOOK_S = 5.0  # between two looks at whether processes work
RECENT_S = 10.0  # a process with much memory takes so long to end, at most
OOM_COUNTS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)


def name_of_signal(number: int) -> str:
    """Any that can end a process: most of the real-time ones have no name of their own."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return f"signal {number}"


class OomKills:
    """Whether the kernel has killed for want of memory shortly before a death.

    It may count those of the whole machine. What was counted long ago has nothing to do with a
    death now, so the number to compare with is read again and again.
    """

    def __init__(self, now: float) -> None:
        self._before = self._since = oom_kills()  # as of RECENT_S ago or more; read last
        self._read_at = now

    def tick(self, now: float) -> None:
        if now - self._read_at >= RECENT_S:
            self._before, self._since = self._since, oom_kills()
            self._read_at = now

    def explains_a_death(self) -> bool:
        """Each kill explains one death."""
        if oom_kills() <= self._before:
            return False
        self._before += 1
        self._since = max(self._since, self._before)
        return True


def oom_kills() -> int:
    """How often the kernel has killed for want of memory, as far as it tells."""
    for path in OOM_COUNTS:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def is_stopped(process: int) -> bool:
    """Whether it was frozen by a signal; False if it is gone."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class Works:
    """Who has done something since the last look, by the leaders of sessions."""

    def __init__(self) -> None:
        self.looks = 0
        self._work: dict[int, int] = {}
        self._look_at = 0.0

    def seen(self, leaders: Sequence[int], now: float) -> list[int]:
        """Now and then; whoever is new to it counts at once."""
        if now < self._look_at and all(leader in self._work for leader in leaders):
            return []
        self.looks += 1
        self._look_at = now + LOOK_S
        before, self._work = self._work, {leader: work_of(leader) for leader in leaders}
        return [leader for leader in leaders if self._work[leader] != before.get(leader)]


def work_of(leader: int) -> int:
    """A number that changes where a session's processes compute, read or write.

    It may also fall: what a process has done goes with it.
    """
    work = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError):  # it has ended, or is not ours
                    if os.getsid(int(name)) == leader:
                        work += _work_of_one(Path("/proc", name))
    return work


def _work_of_one(process: Path) -> int:
    """Its ticks of CPU time, with those of the children that it has seen end, and its bytes."""
    fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
    work = sum(map(int, fields[11:15]))
    with contextlib.suppress(OSError):
        for line in (process / "io").read_text().splitlines():
            name, _, count = line.partition(": ")
            if name in ("rchar", "wchar"):
                work += int(count)
    return work
