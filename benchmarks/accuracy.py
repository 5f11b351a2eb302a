"""What partial recovery costs in accuracy: CPR's failure pattern on the planted data.

    python -m benchmarks.accuracy                 # 5 seeds, about 10 minutes
    python -m benchmarks.accuracy --seeds 2 --steps 300

Two failures, each of half of the servers, late in an interval between two saves. Every strategy
meets the same failures; the loss is the AUC of the undisturbed run of the same seed less its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import numpy as np

from planaria.cluster.run import JobRun
from planaria.comparing.accounts import interval
from planaria.config import Config
from planaria.schedule import parse_kill, resolve

SERVERS = 6
INTERVAL = 0.2  # of the job, between two saves
FAILURES = (0.38, 0.78)  # of the job: nine tenths of an interval after a save
NOTHING = "nothing restored"

STRATEGIES: dict[str, list[str]] = {
    "erasure, r = 3": ["strategy=erasure", "parity=3", "k=3"],
    "cpr, mfu": ["strategy=cpr", "cpr.variant=mfu"],
    "cpr, ssu": ["strategy=cpr", "cpr.variant=ssu"],
    "cpr, scar": ["strategy=cpr", "cpr.variant=scar"],
    "cpr, vanilla": ["strategy=cpr"],
    NOTHING: ["strategy=cpr"],
}


def job(seed: int, steps: int, *sets: str) -> Config:
    common = [f"seed={seed}", f"steps={steps}", f"servers={SERVERS}", f"spares={SERVERS // 2}"]
    return Config.load(None, [*common, "trainers=1", "data.test_samples=50000", *sets])


def run(name: str, seed: int, steps: int) -> dict[str, Any]:
    every = int(INTERVAL * steps) if name != NOTHING else 100 * steps
    with tempfile.TemporaryDirectory(prefix="planaria-bench-") as folder:
        saves = [f"checkpoint.path={folder}", f"checkpoint.every_steps={every}"]
        sets = [*STRATEGIES[name], *([] if name.startswith("erasure") else saves)]
        config = job(seed, steps, *sets, "cpr.target_pls=1")
        kills = [f"server:any*{SERVERS // 2}@{int(at * steps)}" for at in FAILURES]
        return JobRun(config, resolve(list(map(parse_kill, kills)), config)).run()


def shown(values: list[float]) -> str:
    found = interval(values)
    return f"± {found.error:.5f}" if found and found.error is not None else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", nargs="*", choices=STRATEGIES, default=list(STRATEGIES))
    chosen = parser.parse_args()
    losses: dict[str, list[float]] = {name: [] for name in chosen.only}
    pls: dict[str, list[float]] = {name: [] for name in chosen.only}
    for seed in range(chosen.seeds):
        undisturbed = JobRun(job(seed, chosen.steps, "strategy=none")).run()
        for name in chosen.only:
            report = run(name, seed, chosen.steps)
            losses[name].append(undisturbed["auc"] - report["auc"])
            pls[name].append(report["pls"])
            equal = report["digest"] == undisturbed["digest"]
            print(
                f"  seed {seed}, {name}: AUC {report['auc']:.5f} of {undisturbed['auc']:.5f}, "
                f"digest {'equal' if equal else 'differs'}",
                file=sys.stderr,
            )
    print("| strategy | AUC loss | 95 % interval | PLS |\n| --- | --- | --- | --- |")
    for name, found in losses.items():
        print(f"| {name} | {np.mean(found):.5f} | {shown(found)} | {np.mean(pls[name]):.3f} |")
    vanilla = "cpr, vanilla"
    for name in ("cpr, mfu", "cpr, ssu", "cpr, scar", NOTHING):
        if vanilla in losses and name in losses:
            gap = np.subtract(losses[vanilla], losses[name]).tolist()
            print(f"vanilla loses {np.mean(gap):+.5f} {shown(gap)} more than {name}, seed by seed")


if __name__ == "__main__":
    main()
