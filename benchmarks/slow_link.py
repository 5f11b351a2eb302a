"""A job on a slow network, with and without what spares it: samples per second, and bytes.

    python -m benchmarks.slow_link --rates 100 300 1000
    python -m benchmarks.slow_link --links shared
    python -m benchmarks.slow_link --dial lossy --rates 100 1000
    python -m benchmarks.slow_link --dial protection --rates 1000

As root, with `ip` and `tc` of iproute2: the network is namespaces of this machine, and
benchmarks/links.py has the two kinds of `--links`.

What `--dial` says is on or off:

    early       answers leave before the step that they wait for; blocks of steps take turns
    lossy       rows travel within an error bound, else exactly; blocks of steps take turns
    gradients   gradients of rows travel in 16 bits; blocks of steps take turns
    protection  one parity, deltas packed, against none; jobs take turns

Blocks of steps with and without take turns within one job (benchmarks/alternating.py), so what
else happens on the machine happens to both. Without `--rates` and the like, each has its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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


class Dial(NamedTuple):
    """What is on or off, and the defaults of its measurement."""

    sets: list[str]
    role: str = ""  # whose processes take turns by blocks of steps; none: jobs do
    networks: tuple[str, ...] = ("small",)
    rates: tuple[int, ...] = (100, 1000)
    dim: int = 16
    rows: int = 100_000
    steps: int = 60
    bars: Mapping[int, float] = MappingProxyType({})  # by mbit/s: the least ratio


DIALS = {
    "early": Dial(
        ["cluster.early_answers=on", "parity=1"],
        "server",
        networks=tuple(NETWORKS),
        rates=(100, 300, 1000),
    ),
    "lossy": Dial(
        ["wire.lookups=lossy", "parity=1"], "trainer", dim=64, bars={100: 1.3, 1000: 1.0}
    ),
    "gradients": Dial(["wire.gradients=bf16", "parity=1"], "trainer", dim=64),
    "protection": Dial([], networks=tuple(NETWORKS), rates=(1000,), bars={1000: 0.85}),
}
SIDES = {"off": ["strategy=none"], "on": ["parity=1", "wire.packing=on"]}  # where jobs take turns


# ---------------------------------------------------------------- a job, in the hub


def job(given: argparse.Namespace) -> Config:
    layers = NETWORKS[given.network]
    dial = DIALS[given.dial]
    # Nobody here could measure the network before the job: it begins where links are not slow.
    bandwidth = [f"wire.bandwidth={given.mbit}Mbit"] if given.dial == "lossy" else []
    return Config.load(
        None,
        [
            *("model.tables=26", f"model.dim={given.dim}", f"model.rows={given.rows}"),
            *("optimizer.name=adagrad", f"data.zipf={given.zipf}"),
            *(f"model.bottom={layers}", f"model.top={layers}"),
            *(f"batch={BATCH}", f"servers={SERVERS}", "trainers=1", "spares=0"),
            *("data.test_samples=0", f"steps={given.steps}"),
            *("cluster.transport=tcp", "cluster.host=here", "cluster.encryption=off"),
            *("cluster.heartbeat_limit_ms=20000", *bandwidth),
            *(dial.sets or SIDES[given.side]),
            *given.set,
        ],
    )


class Look(NamedTuple):
    """At the end of a step."""

    at: float
    up: int  # bytes
    down: int


Took = tuple[float, float, float]
"""Seconds of a step, and megabytes up and down."""


class Counting(Watcher):
    """When each step was done, and how many bytes had passed by then."""

    def __init__(self, device: str) -> None:
        self.counters = Path("/sys/class/net") / device / "statistics"
        self.looks: dict[int, Look] = {}

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if isinstance(event.what, StepDone):
            up, down = (int((self.counters / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
            self.looks[event.what.step] = Look(event.at, up, down)

    def by_block(self) -> dict[str, list[Took]]:
        found: dict[str, list[Took]] = {"off": [], "on": []}
        for step in self.looks:
            settled = all(is_on(step - n) == is_on(step + 1) for n in range(2))
            if step > BLOCK_STEPS and settled:  # windows are open, and nothing is left of before
                found["on" if is_on(step) else "off"].append(self._took(step))
        return found

    def all_steps(self) -> list[Took]:
        return [self._took(step) for step in self.looks if step > BLOCK_STEPS]

    def _took(self, step: int) -> Took:
        (at, up, down), then = self.looks[step], self.looks[step - 1]
        return at - then.at, (up - then.up) / 1e6, (down - then.down) / 1e6


def run_job(given: argparse.Namespace) -> None:
    counting = Counting("lo" if given.links == "shared" else "to-trainer-0")
    config, role = job(given), DIALS[given.dial].role
    turns = {role: [f'"{alternating.__file__}"', given.dial]} if role else {}
    links.spread(given.folder, given.hub, given.links, turns)
    JobRun(config, observers=[counting]).run()
    links.require_traffic(max(look.up for look in counting.looks.values()))
    found = counting.by_block() if role else {given.side: counting.all_steps()}
    print(json.dumps(found))


# ---------------------------------------------------------------- the table


def measure(given: argparse.Namespace, layers: str, mbit: int) -> str:
    links.set_rate(MEMBERS, given.links, mbit)
    found: dict[str, list[Took]] = {"off": [], "on": []}
    by_blocks = bool(DIALS[given.dial].role)
    for number in range(given.rounds):
        for side in ["on"] if by_blocks else ["off", "on"][:: 1 if number % 2 else -1]:
            said = links.in_hub("benchmarks.slow_link", *options(given, layers, mbit, side))
            for dial, took in json.loads(said.splitlines()[-1]).items():
                found[dial] += took
    line = row(given, layers, mbit, found)
    print(line, file=sys.stderr, flush=True)
    return line


def options(given: argparse.Namespace, layers: str, mbit: int, side: str) -> list[str]:
    """Of the process that runs a job."""
    names = ("dial", "links", "steps", "zipf", "dim", "rows")
    same = [f"--{name}={getattr(given, name)}" for name in names]
    same += [f"--set={one}" for one in given.set]
    return [*same, f"--network={layers}", f"--mbit={mbit}", f"--side={side}"]


def row(given: argparse.Namespace, layers: str, mbit: int, found: dict[str, list[Took]]) -> str:
    off, on = ([statistics.median(of) for of in zip(*found[dial], strict=True)] for dial in found)
    quarters = {dial: statistics.quantiles([s for s, _, _ in found[dial]]) for dial in found}
    spread = "; ".join(f"{1e3 * low:.0f} to {1e3 * high:.0f}" for low, _, high in quarters.values())
    ratio, bar, verdict = off[0] / on[0], DIALS[given.dial].bars.get(mbit), ""
    if bar is not None:
        verdict = "met" if ratio >= bar else "missed"
    return (
        f"| {layers} | {mbit} | {BATCH / off[0]:,.0f} | {BATCH / on[0]:,.0f} | {ratio:.2f} | "
        f"{'' if bar is None else f'>= {bar:g}'} | {verdict} | {spread} | "
        f"{off[1]:.2f} → {on[1]:.2f}; {off[2]:.2f} → {on[2]:.2f} | "
        f"{len(found['off'])} + {len(found['on'])} |"
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dial", choices=list(DIALS), default="early")
    parser.add_argument("--rates", type=int, nargs="+", metavar="MBIT")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS))
    parser.add_argument("--links", choices=["each", "shared"], default="each")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--rows", type=int, help="of each of the 26 tables")
    parser.add_argument("--rounds", type=int, default=1, help="jobs of a kind")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the job: strategy=none"
    )
    parser.add_argument("--zipf", type=float, default=1.05, help="0: all rows are equally likely")
    # Of the process that runs a job in the hub:
    for name in ("--network", "--mbit", "--side", "--hub"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = arguments().parse_args()
    for name in ("rates", "networks", "steps", "dim", "rows"):
        if getattr(given, name) is None:
            setattr(given, name, getattr(DIALS[given.dial], name))
    if given.network:
        run_job(given)
        return
    links.check()
    lines = [
        "| network | mbit/s | samples/s, off | on | ratio | bar | verdict | ms of a step, middle "
        "half | MB of a step: up; down | steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with links.namespaces(MEMBERS, given.links):
        for layers in given.networks:
            lines += [measure(given, layers, mbit) for mbit in given.rates]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
