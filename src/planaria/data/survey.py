"""What is in a table: types, nulls, how many values there are, and how unevenly they are used.

Values are counted by a 64-bit hash, exactly up to LIMIT distinct ones. From there on only those are
followed whose hash ends in a zero bit, or in two, or in three: a sample of the values that stays
below LIMIT, each with its true count. What follows from it is an estimate, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.types import is_dictionary

from planaria.data.blocks import Tables
from planaria.data.columns import column_of, is_list, is_text, texts
from planaria.data.hashing import text_keys
from planaria.kernels.twin_numbers import mix
from planaria.kernels.types import Index, Keys

LIMIT = 2**20
SEPARATOR = "|"
SEPARATED_SHARE = 0.1  # of the texts of a column that has many values in one


@dataclass
class Counts:
    """How often each value was met; `zero_bits` > 0 if only a sample of the values is followed."""

    limit: int = LIMIT
    hashes: Keys = field(default_factory=lambda: np.empty(0, np.uint64))  # ascending
    counts: Index = field(default_factory=lambda: np.empty(0, np.int64))
    zero_bits: int = 0

    def add(self, hashes: Keys) -> None:
        new, counts = np.unique(hashes[self._followed(hashes)], return_counts=True)
        both = np.concatenate([self.hashes, new])
        self.hashes, where = np.unique(both, return_inverse=True)
        total = np.zeros(len(self.hashes), np.int64)
        np.add.at(total, where, np.concatenate([self.counts, counts]))
        self.counts = total
        while len(self.hashes) > self.limit:
            self.zero_bits += 1
            keep = self._followed(self.hashes)
            self.hashes, self.counts = self.hashes[keep], self.counts[keep]

    def _followed(self, hashes: Keys) -> Any:
        return hashes & np.uint64(2**self.zero_bits - 1) == 0

    @property
    def distinct(self) -> int:
        return len(self.hashes) << self.zero_bits

    @property
    def exact(self) -> bool:
        return self.zero_bits == 0

    def hot_share(self, share: float) -> float:
        """The part of all uses that goes to this share of the values, the most used ones."""
        if not len(self.counts):
            return 0.0
        top = max(1, round(len(self.counts) * share))
        return float(np.sort(self.counts)[-top:].sum() / self.counts.sum())


@dataclass
class ColumnSurvey:
    name: str
    type: str  # as the file has it; for text, what all of it can be read as: integer, number, text
    many: bool = False  # lists, or text between separators
    rows: int = 0
    nulls: int = 0  # rows without a value: empty text and NaN, too
    items: int = 0  # values: more or fewer than rows if there are many in one
    counts: Counts = field(default_factory=Counts)

    @property
    def mean_length(self) -> float:
        return self.items / self.rows if self.rows else 0.0

    def add(self, array: Any) -> None:
        self.rows += len(array)
        if is_dictionary(array.type):
            array = array.dictionary_decode()
        if self.many and is_text(array.type):
            array = pc.split_pattern(pc.cast(array, pa.large_binary()), SEPARATOR)
        items = _without_nulls(array.flatten() if is_list(array.type) else array)
        self.nulls += array.null_count if self.many else len(array) - len(items)
        self.items += len(items)
        if is_text(items.type):
            self.type = _narrowest(items, self.type)
        self.counts.add(_hashes(items))


def survey(
    tables: Tables, on_rows: Callable[[int], None] = lambda rows: None, limit: int = LIMIT
) -> list[ColumnSurvey]:
    """One pass over everything. on_rows: called after each block, with the number of its rows."""
    names = list(tables.columns)
    found: dict[str, ColumnSurvey] = {}
    for block in range(len(tables.starts) - 1):
        table = tables.read(block, names)
        for name in names:
            array = column_of(table, name)
            if name not in found:
                found[name] = _first_look(name, array, limit)
            found[name].add(array)
        on_rows(table.num_rows)
    return list(found.values())


def _first_look(name: str, array: Any, limit: int) -> ColumnSurvey:
    kind = array.type.value_type if is_dictionary(array.type) else array.type
    if is_list(kind):
        many, kind = True, kind.value_type
    else:
        many = is_text(kind) and _has_separators(array)
    return ColumnSurvey(name, "integer" if is_text(kind) else str(kind), many, counts=Counts(limit))


def _has_separators(array: Any) -> bool:
    """Whether some of the first texts have them; a single one may be there for another reason."""
    if is_dictionary(array.type):
        array = array.dictionary_decode()
    found = pc.match_substring(pc.cast(array, pa.large_binary()), SEPARATOR)
    return bool((pc.sum(found).as_py() or 0) > SEPARATED_SHARE * len(array))


def _without_nulls(items: Any) -> Any:
    items = items.drop_null()
    if is_text(items.type):
        return items.filter(pc.greater(pc.binary_length(items), 0))
    if pa.types.is_floating(items.type):
        return items.filter(pc.invert(pc.is_nan(items)))
    return items


def _narrowest(items: Any, kind: str) -> str:
    """What these texts can be read as, if all before them could be read as this kind."""
    for name, target in (("integer", pa.int64()), ("number", pa.float64())):
        if kind in ("integer", name):
            try:
                pc.cast(pc.cast(items, pa.string()), target)
            except pa.ArrowInvalid:
                continue
            return name
    return "text"


def _hashes(items: Any) -> Keys:
    types, kind = pa.types, items.type
    if types.is_null(kind) or types.is_nested(kind):  # nothing in it can be an id
        return np.empty(0, np.uint64)
    if types.is_floating(kind):
        numbers = pc.cast(items, pa.float64()).to_numpy(zero_copy_only=False)
        return mix(numbers.view(np.uint64))
    if not (is_text(kind) or types.is_integer(kind)):
        items = pc.cast(items, pa.string())
    if is_text(items.type):
        return text_keys(*texts(items))
    return mix(
        pc.cast(items, pa.int64(), safe=False).to_numpy(zero_copy_only=False).view(np.uint64)
    )
