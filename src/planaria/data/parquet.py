"""Parquet files: a block is a row group.

Row groups are decoded whole, and the last ones kept, so reading in order decodes each once, and
shuffled reading (planaria.data.order) once per epoch. Groups of 20,000 to 100,000 rows are best:
four of them, at least, are held in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from planaria.data.blocks import BlockSource, Paths, check_columns, check_not_empty, find_files
from planaria.data.schema import Schema
from planaria.errors import DataError
from planaria.kernels.types import Index

ENDINGS = (".parquet", ".parq", ".pq")
T = TypeVar("T")


class ParquetTables:
    """The row groups of all files. Only footers are read before a group is asked for."""

    def __init__(
        self, paths: Paths, needs: Sequence[str] = (), dictionaries: Sequence[str] = ()
    ) -> None:
        """dictionaries: columns to be read as indices into their distinct values."""
        self.files = find_files(paths, ENDINGS)
        self._dictionaries = list(dictionaries)
        self._footers: list[Any] = []
        self._first_blocks = [0]  # of each file, and how many there are
        sizes: list[int] = []
        for path in self.files:
            footer = _trying(path, partial(pq.read_metadata, path))
            columns = {field.name: field.type for field in footer.schema.to_arrow_schema()}
            check_columns(path, list(columns), needs)
            if not self._footers:
                self.columns = columns
            self._footers.append(footer)
            sizes += [footer.row_group(n).num_rows for n in range(footer.num_row_groups)]
            self._first_blocks.append(len(sizes))
        self.starts: Index = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        check_not_empty(self.files, self.starts)
        self._open: tuple[int, Any] | None = None  # the file that was read last

    def read(self, block: int, columns: Sequence[str]) -> Any:
        number = bisect_right(self._first_blocks, block) - 1
        group, path = block - self._first_blocks[number], self.files[number]

        def read_group() -> Any:
            file = self._file(number)
            return file.read_row_group(group, columns=list(columns), use_threads=False)

        return _trying(path, read_group)

    def place(self, block: int, row: int) -> str:
        number = bisect_right(self._first_blocks, block) - 1
        before = self.starts[self._first_blocks[number]]
        return f"{self.files[number]}, row {self.starts[block] - before + row + 1}"

    def close(self) -> None:
        if self._open:
            self._open[1].close()
            self._open = None

    def _file(self, number: int) -> Any:
        if self._open is None or self._open[0] != number:
            self.close()
            file = pq.ParquetFile(
                self.files[number],
                metadata=self._footers[number],
                read_dictionary=self._dictionaries,
            )
            self._open = number, file
        return self._open[1]


class ParquetFiles(BlockSource):
    """One file, several, a pattern or a folder, as samples; rows in errors count from 1."""

    def __init__(self, paths: Paths, schema: Schema) -> None:
        ids = [one.column for one in schema.sparse if one.type != "integer" and not one.many]
        super().__init__(ParquetTables(paths, schema.needs, ids), schema)


def _trying(path: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"cannot read {path}: {reason}; it is no Parquet file, or damaged or cut off: restore "
            "it"
        ) from error
