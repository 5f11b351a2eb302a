"""Bytes of answers, exact over lossy, once a job has trained for a while.

    python -m benchmarks.answers                        # 26 tables of 1 M rows: 7 GB of memory
    python -m benchmarks.answers --rows 100000

Two jobs, one some steps longer than the other: what it has sent more are the answers of those
steps. Servers count the bytes of their rows, and those of the frames that they made of them.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from planaria.cluster.run import JobRun
from planaria.config import Config

BAR = 6.0
KINDS = ("Answer", "Early")


def job(given: argparse.Namespace, steps: int) -> Config:
    return Config.load(
        None,
        [
            *("batch=2048", "model.tables=26", f"model.rows={given.rows}"),
            *(f"model.dim={given.dim}", f"optimizer.name={given.optimizer}"),
            *("data.test_samples=0", "servers=6", "trainers=1", "spares=0", "strategy=none"),
            *("wire.lookups=lossy", f"wire.bandwidth={given.mbit}Mbit", f"steps={steps}"),
        ],
    )


def sent(given: argparse.Namespace, steps: int) -> tuple[int, int, dict[str, str]]:
    """Bytes of rows and of what was sent for them, and the encoders of the tables."""
    report: dict[str, Any] = JobRun(job(given, steps)).run()
    sums = [report["sent"][kind] for kind in KINDS if kind in report["sent"]]
    exact, lossy = (sum(one[what] for one in sums) for what in ("bytes", "packed"))
    print(
        f"  {steps} steps: {exact / 1e6:,.1f} MB of rows, {lossy / 1e6:,.1f} sent",
        file=sys.stderr,
        flush=True,
    )
    return exact, lossy, report["config"]["wire"]["encoders"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--after", type=int, default=300, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=20, help="that count")
    parser.add_argument("--mbit", type=int, default=100, help="the link that encoders are for")
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    given = parser.parse_args()
    exact_before, lossy_before, _ = sent(given, given.after)
    exact, lossy, encoders = sent(given, given.after + given.steps)
    ratio = (exact - exact_before) / (lossy - lossy_before)
    names = ", ".join(sorted(set(encoders.values())))
    print("| bytes of answers, exact over lossy | figure | bar | verdict | encoders | all steps |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| 26 tables of {given.rows:,} rows, dim {given.dim}, after {given.after} steps | "
        f"{ratio:.2f} | >= {BAR:g} | {'met' if ratio >= BAR else 'missed'} | {names} | "
        f"{exact / lossy:.2f} |"
    )


if __name__ == "__main__":
    main()
