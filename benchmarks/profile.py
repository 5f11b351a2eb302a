"""Where the time of a step goes: CPU of every process of a job, by role and kind of thread.

    python -m benchmarks.profile                       # none, r = 1 and r = 2
    python -m benchmarks.profile --rows 300000 --steps 60

Read from the kernel's counters at two steps of a job that is running, so nothing is slowed down by
being watched. `io` is ZeroMQ's own thread; `waits` is the time per step that the trainer's main
thread did not run: for the servers, or for a core.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.cluster import Sizes, job
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.wire.control import StepDone

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIRST_STEP = 20  # start-up is over by then

Use = Counter[tuple[str, str]]
"""(role, thread) -> ticks of CPU"""


def cpu_of(pid: int, role: str) -> Use:
    found: Use = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, fields = (task / "stat").read_text().rsplit(") ", 1)
        user, system = fields.split()[11:13]
        thread = "io" if "ZMQ" in name else "main" if task.name == str(pid) else "other"
        found[role, thread] += int(user) + int(system)
    return found


class Looks(Watcher):
    """Looks at a job's processes when a first and a last step are done."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.looks: list[tuple[int, float, Use]] = []

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        done = event.what
        if not isinstance(done, StepDone) or done.rank != 0:
            return
        if done.step in (FIRST_STEP, self.config.steps):
            use: Use = Counter()
            for process in processes.launcher.processes.values():
                use += cpu_of(process.handle.pid, process.role)
            self.looks.append((done.step, event.at, use))


def profile(name: str, config: Any) -> None:
    watched = Looks(config)
    JobRun(config, observers=[watched]).run()
    (first, start, before), (last, end, after) = watched.looks
    steps = last - first
    wall_ms = (end - start) / steps * 1e3
    used = {key: (after[key] - before[key]) / TICKS_PER_S / steps * 1e3 for key in sorted(after)}
    waits_ms = wall_ms - used["trainer", "main"]
    print(f"{name}: {wall_ms:.1f} ms a step, of which the trainer waits {waits_ms:.1f}")
    for (role, thread), cpu_ms in used.items():
        if cpu_ms >= 0.05:
            print(f"  {role:12} {thread:6} {cpu_ms:8.2f} ms of CPU a step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    sizes = Sizes(options.rows, options.dim, options.steps)
    profile("none", job(sizes, "strategy=none"))
    profile("r = 1", job(sizes, "parity=1"))
    profile("r = 2", job(sizes, "parity=2", "k=4"))


if __name__ == "__main__":
    main()
