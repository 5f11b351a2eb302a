"""Plans for tables larger than memory: what they save, and how near the bound they are.

    python -m benchmarks.placing                     # everything; some minutes
    python -m benchmarks.placing --only sharded      # 397 whole tables on 16 servers
    python -m benchmarks.placing --only slow         # rows from SSDs, against an even split of RAM
    python -m benchmarks.placing --only sample       # plans by 1 % of the samples

Nothing is timed but planning. The 397 tables are generated: their sizes, skews and poolings are
spread as RecShard's are said to be, not taken from it. Rows from SSDs are counted, of accesses
drawn from the true distribution and not from the curve that the plan was made by.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planaria.kernels.types import Index
from planaria.placing.costs import Curve, Heat, Machine, Numbers, Storing
from planaria.placing.counting import RowCounts
from planaria.placing.curves import knots
from planaria.placing.making import hottest
from planaria.placing.sampling import SurveyedTable
from planaria.placing.simple import METRICS, even_split, greedy
from planaria.placing.spreading import spread
from planaria.placing.statistics import FeatureStatistics, TableStatistics, summarised
from planaria.placing.whole import Problem, assign_heuristically

DRAWS = 400_000  # fresh samples, of which rows are looked up


def zipf(rows: int, exponent: float) -> Numbers:
    heat = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return np.asarray(heat / heat.sum(), np.float64)


# ------------------------------------------------------------------------ whole tables


def sharded_instance(seed: int, tables: int = 397, rows_in_all: float = 5.3e9) -> list[Heat]:
    """Tables as a production model has them: sizes over six orders of magnitude, most features rare
    and short, a few in every sample and long, some skewed and some nearly flat.
    """
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 2.2, tables))
    sizes = np.clip(sizes / sizes.sum() * rows_in_all, 100, 2.5e8).astype(np.int64)
    exponents = np.clip(rng.normal(1.05, 0.3, tables), 0.1, 1.8)
    pooling = np.clip(np.exp(rng.normal(1.0, 1.4, tables)), 1, 200)
    coverage = np.clip(rng.beta(0.7, 0.5, tables), 0.01, 1)
    heats = []
    for number in range(tables):
        at = knots(int(sizes[number]))
        share = power_sum(at, exponents[number])
        accesses = float(pooling[number] * coverage[number])
        name = f"t{number}"
        heats.append(Heat(name, int(sizes[number]), 256, accesses, at, share / share[-1]))
    return heats


def power_sum(at: Index, exponent: float) -> Numbers:
    """Of i^-exponent up to each of these, by the integral behind the first thousand."""
    first = np.append(0.0, np.cumsum(np.arange(1, 1001, dtype=np.float64) ** -exponent))
    n = np.maximum(at, 1000) + 0.5
    e = 1 - exponent
    rest = np.log(n / 1000.5) if abs(e) < 1e-9 else (n**e - 1000.5**e) / e
    return np.asarray(first[np.minimum(at, 1000)] + rest, np.float64)


def show_sharded(seeds: int) -> None:
    print("## 397 whole tables, 16 servers: RAM at 1555 GB/s, the slow tier at 16 GB/s")
    names = ["seed", "records", "RAM", *(f"greedy by {metric}" for metric in METRICS)]
    names += ["best over ours", "ours over bound", "dearest table over mean", "largest over mean"]
    names += ["best over spread rows", "slow rows, best over ours", "planning"]
    print(f"| {' | '.join(names)} |\n{'| --- ' * len(names)}|")
    for seed in range(seeds):
        for ram in (24e9, 8e9):
            _show_sharded(seed, ram)


def _show_sharded(seed: int, ram: float) -> None:
    curves = [Curve(heat, Storing(page=1)) for heat in sharded_instance(seed)]
    machines = [Machine(ram, 1e12, 1555e9, 16e9)] * 16
    started = time.perf_counter()
    problem = Problem(curves, machines)
    found = assign_heuristically(problem)
    seconds = time.perf_counter() - started
    others = [greedy(curves, machines, metric) for metric in METRICS]
    times = [float(one.max()) / found.largest for one in others]
    ours = _slow(curves, found.ram)
    # Of greedy sharding, the seconds beyond what RAM alone would take are the slow tier's.
    fast = sum(float(curve.traffic.seconds(machines[0])[-1]) for curve in curves)
    per_row = 2 * 256 * (1 / 16e9 - 1 / 1555e9)
    slow = min((float(one.sum()) - fast) / per_row for one in others)
    size = sum(curve.bytes for curve in curves)
    dearest = float(problem.alone.min(axis=0).max()) / float(found.seconds.mean())
    spread_rows = min(float(one.max()) for one in others) / spread(curves, machines).largest
    cells = [f"{seed}", f"{size / 1e9:,.0f} GB", f"{16 * ram / size:.0%}"]
    cells += [f"{one:.2f}" for one in (*times, min(times))]
    cells += [f"{found.largest / found.bound:.5f}", f"{dearest:.3f}"]
    cells += [f"{found.largest / found.seconds.mean():.5f}", f"{spread_rows:.2f}"]
    cells += [f"{slow / ours:.1f}", f"{seconds:.1f} s"]
    print(f"| {' | '.join(cells)} |")


def _slow(curves: list[Curve], ram: Numbers) -> float:
    return float(
        sum(
            curve.heat.accesses * (1 - np.interp(size, curve.ram, curve.heat.share))
            for curve, size in zip(curves, ram, strict=True)
        )
    )


# ------------------------------------------------------------------------ rows from SSDs


@dataclass(frozen=True, eq=False)
class Truth:
    """A table, how hot each of its rows truly is, and what a sample says of it."""

    heat: Numbers  # float64[rows]: share of accesses
    found: TableStatistics
    by_heat: Index


def truths(sizes: list[int], exponent: float, sampled: int, accesses: list[float]) -> list[Truth]:
    made = []
    for number, (rows, each) in enumerate(zip(sizes, accesses, strict=True)):
        rng = np.random.default_rng(number)
        heat = rng.permutation(zipf(rows, exponent))
        made.append(_sampled(f"t{number}", heat, rng.poisson(heat * sampled * each), each))
    return made


def _sampled(name: str, heat: Numbers, counts: Index, accesses: float) -> Truth:
    counted = RowCounts.of(counts)
    feature = FeatureStatistics(name, 1.0, accesses)
    found = summarised(SurveyedTable(name, len(heat), 512), counted, (feature,), 0.01)
    return Truth(heat, found, counted.by_heat[0])


def show_slow() -> None:
    print("## Rows from SSDs, of fresh samples: the plan over the same RAM for every table")
    print("| tables | RAM | plan | even split by heat | by row number | over by heat "
          "| over by number |")  # fmt: skip
    print("| --- " * 7 + "|")
    rng = np.random.default_rng(0)
    spread_out = np.exp(rng.uniform(np.log(10), np.log(3e6), 26)).astype(int).tolist()
    pooled = np.exp(rng.normal(0, 1.4, 26)).tolist()
    cases = {
        "26 of 620,000 rows, Zipf 1.05": ([620_000] * 26, [1.0] * 26),
        "26 of 10 to 3,000,000 rows": (spread_out, [1.0] * 26),
        "the same, pooling 0.1 to 10": (spread_out, pooled),
    }
    for name, (sizes, accesses) in cases.items():
        tables = truths(sizes, 1.05, 10_000_000, accesses)
        for ram in (0.2, 0.1, 0.05):
            _show_slow(name, tables, ram)


def _show_slow(name: str, tables: list[Truth], ram: float) -> None:
    curves = [Curve(one.found.heat(), Storing()) for one in tables]
    size = sum(curve.bytes for curve in curves)
    plan = spread(curves, [Machine(ram * size / 4, size)] * 4)
    split = even_split(curves, ram * size)
    numbers = [np.arange(len(one.heat)) for one in tables]
    ranked = [hottest(one.by_heat, len(one.heat), len(one.heat)) for one in tables]
    ours = drawn_slow(tables, ranked, plan.hot[0])
    by_heat = drawn_slow(tables, ranked, split)
    by_number = drawn_slow(tables, numbers, split)
    print(
        f"| {name} | {ram:.0%} | {ours:.4f} | {by_heat:.4f} | {by_number:.4f} | "
        f"1/{by_heat / ours:.2f} | 1/{by_number / ours:.1f} |"
    )


def drawn_slow(tables: list[Truth], ranked: list[Index], hot: Index) -> float:
    """Rows per sample that are not among the first `hot`, of accesses that are drawn."""
    slow = 0.0
    for number, (one, rows, count) in enumerate(zip(tables, ranked, hot, strict=True)):
        rng = np.random.default_rng([7, number])
        cold = 1 - float(one.heat[rows[:count]].sum())
        each = one.found.accesses_per_sample
        slow += rng.poisson(DRAWS * each * max(cold, 0.0)) / DRAWS
    return slow


# ------------------------------------------------------------------------ what a sample knows


def show_sample() -> None:
    print("## Plans by 1 % of the samples, costed by all: over plans by all of them")
    print("RAM for 20 % of 26 tables of 20,000 rows; in brackets what the statistics predict")
    columns = (100, 300, 1000, 3000, 10_000)
    names = " | ".join(f"{per_row:,} accesses per row" for per_row in columns)
    print(f"| Zipf | {names} |")
    print("| --- " * (1 + len(columns)) + "|")
    for exponent in (0.8, 1.05, 1.3):
        cells = [_sample_cost(exponent, per_row) for per_row in columns]
        print(f"| {exponent} | " + " | ".join(cells) + " |")


def _sample_cost(exponent: float, per_row: int, rows: int = 20_000, tables: int = 26) -> str:
    rng = np.random.default_rng(per_row)
    sampled, exact = [], []
    for number in range(tables):
        heat = rng.permutation(zipf(rows, exponent))
        full = rng.poisson(heat * rows * per_row)
        true = full / full.sum()
        sampled.append(_sampled(f"t{number}", true, rng.binomial(full, 0.01), 1.0))
        exact.append(_sampled(f"t{number}", true, full, 1.0))
    (ours, predicted), (best, _) = (_costs(tables) for tables in (sampled, exact))
    return f"{ours / best:.3f} ({predicted / best:.3f})"


def _costs(tables: list[Truth]) -> tuple[float, float]:
    """What a plan costs by the true shares of its rows, and what it was planned to cost."""
    curves = [Curve(one.found.heat(), Storing()) for one in tables]
    size = sum(curve.bytes for curve in curves)
    machine = Machine(0.2 * size / 6, size)
    plan = spread(curves, [machine] * 6)
    total = 0.0
    for one, hot, curve in zip(tables, plan.hot[0], curves, strict=True):
        rows = hottest(one.by_heat, len(one.heat), int(hot))
        share = np.full(len(curve.heat.hot), float(one.heat[rows].sum()))
        heat = Heat("t", curve.heat.rows, 512, 1.0, curve.heat.hot, np.minimum(share, 1.0))
        total += float(Curve(heat, Storing()).traffic.seconds(machine)[0]) / 6
    return total, plan.largest


PARTS: dict[str, Callable[[int], None]] = {
    "sharded": show_sharded,
    "slow": lambda seeds: show_slow(),
    "sample": lambda seeds: show_sample(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=list(PARTS), help="one part")
    parser.add_argument("--seeds", type=int, default=3, help="generated instances")
    options = parser.parse_args()
    for name, show in PARTS.items():
        if options.only in (None, name):
            show(options.seeds)
            print(flush=True)


if __name__ == "__main__":
    main()
