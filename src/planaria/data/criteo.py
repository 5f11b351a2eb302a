"""Criteo's click logs: one sample per line, 40 fields between tabs, plain or gzip.

The fields are the label (0 or 1), 13 integers and 26 ids in hexadecimal. A field may be empty,
but not the label.

- An integer x becomes log(1 + max(x, 0)); a missing one becomes 0.
- An id becomes a row: its value, mixed with the table's number, modulo (rows - 1), plus 1. Row 0
  of every table stands for "missing", and for nothing else unless the table has one row only.

Logarithms come from + - * / alone, so that every machine reads the same bits.

Any sample can be asked for (planaria.data.lines says what that costs). How many `samples` there are
is counted when it is first asked for, by one pass over what nobody has passed yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from planaria.data.hashing import rows_of
from planaria.data.lines import Lines
from planaria.data.source import DENSE_FEATURES, Batch, check_range, check_tables
from planaria.errors import ArgumentError, DataError
from planaria.kernels.twin_numbers import log_exact
from planaria.kernels.types import Bytes, Index, Keys

TABLES = 26
FIELDS = 1 + DENSE_FEATURES + TABLES
MAX_DIGITS = 18  # of an integer: fits int64
MAX_HEX_DIGITS = 16  # of an id: fits uint64

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = (np.uint8(ord(c)) for c in "\t\n\r-0")
_NO_DIGIT = np.uint8(255)
_DIGITS: Bytes = np.full(256, _NO_DIGIT)  # value of each character as a hexadecimal digit
for _value, _characters in enumerate([*"0123456789", "aA", "bB", "cC", "dD", "eE", "fF"]):
    _DIGITS[[ord(c) for c in _characters]] = _value

Mask = NDArray[np.bool_]


class CriteoFile:
    """A source that reads one file; `close` it, or use it in a `with` statement."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: Sequence[int],
        cache: Path | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """cache: the folder for marks (planaria.data.marks), else the user's cache folder.

        on_progress: called after each chunk that is passed, many times a second, because the way to
        a sample that nobody has passed yet may take minutes.
        """
        self.tables = check_tables(tables)
        if len(self.tables) != TABLES:
            raise ArgumentError(f"Criteo's data has {TABLES} tables; rows of {len(tables)} given")
        self._lines = Lines(os.fspath(path), cache, on_progress)

    @property
    def samples(self) -> int:
        return self._lines.count()

    def read(self, start: int, count: int) -> Batch:
        check_range(start, count)
        text = self._lines.take(start, count)
        return _parse(text, self.tables, self._lines.path, start + 1)

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------- lines to samples


def _parse(text: bytes, tables: Sequence[int], path: str, first_line: int) -> Batch:
    """`text` is whole lines; `first_line` counts from 1, as editors do."""
    # Digits are looked up past the end of short fields, hence the padding.
    data = np.frombuffer(text + bytes(MAX_DIGITS + 1), np.uint8)
    starts, ends = _fields(data, text, path, first_line)
    lengths = ends - starts
    labels, bad_labels = _labels(data, starts[:, :1], lengths[:, :1])
    integers, bad_integers = _integers(
        data, starts[:, 1 : 1 + DENSE_FEATURES], lengths[:, 1 : 1 + DENSE_FEATURES]
    )
    values, bad_ids = hexadecimals(
        data, starts[:, 1 + DENSE_FEATURES :], lengths[:, 1 + DENSE_FEATURES :]
    )
    bad = np.concatenate([bad_labels, bad_integers, bad_ids], axis=1)
    if bad.any():
        line, field = (int(x) for x in np.argwhere(bad)[0])
        found = text[starts[line, field] : ends[line, field]]
        _refuse_field(path, first_line + line, field, found)
    dense = log_exact(np.maximum(integers, 0) + 1.0).astype(np.float32)
    missing = lengths[:, 1 + DENSE_FEATURES :] == 0
    ids = rows_of(values, missing, np.arange(len(tables)), np.array(tables))
    return Batch(dense, ids, labels[:, 0].astype(np.float32))


def _fields(data: Bytes, text: bytes, path: str, first_line: int) -> tuple[Index, Index]:
    """Where fields start and end, int64[lines, 40] each."""
    lines = text.count(b"\n")
    marks = np.flatnonzero((data == _TAB) | (data == _NEWLINE))
    wrong = len(marks) != lines * FIELDS
    if not wrong:
        wrong = bool((data[marks[FIELDS - 1 :: FIELDS]] != _NEWLINE).any())
    if wrong:
        counts = [line.count(b"\t") + 1 for line in text.split(b"\n")]
        line = next(i for i, fields in enumerate(counts) if fields != FIELDS)
        raise DataError(
            f"{path}, line {first_line + line}: {counts[line]} fields; expected {FIELDS} between "
            f"tabs: label, {DENSE_FEATURES} integers, {TABLES} hexadecimal ids"
        )
    starts = np.zeros_like(marks)
    starts[1:] = marks[:-1] + 1
    marks[FIELDS - 1 :: FIELDS] -= data[marks[FIELDS - 1 :: FIELDS] - 1] == _RETURN
    return starts.reshape(lines, FIELDS), marks.reshape(lines, FIELDS)


def _labels(data: Bytes, starts: Index, lengths: Index) -> tuple[Bytes, Mask]:
    labels = data[starts] - _ZERO
    return labels, (lengths != 1) | (labels > 1)


def _integers(data: Bytes, starts: Index, lengths: Index) -> tuple[Index, Mask]:
    """(values, which are no integers); an empty field is 0."""
    negative = data[starts] == _MINUS
    starts, digits = starts + negative, lengths - negative
    bad: Mask = (digits > MAX_DIGITS) | (negative & (digits == 0))
    values = np.zeros(starts.shape, np.int64)
    for i in range(min(int(digits.max(initial=0)), MAX_DIGITS)):
        there = digits > i
        digit = _DIGITS[data[starts + i]]
        bad |= there & (digit > 9)
        values = np.where(there, values * 10 + digit, values)
    return np.where(negative, -values, values), bad


def hexadecimals(data: Bytes, starts: Index, lengths: Index) -> tuple[Keys, Mask]:
    """(values, which are not hexadecimal); an empty field is 0."""
    bad: Mask = lengths > MAX_HEX_DIGITS
    values = np.zeros(starts.shape, np.uint64)
    for i in range(min(int(lengths.max(initial=0)), MAX_HEX_DIGITS)):
        there = lengths > i
        digit = _DIGITS[data[starts + i]]
        bad |= there & (digit == _NO_DIGIT)
        values = np.where(there, values << np.uint64(4) | digit, values)
    return values, bad


def _refuse_field(path: str, line: int, field: int, found: bytes) -> NoReturn:
    if field == 0:
        what, expected = "the label", "0 or 1"
    elif field <= DENSE_FEATURES:
        what, expected = f"integer {field}", f"up to {MAX_DIGITS} digits, or nothing"
    else:
        what = f"id {field - DENSE_FEATURES}"
        expected = f"up to {MAX_HEX_DIGITS} hexadecimal digits, or nothing"
    shown = found[:40].decode("utf-8", "backslashreplace")
    raise DataError(
        f"{path}, line {line}, field {field + 1}: {what} is {shown!r}; expected {expected}"
    )
