"""A job on a slow network, with and without early answers: samples per second, and bytes.

    python -m benchmarks.slow_link --rates 100 300 1000
    python -m benchmarks.slow_link --links shared

As root, with `ip` and `tc` of iproute2: the network is namespaces of this machine, of which nothing
is left behind. `--links each` gives every server and the trainer a namespace and a link of its own,
as fast in one direction as in the other, like machines at a switch. With `--links shared` everybody
sends over one loopback device, both ways and servers among themselves: like a bus.

Blocks of steps with and without take turns within one job (benchmarks/alternating.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks import alternating
from benchmarks.alternating import BLOCK_STEPS, is_on
from planaria.cluster import nursery
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.wire.control import StepDone

NETWORKS = {"small": "[64,32]", "512-256": "[512,256]"}
QUEUE_MS = 100  # of a link
SERVERS, BATCH = 6, 2048
HUB = f"planaria-{os.getpid()}"
HOSTS = Path("/etc/netns")  # `ip netns exec` puts what is there in the place of /etc
MEMBERS = [*(f"server-{place}" for place in range(SERVERS)), "trainer-0"]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def inside(namespace: str, *command: str) -> None:
    run("ip", "netns", "exec", namespace, *command)


def namespace_of(member: str) -> str:
    return f"{HUB}-{member}"


def slow_down(namespace: str, device: str, mbit: int) -> None:
    burst = max(128 << 10, mbit * 1_000_000 // 8 // 250)  # what a tick of the kernel lets go
    inside(
        namespace,
        *("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit"),
        *("burst", str(burst), "latency", f"{QUEUE_MS}ms"),
    )


# ---------------------------------------------------------------- namespaces


def add(namespace: str, address: str) -> None:
    """In it, `here` is its own address."""
    run("ip", "netns", "add", namespace)
    inside(namespace, "ip", "link", "set", "lo", "up")
    folder = HOSTS / namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} here\n")


def join(number: int, member: str) -> None:
    """A namespace with a link to the hub's bridge."""
    namespace, port = namespace_of(member), f"to-{member}"
    add(namespace, f"10.77.0.{number}")
    inside(HUB, "ip", "link", "add", port, "type", "veth", "peer", "name", f"x{number}")
    inside(HUB, "ip", "link", "set", f"x{number}", "netns", namespace)
    inside(HUB, "ip", "link", "set", port, "master", "bridge", "up")
    inside(namespace, "ip", "link", "set", f"x{number}", "name", "eth0")
    inside(namespace, "ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
    inside(namespace, "ip", "link", "set", "eth0", "up")


@contextlib.contextmanager
def namespaces(links: str) -> Iterator[None]:
    try:
        add(HUB, "127.0.0.1" if links == "shared" else "10.77.0.1")
        if links == "each":
            inside(HUB, "ip", "link", "add", "bridge", "type", "bridge")
            inside(HUB, "ip", "address", "add", "10.77.0.1/24", "dev", "bridge")
            inside(HUB, "ip", "link", "set", "bridge", "up")
            for number, member in enumerate(MEMBERS, 2):
                join(number, member)
        yield
    finally:
        for namespace in [*map(namespace_of, MEMBERS), HUB]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(HOSTS / namespace, ignore_errors=True)


def set_rate(links: str, mbit: int) -> None:
    if links == "shared":
        slow_down(HUB, "lo", mbit)
        return
    for member in MEMBERS:
        slow_down(HUB, f"to-{member}", mbit)
        slow_down(namespace_of(member), "eth0", mbit)


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


def spread_processes(given: argparse.Namespace) -> None:
    """Servers answer early in turns, and all start in the namespaces of their places."""
    python, server = given.folder / "python", Path(alternating.__file__)
    where = f'ip netns exec "{given.hub}-$1-$4"' if given.links == "each" else ""
    python.write_text(
        "#!/bin/sh\n"
        "shift 3\n"  # -P -m planaria.cluster
        'case "$1" in\n'
        f'server) exec {where} "{sys.executable}" -P "{server}" "$@" ;;\n'
        f'trainer) exec {where} "{sys.executable}" -P -m planaria.cluster "$@" ;;\n'
        f'*) exec "{sys.executable}" -P -m planaria.cluster "$@" ;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    nursery.IMPORTS.clear()  # who is forked is where its parent is
    sys.executable = str(python)


def run_job(given: argparse.Namespace) -> None:
    counting = Counting("lo" if given.links == "shared" else "to-trainer-0")
    config = job(given)
    spread_processes(given)
    JobRun(config, observers=[counting]).run()
    print(json.dumps(counting.result()))


# ---------------------------------------------------------------- the table


def measure(given: argparse.Namespace, layers: str, mbit: int) -> str:
    set_rate(given.links, mbit)
    folder = Path(f"/tmp/{HUB}")
    folder.mkdir(exist_ok=True)
    command = [
        *("ip", "netns", "exec", HUB, sys.executable, "-m", "benchmarks.slow_link"),
        *("--network", layers, "--steps", str(given.steps), "--zipf", str(given.zipf)),
        *("--links", given.links, "--hub", HUB, "--folder", str(folder)),
    ]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    finally:
        shutil.rmtree(folder)
    if ran.returncode:
        raise SystemExit(f"a job failed:\n{ran.stdout}\n{ran.stderr}")
    line = row(layers, mbit, json.loads(ran.stdout.splitlines()[-1]))
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
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise SystemExit(f"{' and '.join(missing)} not found: apt-get install iproute2")
    if os.geteuid() != 0:
        raise SystemExit("only root may make network namespaces and slow links: use sudo")
    lines = [
        "| network | mbit/s | samples/s, off | on | ratio | ms of a step, middle half | "
        "MB of a step: up; down | steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with namespaces(given.links):
        for layers in given.networks:
            lines += [measure(given, layers, mbit) for mbit in given.rates]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
