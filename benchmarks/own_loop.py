"""A user's loop over planaria.torch: beside the loop of `planaria train`, and beside plain torch.

    python -m benchmarks.own_loop                      # everything, about twenty minutes
    python -m benchmarks.own_loop --quick              # small tables, one round
    python -m benchmarks.own_loop --only loops --rounds 5

Sides take turns, and the median of a side's rounds counts. Ratios are given twice: of samples per
second, and of the trainer's CPU time per step, which says more where two cores carry ten processes.
The user's loop is planaria/models/named.py, or benchmarks/scripts/multi_hot.py where a bag has
several ids.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import msgspec
import pyarrow.parquet as pq

from benchmarks.cluster import Row, show
from benchmarks.in_process import plain_speed
from benchmarks.reading import ROW_GROUP, SCHEMA, criteo_like, in_order, rows_per_s
from benchmarks.speed import Speed, built_in_speed, earlier_speed, script_speed
from planaria.cluster.scripts import INCLUDED
from planaria.config import Config
from planaria.data import Schema
from planaria.data.parquet import ParquetFiles

# In a folder of its own, because a script can import all that lies beside it, by its first name.
MULTI_HOT = Path(__file__).parent / "scripts" / "multi_hot.py"
NETWORKS = {
    "small": ["model.bottom=[64,32]", "model.top=[64,32]"],
    "512-256": ["model.bottom=[512,256,64]", "model.top=[512,256]"],
}
JOB = [
    "batch=2048",
    "model.tables=26",
    "model.dim=16",
    "optimizer.name=adagrad",
    "data.test_samples=0",
    "servers=6",
    "trainers=1",
    "strategy=none",
    "spares=0",
    "script.spares=0",
]
LARGE_DENSE = ["model.bottom=[64]", "model.top=[2048,864]"]  # 10 MB
Side = Callable[[], Speed]


class Sizes(NamedTuple):
    rows: int
    steps: int
    rounds: int
    networks: list[str]
    before: Path | None = None  # a checkout of earlier code, installed

    def sets(self, *more: str) -> list[str]:
        return [*JOB, f"model.rows={self.rows}", f"steps={self.steps}", *more]


def job(sizes: Sizes, *sets: str) -> Config:
    return Config.load(None, sizes.sets(*sets))


def in_turn(what: str, sides: dict[str, Side], rounds: int) -> dict[str, Speed]:
    """The medians of each side; the order turns around every round."""
    found: dict[str, list[Speed]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            speed = sides[name]()
            found[name].append(speed)
            print(
                f"  {what}, {number + 1} of {rounds}, {name}: {speed.samples_per_s:,.0f}/s, "
                f"CPU a step {speed.trainer_ms:.1f} ms, with servers {speed.all_ms:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return {
        name: Speed(*map(statistics.median, zip(*speeds, strict=True)))
        for name, speeds in found.items()
    }


def compared(what: str, medians: dict[str, Speed], ours: str, other: str, bar: float) -> list[Row]:
    """Two rows: on the wall, and in CPU time of the process that computes."""
    detail = "; ".join(
        f"{name} {one.samples_per_s:,.0f}/s, CPU a step {one.trainer_ms:.1f} ms, "
        f"with servers {one.all_ms:.1f}"
        for name, one in medians.items()
    )
    mine, theirs = medians[ours], medians[other]
    wall = mine.samples_per_s / theirs.samples_per_s
    return [
        Row(f"samples/s, {what}", wall, bar, False, detail),
        Row(f"the same by CPU time, {what}", theirs.trainer_ms / mine.trainer_ms, bar, False, ""),
    ]


def loops(sizes: Sizes) -> list[Row]:
    """The same model on the same samples: our loop, and a user's."""
    rows = []
    for name in sizes.networks:
        config = job(sizes, *NETWORKS[name])
        sides: dict[str, Side] = {
            "built-in": lambda config=config: built_in_speed(config),  # type: ignore[misc]
            "user's": lambda config=config: script_speed(config, INCLUDED)[0],  # type: ignore[misc]
        }
        if before := sizes.before:
            # Older code knows no scripts.
            sets = [one for one in sizes.sets(*NETWORKS[name]) if not one.startswith("script.")]
            sides["before"] = lambda config=config, sets=sets: earlier_speed(  # type: ignore[misc]
                before, config, sets
            )
        medians = in_turn(name, sides, sizes.rounds)
        rows += compared(f"user's loop over built-in, {name}", medians, "user's", "built-in", 0.97)
        if before:
            what = f"user's loop over the built-in one of before, {name}"
            rows += compared(what, medians, "user's", "before", 0.97)
    return rows


def plain(sizes: Sizes) -> list[Row]:
    """The user's loop, and what plain torch does in one process, in its better form."""
    rows = []
    for name in sizes.networks:
        config = job(sizes, *NETWORKS[name])
        sides: dict[str, Side] = {
            "ours": lambda config=config: script_speed(config, INCLUDED)[0],  # type: ignore[misc]
            "plain": lambda config=config: plain_speed(config, sizes.steps),  # type: ignore[misc]
            "plain, one table": lambda config=config: plain_speed(  # type: ignore[misc]
                config, sizes.steps, one_table=True
            ),
        }
        rows += against_plain(f"none over plain torch, {name}", sides, sizes, 1.2)
    return rows


def multi_hot(sizes: Sizes) -> list[Row]:
    """The same with ten ids per bag."""
    config = job(sizes, *NETWORKS["512-256"])
    sides: dict[str, Side] = {
        "ours": lambda: script_speed(config, MULTI_HOT)[0],
        "plain": lambda: plain_speed(config, sizes.steps, multi_hot=True),
        "plain, one table": lambda: plain_speed(
            config, sizes.steps, one_table=True, multi_hot=True
        ),
    }
    return against_plain("none over plain torch, bags of 10", sides, sizes, 1.0)


def against_plain(what: str, sides: dict[str, Side], sizes: Sizes, bar: float) -> list[Row]:
    medians = in_turn(what, sides, sizes.rounds)
    best = max(("plain", "plain, one table"), key=lambda name: medians[name].samples_per_s)
    return compared(what, medians, "ours", best, bar)


def dense(sizes: Sizes) -> list[Row]:
    """What each of two trainers sends for the sum of a dense part of 10 MB."""
    config = job(sizes, *LARGE_DENSE, "trainers=2", "batch=512", "steps=24", "model.rows=1000")
    _, said = script_speed(config, MULTI_HOT, "count")
    counts = [line.split()[-2:] for line in said if "sent" in line]
    ratios = [int(sent) / int(once) for sent, once in counts]
    size = int(counts[0][1]) / config.steps / 1e6
    return [
        Row(
            f"bytes that each of two trainers sends for the dense sum, over {size:.1f} MB",
            max(ratios),
            2.1,
            True,
            f"{config.steps} steps",
        )
    ]


def reading(sizes: Sizes) -> list[Row]:
    """One thread reads a file shaped like Criteo's; a job trains on it."""
    samples = sizes.steps * 2048
    with tempfile.TemporaryDirectory() as folder:
        data, schema = Path(folder, "day.parquet"), Path(folder, "schema.yaml")
        pq.write_table(criteo_like(samples), data, row_group_size=ROW_GROUP)
        tables = tuple(msgspec.structs.replace(one, rows=sizes.rows) for one in SCHEMA.sparse)
        msgspec.structs.replace(SCHEMA, sparse=tables).save(schema)
        read = rows_per_s(samples, lambda: in_order(ParquetFiles(data, Schema.load(schema))))
        config = job(
            sizes,
            "data.source=files",
            f"data.path={data}",
            f"data.schema={schema}",
            "data.validation=0",
            "data.shuffle=off",
        )
        speed = script_speed(config, INCLUDED)[0]
    return [
        Row(
            "rows/s read from Parquet over rows/s trained, small",
            read / speed.samples_per_s,
            3,
            False,
            f"read {read:,.0f} per second of CPU, trained {speed.samples_per_s:,.0f}/s",
        )
    ]


PARTS = {
    "loops": loops,
    "plain": plain,
    "multi_hot": multi_hot,
    "dense": dense,
    "reading": reading,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--network", choices=NETWORKS, help="one, instead of both in turn")
    parser.add_argument(
        "--before", type=Path, help="a checkout of earlier code, installed: its loop as well"
    )
    parser.add_argument("--quick", action="store_true", help="20,000 rows, 60 steps, one round")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each of the 26 tables")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    networks = [options.network] if options.network else list(NETWORKS)
    sizes = Sizes(options.rows, options.steps, options.rounds, networks, options.before)
    if options.quick:
        sizes = sizes._replace(rows=20_000, steps=60, rounds=1)
    rows: list[Row] = []
    for name, part in PARTS.items():
        if options.only in (None, name):
            print(f"{name}: {part.__doc__}", file=sys.stderr)
            rows += part(sizes)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
