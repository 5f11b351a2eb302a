"""Files by what they look like: Parquet by their endings, anything else as lines of text."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

from planaria.data.blocks import BlockSource, Paths, Tables, find_files
from planaria.data.csv import ENDINGS as TEXT
from planaria.data.csv import CsvFiles, CsvTables
from planaria.data.parquet import ENDINGS as PARQUET
from planaria.data.parquet import ParquetFiles, ParquetTables
from planaria.data.presets import PRESETS
from planaria.data.schema import Schema
from planaria.errors import DataError

MAX_LINE_BYTES = 2**20
DELIMITERS = ",\t;|"


def open_source(
    paths: Paths, schema: Schema, on_progress: Callable[[], None] = lambda: None
) -> BlockSource:
    """on_progress: called many times a second while lines are counted."""
    if _is_parquet(paths):
        return ParquetFiles(paths, schema)
    return CsvFiles(paths, schema, on_progress=on_progress)


class Opened(NamedTuple):
    """All columns of some files, and what these look like."""

    tables: Tables
    preset: Schema | None
    delimiter: str = ","


def open_tables(
    paths: Paths, schema: Schema | None = None, on_progress: Callable[[], None] = lambda: None
) -> Opened:
    """schema: the preset to read them by; without, they are recognised.

    Lines of text that no preset knows begin with a header.
    """
    if _is_parquet(paths):
        parquet = ParquetTables(paths)
        return Opened(parquet, schema or recognise_columns(list(parquet.columns)))
    line = first_line(find_files(paths, TEXT)[0])
    schema = schema or recognise_line(line)
    delimiter: str = max(DELIMITERS, key=line.count) if schema is None else schema.delimiter
    columns = () if schema is None else schema.columns
    tables = CsvTables(paths, delimiter=delimiter, columns=columns, on_progress=on_progress)
    return Opened(tables, schema, delimiter)


def _is_parquet(paths: Paths) -> bool:
    endings = find_files(paths, (*PARQUET, *TEXT))
    are_parquet = {file.endswith(PARQUET) for file in endings}
    if len(are_parquet) > 1:
        raise DataError(f"{paths}: some files are Parquet and some are not; name those of one kind")
    return are_parquet.pop()


def first_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as text:
            line = text.readline(MAX_LINE_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; check the path and the file") from error
    return line.decode("utf-8-sig", "replace").rstrip("\r\n")


def recognise_columns(names: list[str]) -> Schema | None:
    """The preset whose columns these are; one that knows few columns has to know all of them."""
    for name in ("criteo", "avazu"):
        if set(PRESETS[name].needs) <= set(names):
            return PRESETS[name]
    return PRESETS["movielens"] if names == ["userId", "movieId", "rating", "timestamp"] else None


def recognise_line(line: str) -> Schema | None:
    """The preset that a file which begins with this line is for."""
    if re.fullmatch(r"\d+::\d+::[\d.]+::\d+", line):
        return PRESETS["movielens-dat"]
    if re.fullmatch(r"\d+\t\d+\t[1-5]\t\d+", line):
        return PRESETS["movielens-100k"]
    if re.fullmatch(r"[01](\t-?\d*){13}(\t[0-9a-fA-F]*){26}", line):
        return PRESETS["criteo"]
    found = recognise_columns(line.split(","))
    return found if found and not found.columns else None
