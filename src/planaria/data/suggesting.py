"""A schema to start from, by what a survey has found. Rules of thumb: a person looks it over."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planaria.data.schema import Dense, Schema, Sparse
from planaria.data.survey import ColumnSurvey
from planaria.errors import DataError

LABELS = ("label", "click", "clicked", "is_click", "target", "y", "rating", "conversion")
ALL_DIFFERENT = 0.9  # values per row of a column that names rows
FEW_ROWS = 1000  # too few to tell
MAX_SUGGESTED_ROWS = 10_000_000
_AMOUNT = re.compile(r"^(i|int|num|n)_?\d+$|count|price|amount|age$", re.IGNORECASE)


def suggest(
    columns: Sequence[ColumnSurvey], label: str | None = None, delimiter: str = ","
) -> tuple[Schema, dict[str, str]]:
    """(schema, columns that are left out and why)."""
    names = [column.name for column in columns]
    label = _label(columns) if label is None else label
    if label not in names:
        raise DataError(f"there is no column {label!r}; there are {', '.join(map(repr, names))}")
    dense: list[Dense] = []
    sparse: list[Sparse] = []
    left_out: dict[str, str] = {}
    many: dict[str, int] = {}  # columns with many ids that have no weights yet, by their items
    for column in columns:
        if column.name == label:
            continue
        if why := _useless(column):
            left_out[column.name] = why
        elif column.many and _is_number(column.type):
            owner = next((n for n, items in many.items() if items == column.items), None)
            if owner is None:
                left_out[column.name] = "lists of numbers that go with no list of ids"
                continue
            del many[owner]
            sparse = [_weighted(one, column.name) if one.column == owner else one for one in sparse]
        elif _is_number(column.type) or _is_amount(column):
            dense.append(Dense(column.name, log=_is_amount(column)))
        else:
            sparse.append(_sparse(column))
            if column.many:
                many[column.name] = column.items
    (learnt,) = (column for column in columns if column.name == label)
    rated = 4.0 if learnt.counts.distinct > 2 and label.lower() == "rating" else None
    schema = Schema(label, tuple(sparse), tuple(dense), positive_from=rated, delimiter=delimiter)
    return schema, left_out


def _label(columns: Sequence[ColumnSurvey]) -> str:
    named = [
        column.name for wanted in LABELS for column in columns if column.name.lower() == wanted
    ]
    two_valued = [
        column.name
        for column in columns
        if not column.many and not column.nulls and column.counts.distinct == 2
    ]
    if not named + two_valued:
        raise DataError("no column looks like a label; name it with --label")
    return (named + two_valued)[0]


def _useless(column: ColumnSurvey) -> str:
    if column.counts.distinct <= 1:
        return "it has one value, or none"
    if re.match(r"(date|time|timestamp|duration)", column.type) or "timestamp" in column.name:
        return "it is a time"
    if not _is_number(column.type) and not column.many and column.rows >= FEW_ROWS:
        if column.counts.distinct > ALL_DIFFERENT * column.rows:
            return "nearly every row has a value of its own"
    return ""


def _is_number(kind: str) -> bool:
    return kind in ("number", "float", "double", "halffloat", "bool") or kind.startswith("decimal")


def _is_integer(kind: str) -> bool:
    return kind == "integer" or bool(re.fullmatch(r"u?int\d+", kind))


def _is_amount(column: ColumnSurvey) -> bool:
    return not column.many and _is_integer(column.type) and bool(_AMOUNT.search(column.name))


def _sparse(column: ColumnSurvey) -> Sparse:
    return Sparse(
        column.name,
        suggested_rows(column.counts.distinct),
        "integer" if _is_integer(column.type) else "text",
        many=column.many,
    )


def _weighted(one: Sparse, weights: str) -> Sparse:
    return Sparse(one.column, one.rows, one.type, many=True, weights=weights)


def suggested_rows(distinct: int) -> int:
    """Two per value, so that few values meet in one; rounded up to two digits."""
    unit: int = 10 ** max(len(str(2 * distinct)) - 2, 0)
    return min(max(-(-2 * distinct // unit) * unit, 10), MAX_SUGGESTED_ROWS)
