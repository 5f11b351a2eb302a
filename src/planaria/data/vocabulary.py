"""Vocabularies: each value that is frequent enough has a row of its own.

A file has one value per line, as JSON has it: text in quotes, or a number. The value of line n has
row n; lines count from 1, because row 0 is for all values that are not there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from planaria.errors import DataError
from planaria.files import write_atomically
from planaria.kernels.types import Index


class Vocabulary:
    """Values by row: pyarrow's int64 or binary, without nulls."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, ids: Any) -> Index:
        """Rows of an array of the same type; 0 for nulls and for what is not there."""
        if not len(self):
            return np.zeros(len(ids), np.int64)
        found = pc.index_in(ids, value_set=self.values)
        rows: Index = pc.fill_null(found, -1).to_numpy().astype(np.int64) + 1
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        # Bytes that are no UTF-8 come back as they were, by way of lone surrogates.
        items = self.values.to_pylist()
        texts = (
            json.dumps(item.decode("utf-8", "surrogateescape") if isinstance(item, bytes) else item)
            for item in items
        )
        write_atomically(Path(path), "".join(f"{text}\n" for text in texts).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], id_type: str, rows: int) -> Vocabulary:
        """id_type: text or integer, as in the schema, which has `rows` rows for it."""
        name = os.fspath(path)
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except FileNotFoundError:
            raise DataError(
                f"there is no vocabulary {name}; make it with `planaria data vocabulary`"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read the vocabulary {name}: {error}") from error
        if len(lines) >= rows:
            raise DataError(
                f"{name} has {len(lines)} values; expected {rows - 1} or fewer, because the schema "
                f"has {rows} rows and row 0 is for all other values"
            )
        wanted = str if id_type == "text" else int
        values: list[bytes | int] = []
        for number, line in enumerate(lines, 1):
            value: Any = None
            try:
                value = json.loads(line)
            except ValueError:
                pass
            if type(value) is not wanted:
                raise DataError(
                    f"{name}, line {number}: {line[:40]!r}; expected "
                    + ("text in quotes" if wanted is str else "a whole number")
                )
            if isinstance(value, str):
                value = value.encode("utf-8", "surrogateescape")
            values.append(value)
        if len(set(values)) < len(values):
            raise DataError(f"{name} has a value twice; make it anew")
        return cls(pa.array(values, pa.binary() if wanted is str else pa.int64()))


def count_values(ids: Any, before: Any = None) -> Any:
    """How often each value was met, `before` included: a table of value and count."""
    found = pc.value_counts(ids)
    table = pa.table({"value": found.field("values"), "count": found.field("counts")})
    table = table.filter(pc.is_valid(table["value"]))
    if before is None:
        return table
    both = pa.concat_tables([before, table]).group_by("value").aggregate([("count", "sum")])
    return both.rename_columns([{"count_sum": "count"}.get(n, n) for n in both.column_names])


def most_frequent(counts: Any, limit: int) -> Vocabulary:
    order = [("count", "descending"), ("value", "ascending")]
    chosen = counts.sort_by(order).slice(0, limit)["value"]
    return Vocabulary(chosen.combine_chunks())
