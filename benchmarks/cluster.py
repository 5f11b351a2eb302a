"""A whole job: what protection costs, what a kill costs, and how fast redundancy comes back.

`python -m benchmarks.cluster --help` says how to use it; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import zmq

from benchmarks.in_process import plain_speed
from benchmarks.speed import Looks
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.schedule import Fault, parse_kill, resolve

STANDARD = [
    "batch=2048",
    "model.tables=26",
    "optimizer.name=adagrad",
    "data.test_samples=0",
    "servers=6",
]
NETWORKS = {
    "default": [],
    "512-256": ["model.bottom=[512,256,64]", "model.top=[512,256]"],
}


class Row(NamedTuple):
    name: str
    figure: float
    bar: float
    at_most: bool
    detail: str

    @property
    def met(self) -> bool:
        return self.figure <= self.bar if self.at_most else self.figure >= self.bar


class Sizes(NamedTuple):
    """How large the benchmark is."""

    rows: int
    dim: int
    steps: int
    rounds: int = 1
    kills: int = 0
    trainers: int = 1
    network: str = "512-256"


def job(sizes: Sizes, *sets: str) -> Config:
    return Config.load(
        None,
        [
            *STANDARD,
            *NETWORKS[sizes.network],
            f"model.rows={sizes.rows}",
            f"model.dim={sizes.dim}",
            f"trainers={sizes.trainers}",
            f"steps={sizes.steps}",
            *sets,
        ],
    )


def show(rows: list[Row]) -> None:
    print("| what | figure | bar | verdict |\n| --- | --- | --- | --- |")
    for row in rows:
        sign = "<=" if row.at_most else ">="
        verdict = "met" if row.met else "missed"
        print(f"| {row.name} | {row.figure:.2f} | {sign} {row.bar:.3g} | {verdict} |")
    for row in rows:
        if row.detail:
            print(f"  {row.name}: {row.detail}")


def run(config: Config, schedule: list[Fault] | None = None) -> tuple[dict[str, Any], JobRun]:
    job_run = JobRun(config, schedule or [])
    return job_run.run(), job_run


def measured(config: Config) -> tuple[float, float]:
    """Samples per second, and milliseconds of CPU that all servers use for a step."""
    looks = Looks(config)
    JobRun(config, observers=[looks]).run()
    wall_ms, used = looks.per_step()
    servers_ms = sum(cpu for (role, _), cpu in used.items() if role == "server")
    return config.batch / wall_ms * 1e3, servers_ms


def throughput(sizes: Sizes) -> list[Row]:
    """Samples per second of the strategies and of plain PyTorch, interleaved."""
    plain = job(sizes, "strategy=none")
    sides: dict[str, Callable[[], tuple[float, float]]] = {
        "none": lambda: measured(plain),
        "r = 1": lambda: measured(job(sizes, "parity=1")),
        "r = 2": lambda: measured(job(sizes, "parity=2", "k=4")),
        "plain": lambda: (plain_speed(plain, sizes.steps).samples_per_s, 0.0),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for round_number in range(sizes.rounds):
        order = list(sides) if round_number % 2 else list(sides)[::-1]
        for name in order:
            found[name].append(sides[name]())
            last = found[name][-1]
            print(f"  {name}: {last[0]:,.0f} samples/s, servers {last[1]:.1f} ms", file=sys.stderr)
    rate = {name: statistics.median(one for one, _ in some) for name, some in found.items()}
    cpu = {name: statistics.median(one for _, one in some) for name, some in found.items()}
    detail = ", ".join(f"{name} {value:,.0f}/s" for name, value in rate.items())
    of_cpu = ", ".join(f"{name} {value:.1f} ms" for name, value in cpu.items() if value)
    least = {"512-256": 0.95, "default": 0.88}[sizes.network]
    rows = [
        Row("samples/s, r = 1 over none", rate["r = 1"] / rate["none"], least, False, detail),
        Row("CPU of all servers, r = 1 over none", cpu["r = 1"] / cpu["none"], 1.6, True, of_cpu),
        Row("samples/s, r = 2 over none", rate["r = 2"] / rate["none"], 0.92, False, detail),
        Row("samples/s, none over PyTorch", rate["none"] / rate["plain"], 1.4, False, detail),
    ]
    return [row._replace(name=f"{row.name}, {sizes.network} network") for row in rows]


GAPS = {"server": (0.95, 3.0), "trainer": (0.5, 3.0), "coordinator": (0.5, 1.0)}
"""By role: the quantile that counts, and how many steps it may be."""


def gaps(sizes: Sizes) -> list[Row]:
    """Kills of one process after another, each with a warm spare at hand."""
    every = max(sizes.steps // 2, 20)
    config = job(sizes, f"steps={every * (sizes.kills + 1)}")
    return [gap(config, role, every, bar) for role, bar in GAPS.items()]


def gaps_of_make_train(sizes: Sizes) -> list[Row]:
    """The same for servers of the job that `make train` runs, but longer."""
    every = 50
    config = Config.load(None, [f"steps={every * (sizes.kills + 1)}"])
    row = gap(config, "server", every, (0.95, 6.0))
    return [row._replace(name=f"{row.name}, the job of make train")]


def gap(config: Config, role: str, every: int, counts: tuple[float, float]) -> Row:
    """From a kill to the next step, after every so many steps of one job. counts: as in GAPS."""
    who = {"server": "server:any", "trainer": "trainer:0", "coordinator": "coordinator"}[role]
    kills = [parse_kill(f"{who}@{step}") for step in range(every, config.steps, every)]
    report, job_run = run(config, resolve(kills, config))
    times = [at for _, at in job_run.progress.step_at]
    step_ms = statistics.median(np.diff(times)) * 1000
    found = [f["gap_ms"] / step_ms for f in report["failures"] if f["gap_ms"] is not None]
    quantile, bar = counts
    detail = f"{len(found)} kills, median {statistics.median(found):.2f} steps of {step_ms:.0f} ms"
    name = f"gap after SIGKILL of a {role}, in steps, {'p95' if quantile > 0.5 else 'median'}"
    return Row(name, float(np.quantile(found, quantile)), bar, True, detail)


def copy_s(size: int) -> float:
    """Sending so many bytes once over loopback with ZeroMQ, 1 MB a message."""
    context = zmq.Context()
    sink = context.socket(zmq.PULL)
    port = sink.bind_to_random_port("tcp://127.0.0.1")
    messages = size >> 20
    payload = np.ones(1 << 20, np.uint8)
    target = np.ones((messages, 1 << 20), np.uint8)  # touched before it is timed

    def send() -> None:
        source = context.socket(zmq.PUSH)
        source.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(messages):
            source.send(payload.data, copy=False)
        source.close()

    start = time.perf_counter()
    sender = threading.Thread(target=send)
    sender.start()
    for number in range(messages):
        target[number] = np.frombuffer(sink.recv(copy=False).buffer, np.uint8)
    sender.join()
    elapsed = time.perf_counter() - start
    sink.close()
    context.term()
    return elapsed


def speed_meanwhile(job_run: JobRun) -> float:
    """Of training while the lost server was rebuilt, over before. The gap is left out, and the step
    in which it was whole again belongs to it.
    """
    failure = job_run.progress.failures[0]
    assert failure.gap_ms is not None
    assert failure.rebuilt_ms is not None
    times = np.array([at for _, at in job_run.progress.step_at])
    goes_on, whole = (failure.at + ms / 1000 for ms in (failure.gap_ms, failure.rebuilt_ms))
    before = np.diff(times[times < failure.at][-30:]).mean()
    first, last = np.searchsorted(times, (goes_on - 1e-6, whole))
    during = np.diff(times[first : max(last, first + 1) + 1]).mean()
    return float(before / during)


def rebuild(sizes: Sizes) -> list[Row]:
    """Time to full redundancy against copying the lost bytes once, and what training keeps of its
    speed meanwhile; and memory in use. With r = 2, after one loss another one can be borne.
    """
    rows = []
    for priority, r, most in (("redundancy", 1, 6.0), ("balanced", 2, 10.0)):
        sets = (f"steps={sizes.steps * 4}", f"rebuild.priority={priority}", f"parity={r}", "k=4")
        config = job(sizes, *sets)
        kill = resolve([parse_kill(f"server:2@{sizes.steps}")], config)
        ratios, kept, details = [], [], []
        for _ in range(sizes.rounds):
            report, job_run = run(config, kill)
            lost, took_ms = (report["failures"][0][of] for of in ("bytes_rebuilt", "rebuilt_ms"))
            copied = statistics.median(copy_s(lost) for _ in range(3))
            ratios.append(took_ms / 1000 / copied)
            kept.append(speed_meanwhile(job_run))
            details.append(f"{lost / 1e6:,.0f} MB in {took_ms:.0f} ms, copy {copied * 1e3:.0f} ms")
        name = f"time to full redundancy over one copy, {priority}"
        rows.append(Row(name, statistics.median(ratios), most, True, "; ".join(details)))
    name = "samples/s while rebuilding over before, balanced, gap left out"
    rows.append(Row(name, statistics.median(kept), 0.9, False, ""))
    needed = report["bytes_records"] * (config.layout.k + config.layout.r) / config.layout.k
    memory = sum(one.resident for one in job_run.reporter.servers.values()) / needed
    rows.append(Row("memory of servers over records x (k + r)/k", memory, 1.15, True, ""))
    return rows


PARTS = {
    "throughput": throughput,
    "gaps": gaps,
    "gaps_of_make_train": gaps_of_make_train,
    "rebuild": rebuild,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--network", choices=NETWORKS, default="512-256", help="its layers")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    sizes = Sizes(
        options.rows,
        options.dim,
        options.steps,
        options.rounds,
        options.kills,
        options.trainers,
        options.network,
    )
    rows: list[Row] = []
    for name, part in PARTS.items():
        if options.only in (None, name):
            rows += part(sizes)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
