"""Deltas of real training steps, packed: what that saves at which step, and what it costs at each
SIMD level, beside zstd.

`python -m benchmarks.packing --help` says how to use it; docs/benchmarks.md what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Before torch is imported: its idle threads would otherwise spin on the core that is measured.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from benchmarks.timing import Side, interleaved
from planaria import Layout, Optimizer, Store, Table, kernels
from planaria.data import Synthetic
from planaria.kernels import packing
from planaria.kernels.types import Bytes, Index, Records
from planaria.tables import make_arenas
from planaria.trainer.dense import DenseState
from planaria.trainer.dlrm import DLRM
from planaria.trainer.routing import Router

TABLES, ROWS, BATCH = 26, 10_000, 2048
SERVERS = 6
SENDERS = 2  # whose messages are looked at: six are alike
STEPS = (1, 10, 30, 100, 300)
LRS = {"adagrad": 0.02, "sgd": 0.02}
DIMS = (16, 64)
ZSTD_LEVEL = 1
BAR = 0.7  # bytes after over bytes before, in the last step


class Message(NamedTuple):
    """What one server tells one holder of its parity about a step."""

    numbers: Index
    changes: Records

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.changes.nbytes

    def packed(self) -> tuple[Bytes, Bytes]:
        numbers = packing.pack_index(self.numbers)
        assert numbers is not None, "record numbers do not lie 2^56 apart"
        return numbers, packing.pack_records(self.changes)


class Packed(NamedTuple):
    optimizer: str
    dim: int
    ratios: list[float]  # at STEPS: bytes after over bytes before


class Rates(NamedTuple):
    optimizer: str
    dim: int
    name: str  # a SIMD level, or zstd
    ratio: float
    pack_rate: float  # GB of arrays per second of CPU time
    unpack_rate: float


# ---------------------------------------------------------------------------- the workload


def train(name: str, dim: int, steps: tuple[int, ...]) -> Iterator[list[Message]]:
    """The messages of each of these steps of a DLRM that learns."""
    optimizer = Optimizer(name, lr=LRS[name])
    arenas = make_arenas([Table(str(i), ROWS, dim) for i in range(TABLES)], optimizer)
    layout = Layout.fresh(servers=SERVERS, r=1)
    stores = [Store(arenas, layout, place, seed=0) for place in range(SERVERS)]
    router = Router(layout.arena(arenas[0].rows))
    source = Synthetic((ROWS,) * TABLES, seed=0)
    model = DLRM(TABLES, dim, (64, 32), (64, 32))
    dense = DenseState(model.parameters, optimizer, initial=model.initial_weights(0))
    model.bind(dense.weights)
    for step in range(1, steps[-1] + 1):
        batch = source.read((step - 1) * BATCH, BATCH)
        rows, inverse = kernels.dedup((batch.ids + arenas[0].first_rows).ravel())
        parts = router.partition(rows)
        ends = np.cumsum(parts.counts).tolist()
        pieces = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        weights = np.empty((len(rows), dim), np.float32)
        for store, piece in zip(stores, pieces, strict=True):
            weights[parts.order[piece]] = store.lookup(0, parts.indices[piece])
        looked_up = weights[inverse].reshape(BATCH, TABLES, dim)
        gradients = model.step(batch.dense, looked_up, batch.labels, BATCH)
        sums = np.empty((len(rows), dim), np.float32)
        kernels.gradient_sum(gradients.embeddings.reshape(-1, dim), inverse, sums)
        changes = [
            store.apply(step, [[(parts.indices[piece], sums[parts.order[piece]])]])
            for store, piece in zip(stores, pieces, strict=True)
        ]
        dense.apply(step, gradients.dense, None)
        if step in steps:
            yield [
                Message(one.indices.copy(), one.delta.copy())
                for store, changed in zip(stores[:SENDERS], changes, strict=False)
                for deltas in store.parity_deltas(changed).values()
                for one in deltas
                if len(one.indices)
            ]


# ---------------------------------------------------------------------------- measuring


def ratio_of(messages: list[Message]) -> float:
    after = sum(len(frame) for message in messages for frame in message.packed())
    return after / sum(message.nbytes for message in messages)


def at_level(level: str, work: Callable[[int], object]) -> Side:
    return Side(work, prepare=lambda turn: kernels.select_level(level))


def unpack(messages: list[Message], frames: list[tuple[Bytes, Bytes]], turn: int) -> None:
    message, (numbers, changes) = messages[turn % len(messages)], frames[turn % len(messages)]
    packing.unpack_index(numbers, len(message.numbers))
    packing.unpack_records(changes, *message.changes.shape)


def measure(optimizer: str, dim: int, messages: list[Message], rounds: int) -> list[Rates]:
    """At every level that this machine has, and of zstd where it is installed."""
    before = kernels.level()
    frames = [message.packed() for message in messages]
    ratios = dict.fromkeys([name for name in kernels.levels() if name != "numpy"], 0.0)
    sides: dict[str, Side] = {}
    for level in ratios:
        ratios[level] = ratio_of(messages)
        sides[f"{level} pack"] = at_level(
            level, lambda turn: messages[turn % len(messages)].packed()
        )
        sides[f"{level} unpack"] = at_level(level, lambda turn: unpack(messages, frames, turn))
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        pass
    else:
        name = f"zstd -{ZSTD_LEVEL}"
        small, large = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()
        plain = [m.numbers.tobytes() + m.changes.tobytes() for m in messages]
        compressed = [small.compress(content) for content in plain]
        ratios[name] = sum(map(len, compressed)) / sum(map(len, plain))
        sides[f"{name} pack"] = Side(lambda turn: small.compress(plain[turn % len(plain)]))
        sides[f"{name} unpack"] = Side(lambda turn: large.decompress(compressed[turn % len(plain)]))
    seconds = interleaved(sides, rounds)
    kernels.select_level(before)
    gigabytes = sum(message.nbytes for message in messages) / len(messages) / 1e9
    return [
        Rates(
            optimizer,
            dim,
            name,
            ratio,
            gigabytes / seconds[f"{name} pack"],
            gigabytes / seconds[f"{name} unpack"],
        )
        for name, ratio in ratios.items()
    ]


# ---------------------------------------------------------------------------- the tables


def print_ratios(found: list[Packed], steps: tuple[int, ...]) -> None:
    print("Bytes after over bytes before, at step:\n")
    print("| optimizer | dim | " + " | ".join(f"{step:5}" for step in steps) + " |")
    print("|-----------|-----|" + "-------|" * len(steps))
    for one in found:
        cells = " | ".join(f"{ratio:5.3f}" for ratio in one.ratios)
        print(f"| {one.optimizer:9} | {one.dim:3} | {cells} |")


def print_verdicts(found: list[Packed]) -> None:
    print("\n| bytes of deltas, packed over unpacked | figure | bar | verdict |")
    print("| --- | --- | --- | --- |")
    for one in found:
        verdict = "met" if one.ratios[-1] <= BAR else "missed"
        print(f"| {one.optimizer}, dim {one.dim} | {one.ratios[-1]:.3f} | <= {BAR:g} | {verdict} |")


def print_rates(rates: list[Rates]) -> None:
    print("\nOf the last of these steps:\n")
    print("| optimizer | dim | by       | ratio | pack GB/s | unpack GB/s | over zstd   |")
    print("|-----------|-----|----------|-------|-----------|-------------|-------------|")
    zstd = {(r.optimizer, r.dim): r for r in rates if r.name.startswith("zstd")}
    for one in rates:
        over, other = "", zstd.get((one.optimizer, one.dim))
        if other is not None and other is not one:
            over = (
                f"{one.pack_rate / other.pack_rate:.1f} / {one.unpack_rate / other.unpack_rate:.1f}"
            )
        print(
            f"| {one.optimizer:9} | {one.dim:3} | {one.name:8} | {one.ratio:5.3f} | "
            f"{one.pack_rate:9.2f} | {one.unpack_rate:11.2f} | {over:>11} |"
        )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.packing",
        description="How much smaller packed deltas of training steps are, and how fast packing "
        "is, on one core.",
        epilog="Rates are bytes of arrays per second of CPU time, medians of rounds in which all "
        "sides run in turn. The last column: how many times faster than zstd to pack and to "
        "unpack.",
    )
    result.add_argument("--steps", type=int, default=STEPS[-1], help="train no further than this")
    result.add_argument("--rounds", type=int, default=41, help="how often each side runs")
    result.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    steps = (*(step for step in STEPS if step < options.steps), options.steps)
    print(f"{os.cpu_count()} cores, SIMD levels {', '.join(kernels.levels())}\n")
    found: list[Packed] = []
    rates: list[Rates] = []
    for optimizer in LRS:
        for dim in DIMS:
            taken = list(train(optimizer, dim, steps))
            found.append(Packed(optimizer, dim, [ratio_of(messages) for messages in taken]))
            rates += measure(optimizer, dim, taken[-1], options.rounds)
    print_ratios(found, steps)
    print_verdicts(found)
    print_rates(rates)
    if options.json:
        figures = [*(one._asdict() for one in found), *(one._asdict() for one in rates)]
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
