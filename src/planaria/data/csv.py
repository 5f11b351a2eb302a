"""CSV and other files of lines, plain or gzip: a block is a fixed number of lines.

One pass over each file counts its lines, and leaves marks (planaria.data.marks), so that later
readers start anywhere at once. A sample is one line: a line end inside of quotes is refused. Quotes
mean something only where the delimiter is a comma. An empty field is null.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from planaria.data.blocks import BlockSource, Paths, check_columns, check_not_empty, find_files
from planaria.data.lines import Lines
from planaria.data.schema import Schema
from planaria.errors import DataError
from planaria.kernels.types import Index

ENDINGS = tuple(f"{kind}{packed}" for kind in (".csv", ".tsv", ".txt") for packed in ("", ".gz"))
BLOCK_LINES = 8192
_SHORT = b"\x1f"  # stands for delimiters of several characters; Arrow knows those of one only
_BOM = b"\xef\xbb\xbf"


class CsvTables:
    """The lines of all files; every column is text."""

    def __init__(
        self,
        paths: Paths,
        needs: Sequence[str] = (),
        *,
        delimiter: str = ",",
        columns: Sequence[str] = (),
        cache: Path | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """columns: their names, for files without a header line."""
        self.files = find_files(paths, ENDINGS)
        self._delimiter = delimiter.encode()
        self._header_lines = 0 if columns else 1
        self._lines: list[Lines] = []
        self._names: list[list[str]] = []
        self._first_blocks = [0]  # of each file, and how many there are
        sizes: list[int] = []
        try:
            for path in self.files:
                lines = Lines(path, cache, on_progress)
                self._lines.append(lines)
                names = list(columns) or self._header(lines)
                check_columns(path, names, needs)
                self._names.append(names)
                samples = lines.count() - self._header_lines
                whole, rest = divmod(max(samples, 0), BLOCK_LINES)
                sizes += [BLOCK_LINES] * whole + [rest] * (rest > 0)
                self._first_blocks.append(len(sizes))
            self.starts: Index = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            check_not_empty(self.files, self.starts)
        except BaseException:
            self.close()
            raise
        self.columns = dict.fromkeys(self._names[0], pa.string())

    def read(self, block: int, columns: Sequence[str]) -> Any:
        number, first = self._line_of(block)
        count = int(self.starts[block + 1] - self.starts[block])
        text = self._lines[number].take(first, count)
        where = f"{self.files[number]}, line "
        table = self._parse(text, self._names[number], columns, where, first + 1)
        if table.num_rows != count:
            raise DataError(
                f"{where}{first + 1} and following: {count} lines are {table.num_rows} rows; "
                "expected one line per sample, without line ends inside of quotes"
            )
        return table

    def place(self, block: int, row: int) -> str:
        number, first = self._line_of(block)
        return f"{self.files[number]}, line {first + row + 1}"

    def close(self) -> None:
        for lines in self._lines:
            lines.close()

    def _line_of(self, block: int) -> tuple[int, int]:
        """(file, the line that a block begins with); lines count from 0."""
        number = bisect_right(self._first_blocks, block) - 1
        within = block - self._first_blocks[number]
        return number, within * BLOCK_LINES + self._header_lines

    def _header(self, lines: Lines) -> list[str]:
        text = lines.take(0, 1).removeprefix(_BOM)
        where = f"{lines.path}, line "
        table = self._parse(text, None, [], where, 1)
        names: list[str] = table.column_names
        if twins := [name for name in names if names.count(name) > 1]:
            raise DataError(f"{where}1: the column {twins[0]!r} stands there twice")
        return names

    def _parse(
        self,
        text: bytes,
        names: list[str] | None,
        columns: Sequence[str],
        where: str,
        first_line: int,
    ) -> Any:
        delimiter = self._delimiter
        if len(delimiter) > 1:
            text, delimiter = text.replace(delimiter, _SHORT), _SHORT
        wrong: list[Any] = []

        def refuse(row: Any) -> str:
            wrong.append(row)
            return "error"

        try:
            return csv.read_csv(
                pa.BufferReader(text),
                csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
                csv.ParseOptions(
                    delimiter=delimiter.decode(),
                    quote_char='"' if delimiter == b"," else False,
                    ignore_empty_lines=False,
                    invalid_row_handler=refuse,
                ),
                csv.ConvertOptions(
                    include_columns=list(columns) or None,
                    column_types=dict.fromkeys(columns, pa.binary()),
                    strings_can_be_null=True,
                    null_values=[""],
                ),
            )
        except (pa.ArrowException, ValueError) as error:
            if wrong and wrong[0].number is not None:
                row = wrong[0]
                raise DataError(
                    f"{where}{first_line + row.number - 1}: {row.actual_columns} fields; expected "
                    f"{row.expected_columns} between {self._delimiter.decode()!r}"
                ) from None
            raise DataError(f"{where}{first_line} and following: {error}") from None


class CsvFiles(BlockSource):
    """One file, several, a pattern or a folder, as samples; the schema says how lines are cut."""

    def __init__(
        self,
        paths: Paths,
        schema: Schema,
        cache: str | os.PathLike[str] | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """cache: the folder for marks, else the user's cache folder.

        on_progress: called many times a second while lines are counted.
        """
        tables = CsvTables(
            paths,
            schema.needs,
            delimiter=schema.delimiter,
            columns=schema.columns,
            cache=None if cache is None else Path(cache),
            on_progress=on_progress,
        )
        super().__init__(tables, schema)
