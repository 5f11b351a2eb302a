"""A job on a slow network, with and without early answers: samples per second, and bytes.

    python -m benchmarks.slow_link --rates 100 300 1000
    python -m benchmarks.slow_link --links shared

As root, with `ip` and `tc` of iproute2: the network is namespaces of this machine, and
benchmarks/links.py has the two kinds of `--links`.

Blocks of steps with and without take turns within one job (benchmarks/alternating.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks import alternating, links
from benchmarks.alternating import BLOCK_STEPS, is_on
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.wire.control import StepDone

NETWORKS = {"small": "[64,32]", "512-256": "[512,256]"}
SERVERS, BATCH = 6, 2048
MEMBERS = [*(f"server-{place}" for place in range(SERVERS)), "trainer-0"]


# ---------------------------------------------------------------- a job, in the hub


def job(given: argparse.Namespace) -> Config:
    layers = NETWORKS[given.network]
    return Config.load(
        None,
        [
            *("model.tables=26", "model.dim=16", "model.rows=100000", "optimizer.name=adagrad"),
            *(f"model.bottom={layers}", f"model.top={layers}", f"data.zipf={given.zipf}"),
            *(f"batch={BATCH}", f"servers={SERVERS}", "trainers=1", "spares=0", "parity=1"),
            *("data.test_samples=0", f"steps={given.steps}"),
            *("cluster.transport=tcp", "cluster.host=here", "cluster.encryption=off"),
            *("cluster.early_answers=on", "cluster.heartbeat_limit_ms=20000"),
        ],
    )


class Look(NamedTuple):
    """At the end of a step."""

    at: float
    up: int  # bytes
    down: int


class Counting(Watcher):
    """When each step was done, and how many bytes had passed by then."""

    def __init__(self, device: str) -> None:
        self.counters = Path("/sys/class/net") / device / "statistics"
        self.looks: dict[int, Look] = {}

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if isinstance(event.what, StepDone):
            up, down = (int((self.counters / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
            self.looks[event.what.step] = Look(event.at, up, down)

    def result(self) -> dict[str, list[tuple[float, float, float]]]:
        """By dial: of each step, seconds and megabytes up and down."""
        found: dict[str, list[tuple[float, float, float]]] = {"off": [], "on": []}
        for step, (at, up, down) in self.looks.items():
            settled = all(is_on(step - n) == is_on(step + 1) for n in range(2))
            if step > BLOCK_STEPS and settled:  # windows are open, and nothing is left of before
                then = self.looks[step - 1]
                took = (at - then.at, (up - then.up) / 1e6, (down - then.down) / 1e6)
                found["on" if is_on(step) else "off"].append(took)
        return found


def run_job(given: argparse.Namespace) -> None:
    counting = Counting("lo" if given.links == "shared" else "to-trainer-0")
    config = job(given)
    server = Path(alternating.__file__)  # answers early in turns
    links.spread(given.folder, given.hub, given.links, [f'"{server}"'])
    JobRun(config, observers=[counting]).run()
    links.require_traffic(max(look.up for look in counting.looks.values()))
    print(json.dumps(counting.result()))


# ---------------------------------------------------------------- the table


def measure(given: argparse.Namespace, layers: str, mbit: int) -> str:
    links.set_rate(MEMBERS, given.links, mbit)
    said = links.in_hub(
        "benchmarks.slow_link",
        *("--network", layers, "--steps", str(given.steps), "--zipf", str(given.zipf)),
        *("--links", given.links),
    )
    line = row(layers, mbit, json.loads(said.splitlines()[-1]))
    print(line, file=sys.stderr, flush=True)
    return line


def row(layers: str, mbit: int, found: dict[str, list[tuple[float, float, float]]]) -> str:
    off, on = ([statistics.median(of) for of in zip(*found[dial], strict=True)] for dial in found)
    quarters = {dial: statistics.quantiles([s for s, _, _ in found[dial]]) for dial in found}
    spread = "; ".join(f"{1e3 * low:.0f} to {1e3 * high:.0f}" for low, _, high in quarters.values())
    return (
        f"| {layers} | {mbit} | {BATCH / off[0]:,.0f} | {BATCH / on[0]:,.0f} | "
        f"{off[0] / on[0]:.2f} | {spread} | {off[1]:.2f} → {on[1]:.2f}; "
        f"{off[2]:.2f} → {on[2]:.2f} | {len(found['off'])} + {len(found['on'])} |"
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 300, 1000], metavar="MBIT")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--links", choices=["each", "shared"], default="each")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--zipf", type=float, default=1.05, help="0: all rows are equally likely")
    # Of the process that runs a job in the hub:
    parser.add_argument("--network", help=argparse.SUPPRESS)
    parser.add_argument("--hub", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = arguments().parse_args()
    if given.network:
        run_job(given)
        return
    links.check()
    lines = [
        "| network | mbit/s | samples/s, off | on | ratio | ms of a step, middle half | "
        "MB of a step: up; down | steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with links.namespaces(MEMBERS, given.links):
        for layers in given.networks:
            lines += [measure(given, layers, mbit) for mbit in given.rates]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
