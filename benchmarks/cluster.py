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
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.schedule import Fault, parse_kill, resolve

STANDARD = [
    "batch=2048",
    "model.tables=26",
    "model.bottom=[512,256,64]",
    "model.top=[512,256]",
    "optimizer.name=adagrad",
    "data.test_samples=0",
    "servers=6",
]


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


def job(sizes: Sizes, *sets: str) -> Config:
    return Config.load(
        None,
        [
            *STANDARD,
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


def throughput(sizes: Sizes) -> list[Row]:
    """Samples per second of the strategies and of plain PyTorch, interleaved."""
    sides: dict[str, Callable[[], float]] = {
        "none": lambda: run(job(sizes, "strategy=none"))[0]["samples_per_s"],
        "r = 1": lambda: run(job(sizes, "parity=1"))[0]["samples_per_s"],
        "r = 2": lambda: run(job(sizes, "parity=2", "k=4"))[0]["samples_per_s"],
        "plain": lambda: plain_speed(job(sizes, "strategy=none"), sizes.steps).samples_per_s,
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(sizes.rounds):
        order = list(sides) if round_number % 2 else list(sides)[::-1]
        for name in order:
            rates[name].append(sides[name]())
            print(f"  {name}: {rates[name][-1]:,.0f} samples/s", file=sys.stderr)
    median = {name: statistics.median(values) for name, values in rates.items()}
    detail = ", ".join(f"{name} {value:,.0f}/s" for name, value in median.items())
    return [
        Row(
            "samples/s, erasure r = 1 over none",
            median["r = 1"] / median["none"],
            0.93,
            False,
            detail,
        ),
        Row(
            "samples/s, erasure r = 2 over none",
            median["r = 2"] / median["none"],
            0.90,
            False,
            detail,
        ),
        Row(
            "samples/s, none over plain PyTorch",
            median["none"] / median["plain"],
            1.0,
            False,
            detail,
        ),
    ]


def gaps(sizes: Sizes) -> list[Row]:
    """Kills of one server after another, each with a warm spare at hand."""
    every = max(sizes.steps // 2, 20)
    steps = every * (sizes.kills + 1)
    config = job(sizes, f"steps={steps}")
    kills = [parse_kill(f"server:any@{every * (n + 1)}") for n in range(sizes.kills)]
    report, job_run = run(config, resolve(kills, config))
    times = [at for _, at in job_run.progress.step_at]
    step_ms = statistics.median(np.diff(times)) * 1000
    found = [f["gap_ms"] / step_ms for f in report["failures"] if f["gap_ms"] is not None]
    during = [
        f["samples_per_s_during"] / report["samples_per_s"]
        for f in report["failures"]
        if f["samples_per_s_during"]
    ]
    detail = f"{len(found)} kills, median {statistics.median(found):.1f} steps of {step_ms:.0f} ms"
    return [
        Row(
            "gap after SIGKILL, median steps, p95",
            float(np.quantile(found, 0.95)),
            12,
            True,
            detail,
        ),
        Row("samples/s while rebuilding over before", statistics.median(during), 0.87, False, ""),
    ]


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


def rebuild(sizes: Sizes) -> list[Row]:
    """Time to full redundancy against copying the lost bytes once, and memory in use."""
    config = job(sizes, f"steps={sizes.steps * 4}")
    kill = resolve([parse_kill(f"server:2@{sizes.steps}")], config)
    ratios, details = [], []
    for _ in range(sizes.rounds):
        report, job_run = run(config, kill)
        failure = report["failures"][0]
        lost = failure["bytes_rebuilt"]
        copied = statistics.median(copy_s(lost) for _ in range(3))
        ratios.append(failure["rebuilt_ms"] / 1000 / copied)
        details.append(
            f"{lost / 1e6:,.0f} MB in {failure['rebuilt_ms']:.0f} ms, copy {copied * 1e3:.0f} ms"
        )
    layout = config.layout
    needed = report["bytes_records"] * (layout.k + layout.r) / layout.k
    memory = sum(one.resident for one in job_run.reporter.servers.values()) / needed
    return [
        Row(
            "time to full redundancy over one copy",
            statistics.median(ratios),
            3,
            True,
            "; ".join(details),
        ),
        Row("memory of servers over records x (k + r)/k", memory, 1.15, True, ""),
    ]


PARTS = {"throughput": throughput, "gaps": gaps, "rebuild": rebuild}


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
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    sizes = Sizes(
        options.rows, options.dim, options.steps, options.rounds, options.kills, options.trainers
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
