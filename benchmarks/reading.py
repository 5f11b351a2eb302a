"""How many samples one core reads: Parquet and text shaped like Criteo's, with hashing.

`python -m benchmarks.reading --help` says how to use it; docs/benchmarks.md what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from planaria.data import PRESETS, CriteoFile, Order
from planaria.data.blocks import BlockSource
from planaria.data.csv import CsvFiles
from planaria.data.parquet import ParquetFiles

SCHEMA = PRESETS["criteo"]
ROW_GROUP = 50_000
BATCH = 2048
ROUNDS = 3


def criteo_like(rows: int, seed: int = 1) -> pa.Table:
    """13 integers, of which one in five is missing, and 26 hexadecimal ids by a Zipf law."""
    rng = np.random.default_rng(seed)
    columns = {"label": pa.array(rng.integers(0, 2, rows), pa.int32())}
    for dense in SCHEMA.dense:
        numbers = rng.geometric(0.01, rows)
        columns[dense.column] = pa.array(numbers, pa.int32(), mask=rng.random(rows) < 0.2)
    for number, sparse in enumerate(SCHEMA.sparse):
        values = 10 ** (1 + number % 6)  # from 10 values to a million
        ids = (rng.zipf(1.2, rows) % values) * 2654435761 % 2**32
        columns[sparse.column] = pa.array([f"{i:08x}" for i in ids.tolist()])
    return pa.table(columns)


def in_order(source: BlockSource) -> None:
    for start in range(0, source.samples, BATCH):
        source.read(start, BATCH)


def shuffled(source: BlockSource) -> None:
    order = Order(source.samples, BATCH, shuffle=True, blocks=source.blocks)
    for step in range(1, order.steps + 1):
        source.take(np.asarray(order.indices(step, 0)))


def by_criteo_file(path: Path, rows: int) -> None:
    with CriteoFile(path, list(SCHEMA.tables.values())) as file:
        for start in range(0, rows, BATCH):
            file.read(start, BATCH)


def rows_per_s(rows: int, read: Callable[[], None]) -> float:
    """By the CPU time of this process: one thread reads, whatever else the machine does."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        read()
        seconds.append(time.process_time() - start)
    return rows / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="how many samples are written")
    rows = parser.parse_args().rows
    table = criteo_like(rows)
    with tempfile.TemporaryDirectory() as folder:
        parquet, text = Path(folder, "day.parquet"), Path(folder, "day.tsv")
        pq.write_table(table, parquet, row_group_size=ROW_GROUP)
        options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        pa.csv.write_csv(table, text, options)
        ways: dict[str, Callable[[], None]] = {
            "Parquet in order": lambda: in_order(ParquetFiles(parquet, SCHEMA)),
            "Parquet shuffled": lambda: shuffled(ParquetFiles(parquet, SCHEMA)),
            "text in order": lambda: in_order(CsvFiles(text, SCHEMA, cache=folder)),
            "text by CriteoFile": lambda: by_criteo_file(text, rows),
        }
        print(f"{rows:,} rows, 13 numbers and 26 ids, batches of {BATCH}, one thread")
        for name, read in ways.items():
            print(f"{name:20} {rows_per_s(rows, read):10,.0f} rows/s")


if __name__ == "__main__":
    main()
