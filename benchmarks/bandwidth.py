"""The bandwidth model of docs/planning.md beside what a job on slow links takes.

    python -m benchmarks.bandwidth                        # 6 to 16 servers; some minutes
    python -m benchmarks.bandwidth --servers 6 12 --rates 100
    python -m benchmarks.bandwidth --servers 6 12 --by survivors

As root, with `ip` and `tc` of iproute2: every process has a link of its own (benchmarks/links.py).
Tables grow with the servers, so that a lost server has as many bytes whatever their number, and all
rows are equally likely, so that the model knows how many a step names. A server is killed halfway,
and a spare takes its place, or the others take over what it held. What a step takes on links that
are not slowed down stands for what the cores do, and is the model's `compute`; all else it is told
is the job.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks import links
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.preflight import dense_bytes
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.planning.bandwidth import (
    WAYS,
    WORD,
    Cluster,
    Link,
    StepBytes,
    Table,
    answer_bytes,
    busy_share,
    bytes_of_tables,
    lost_bytes,
    protect_bytes,
    push_bytes,
    rebuild_bytes,
    rebuild_time,
    step_time,
)
from planaria.schedule import parse_kill, resolve
from planaria.wire.control import Rebuilt, StepDone, Viewed

TABLES, DIM, BATCH = 26, 16, 2048
K, R = 4, 1
FIRST_STEP = 4  # windows are open by then
KILLED = 1  # a place that keeps no copy of the dense state
NEVER_KILLED = 2
LOST_BYTES = 15_000_000  # of each server, parity as well


def members_of(servers: int) -> list[str]:
    """Three of the servers are spares, each of which is started when the one before is used."""
    return [*(f"server-{number}" for number in range(servers + 3)), "trainer-0"]


# ---------------------------------------------------------------- a job, in the hub


def job(servers: int, steps: int, chunk: int = 1, by: str = "replacement") -> Config:
    records = LOST_BYTES * servers * K / (K + R) / (2 * DIM * WORD)  # Adagrad's
    return Config.load(
        None,
        [
            *(
                f"model.tables={TABLES}",
                f"model.dim={DIM}",
                f"model.rows={round(records / TABLES)}",
            ),
            *("optimizer.name=adagrad", "data.zipf=0", f"batch={BATCH}", f"servers={servers}"),
            *("trainers=1", "spares=1", f"parity={R}", f"k={K}", f"steps={steps}"),
            *("data.test_samples=0", "cluster.transport=tcp", "cluster.host=here"),
            *("cluster.encryption=off", "cluster.heartbeat_limit_ms=20000"),
            *(f"rebuild.chunk={chunk}", f"rebuild.by={by}"),
        ],
    )


class Look(NamedTuple):
    at: float
    trainer_out: int  # bytes so far
    trainer_in: int
    server_out: int
    server_in: int
    rebuilder_in: int  # the replacement, or a survivor


class Looks(Watcher):
    """When each step was done and the lost server whole, and how many bytes had passed by then."""

    def __init__(self, rebuilder: int) -> None:
        self.rebuilder = f"to-server-{rebuilder}"
        self.steps: dict[int, Look] = {}
        self.whole: Look | None = None

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if isinstance(event.what, StepDone):
            self.steps[event.what.step] = self._look(event.at)
        elif isinstance(event.what, Rebuilt) or self._is_taken_over(event.what):
            self.whole = self.whole or self._look(event.at)

    def _is_taken_over(self, what: object) -> bool:
        return isinstance(what, Viewed) and any(resize.lost for resize in what.resizes)

    def _look(self, at: float) -> Look:
        counted = [
            int((Path("/sys/class/net") / device / "statistics" / f"{way}_bytes").read_text())
            for device in ("to-trainer-0", f"to-server-{NEVER_KILLED}")
            for way in ("rx", "tx")  # of the hub's end: what the member sends comes in there
        ]
        into = Path("/sys/class/net") / self.rebuilder / "statistics" / "tx_bytes"
        return Look(at, *[*counted, int(into.read_text())])


def run_job(given: argparse.Namespace) -> None:
    (servers,) = given.servers
    config = job(servers, given.steps, given.chunk, given.by)
    halfway = given.steps // 2
    looks = Looks(servers if given.by == "replacement" else NEVER_KILLED)
    links.spread(given.folder, given.hub, "each", {})
    schedule = resolve([parse_kill(f"server:{KILLED}@{halfway}")], config)
    (failure,) = JobRun(config, schedule, observers=[looks]).run()["failures"]
    first, last = looks.steps[FIRST_STEP], looks.steps[halfway]
    times = [looks.steps[step].at for step in range(FIRST_STEP, halfway + 1)]
    assert looks.whole is not None
    found = {
        "step_s": statistics.median(b - a for a, b in pairwise(times)),
        "rebuild_s": failure["rebuilt_ms"] / 1000,
        "lost": failure["bytes_rebuilt"] or LOST_BYTES,
        "rebuilder_in": looks.whole.rebuilder_in - last.rebuilder_in,
        "steps_meanwhile": sum(
            last.at < look.at <= looks.whole.at for look in looks.steps.values()
        ),
    }
    for name in Look._fields[1:5]:
        found[name] = (getattr(last, name) - getattr(first, name)) / (halfway - FIRST_STEP)
    links.require_traffic(found["trainer_out"])
    print(json.dumps(found))


# ---------------------------------------------------------------- the tables


def sent_in(config: Config) -> StepBytes:
    tables = [Table(table.rows, DIM, 2 * DIM) for table in config.tables]
    state, gradient = dense_bytes(config)
    return bytes_of_tables(tables, BATCH, 1)._replace(gradient=gradient, state=state)


def measure(servers: int, mbit: int, given: argparse.Namespace) -> dict[str, float]:
    links.set_rate(members_of(servers), "each", mbit)
    options = {"servers": servers, "steps": given.steps, "chunk": given.chunk, "by": given.by}
    words = [f"--{name}={value}" for name, value in options.items()]
    said = links.in_hub("benchmarks.bandwidth", *words)
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    print(servers, mbit, found, file=sys.stderr, flush=True)
    return found


def time_row(
    servers: int, mbit: int, by: str, free: dict[str, float], found: dict[str, float]
) -> str:
    """free: what was measured on links that nobody slowed down."""
    sent, link = sent_in(job(servers, 1)), Link(mbit * 1e6)
    cluster = Cluster(servers, 1, K, R)
    step = step_time(sent, cluster, link, free["step_s"])
    busy = busy_share(sent, cluster, link, found["step_s"])
    rebuild = rebuild_time(by, LOST_BYTES, cluster, link, busy).seconds
    return (
        f"| {servers} | {mbit} | {1e3 * step.least:.0f} to {1e3 * step.seconds:.0f} | "
        f"{1e3 * found['step_s']:.0f} | {found['step_s'] / step.least:.2f}; "
        f"{found['step_s'] / step.seconds:.2f} | {rebuild:.2f} | {found['rebuild_s']:.2f} | "
        f"{found['rebuild_s'] / rebuild:.2f} | {1e3 * free['step_s']:.0f}; "
        f"{free['rebuild_s']:.2f} |"
    )


def byte_row(servers: int, mbit: int, by: str, found: dict[str, float]) -> str:
    """What the links carried in a step, and into who rebuilds, over what the model says."""
    config = job(servers, 1)
    sent, cluster = sent_in(config), Cluster(servers, 1, K, R)
    push, answers, protect = (
        phase(sent, cluster) for phase in (push_bytes, answer_bytes, protect_bytes)
    )
    # Copies of the dense state go to the first server, which is not the one that was looked at.
    expected = {
        "trainer_out": push["trainer out"] + protect["trainer out"],
        "trainer_in": answers["trainer in"],
        "server_out": answers["server out"] + protect["server out"],
        "server_in": push["server in"] + protect["server out"],
        "rebuilder_in": next(iter(rebuild_bytes(by, LOST_BYTES, cluster).values()))
        + found["steps_meanwhile"] * (push["server in"] + protect["server out"]),
    }
    cells = [
        f"{found[name] / 1e6:.2f}; {found[name] / size:.2f}" for name, size in expected.items()
    ]
    records = sum(arena.rows * arena.words for arena in config.arenas) * WORD
    lost = f"{found['lost'] / 1e6:.1f}; {found['lost'] / lost_bytes(records, cluster):.2f}"
    return f"| {servers} | {mbit} | {' | '.join(cells)} | {lost} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bandwidth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--servers", type=int, nargs="+", default=[6, 8, 12, 16])
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 300], metavar="MBIT")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--chunk", type=int, default=2048, help="rebuild.chunk")
    parser.add_argument("--by", choices=WAYS[:2], default=WAYS[0], help="rebuild.by")
    # Of the process that runs a job in the hub:
    parser.add_argument("--hub", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hub:
        run_job(given)
        return
    links.check()
    times, sizes = [], []
    for servers in given.servers:
        with links.namespaces(members_of(servers), "each"):
            free = measure(servers, 0, given)
            for mbit in given.rates:
                found = measure(servers, mbit, given)
                times.append(time_row(servers, mbit, given.by, free, found))
                sizes.append(byte_row(servers, mbit, given.by, found))
    print(
        "| servers | mbit/s | ms of a step: model | measured | over it | s of a rebuild: model | "
        f"measured | over it | not slowed: ms; s |\n|{' --- |' * 9}"
    )
    print("\n".join(times))
    print("\nMB in a step, and over the model's; into the replacement, or a survivor; lost")
    print("| servers | mbit/s | trainer out | in | server out | in | rebuilding in | lost |")
    print(f"|{' --- |' * 8}")
    print("\n".join(sizes))


if __name__ == "__main__":
    main()
