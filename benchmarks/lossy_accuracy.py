"""What lossy lookups cost in accuracy: AUC and loss beside those of exact ones, seed by seed.

    python -m benchmarks.lossy_accuracy                 # 5 seeds
    python -m benchmarks.lossy_accuracy --seeds 2 --steps 200
    python -m benchmarks.lossy_accuracy --png loss.png

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
EXACT, LOSSY = "exact", "lossy"


class Ran(NamedTuple):
    auc: float
    loss: list[float]  # by step
    ratio: float  # bytes of rows over bytes sent for them


def run(given: argparse.Namespace, seed: int, lookups: str) -> Ran:
    config = Config.load(
        None,
        [
            *(f"seed={seed}", f"steps={given.steps}", f"batch={given.batch}", "trainers=1"),
            *(f"model.rows={given.rows}", f"model.dim={given.dim}", "strategy=none"),
            *(f"data.test_samples={given.test_samples}", f"wire.lookups={lookups}"),
            *(f"wire.bandwidth={given.mbit}Mbit", f"wire.decay_steps={given.decay_steps}"),
            "data.zipf=1.05",
        ],
    )
    report: dict[str, Any] = JobRun(config).run()
    answers = report["sent"]["Answer"]
    curve = [loss for _, loss in report["loss_curve"]]
    return Ran(report["auc"], curve, answers["bytes"] / answers["packed"])


def windows(loss: list[float]) -> list[float]:
    """The means of as many parts of a curve."""
    return [float(np.mean(part)) for part in np.array_split(loss, WINDOWS)]


def print_tables(given: argparse.Namespace, ran: dict[str, list[Ran]]) -> None:
    lost = [a.auc - b.auc for a, b in zip(ran[EXACT], ran[LOSSY], strict=True)]
    around = interval(lost)
    error = "" if around is None or around.error is None else f"± {around.error:.5f}"
    mean = float(np.mean(lost))
    ratio = float(np.mean([one.ratio for one in ran[LOSSY]]))
    verdict = "met" if mean <= BAR else "missed"
    print("| AUC lost by lossy lookups | 95 % interval | bar | verdict | bytes of rows over sent |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| {mean:+.5f} | {error} | <= {BAR:g} | {verdict} | {ratio:.1f} |\n")
    print("| seed | AUC, exact | lossy | lost |\n| --- | --- | --- | --- |")
    for seed, (a, b) in enumerate(zip(ran[EXACT], ran[LOSSY], strict=True)):
        print(f"| {seed} | {a.auc:.5f} | {b.auc:.5f} | {a.auc - b.auc:+.5f} |")
    curves = {side: np.mean([windows(one.loss) for one in ran[side]], axis=0) for side in ran}
    print("\nTraining loss, mean of all seeds:\n\n| steps | exact | lossy |\n| --- | --- | --- |")
    ends = [len(part) for part in np.array_split(range(given.steps), WINDOWS)]
    for end, a, b in zip(np.cumsum(ends), curves[EXACT], curves[LOSSY], strict=True):
        print(f"| up to {end} | {a:.4f} | {b:.4f} |")


def write_png(ran: dict[str, list[Ran]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for side, colour in ((EXACT, "#2a7f62"), (LOSSY, "#c8553d")):
        curves = np.array([one.loss for one in ran[side]])
        mean = curves.mean(axis=0)
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
    ran: dict[str, list[Ran]] = {EXACT: [], LOSSY: []}
    for seed in range(given.seeds):
        for side, found in ran.items():
            found.append(run(given, seed, side))
            print(f"  seed {seed}, {side}: AUC {found[-1].auc:.5f}", file=sys.stderr, flush=True)
    print_tables(given, ran)
    if given.png:
        write_png(ran, given.png)


if __name__ == "__main__":
    main()
