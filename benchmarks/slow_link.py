"""Jobs on a slow network, with and without early answers: samples per second, and bytes.

    python -m benchmarks.slow_link --rates 100 300 1000 --rounds 2
    python -m benchmarks.slow_link --links shared

As root, with `ip` and `tc` of iproute2: the network is namespaces of this machine, of which nothing
is left behind. `--links each` gives every server and every trainer a namespace and a link of its
own, as fast in one direction as in the other, like machines at a switch. With `--links shared`
everybody sends over one loopback device, both ways and servers among themselves: like a bus.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from planaria.cluster import launcher
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.wire.control import StepDone

NETWORKS = {"small": "[64,32]", "512-256": "[512,256]"}
FIRST_STEP = 4  # connections are made, and windows open, by then
QUEUE_MS = 100  # of a link
SERVERS, TRAINERS = 6, 1
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
            *("batch=2048", f"trainers={TRAINERS}", f"servers={SERVERS}", "spares=0", "parity=1"),
            *("data.test_samples=0", f"steps={given.steps}"),
            *("cluster.transport=tcp", "cluster.host=here", "cluster.encryption=off"),
            f"cluster.early_answers={given.early}",
        ],
    )


class Counting(Watcher):
    """When some first and the last step were done, and how many bytes had passed by then."""

    def __init__(self, config: Config, device: str) -> None:
        self.config = config
        self.counters = Path("/sys/class/net") / device / "statistics"
        self.looks: list[tuple[int, float, int, int]] = []

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        done = event.what
        if isinstance(done, StepDone) and done.step in (FIRST_STEP, self.config.steps):
            up, down = (int((self.counters / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
            self.looks.append((done.step, event.at, up, down))

    def result(self) -> dict[str, float]:
        (first, start, up, down), (last, end, up_then, down_then) = self.looks
        steps = last - first
        return {
            "samples_per_s": self.config.batch * steps / (end - start),
            "up_mb": (up_then - up) / steps / 1e6,
            "down_mb": (down_then - down) / steps / 1e6,
        }


def spread_processes(hub: str, folder: Path) -> None:
    """Servers and trainers start in the namespaces of their places."""
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$4" in\n'
        f'server|trainer) exec ip netns exec "{hub}-$4-$7" "{sys.executable}" "$@" ;;\n'
        f'*) exec "{sys.executable}" "$@" ;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    launcher.IMPORTS = {}  # who is forked is where its parent is
    sys.executable = str(python)


def run_job(given: argparse.Namespace) -> None:
    config = job(given)
    device = "lo"
    if given.links == "each":
        device = "to-trainer-0"
        spread_processes(given.hub, given.folder)
    counting = Counting(config, device)
    report = JobRun(config, [], observers=[counting]).run()
    print(json.dumps({**counting.result(), "digest": report["digest"]}))


# ---------------------------------------------------------------- the table


def measure(given: argparse.Namespace, network: str, mbit: int, early: str) -> dict[str, Any]:
    set_rate(given.links, mbit)
    folder = Path(f"/tmp/{HUB}")
    folder.mkdir(exist_ok=True)
    command = [
        *("ip", "netns", "exec", HUB, sys.executable, "-m", "benchmarks.slow_link"),
        *("--early", early, "--network", network, "--steps", str(given.steps)),
        *("--zipf", str(given.zipf), "--links", given.links),
        *("--hub", HUB, "--folder", str(folder)),
    ]
    began = time.monotonic()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    finally:
        shutil.rmtree(folder)
    if ran.returncode:
        raise SystemExit(f"a job failed:\n{ran.stdout}\n{ran.stderr}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    took_s = time.monotonic() - began
    print(f"  {network}, {mbit} mbit, {early}: {found}, {took_s:.0f} s", file=sys.stderr, flush=True)
    return found


def compare(given: argparse.Namespace, network: str, mbit: int) -> str:
    found: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for number in range(given.rounds):
        for early in ("off", "on") if number % 2 == 0 else ("on", "off"):
            found[early].append(measure(given, network, mbit, early))
    digests = {json.dumps(one["digest"]) for runs in found.values() for one in runs}
    if len(digests) > 1:
        raise SystemExit(f"the models differ: {digests}")

    def median(early: str, what: str) -> float:
        return statistics.median(one[what] for one in found[early])

    ratios = [
        on["samples_per_s"] / off["samples_per_s"]
        for on, off in zip(found["on"], found["off"], strict=True)
    ]
    megabytes = "; ".join(
        f"{median('off', way):.2f} → {median('on', way):.2f}" for way in ("up_mb", "down_mb")
    )
    return (
        f"| {network} | {mbit} | {median('off', 'samples_per_s'):,.0f} | "
        f"{median('on', 'samples_per_s'):,.0f} | {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) | {megabytes} |"
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
    parser.add_argument("--rounds", type=int, default=2, help="pairs of jobs of each kind")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--zipf", type=float, default=1.05, help="0: all rows are equally likely")
    # Of the process that runs a job in the hub:
    parser.add_argument("--early", choices=["off", "on"], help=argparse.SUPPRESS)
    parser.add_argument("--network", help=argparse.SUPPRESS)
    parser.add_argument("--hub", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = arguments().parse_args()
    if given.early:
        run_job(given)
        return
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise SystemExit(f"{' and '.join(missing)} not found: apt-get install iproute2")
    if os.geteuid() != 0:
        raise SystemExit("only root may make network namespaces and slow links: use sudo")
    lines = [
        "| network | mbit/s | samples/s, off | on | ratio | MB per step: up; down |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with namespaces(given.links):
        for layers in given.networks:
            for mbit in given.rates:
                lines.append(compare(given, layers, mbit))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
