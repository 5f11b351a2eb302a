"""What smaller messages cost in accuracy: AUC and loss beside those of exact ones, seed by seed.

    python -m benchmarks.lossy_accuracy                 # 5 seeds
    python -m benchmarks.lossy_accuracy --seeds 2 --steps 200
    python -m benchmarks.lossy_accuracy --png loss.png
    python -m benchmarks.lossy_accuracy --only lossy bf16-gradients fp16-gradients

One pass of the planted data: no sample comes twice. Both jobs of a seed start from the same weights
and read the same samples; the held-out ones are looked up exactly by both. Bounds are those of the
paper, which are twice as wide up to step 6,553: without --decay-steps they stay so all the way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planaria.cluster.run import JobRun
from planaria.comparing.accounts import interval
from planaria.config import Config
from planaria.config.wire import WireConfig

BAR = 0.0005
WINDOWS = 8  # of the loss curve, in the table
EXACT = "exact"
SIDES = {
    "lossy": ["wire.lookups=lossy"],
    "fp16": ["wire.lookups=fp16"],
    "bf16": ["wire.lookups=bf16"],
    "fp16-gradients": ["wire.gradients=fp16"],
    "bf16-gradients": ["wire.gradients=bf16"],
}
COLOURS = ("#2a7f62", "#c8553d", "#3d6fc8", "#8a5a9e", "#d9a441", "#555555")


class Ran(NamedTuple):
    auc: float
    loss: list[float]  # by step
    ratio: float  # bytes of rows and gradients over bytes sent for them


def run(given: argparse.Namespace, seed: int, side: str) -> Ran:
    config = Config.load(
        None,
        [
            *(f"seed={seed}", f"steps={given.steps}", f"batch={given.batch}", "trainers=1"),
            *(f"model.rows={given.rows}", f"model.dim={given.dim}", "strategy=none"),
            *(f"data.test_samples={given.test_samples}", *SIDES.get(side, ())),
            *(f"wire.bandwidth={given.mbit}Mbit", f"wire.decay_steps={given.decay_steps}"),
            "data.zipf=1.05",
        ],
    )
    report: dict[str, Any] = JobRun(config).run()
    sent = report["sent"]["Push" if side.endswith("gradients") else "Answer"]
    curve = [loss for _, loss in report["loss_curve"]]
    return Ran(report["auc"], curve, sent["bytes"] / sent["packed"])


def windows(loss: list[float]) -> list[float]:
    """The means of as many parts of a curve."""
    return [float(np.mean(part)) for part in np.array_split(loss, WINDOWS)]


def lost(ran: dict[str, list[Ran]], side: str) -> list[float]:
    """Of AUC, by seed."""
    return [a.auc - b.auc for a, b in zip(ran[EXACT], ran[side], strict=True)]


def verdict(mean: float, error: float) -> str:
    """Of the mean; and whether the seeds tell it from the bar."""
    said = "met" if mean <= BAR else "missed"
    return said if abs(mean - BAR) >= error else f"{said}, within noise"


def print_tables(given: argparse.Namespace, ran: dict[str, list[Ran]]) -> None:
    print("| | AUC lost | 95 % interval | bar | verdict | bytes over sent | seed by seed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for side in given.only:
        found = lost(ran, side)
        around, mean = interval(found), float(np.mean(found))
        error = 0.0 if around is None or around.error is None else around.error
        ratio = float(np.mean([one.ratio for one in ran[side]]))
        seeds = ", ".join(f"{one:+.5f}" for one in found)
        print(
            f"| {side} | {mean:+.5f} | ± {error:.5f} | <= {BAR:g} | {verdict(mean, error)} | "
            f"{ratio:.1f} | {seeds} |"
        )
    print(f"\nAUC, exact: {', '.join(f'{one.auc:.5f}' for one in ran[EXACT])}")
    curves = {side: np.mean([windows(one.loss) for one in ran[side]], axis=0) for side in ran}
    print("\nTraining loss, mean of all seeds:\n")
    print(f"| steps | {' | '.join(curves)} |\n| --- |{' --- |' * len(curves)}")
    ends = np.cumsum([len(part) for part in np.array_split(range(given.steps), WINDOWS)])
    for end, *losses in zip(ends, *curves.values(), strict=True):
        print(f"| up to {end} | {' | '.join(f'{loss:.4f}' for loss in losses)} |")


def write_png(ran: dict[str, list[Ran]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for colour, (side, runs) in zip(COLOURS, ran.items(), strict=False):
        mean = np.mean([one.loss for one in runs], axis=0)
        width = max(len(mean) // 60, 1)
        smooth = np.convolve(mean, np.ones(width) / width, mode="valid")
        axes.plot(np.arange(width, len(mean) + 1), smooth, color=colour, label=side)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, mean of {len(ran[EXACT])} seeds")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lossy_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=["lossy"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=10_000, help="of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--test-samples", type=int, default=50_000)
    parser.add_argument("--mbit", type=int, default=100, help="the link that encoders are for")
    parser.add_argument("--decay-steps", type=int, default=WireConfig().decay_steps)
    parser.add_argument("--png", type=Path, help="draw the loss curves here")
    given = parser.parse_args()
    ran: dict[str, list[Ran]] = {side: [] for side in (EXACT, *given.only)}
    for seed in range(given.seeds):
        for side, found in ran.items():
            found.append(run(given, seed, side))
            print(f"  seed {seed}, {side}: AUC {found[-1].auc:.5f}", file=sys.stderr, flush=True)
    print_tables(given, ran)
    if given.png:
        write_png(ran, given.png)


if __name__ == "__main__":
    main()
