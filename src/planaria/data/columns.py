"""From the columns of a table to samples, as a schema has it.

What does not fit is refused, with its row: nothing is trained on a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from planaria.data.criteo import MAX_HEX_DIGITS, hexadecimals
from planaria.data.hashing import rows_of, text_keys
from planaria.data.samples import Lengths, Samples
from planaria.data.schema import Dense, Schema, Sparse
from planaria.data.vocabulary import Vocabulary
from planaria.errors import DataError
from planaria.kernels.twin_numbers import log_exact
from planaria.kernels.types import Bytes, Floats, Index, Keys

Place = Callable[[int], str]
"""Where a row stands: `clicks.csv, line 17`."""
Doubles = NDArray[np.float64]
MAX_WHOLE = 2.0**53  # beyond it, doubles cannot tell whole numbers apart
NO_ROWS: Index = np.empty(0, np.int64)


class Columns:
    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        names = list(schema.tables)
        self._table_numbers = [names.index(one.table_name) for one in schema.sparse]

    @cached_property
    def _vocabularies(self) -> dict[str, Vocabulary]:
        """By column."""
        return {
            one.column: Vocabulary.load(one.vocabulary, one.type, one.rows)
            for one in self.schema.sparse
            if one.vocabulary is not None
        }

    def samples(self, table: Any, place: Place) -> Samples:
        schema, n = self.schema, table.num_rows
        dense = np.empty((n, len(schema.dense)), np.float32)
        for number, one in enumerate(schema.dense):
            dense[:, number] = _dense(table, one, place)
        bags = [self._bags(table, number, place) for number in range(len(schema.sparse))]
        weights = None
        if any(one.weights is not None for one in schema.sparse):
            weights = np.concatenate(
                [
                    _weights(table, one, lengths, place)
                    for one, (_, lengths) in zip(schema.sparse, bags, strict=True)
                ]
            )
        return Samples(
            self._labels(table, place),
            dense,
            schema.keys,
            np.concatenate([NO_ROWS, *(rows for rows, _ in bags)]),
            np.concatenate([np.empty(0, np.int32), *(lengths for _, lengths in bags)]),
            weights,
        )

    def ids_of(self, table: Any, one: Sparse, place: Place) -> Any:
        """All ids of a column, nulls too: pyarrow's int64 or binary."""
        array, lengths = _flat(table, one, place)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        return _typed(array, one, _item_place(lengths, place))

    def _labels(self, table: Any, place: Place) -> Floats:
        name = self.schema.label
        if not name:
            return np.zeros(table.num_rows, np.float32)
        numbers = _numbers(column_of(table, name), name, place)
        with np.errstate(over="ignore"):
            labels = numbers.astype(np.float32)
        bad = ~np.isfinite(labels)
        if bad.any():
            row = int(np.argmax(bad))
            found = "missing" if np.isnan(numbers[row]) else f"{numbers[row]}"
            raise DataError(f"{place(row)}: the label {name!r} is {found}; expected a number")
        if self.schema.positive_from is not None:
            labels = (numbers >= self.schema.positive_from).astype(np.float32)
        return labels

    def _bags(self, table: Any, number: int, place: Place) -> tuple[Index, Lengths]:
        one = self.schema.sparse[number]
        array, lengths = _flat(table, one, place)
        item_place = _item_place(lengths, place)
        if not pa.types.is_dictionary(array.type):
            return self._rows(array, number, item_place), lengths
        # Each distinct value is hashed once, and a wrong one is where it is first met.
        indices = pc.fill_null(array.indices, -1).to_numpy()

        def first_use(value: int) -> str:
            return item_place(int(np.argmax(indices == value)))

        rows = np.append(self._rows(array.dictionary, number, first_use), 0)  # 0: of nulls
        return rows[indices], lengths

    def _rows(self, array: Any, number: int, place: Place) -> Index:
        one = self.schema.sparse[number]
        if one.type == "hex":
            keys, missing = _hex(array, one.column, place)
        else:
            ids = _typed(array, one, place)
            if one.vocabulary is not None:
                return self._vocabularies[one.column].rows(ids)
            missing = ids.is_null().to_numpy(zero_copy_only=False)
            if one.type == "integer":
                keys = pc.fill_null(ids, 0).to_numpy().view(np.uint64)
            else:
                keys = text_keys(*texts(ids))
        table = np.array([self._table_numbers[number]])
        return rows_of(keys, missing, table, np.array([one.rows]))


# ---------------------------------------------------------------------------- one column


def column_of(table: Any, name: str) -> Any:
    """One array, with its text in one piece: some writers leave views of it."""
    array = table.column(name).combine_chunks()
    if _is_view(array.type):
        return pc.cast(array, pa.large_binary())
    if is_list(array.type) and _is_view(array.type.value_type):
        return pc.cast(array, pa.large_list(pa.large_binary()))
    return array


def _is_view(kind: Any) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def is_list(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _numbers(array: Any, name: str, place: Place) -> Doubles:
    """NaN where there is none."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    types = pa.types
    if is_text(array.type):
        array = _parse(array, pa.float64(), name, "a number", place)
    elif not (
        types.is_integer(array.type)
        or types.is_floating(array.type)
        or types.is_boolean(array.type)
        or types.is_decimal(array.type)
        or types.is_null(array.type)
    ):
        raise DataError(f"{place(0)}: {name!r} has the type {array.type}; expected numbers")
    numbers: Doubles = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers


def _parse(array: Any, kind: Any, name: str, expected: str, place: Place) -> Any:
    """Text as numbers; empty text is null."""
    empty = pc.equal(pc.binary_length(array), 0)
    if pc.any(empty).as_py():
        array = pc.if_else(empty, pa.scalar(None, array.type), array)
    try:
        return pc.cast(pc.cast(array, pa.string()), kind)
    except pa.ArrowInvalid:
        for row, found in enumerate(array):
            try:
                pc.cast(pc.cast(found, pa.string()), kind)
            except pa.ArrowInvalid:
                _refuse(place(row), name, found.as_py(), expected)
        raise  # not reached: one of them is wrong


def _refuse(where: str, name: str, found: object, expected: str) -> NoReturn:
    text = found.decode("utf-8", "backslashreplace") if isinstance(found, bytes) else str(found)
    raise DataError(f"{where}: {name!r} is {text[:40]!r}; expected {expected}")


def _dense(table: Any, one: Dense, place: Place) -> Floats:
    numbers = _numbers(column_of(table, one.column), one.column, place)
    missing = np.isnan(numbers)
    if missing.any():
        numbers = np.where(missing, 0.0, numbers)
    with np.errstate(over="ignore"):
        found = numbers.astype(np.float32)
    if not np.isfinite(found).all():
        row = int(np.argmin(np.isfinite(found)))
        _refuse(place(row), one.column, numbers[row], "a number that fits float32")
    if one.log:
        found = log_exact(np.maximum(numbers, 0.0) + 1.0).astype(np.float32)
    found[missing] = one.fill
    return found


# ---------------------------------------------------------------------------- ids


def _flat(table: Any, one: Sparse, place: Place) -> tuple[Any, Lengths]:
    """(ids of all rows, how many each row has)."""
    array = column_of(table, one.column)
    if not one.many:
        if is_list(array.type):
            raise DataError(
                f"{place(0)}: {one.column!r} has lists; expected one id, or `many: true` in the "
                "schema"
            )
        return array, np.ones(len(array), np.int32)
    return _split(array, one.column, one.separator, place)


def _split(array: Any, name: str, separator: str, place: Place) -> tuple[Any, Lengths]:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = pc.cast(array, pa.large_binary())
        empty = pc.equal(pc.binary_length(array), 0)
        array = pc.if_else(empty, pa.scalar(None, array.type), array)
        array = pc.split_pattern(array, separator)
    elif not is_list(array.type):
        raise DataError(
            f"{place(0)}: {name!r} has the type {array.type}; expected lists, or text between "
            f"{separator!r}"
        )
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int32)
    return array.flatten(), lengths


def _item_place(lengths: Lengths, place: Place) -> Place:
    """Where an id of a flat array stands."""
    return lambda item: place(int(np.searchsorted(np.cumsum(lengths), item, side="right")))


def _typed(array: Any, one: Sparse, place: Place) -> Any:
    """int64 or binary; empty text is null."""
    name, kind = one.column, array.type
    if pa.types.is_null(kind):
        return pc.cast(array, pa.int64() if one.type == "integer" else pa.binary())
    if one.type == "integer":
        if is_text(kind):
            array = _parse(array, pa.int64(), name, "a whole number below 2^63", place)
        elif pa.types.is_floating(kind):  # what some tools make of integers with nulls
            array = _whole(array, name, place)
        elif not pa.types.is_integer(kind):
            raise DataError(f"{place(0)}: {name!r} has the type {kind}; expected whole numbers")
        array = pc.cast(array, pa.int64(), safe=False)
        if one.modulo is not None:
            missing = array.is_null().to_numpy(zero_copy_only=False)
            left = pc.fill_null(array, 0).to_numpy() % one.modulo
            array = pa.array(left, pa.int64(), mask=missing)
        return array
    if not is_text(kind):
        advice = "; set `type: integer` in the schema" if pa.types.is_integer(kind) else ""
        raise DataError(f"{place(0)}: {name!r} has the type {kind}; expected text{advice}")
    array = pc.cast(array, pa.large_binary() if _is_large(kind) else pa.binary())
    empty = pc.equal(pc.binary_length(array), 0)
    if pc.any(empty).as_py():
        array = pc.if_else(empty, pa.scalar(None, array.type), array)
    return array


def _whole(array: Any, name: str, place: Place) -> Any:
    numbers: Doubles = pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False)
    missing = np.isnan(numbers)
    bad = ~missing & ((numbers != np.floor(numbers)) | (np.abs(numbers) > MAX_WHOLE))
    if bad.any():
        row = int(np.argmax(bad))
        _refuse(place(row), name, numbers[row], "a whole number")
    return pa.array(np.where(missing, 0, numbers).astype(np.int64), mask=missing)


def _is_large(kind: Any) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def texts(array: Any) -> tuple[Bytes, Index, Index]:
    """(bytes, where each text starts, how long it is) of pyarrow's binary."""
    _, offsets, data = array.buffers()
    dtype = np.int64 if _is_large(array.type) else np.int32
    if not len(array):
        return np.empty(0, np.uint8), NO_ROWS, NO_ROWS
    stored = np.frombuffer(offsets, dtype)[array.offset : array.offset + len(array) + 1]
    bounds: Index = stored.astype(np.int64)
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return content, bounds[:-1], np.diff(bounds)


def _hex(array: Any, name: str, place: Place) -> tuple[Keys, NDArray[np.bool_]]:
    """(values, which are missing) of hexadecimal text."""
    if not (is_text(array.type) or pa.types.is_null(array.type)):
        raise DataError(f"{place(0)}: {name!r} has the type {array.type}; expected text")
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.uint64), np.ones(len(array), np.bool_)
    data, starts, lengths = texts(array)
    missing = array.is_null().to_numpy(zero_copy_only=False) | (lengths == 0)
    lengths = np.where(missing, 0, lengths)
    keys, bad = hexadecimals(np.append(data, np.zeros(MAX_HEX_DIGITS, np.uint8)), starts, lengths)
    if bad.any():
        item = int(np.argmax(bad))
        expected = f"up to {MAX_HEX_DIGITS} hexadecimal digits, or nothing"
        _refuse(place(item), name, array[item].as_py(), expected)
    return keys, missing


def _weights(table: Any, one: Sparse, lengths: Lengths, place: Place) -> Floats:
    if one.weights is None:
        return np.ones(int(lengths.sum(dtype=np.int64)), np.float32)
    array, found = _split(column_of(table, one.weights), one.weights, one.separator, place)
    if (found != lengths).any():
        row = int(np.argmax(found != lengths))
        raise DataError(
            f"{place(row)}: {one.weights!r} has {found[row]} weights; expected {lengths[row]}, one "
            f"for each id of {one.column!r}"
        )
    numbers = _numbers(array, one.weights, _item_place(found, place))
    with np.errstate(over="ignore"):
        weights = numbers.astype(np.float32)
    if not np.isfinite(weights).all():
        item = int(np.argmin(np.isfinite(weights)))
        where = _item_place(found, place)(item)
        raise DataError(f"{where}: a weight in {one.weights!r} is no number; expected one per id")
    return weights
