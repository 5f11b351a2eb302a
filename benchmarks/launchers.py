"""One job with each launcher: local processes, hosts that join, Ray's actors.

    python -m benchmarks.launchers                      # 300 k rows per table, three rounds
    python -m benchmarks.launchers --only local none    # without Ray

All on this machine, over tcp and without encryption, so that the launcher is all that differs. The
launchers take turns, and each job says its own steady speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

PLANARIA = [sys.executable, "-m", "planaria"]
ADDRESS = "127.0.0.1:7843"
HOSTS = {"server": 6, "trainer": 1}
JOB = (
    "batch=2048",
    "model.tables=26",
    "model.dim=16",
    "optimizer.name=adagrad",
    "data.test_samples=0",
    f"servers={HOSTS['server']}",
    f"trainers={HOSTS['trainer']}",
    "spares=0",
    "cluster.transport=tcp",
    "cluster.encryption=off",
    "cluster.heartbeat_limit_ms=20000",
)
OPTIONS = {
    "local": [],
    "none": ["--on", "none", "--listen", ADDRESS],
    "ray": ["--on", "ray"],
}


@contextlib.contextmanager
def hosts(key: Path) -> Iterator[None]:
    """They join, and end with the job."""
    deadline = time.monotonic() + 60
    while not key.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    joins = ["--join", ADDRESS, "--key", str(key)]
    processes = [
        subprocess.Popen(
            [*PLANARIA, role, *joins, "--count", str(count)], stdout=subprocess.DEVNULL
        )
        for role, count in HOSTS.items()
    ]
    try:
        yield
    finally:
        for process in processes:
            process.wait(60)


def speed(launcher: str, sets: list[str]) -> float:
    """Samples per second."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        report, key = Path(folder, "report.json"), Path(folder, "key")
        words = [*PLANARIA, "train", *sets, *OPTIONS[launcher], "--report", str(report)]
        if launcher == "none":
            words += ["--key", str(key)]
        job = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        if launcher == "none":
            stack.enter_context(hosts(key))
        if job.wait(1800):
            raise SystemExit(f"the job with {launcher} has failed: {' '.join(words)}")
        return float(json.loads(report.read_text())["samples_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--rows", type=int, default=300_000, help="of each table")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    pairs = [*JOB, f"model.rows={given.rows}", f"steps={given.steps}"]
    sets = [word for pair in pairs for word in ("--set", pair)]
    found: dict[str, list[float]] = {launcher: [] for launcher in given.only}
    for turn in range(given.rounds):
        for launcher in given.only if turn % 2 else reversed(given.only):
            found[launcher].append(speed(launcher, sets))
    print("| launcher | samples/s | over local | rounds |")
    print("| --- | --- | --- | --- |")
    for launcher, speeds in found.items():
        ratio = statistics.median(
            [one / local for one, local in zip(speeds, found.get("local", speeds), strict=True)]
        )
        rounds = ", ".join(f"{one:,.0f}" for one in speeds)
        print(f"| {launcher} | {statistics.median(speeds):,.0f} | {ratio:.2f} | {rounds} |")


if __name__ == "__main__":
    main()
