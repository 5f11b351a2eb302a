"""Samples out of tables that are read in blocks: decoded whole, and the last ones kept.

A block is what a file gives in one go: a row group of Parquet, some thousand lines of CSV. To read
one sample means to decode its block, so whoever reads in an order of his own stays in few of them
for a while (planaria.data.order does).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from planaria.data.columns import Columns
from planaria.data.samples import Samples, concat
from planaria.data.schema import Schema
from planaria.data.source import check_range
from planaria.data.vocabulary import count_values, most_frequent
from planaria.errors import ArgumentError, DataError
from planaria.kernels.types import Index

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SAMPLES_KEPT = 2**19  # twice what an order mixes at a time (planaria.data.order.WINDOW)
BLOCKS_KEPT = 4  # at least, however large: a batch may lie in two windows of two blocks each


class Tables(Protocol):
    """Files of equal columns, as one table."""

    columns: dict[str, Any]  # Arrow's type of each
    starts: Index  # int64[blocks + 1]: the first row of each block, and how many rows there are

    def read(self, block: int, columns: Sequence[str]) -> Any:
        """A block as a pyarrow.Table."""

    def place(self, block: int, row: int) -> str:
        """Where a row of a block stands, as a person looks for it."""

    def close(self) -> None: ...


class BlockSource:
    """Samples by number; `close` it, or use it in a `with` statement."""

    def __init__(self, tables: Tables, schema: Schema) -> None:
        self.schema = schema
        self._tables = tables
        self._columns = Columns(schema)
        self._kept: OrderedDict[int, Samples] = OrderedDict()  # by block, the latest used last

    @property
    def keys(self) -> tuple[str, ...]:
        return self.schema.keys

    @property
    def samples(self) -> int:
        return int(self._tables.starts[-1])

    @property
    def blocks(self) -> Index:
        """int64[n]: the first sample of each block."""
        return self._tables.starts[:-1]

    def read(self, start: int, count: int) -> Samples:
        """Samples start to start + count - 1, fewer where the files end before."""
        check_range(start, count)
        starts = self._tables.starts
        stop = min(start + count, self.samples)
        if start >= stop:
            return self._block(0).slice(0, 0)
        first, last = np.searchsorted(starts, [start, stop - 1], side="right") - 1
        parts = (
            self._block(block).slice(max(start - starts[block], 0), stop - starts[block])
            for block in range(first, last + 1)
        )
        return concat([part for part in parts if len(part)])

    def take(self, numbers: Index | range) -> Samples:
        """Samples by number, in that order."""
        index: Index = np.asarray(numbers, np.int64)
        if len(index) and not 0 <= index.min() <= index.max() < self.samples:
            wrong = index[(index < 0) | (index >= self.samples)][0]
            raise ArgumentError(f"there is no sample {wrong}: they are 0 to {self.samples - 1}")
        blocks = np.searchsorted(self._tables.starts, index, side="right") - 1
        order = np.argsort(blocks, kind="stable")
        parts = [
            self._block(int(block)).take(index[blocks == block] - self._tables.starts[block])
            for block in np.unique(blocks)
        ]
        if not parts:
            return self._block(0).slice(0, 0)
        return concat(parts).take(np.argsort(order))

    def make_vocabularies(self) -> dict[str, int]:
        """Scans everything once and writes the files of vocabularies that are not there yet.

        The most frequent values come first, equally frequent ones by value. Takes memory for all
        distinct values. Returns how many values each new file has.
        """
        wanted = [one for one in self.schema.sparse if one.vocabulary is not None]
        wanted = [one for one in wanted if not os.path.exists(one.vocabulary or "")]
        names = [one.column for one in wanted]
        counts: dict[str, Any] = {}  # by file
        for block in range(len(self.blocks) if wanted else 0):
            table = self._tables.read(block, names)
            for one in wanted:
                ids = self._columns.ids_of(table, one, self._placer(block))
                assert one.vocabulary is not None
                counts[one.vocabulary] = count_values(ids, counts.get(one.vocabulary))
        made = {}
        for path, rows in {one.vocabulary: one.rows for one in wanted}.items():
            assert path is not None
            vocabulary = most_frequent(counts[path], rows - 1)
            vocabulary.save(path)
            made[path] = len(vocabulary)
        return made

    def close(self) -> None:
        self._tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _block(self, number: int) -> Samples:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        table = self._tables.read(number, self.schema.needs)
        found = self._columns.samples(table, self._placer(number))
        self._kept[number] = found
        while len(self._kept) > BLOCKS_KEPT and sum(map(len, self._kept.values())) > SAMPLES_KEPT:
            self._kept.popitem(last=False)
        return found

    def _placer(self, block: int) -> Any:
        return lambda row: self._tables.place(block, row)


def find_files(paths: Paths, endings: Sequence[str]) -> list[str]:
    """One file, several, a pattern, or all files in a folder that end so; sorted unless several."""
    if not isinstance(paths, str | os.PathLike):
        files = [file for path in paths for file in find_files(path, endings)]
        if not files:
            raise DataError("no files were given; name one at least")
        return files
    path = os.fspath(paths)
    if os.path.isdir(path):
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_file())
        found = [str(Path(path, name)) for name in names if name.endswith(tuple(endings))]
        found = [file for file in found if not os.path.basename(file).startswith((".", "_"))]
    elif os.path.exists(path):
        found = [path]
    else:
        found = sorted(glob(path))
    if not found:
        wanted = f" that end in {', '.join(endings)}" if os.path.isdir(path) else ""
        raise DataError(f"{path}: there are no such files{wanted}; check the path")
    for file in found:
        if not os.path.getsize(file):
            raise DataError(f"{file} is empty; expected samples in it")
    return found


def check_columns(path: str, there: Sequence[str], needs: Sequence[str]) -> None:
    if missing := [name for name in needs if name not in there]:
        raise DataError(
            f"{path} has no column {missing[0]!r}; there are {', '.join(map(repr, there))}"
        )


def check_not_empty(files: Sequence[str], starts: Index) -> None:
    if not starts[-1]:
        raise DataError(f"{', '.join(files[:3])}: there is no sample in it; expected at least one")
