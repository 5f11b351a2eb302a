"""The kernels against NumPy, PyTorch, FBGEMM and ISA-L: ratios, and the bars that they must meet.

`python -m benchmarks.kernels --help` says how to use it; docs/benchmarks.md what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before torch is imported: its idle threads would otherwise spin on the core that is measured.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import Side, interleaved
from planaria import kernels
from planaria.codes import Code
from planaria.kernels.field import PRODUCT
from planaria.kernels.types import Bytes, Floats, Index, OptimizerRule, Records
from planaria.optimizers import Optimizer

ROWS = 50_000
DIM = 64
ARENA_BYTES = 1 << 30
TABLE_BYTES = 4 << 30
LOOKUPS = 2048 * 26  # a batch of 2048 samples with 26 categorical features
CODED_BYTES = 64 << 20
INDEX_SETS = 24  # at 12.8 MB a set, ten times any L3 cache
EPS = 1e-8
LR = 0.01

rng = np.random.default_rng(1)


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio of two medians, and what it must be."""

    name: str
    bar: float | None  # None: for information
    at_most: bool = False  # the bar is a ceiling; else a floor
    ours_ms: float = 0.0
    other_ms: float = 0.0
    note: str = ""  # why there is no figure

    @property
    def ratio(self) -> float:
        """How much faster ours is; against a ceiling, how much longer it takes."""
        if self.at_most:
            return self.ours_ms / self.other_ms
        return self.other_ms / self.ours_ms

    @property
    def verdict(self) -> str:
        if self.note:
            return self.note
        if self.bar is None:
            return "-"
        met = self.ratio <= self.bar if self.at_most else self.ratio >= self.bar
        return "met" if met else "missed"

    def cells(self) -> tuple[str, ...]:
        bar = "" if self.bar is None else f"{'<=' if self.at_most else '>='} {self.bar:g}x"
        figures = (
            ("", "", "")
            if self.note
            else (f"{self.ours_ms:.2f}", f"{self.other_ms:.2f}", f"{self.ratio:.2f}x")
        )
        return (self.name, *figures, bar, self.verdict)


def compare(
    name: str,
    seconds: dict[str, float],
    ours: str,
    other: str,
    bar: float | None,
    at_most: bool = False,
) -> Row:
    return Row(name, bar, at_most, seconds[ours] * 1e3, seconds[other] * 1e3)


def optional(module: str) -> Any | None:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):  # OSError: installed, but a library of the system is not
        return None


# ---------------------------------------------------------------------------- the workload


def arena(words: int) -> Records:
    """1 GB of records, every page touched, every word the float 0.5."""
    records = kernels.allocate(ARENA_BYTES // 4 // words, words)
    records.view(np.float32)[:] = 0.5
    return records


def index_sets(rows: int) -> list[Index]:
    """Sets of distinct random rows; no row is in two sets, so none is found in the cache."""
    drawn = rng.permutation(rows)[: ROWS * INDEX_SETS].astype(np.int64)
    return list(drawn.reshape(INDEX_SETS, ROWS))


def gradients(rows: int) -> Floats:
    return rng.standard_normal((rows, DIM), np.float32)


def random_bytes(count: int) -> Bytes:
    return rng.integers(0, 256, count, np.uint8)


# ---------------------------------------------------------------------------- update


class NumpyUpdate:
    """Gather, step, delta and scatter as good NumPy does it: no array is allocated."""

    def __init__(self, optimizer: Optimizer) -> None:
        words = optimizer.record_words(DIM)
        self.optimizer = optimizer
        self.old = np.empty((ROWS, words), np.uint32)
        self.new = np.empty((ROWS, words), np.uint32)
        self.change = np.empty((ROWS, DIM), np.float32)

    def __call__(self, records: Records, index: Index, grads: Floats, delta: Records) -> None:
        # mode="clip" writes to `out` directly, where the default goes through a copy.
        np.take(records, index, axis=0, out=self.old, mode="clip")
        np.copyto(self.new, self.old)
        floats = self.new.view(np.float32)
        weights, state = floats[:, :DIM], floats[:, DIM:]
        change = self.change
        if self.optimizer.name == "sgd":
            np.multiply(grads, np.float32(-LR), out=change)
        elif self.optimizer.name == "adagrad":
            np.multiply(grads, grads, out=change)
            state += change
            np.sqrt(state, out=change)
            change += np.float32(EPS)
            np.divide(grads, change, out=change)
            change *= np.float32(-LR)
        else:
            state[:, 0] += np.einsum("ij,ij->i", grads, grads) / np.float32(DIM)
            np.multiply(grads, np.float32(-LR) / (np.sqrt(state) + np.float32(EPS)), out=change)
        weights += change
        np.bitwise_xor(self.old, self.new, out=delta)
        records[index] = self.new


class FbgemmUpdate:
    """FBGEMM's backward with the fused update; the forward pass before it is not timed."""

    def __init__(self, optimizer: Optimizer, rows: int) -> None:
        torch = importlib.import_module("torch")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        kind = {
            "sgd": configs.EmbOptimType.EXACT_SGD,
            "adagrad": configs.EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }[optimizer.name]
        place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self.from_numpy = torch.from_numpy
        self.offsets = torch.arange(ROWS + 1)
        self.table = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, *place)], optimizer=kind, learning_rate=LR, eps=EPS
        )
        self.output: Any = None

    def forward(self, index: Index) -> None:
        self.output = self.table(self.from_numpy(index), self.offsets)

    def backward(self, grads: Floats) -> None:
        self.output.backward(self.from_numpy(grads))


def update() -> Iterator[Row]:
    for name in ("sgd", "adagrad", "rowwise_adagrad"):
        yield from update_by(Optimizer(name, lr=LR, eps=EPS))


def update_by(optimizer: Optimizer) -> Iterator[Row]:
    words = optimizer.record_words(DIM)
    records = arena(words)
    sets = index_sets(len(records))
    grads = gradients(ROWS)
    out = kernels.Applied(np.zeros(ROWS, np.int64), np.zeros((ROWS, words), np.uint32))
    with_numpy = NumpyUpdate(optimizer)
    sides = {
        "ours": Side(apply_sets(optimizer.rule(), records, sets, grads, out)),
        "numpy": Side(lambda turn: with_numpy(records, sets[turn % INDEX_SETS], grads, out.delta)),
    }
    installed = optional("fbgemm_gpu") is not None
    if installed:
        fbgemm = FbgemmUpdate(optimizer, ARENA_BYTES // 4 // DIM)
        sides["fbgemm"] = Side(
            lambda turn: fbgemm.backward(grads),
            lambda turn: fbgemm.forward(sets[turn % INDEX_SETS]),
        )
    seconds = interleaved(sides, rounds=25)
    yield compare(f"update {optimizer.name} / NumPy", seconds, "ours", "numpy", 3)
    row_name = f"update {optimizer.name} / FBGEMM"
    if installed:
        yield compare(row_name, seconds, "ours", "fbgemm", 2)
    else:
        yield Row(row_name, 2, note="not installed: pip install --no-deps fbgemm-gpu-cpu")


def apply_sets(
    rule: OptimizerRule, records: Records, sets: list[Index], grads: Floats, out: kernels.Applied
) -> Callable[[int], object]:
    return lambda turn: kernels.apply(
        rule, records, len(records), DIM, [(sets[turn % INDEX_SETS], grads)], out
    )


# ---------------------------------------------------------------------------- parity


def parity() -> Iterator[Row]:
    records = arena(DIM)
    sets = index_sets(len(records))
    # One buffer is the delta of XOR and GF and the output of gather: as warm for one as for all.
    values = random_bytes(ROWS * DIM * 4).view(np.uint32).reshape(ROWS, DIM)
    coef = rng.integers(2, 256, ROWS, np.uint8)
    old = np.zeros((ROWS, DIM), np.uint32)

    def numpy_xor(turn: int) -> None:
        records[sets[turn % INDEX_SETS]] ^= values

    def numpy_xor_reusing(turn: int) -> None:
        index = sets[turn % INDEX_SETS]
        np.take(records, index, axis=0, out=old, mode="clip")
        np.bitwise_xor(old, values, out=old)
        records[index] = old

    def numpy_gf(turn: int) -> None:
        product: NDArray[np.uint8] = PRODUCT[coef[:, None], values.view(np.uint8)]
        records[sets[turn % INDEX_SETS]] ^= product.view(np.uint32)

    native = {
        "gather": Side(lambda turn: kernels.gather(records, sets[turn % INDEX_SETS], values)),
        "xor": Side(lambda turn: kernels.mul_add(records, sets[turn % INDEX_SETS], None, values)),
        "gf": Side(lambda turn: kernels.mul_add(records, sets[turn % INDEX_SETS], coef, values)),
    }

    def numpy_take(turn: int) -> None:
        np.take(records, sets[turn % INDEX_SETS], axis=0, out=old, mode="clip")

    seconds = interleaved(native, rounds=101)
    with_numpy = interleaved(
        {
            "xor": native["xor"],
            "numpy take": Side(numpy_take),
            "numpy xor": Side(numpy_xor),
            "numpy xor, reusing": Side(numpy_xor_reusing),
            "gf": native["gf"],
            "numpy gf": Side(numpy_gf),
        },
        rounds=15,
    )
    yield compare("XOR apply / NumPy", with_numpy, "xor", "numpy xor", 4)
    yield compare("XOR apply / NumPy reusing a buffer", with_numpy, "xor", "numpy xor, reusing", 4)
    yield compare("GF multiply-add / NumPy", with_numpy, "gf", "numpy gf", 4)
    yield compare("XOR apply / gather", seconds, "xor", "gather", 1.3, at_most=True)
    yield compare("GF multiply-add / gather", seconds, "gf", "gather", 1.3, at_most=True)
    yield compare("GF multiply-add / XOR apply", seconds, "gf", "xor", 1.25, at_most=True)
    yield compare("GF multiply-add / np.take", with_numpy, "gf", "numpy take", None, at_most=True)


# ---------------------------------------------------------------------------- code


def code() -> Iterator[Row]:
    """Both sides get whole shards in memory and give whole shards; ISA-L's come with a header."""
    pyeclib = optional("pyeclib.ec_iface")
    for ec_type in ("isa_l_rs_vand", "isa_l_rs_cauchy"):
        if pyeclib is None or ec_type not in pyeclib.VALID_EC_TYPES:
            for verb in ("encode", "reconstruct"):
                note = "not installed: pip install pyeclib"
                yield Row(f"{verb} 4+2 / {ec_type}", 3, note=note)
        else:
            yield from code_against(ec_type, pyeclib.ECDriver(k=4, m=2, ec_type=ec_type))


def code_against(ec_type: str, driver: Any) -> Iterator[Row]:
    ours = Code(4, 2)
    data = [random_bytes(CODED_BYTES // 4) for _ in range(4)]
    parity_out = [np.zeros_like(data[0]) for _ in range(2)]
    ours.encode(data, parity_out)
    left = {2: data[2], 3: data[3], 4: parity_out[0], 5: parity_out[1]}
    joined = b"".join(shard.tobytes() for shard in data)
    fragments = driver.encode(joined)[2:]
    seconds = interleaved(
        {
            "encode": Side(lambda turn: ours.encode(data, parity_out)),
            "isa-l encode": Side(lambda turn: driver.encode(joined)),
            "reconstruct": Side(lambda turn: ours.reconstruct(left)),
            "isa-l reconstruct": Side(lambda turn: driver.reconstruct(fragments, [0, 1])),
        },
        rounds=15,
    )
    yield compare(f"encode 4+2 / {ec_type}", seconds, "encode", "isa-l encode", 3)
    yield compare(f"reconstruct 4+2 / {ec_type}", seconds, "reconstruct", "isa-l reconstruct", 3)


# ---------------------------------------------------------------------------- ids and gradients


def batch_ids(zipf: bool) -> Index:
    """One batch: 2048 ids of each of 26 tables with a million rows, in the order of samples."""
    shape, rows = (2048, 26), 1_000_000
    ids = rng.zipf(1.2, shape) % rows if zipf else rng.integers(0, rows, shape)
    return (ids + np.arange(26) * rows).astype(np.int64).reshape(-1)


def ids() -> Iterator[Row]:
    for zipf in (True, False):
        batches = [batch_ids(zipf) for _ in range(8)]
        yield from ids_of("Zipf" if zipf else "uniform", batches)


def ids_of(name: str, batches: list[Index]) -> Iterator[Row]:
    seconds = interleaved(
        {
            "ours": Side(lambda turn: kernels.dedup(batches[turn % 8])),
            "numpy": Side(lambda turn: np.unique(batches[turn % 8], return_inverse=True)),
        }
    )
    yield compare(f"dedup {name} / np.unique", seconds, "ours", "numpy", 2.5)
    row_name = f"gradient sum {name} / torch index_add_"
    torch = optional("torch")
    if torch is None:
        yield Row(row_name, 3, note="not installed: pip install torch")
        return
    unique, inverse = kernels.dedup(batches[0])
    grads = gradients(len(inverse))
    out = np.zeros((len(unique), DIM), np.float32)
    sums, numbers, terms = (torch.from_numpy(a) for a in (out, inverse, grads))
    seconds = interleaved(
        {
            "ours": Side(lambda turn: kernels.gradient_sum(grads, inverse, out)),
            # It adds to what is there, so it needs the zeros that ours does without.
            "torch": Side(lambda turn: sums.zero_().index_add_(0, numbers, terms)),
        }
    )
    yield compare(row_name, seconds, "ours", "torch", 3)


# ---------------------------------------------------------------------------- lookup, threads


def lookup() -> Iterator[Row]:
    name, bar = "one-hot lookup / no prefetch, 4 KB pages", 1.4
    if available_bytes() < 2.5 * TABLE_BYTES:
        yield Row(name, bar, note=f"needs {2.5 * TABLE_BYTES / 2**30:.0f} GB of free memory")
        return
    rows = TABLE_BYTES // 4 // DIM
    tables = {huge: kernels.allocate(rows, DIM, huge_pages=huge) for huge in (True, False)}
    for table in tables.values():
        table.reshape(-1)[::1024] = 1  # a word of every page: the rest is there then, too
    batches = [rng.integers(0, rows, LOOKUPS) for _ in range(INDEX_SETS)]
    offsets = np.arange(LOOKUPS + 1, dtype=np.int64)
    out = np.zeros((LOOKUPS, DIM), np.float32)

    def pool(huge: bool, prefetch_rows: int) -> Side:
        values = tables[huge].view(np.float32)
        return Side(
            lambda turn: kernels.pool(
                values, batches[turn % INDEX_SETS], offsets, out=out, prefetch_rows=prefetch_rows
            )
        )

    seconds = interleaved({"ours": pool(True, kernels.PREFETCH_ROWS), "plain": pool(False, 0)})
    yield compare(name, seconds, "ours", "plain", bar)


def threads() -> Iterator[Row]:
    name, bar = "update sgd, two threads / one", 1.5
    if (os.cpu_count() or 1) < 2:
        yield Row(name, bar, note="needs two cores")
        return
    records = arena(DIM)
    out = kernels.Applied(np.zeros(ROWS, np.int64), np.zeros((ROWS, DIM), np.uint32))
    rule = Optimizer("sgd", lr=LR).rule()
    run = apply_sets(rule, records, index_sets(len(records)), gradients(ROWS), out)
    seconds = interleaved(
        {
            "two": Side(run, lambda turn: kernels.set_threads(2)),
            "one": Side(run, lambda turn: kernels.set_threads(1)),
        },
        clock=time.perf_counter,
    )
    kernels.set_threads(1)
    yield compare(name, seconds, "two", "one", bar)


# ---------------------------------------------------------------------------- the table

GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "update": update,
    "parity": parity,
    "code": code,
    "ids": ids,
    "lookup": lookup,
    "threads": threads,
}
HEADER = ("kernel / compared with", "ours ms", "other ms", "ratio", "bar", "verdict")
WIDTHS = (44, 8, 8, 7, 9, 7)


def line(cells: tuple[str, ...]) -> str:
    first, *rest = (
        cell.ljust(width) if at in (0, 5) else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    return "| " + " | ".join([first, *rest]) + " |"


def available_bytes() -> int:
    for entry in Path("/proc/meminfo").read_text().splitlines():
        if entry.startswith("MemAvailable:"):
            return int(entry.split()[1]) * 1024
    return 0


def cpu_model() -> str:
    for entry in Path("/proc/cpuinfo").read_text().splitlines():
        if entry.startswith("model name"):
            return entry.partition(":")[2].strip()
    return "unknown CPU"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Times Planaria's kernels side by side with NumPy, PyTorch, FBGEMM and ISA-L, "
        "and says which bars they meet.",
        epilog="A ratio is the median of the other divided by the median of ours, so 3.00x means "
        "three times faster; where the bar is a ceiling (<=) it is ours divided by the other. "
        "The sides run in turn, on rows that the turn before has not touched. Ratios can be "
        "trusted on a busy machine more than times can; run again what is close to its bar. "
        "PLANARIA_SIMD=portable (or avx2, gfni) measures another SIMD level. "
        "All groups take about two minutes and 10 GB of memory.",
    )
    result.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        choices=list(GROUPS),
        help=f"measure this group of kernels: {', '.join(GROUPS)}. Give it again for more",
    )
    result.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the rows, with their medians, there"
    )
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch = optional("torch")
    if torch is not None:
        torch.set_num_threads(1)
    kernels.set_threads(1)
    print(f"{cpu_model()}, {os.cpu_count()} cores, SIMD level {kernels.level()}\n")
    print(line(HEADER))
    print("|" + "|".join("-" * (width + 2) for width in WIDTHS) + "|")
    rows: list[Row] = []
    for group in options.only or GROUPS:
        for row in GROUPS[group]():
            rows.append(row)
            print(line(row.cells()), flush=True)
    missed = [row.name for row in rows if row.verdict == "missed"]
    print(f"\n{len(missed)} missed" + "".join(f"\n  {name}" for name in missed))
    if options.json:
        entries = [
            asdict(row) | {"ratio": None if row.note else row.ratio, "verdict": row.verdict}
            for row in rows
        ]
        options.json.write_text(json.dumps(entries, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
