"""This machine, and the command that is running on it: what a figure that was measured needs."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    cores: int  # that this process may use
    memory_bytes: int
    cpu: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            len(os.sched_getaffinity(0)),
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            _cpu_model(),
        )

    def describe(self) -> str:
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"{cores}, {self.memory_bytes / 2**30:.1f} GiB of memory, {self.cpu}"


@dataclass(frozen=True)
class Origin:
    """Where a page of figures comes from."""

    command: str
    date: str
    machine: Machine

    @classmethod
    def now(cls) -> Origin:
        return cls(command_line(), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", Machine.here())


def command_line() -> str:
    return shlex.join(["planaria", *sys.argv[1:]])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else os.uname().machine
