"""What this machine has to give to a job: memory, descriptors, processes.

None stands for "no limit is known". Limits of a container (cgroups, both versions) count at every
level up to the root, because each of them can end a process.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True)
class Facts:
    memory_bytes: int | None = None  # free, or freed by the kernel on demand
    descriptors: int | None = None  # the hard limit of one process
    tasks: int | None = None  # processes and threads that may still be started


def read_facts(proc: Path = PROC, cgroups: Path = CGROUPS) -> Facts:
    memory = [_available(proc), *_cgroup_memory(proc, cgroups)]
    tasks = [_user_tasks(proc), *_cgroup_tasks(proc, cgroups)]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return Facts(_least(memory), None if hard == resource.RLIM_INFINITY else hard, _least(tasks))


def _least(limits: list[int | None]) -> int | None:
    return min((max(limit, 0) for limit in limits if limit is not None), default=None)


def _available(proc: Path) -> int | None:
    kibibytes = _fields(proc / "meminfo").get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _cgroup_memory(proc: Path, cgroups: Path) -> Iterator[int | None]:
    """Page cache counts as used there, although it is given back on demand."""
    for folder in _own_cgroups(proc, cgroups, ""):
        cache = _fields(folder / "memory.stat")
        freed = sum(cache.get(n, 0) for n in ("active_file", "inactive_file", "slab_reclaimable"))
        yield _room(folder / "memory.max", folder / "memory.current", freed)
    for folder in _own_cgroups(proc, cgroups, "memory"):
        cache = _fields(folder / "memory.stat")
        freed = sum(cache.get(name, 0) for name in ("total_active_file", "total_inactive_file"))
        yield _room(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", freed)


def _cgroup_tasks(proc: Path, cgroups: Path) -> Iterator[int | None]:
    for controller in ("", "pids"):
        for folder in _own_cgroups(proc, cgroups, controller):
            yield _room(folder / "pids.max", folder / "pids.current", 0)


def _own_cgroups(proc: Path, cgroups: Path, controller: str) -> Iterator[Path]:
    """This process's group and those that it is in; controller "" is version 2.

    A container may see its own group as the root: then the path of /proc does not exist there.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = cgroups / controller
            own = root / path.lstrip("/")
            while own != root:
                yield own
                own = own.parent
            yield root


def _room(limit: Path, used: Path, freed: int) -> int | None:
    most, now = _text(limit).strip(), _text(used).strip()
    if not (most.isdigit() and now.isdigit()):  # "max", or no such file
        return None
    return int(most) - int(now) + freed


def _user_tasks(proc: Path) -> int | None:
    """What the limit of processes leaves to this user; it does not bind root."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.getuid() == 0 or most == resource.RLIM_INFINITY:
        return None
    running = 0
    for status in proc.glob("[0-9]*/status"):
        fields = _fields(status)
        if fields.get("Uid:") == os.getuid():
            running += fields.get("Threads:", 1)
    return most - running


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and numbers: the first number of each."""
    parts = (line.split() for line in _text(file).splitlines())
    return {part[0]: int(part[1]) for part in parts if len(part) > 1 and part[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # no such file here, or a process that has just ended
        return ""
