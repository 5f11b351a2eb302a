"""CPU time of a step beside that of an earlier commit, where a job uses nothing that is new.

    git worktree add ../before 8cf6bd9 && make -C ../before .venv/.installed
    python -m benchmarks.before ../before
    python -m benchmarks.before ../before --rounds 3 --steps 40

Jobs of the two checkouts take turns, and who comes first changes every round. A ratio is that of
the two jobs of one round, of the CPU time of a step, all processes together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.speed import ROOT, Speed, earlier_speed
from planaria.comparing.accounts import interval
from planaria.config import Config

BAR = 1.01
SIDES = {"none": ["strategy=none"], "r = 1": ["parity=1"]}


def job(given: argparse.Namespace, side: str) -> list[str]:
    return [
        *("batch=2048", "model.tables=26", f"model.rows={given.rows}", f"model.dim={given.dim}"),
        *("optimizer.name=adagrad", "data.test_samples=0", "servers=6", "spares=0"),
        *(f"steps={given.steps}", "trainers=1", *SIDES[side]),
    ]


def a_round(number: int, before: Path, sets: list[str]) -> float:
    """CPU after over before."""
    order = [before, ROOT] if number % 2 else [ROOT, before]
    found: dict[Path, Speed] = {}
    for checkout in order:
        found[checkout] = earlier_speed(checkout, Config.load(None, sets), sets)
    ratio = found[ROOT].all_ms / found[before].all_ms
    print(
        f"  {found[before].all_ms:.1f} → {found[ROOT].all_ms:.1f} ms of CPU a step: {ratio:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return ratio


def row(side: str, ratios: list[float]) -> str:
    middle = statistics.median(ratios)
    around = interval(ratios)
    mean = f"{around.mean:.3f} ± {around.error:.3f}" if around and around.error else ""
    verdict = "met" if middle <= BAR else "missed"
    rounds = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return f"| {side} | {middle:.3f} | {mean} | <= {BAR} | {verdict} | {rounds} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="a checkout of the earlier commit, installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--only", nargs="*", choices=list(SIDES), default=list(SIDES))
    given = parser.parse_args()
    if not (given.before / ".venv" / "bin" / "python").exists():
        parser.error(f"{given.before} is not installed: make -C {given.before} .venv/.installed")
    found: dict[str, list[float]] = {side: [] for side in given.only}
    for number in range(given.rounds):
        for side, ratios in found.items():
            ratios.append(a_round(number, given.before.resolve(), job(given, side)))
    print("| job | CPU after over before | mean, 95 % | bar | verdict | rounds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for side, ratios in found.items():
        print(row(side, ratios))


if __name__ == "__main__":
    main()
