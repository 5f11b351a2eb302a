"""What grows with the number of servers: the real machines of a job, in the simulator.

    python -m benchmarks.scale                              # 8 to 1,000 servers; some minutes
    python -m benchmarks.scale --servers 1000 --trainers 100 --steps 2

Servers, trainers and the coordinator are those of every job; only the network and the clock are
simulated. Rows and ids grow with the servers, so that each has as much to do. Each job runs twice,
the second time with a kill, and its digest must be that of a run without machines.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from planaria.layout import Layout
from planaria.simulator.faults import Faults
from planaria.simulator.toy import ToyJob, reference
from planaria.simulator.world import World
from planaria.wire.codec import encode
from planaria.wire.messages import (
    Answer,
    Delta,
    Install,
    Lookup,
    MateRequest,
    Member,
    Message,
    Prepare,
    Promise,
    Push,
)

OF_STEPS = (Lookup, Push, Delta)
OF_RECOVERY = (Prepare, Promise, MateRequest)
ROWS, IDS = 48, 8  # of a server, and those that a step names there
"""Enough that every owner has changes for most of its holders."""


@dataclass(frozen=True)
class WideJob(ToyJob):
    """With the groups that a true job would have."""

    @property
    def layout(self) -> Layout:
        return _layout(self.servers, self.r, self.k)


@lru_cache
def _layout(servers: int, r: int, k: int) -> Layout:
    return Layout.fresh(servers, r, k)


class Counted(World):
    """Counts what arrives, and kills a server in the middle if it is told to."""

    def __init__(self, job: WideJob, *, kills: bool) -> None:
        self.arrived: Counter[type[Message]] = Counter()
        self.install: Install | None = None
        self.kills = kills
        super().__init__(job, 1, Faults(count=0), network="even")

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        self.arrived[type(message)] += 1
        if isinstance(message, Install):
            self.install = message
        if self.kills and isinstance(message, Answer) and message.step > self.job.steps // 2:
            self.kills = False
            self.kill(self.first_members[0][1])


def measure(servers: int, k: int, r: int, trainers: int, steps: int) -> list[Any]:
    began = time.monotonic()
    layout = _layout(servers, r, k)
    grouped_s = time.monotonic() - began
    job = WideJob(
        servers=servers,
        k=k,
        r=r,
        trainers=trainers,
        steps=steps,
        tables=((ROWS * servers, 2),),
        ids=IDS * servers // trainers,
    )
    reference(job)
    began = time.process_time()
    world, disturbed = (Counted(job, kills=kills).run() for kills in (False, True))
    ran_s = time.process_time() - began
    assert world.install is not None
    of_steps = [world.arrived[kind] / servers / steps for kind in OF_STEPS]
    of_recovery = [disturbed.arrived[kind] for kind in OF_RECOVERY]
    delivered = world.delivered + disturbed.delivered
    return [
        servers,
        layout.n_groups,
        f"{grouped_s:.2f}",
        *(f"{count:.1f}" for count in of_steps),
        *of_recovery,
        f"{len(encode(b'', '', '', world.install)[1]) / 1000:.1f}",
        f"{1000 * ran_s / delivered:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[8, 12, 20, 22, 24, 48, 200, 1000]
    )
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--r", type=int, default=1)
    options = parser.parse_args()
    print(f"k = {options.k}, r = {options.r}, {options.trainers} trainers, {options.steps} steps")
    print("messages that arrive at a server in a step; all of a recovery; how large an install is")
    names = " | ".join(kind.__name__ for kind in (*OF_STEPS, *OF_RECOVERY))
    print(f"| servers | groups | s for them | {names} | kB | ms a message |")
    print(f"|{' --- |' * (5 + len(OF_STEPS) + len(OF_RECOVERY))}")
    for servers in options.servers:
        row = measure(servers, options.k, options.r, options.trainers, options.steps)
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
