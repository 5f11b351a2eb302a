"""Saving and recovering: what checkpoints cost while training goes on, and what a kill then costs.

    python -m benchmarks.checkpoints                      # everything
    python -m benchmarks.checkpoints --only disk blocking --megabytes 1000
    python -m benchmarks.checkpoints --only gap --rows 1000000

Ratios of things measured side by side in one run; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from benchmarks.cluster import Row, Sizes, job, show
from planaria.checkpoints import Checkpoint, Facts, PartWriter, publish, restore
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import Watcher
from planaria.cluster.parts import SavedRecords
from planaria.cluster.run import JobRun
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.schedule import parse_kill, resolve
from planaria.server.store import Store
from planaria.tables import Table, make_arenas

RULE = Optimizer("adagrad", lr=0.02)
ALONE = Layout.fresh(1, 0, 1)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr)


# ------------------------------------------------------------------ jobs that save


class Windows(Watcher):
    """Remembers when saves were under way."""

    def __init__(self) -> None:
        self.windows: list[tuple[float, float]] = []
        self._seen = 0

    def on_tick(self, now: float, processes: Attempt) -> None:
        published = processes.saves.published
        for one in published[self._seen :]:
            if "seconds" in one:
                self.windows.append((now - one["seconds"], now))
        self._seen = len(published)


def while_saving(sizes: Sizes, folder: Path) -> list[Row]:
    """Samples per second during asynchronous saves over those between them, in the same job.

    A save lasts from when the first process took its content until it counts, rests included. A
    writer spreads it over half of the time between two saves at most, so steps without one are
    left to compare with. With few steps it is in a hurry: 80 between two saves are 11 s here.
    """
    every = max(sizes.steps // 5, 10)
    config = job(
        sizes,
        "strategy=none",
        f"checkpoint.path={folder}",
        f"checkpoint.every_steps={every}",
        "checkpoint.keep_last=1",
    )
    watched = Windows()
    run = JobRun(config, observers=[watched])
    run.run()
    times = np.array([at for _, at in run.progress.step_at])[sizes.steps // 10 :]
    middles, seconds = (times[1:] + times[:-1]) / 2, np.diff(times)
    saving = np.zeros(len(middles), bool)
    for start, end in watched.windows:
        saving |= (middles >= start) & (middles <= end)
    ratio = float(np.mean(seconds[~saving]) / np.mean(seconds[saving]))
    shares = f"{saving.sum()} of {len(saving)} steps while saving"
    return [Row("samples/s while saving over without", ratio, 0.90, False, shares)]


def written_bytes(sizes: Sizes, folder: Path) -> list[Row]:
    """Ten saves of one job: differences with 4 bits over full ones with 32."""
    every = sizes.steps // 10
    written: dict[str, float] = {}
    for name, sets in (
        ("full", ["checkpoint.policy=full", "checkpoint.bits=32"]),
        ("small", ["checkpoint.policy=intermittent", "checkpoint.bits=4"]),
    ):
        config = job(
            sizes,
            "strategy=none",
            "optimizer.name=rowwise_adagrad",
            f"checkpoint.path={folder / name}",
            f"checkpoint.every_steps={every}",
            *sets,
        )
        found = JobRun(config).run()["checkpoints"]
        written[name] = sum(one["bytes"] for one in found)
        say(f"{name}: " + ", ".join(f"{one['bytes'] / 1e6:.1f}" for one in found) + " MB")
    detail = f"{written['small'] / 1e6:,.0f} of {written['full'] / 1e6:,.0f} MB, row-wise Adagrad"
    ratio = written["small"] / written["full"]
    return [Row("bytes of differences with 4 bits over full saves", ratio, 1 / 6, True, detail)]


def tracking(sizes: Sizes, folder: Path) -> list[Row]:
    """What MFU's counters and SSU's list cost a job: nothing is saved while it is measured."""
    rates: dict[str, list[float]] = {"vanilla": [], "mfu": [], "ssu": []}
    for number in range(sizes.rounds):
        for variant in sorted(rates, reverse=bool(number % 2)):
            config = job(
                sizes,
                "strategy=cpr",
                f"cpr.variant={variant}",
                f"checkpoint.path={folder / f'{variant}-{number}'}",
                f"checkpoint.every_steps={sizes.steps * 100}",
            )
            rates[variant].append(JobRun(config).run()["samples_per_s"])
            say(f"{variant}: {rates[variant][-1]:,.0f} samples/s")
    median = {name: statistics.median(values) for name, values in rates.items()}
    return [
        Row(f"samples/s, {name} over none", median[name] / median["vanilla"], 0.99, False, "")
        for name in ("mfu", "ssu")
    ]


def gap(sizes: Sizes, folder: Path) -> list[Row]:
    """From a kill to the next step: parity, and rolling back to a checkpoint."""
    gaps: dict[str, float] = {}
    half = sizes.steps // 2
    for name, sets in (
        ("erasure", ["parity=1"]),
        (
            "checkpoint",
            ["strategy=checkpoint", f"checkpoint.path={folder}", f"checkpoint.every_steps={half}"],
        ),
    ):
        config = job(sizes, *sets)
        run = JobRun(config, resolve([parse_kill(f"server:2@{half + half // 2}")], config))
        gaps[name] = run.run()["failures"][0]["gap_ms"]
        say(f"{name}: {gaps[name]:,.0f} ms")
    detail = ", ".join(f"{name} {value:,.0f} ms" for name, value in gaps.items())
    ratio = gaps["erasure"] / gaps["checkpoint"]
    return [Row("kill to next step, erasure over checkpoint", ratio, 0.1, True, detail)]


# ------------------------------------------------------------------ one store, and a disk


def make_store(megabytes: int) -> Store:
    rows = megabytes * 1_000_000 // (2 * 16 * 4)
    store = Store(make_arenas([Table("t", rows, 16)], RULE), ALONE, 0)
    store.digest()  # every page is touched before anything is timed
    return store


def _dd(source: str, target: str, *more: str) -> None:
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", *more]
    subprocess.run(command, check=True, capture_output=True)


def _forget(*paths: Path) -> None:
    """Drops files from the page cache, so that the disk is read."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk(megabytes: int, rounds: int, folder: Path) -> list[Row]:
    """A part written durably, and restored, over dd with fsync and dd to nowhere."""
    store = make_store(megabytes)
    blank = Store([store.arenas[0].arena], ALONE, 0, blank_at=1)
    blank.arenas[0].records.clear(0, len(blank.arenas[0].records))
    facts = Facts([Table("t", store.arenas[0].arena.rows, 16)], RULE, ALONE)
    seconds: dict[str, list[float]] = {name: [] for name in ("save", "load", "write", "read")}
    raw = folder / "raw"
    size = 0

    def save(step: int) -> None:
        nonlocal size
        content = SavedRecords(store)
        with PartWriter(folder, step, 0) as part:
            content.write(part)
            summary = part.finish()
        content.close()
        size = summary.bytes
        publish(folder, step, [summary], facts)

    def load(step: int) -> None:
        arena = blank.arenas[0]
        restore(Checkpoint(folder, step), [arena.arena], ALONE, 0, [arena.records])

    def in_turn(step: int, *sides: tuple[str, Callable[[], object]]) -> None:
        """A, B, B, A: whoever comes second finds pages that the other has just given up."""
        for name, act in sides if step % 2 else reversed(sides):
            _forget(*folder.glob("step-*/place-*.part"), *folder.glob("raw"))
            began = time.monotonic()
            act()
            seconds[name].append(time.monotonic() - began)

    save(0)  # not counted
    for step in range(1, rounds + 1):
        write = partial(_dd, "/dev/zero", str(raw), f"count={size // (4 << 20)}", "conv=fsync")
        in_turn(step, ("save", partial(save, step)), ("write", write))
        in_turn(step, ("load", partial(load, step)), ("read", partial(_dd, str(raw), "/dev/null")))
        shutil.rmtree(folder / f"step-{step:08d}")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rates = ", ".join(f"{name} {size / 1e6 / value:,.0f} MB/s" for name, value in median.items())
    return [
        Row("save rate over the disk's", median["write"] / median["save"], 0.8, False, rates),
        Row("load rate over the disk's", median["read"] / median["load"], 0.8, False, ""),
    ]


def blocking(megabytes: int, rounds: int, folder: Path) -> list[Row]:
    """How long a save keeps steps waiting, over torch.distributed.checkpoint's async_save."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = make_store(megabytes)
    records = store.arenas[0].records.read(0, store.arenas[0].data_records)
    tensor = torch.from_numpy(records.view(np.float32))
    draw = np.random.default_rng(0)
    ours: list[float] = []
    theirs: list[float] = []
    step = 0
    for number in range(rounds):
        began = time.monotonic()
        content = SavedRecords(store)
        taken = time.monotonic() - began
        thread = threading.Thread(target=_write_part, args=(folder, number + 1, content))
        thread.start()
        while thread.is_alive():  # steps go on, and pay for what they change
            step += 1
            index = np.unique(draw.zipf(1.2, 8000) % len(records))
            store.apply(step, [[(index, np.ones((len(index), 16), np.float32))]])
            time.sleep(0.02)
        thread.join()
        ours.append(taken + content.blocked_s)
        began = time.monotonic()
        future = dcp.async_save({"t": tensor}, checkpoint_id=str(folder / f"dcp-{number}"))
        theirs.append(time.monotonic() - began)
        future.result()
        shutil.rmtree(folder / f"dcp-{number}")
    dist.destroy_process_group()
    detail = f"{statistics.median(ours) * 1e3:.1f} of {statistics.median(theirs) * 1e3:.0f} ms"
    ratio = statistics.median(ours) / statistics.median(theirs)
    return [Row("blocked by a save over torch's async_save", ratio, 0.1, True, detail)]


def _write_part(folder: Path, step: int, content: SavedRecords) -> None:
    with PartWriter(folder, step, 0) as part:
        content.write(part)
        part.finish()
    content.close()
    shutil.rmtree(folder / f"step-{step:08d}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = ["saving", "disk", "blocking", "bytes", "tracking", "gap"]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--rows", type=int, default=300_000, help="per table, of 26")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the store that is saved")
    parser.add_argument("--folder", type=Path, help="where to save; a temporary one if none")
    chosen = parser.parse_args()
    sizes = Sizes(chosen.rows, 16, chosen.steps, chosen.rounds)
    parts: dict[str, Callable[[Path], Sequence[Row]]] = {
        "saving": lambda folder: while_saving(sizes, folder),
        "disk": lambda folder: disk(chosen.megabytes, chosen.rounds, folder),
        "blocking": lambda folder: blocking(chosen.megabytes, chosen.rounds, folder),
        "bytes": lambda folder: written_bytes(sizes, folder),
        "tracking": lambda folder: tracking(sizes, folder),
        "gap": lambda folder: gap(sizes, folder),
    }
    rows: list[Row] = []
    for name in chosen.only:
        say(name)
        with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="planaria-bench-") as folder:
            rows += parts[name](Path(folder))
    show(rows)


if __name__ == "__main__":
    main()
