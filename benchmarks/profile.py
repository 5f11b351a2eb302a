"""Where the time of a step goes: CPU of every process of a job, by role and kind of thread.

    python -m benchmarks.profile                       # none, r = 1 and r = 2
    python -m benchmarks.profile --rows 300000 --steps 60

Read from the kernel's counters at two steps of a job that is running, so nothing is slowed down by
being watched. `io` is ZeroMQ's own thread; `waits` is the time per step that the trainer's main
thread did not run: for the servers, or for a core.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.cluster import Sizes, job
from benchmarks.speed import Looks
from planaria.cluster.run import JobRun


def profile(name: str, config: Any) -> None:
    watched = Looks(config)
    JobRun(config, observers=[watched]).run()
    wall_ms, used = watched.per_step()
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
