"""Rows of lookups within an error bound: what each encoder saves and costs, beside zstd on the same
codes.

`python -m benchmarks.lossy --help` says how to use it; docs/benchmarks.md what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import Side, interleaved
from planaria import kernels
from planaria.kernels import lossy
from planaria.kernels.types import Bytes, Floats

BATCH = 2048
TABLES = 26
DIM = 64
BOUND = 0.03  # of what a table's numbers span, as in the paper of SC'24
ANSWERS = 6  # taken in turn, so that nobody finds its rows in the cache
BAR = 2.0  # times faster than zstd, in each direction
ZSTD_LEVEL = 1


class Answer(NamedTuple):
    rows: Floats  # [lookups, DIM]
    tables: NDArray[np.int32]
    frame: Bytes  # memory for one
    out: Floats  # and for the rows that come back


class Figures(NamedTuple):
    name: str
    ratio: float  # bytes before over bytes after
    encode_rate: float  # MB of rows per second
    decode_rate: float


# ---------------------------------------------------------------------------- the workload


def draw(rng: np.random.Generator) -> tuple[Floats, NDArray[np.int32]]:
    """The distinct rows that a batch looks up, Zipf's, in tables of 10 to a million rows."""
    rows, tables = [], []
    for table, size in enumerate(np.geomspace(10, 1e6, TABLES).astype(int)):
        distinct = len(np.unique(rng.zipf(1.2, BATCH) % size))
        weights = rng.standard_normal((distinct, DIM)) * rng.gamma(2, 0.5, (distinct, 1))
        rows.append((weights / np.sqrt(size)).astype(np.float32))
        tables.append(np.full(distinct, table, np.int32))
    order = rng.permutation(sum(map(len, rows)))
    return np.concatenate(rows)[order], np.concatenate(tables)[order]


def answers() -> list[Answer]:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(ANSWERS):
        rows, tables = draw(rng)
        frame = np.empty(lossy.frame_bound(len(rows), DIM, TABLES), np.uint8)
        found.append(Answer(rows, tables, frame, np.empty_like(rows)))
    return found


def bounds_of(answer: Answer) -> Floats:
    spans = [np.ptp(answer.rows[answer.tables == table]) for table in range(TABLES)]
    return np.array(spans, np.float32) * np.float32(BOUND)


def codes_of(answer: Answer, bounds: Floats) -> list[bytes]:
    """The codes of each table, a byte each, as zstd is given them."""
    scales = lossy.scales(bounds)
    found = []
    for table in range(TABLES):
        own = np.rint(answer.rows[answer.tables == table] / scales[table])
        found.append((own - own.min()).astype(np.uint8).tobytes())
    return found


# ---------------------------------------------------------------------------- measuring


def measure(rounds: int) -> list[Figures]:
    """Of all encoders, and of zstd on codes that are there already."""
    given = answers()
    bounds = bounds_of(given[0])
    sides: dict[str, Side] = {}
    sizes: dict[str, int] = {}
    for name in lossy.available():
        encoders = [name] * TABLES
        frames = [lossy.encode(a.rows, a.tables, bounds, encoders).copy() for a in given]
        sizes[name] = sum(map(len, frames))
        sides[f"{name} encode"] = encode_side(given, bounds, encoders)
        sides[f"{name} decode"] = decode_side(given, frames)
    if "zstd" in lossy.available():
        zstandard = importlib.import_module("zstandard")
        pack, unpack = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()
        plain = [codes_of(answer, bounds) for answer in given]
        packed = [[pack.compress(codes) for codes in one] for one in plain]
        sizes["codes"] = sum(len(content) for one in packed for content in one)
        sides["codes encode"] = Side(lambda turn: [*map(pack.compress, plain[turn % ANSWERS])])
        sides["codes decode"] = Side(lambda turn: [*map(unpack.decompress, packed[turn % ANSWERS])])
    seconds = interleaved(sides, rounds)
    total = sum(answer.rows.nbytes for answer in given)
    megabytes = total / ANSWERS / 1e6
    return [
        Figures(
            name,
            total / size,
            megabytes / seconds[f"{name} encode"],
            megabytes / seconds[f"{name} decode"],
        )
        for name, size in sizes.items()
    ]


def encode_side(given: list[Answer], bounds: Floats, encoders: list[str]) -> Side:
    def run(turn: int) -> None:
        answer = given[turn % ANSWERS]
        lossy.encode(answer.rows, answer.tables, bounds, encoders, out=answer.frame)

    return Side(run)


def decode_side(given: list[Answer], frames: list[Bytes]) -> Side:
    def run(turn: int) -> None:
        answer = given[turn % ANSWERS]
        lossy.decode(frames[turn % ANSWERS], answer.tables, DIM, answer.out)

    return Side(run)


# ---------------------------------------------------------------------------- the table


def times_faster(ours: Figures, other: Figures) -> tuple[float, float, float]:
    """To encode, to decode, and both, one after the other."""
    both = [1 / (1 / f.encode_rate + 1 / f.decode_rate) for f in (ours, other)]
    return (
        ours.encode_rate / other.encode_rate,
        ours.decode_rate / other.decode_rate,
        both[0] / both[1],
    )


# "zstd" does all that ours do around its own compression: the codes are found, checked and framed.
COMPARED = (
    ("huffman, rows to frame and back; zstd, codes it is given", "huffman", "codes"),
    ("none, rows to frame and back; zstd, codes it is given", "none", "codes"),
    ("huffman, rows to frame and back; zstd, rows to frame and back", "huffman", "zstd"),
    ("none, rows to frame and back; zstd, rows to frame and back", "none", "zstd"),
)
LABELS = {"codes": f"zstd -{ZSTD_LEVEL} on ready codes"}


def print_table(figures: list[Figures]) -> None:
    by_name = {each.name: each for each in figures}
    print("| encoder                | ratio | encode MB/s | decode MB/s |    over zstd on codes |")
    print("|------------------------|-------|-------------|-------------|-----------------------|")
    for each in figures:
        over = ""
        if "codes" in by_name and each.name not in ("codes", "exact"):
            over = " / ".join(f"{x:.2f}" for x in times_faster(each, by_name["codes"]))
        name = LABELS.get(each.name, each.name)
        print(
            f"| {name:22} | {each.ratio:5.2f} | {each.encode_rate:11.0f} | "
            f"{each.decode_rate:11.0f} | {over:>21} |"
        )
    if "codes" not in by_name:
        return
    print(f"\n| over zstd -{ZSTD_LEVEL} on the same codes | encode | decode | bar | verdict |")
    print("| --- | --- | --- | --- | --- |")
    for label, name, other in COMPARED:
        encode, decode, _ = times_faster(by_name[name], by_name[other])
        verdict = "met" if min(encode, decode) >= BAR else "missed"
        print(f"| {label} | {encode:.2f} | {decode:.2f} | >= {BAR:g} | {verdict} |")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.lossy",
        description="What each encoder of lossy lookups makes of the rows of a batch, and how "
        "fast, on one core, beside zstd on the same codes.",
        epilog="Rates are bytes of rows per second of CPU time; medians of rounds in which all "
        "sides run in turn. Ours find the codes, too, and check them; zstd is given them. The last "
        "column: how many times faster to encode, to decode, and both. "
        "PLANARIA_SIMD=portable (or avx2, gfni) measures another SIMD level.",
    )
    result.add_argument("--rounds", type=int, default=41, help="how often each side runs")
    result.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    print(f"{os.cpu_count()} cores, SIMD level {kernels.level()}\n")
    figures = measure(options.rounds)
    print_table(figures)
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in figures], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
