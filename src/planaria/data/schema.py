"""Which columns of a file are the label, the numbers and the ids, and what becomes of them.

A schema is a YAML file, or the same as objects:

    label: click
    dense:
      - {column: price, log: true}
    sparse:
      - {column: user, rows: 100000, type: integer}
      - {column: genres, rows: 50, many: true, separator: "|", weights: genre_weights}
      - {column: city, rows: 5000, vocabulary: cities.txt}

All of it is checked when it is read, with the path of the key that is wrong.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import yaml  # type: ignore[import-untyped]

from planaria.data.source import MAX_ROWS
from planaria.errors import ConfigError
from planaria.files import write_atomically

Name = Annotated[str, msgspec.Meta(min_length=1)]
IdType = Literal["text", "integer", "hex"]


class Dense(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column of numbers: x, or log(1 + max(x, 0)). Nulls and NaN become `fill`, as it is."""

    column: Name
    log: bool = False
    fill: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.fill):
            raise ValueError(f"fill: expected a number, got {self.fill}")


class Sparse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column of ids, which become rows of a table.

    Row 0 is for ids that are missing, and for those that a vocabulary does not have.
    """

    column: Name
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    type: IdType = "text"  # hex: a number in hexadecimal digits
    modulo: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)] | None = None  # of an integer, first
    many: bool = False  # any number of ids: a list in Parquet, else text between separators
    separator: Name = "|"
    weights: Name | None = None  # the column with a weight for each id
    vocabulary: Name | None = None  # a file; without, ids are hashed
    table: Name | None = None  # columns of one table share its rows; without, one of its own

    def __post_init__(self) -> None:
        if self.weights is not None and not self.many:
            raise ValueError("weights go with a column that has `many` ids")
        if self.modulo is not None and self.type != "integer":
            raise ValueError("`modulo` goes with `type: integer`")
        if self.vocabulary is not None and self.type == "hex":
            raise ValueError("a vocabulary goes with text or integers")

    @property
    def table_name(self) -> str:
        return self.table or self.column


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: Name
    sparse: tuple[Sparse, ...] = ()
    dense: tuple[Dense, ...] = ()
    positive_from: float | None = None  # labels become 1 from this value on, else 0
    delimiter: Name = ","  # CSV
    columns: tuple[Name, ...] = ()  # CSV without a header line: what would stand there

    def __post_init__(self) -> None:
        names = [one.column for one in self.sparse]
        if twins := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"sparse: {min(twins)!r} stands there twice")
        first: dict[str, Sparse] = {}
        for one in self.sparse:
            other = first.setdefault(one.table_name, one)
            if (one.rows, one.vocabulary) != (other.rows, other.vocabulary):
                raise ValueError(
                    f"sparse: {other.column!r} and {one.column!r} share the table "
                    f"{one.table_name!r}; expected the same rows and vocabulary"
                )
        if unknown := [name for name in self.needs if self.columns and name not in self.columns]:
            raise ValueError(f"columns: expected {unknown[0]!r} among them")

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(one.column for one in self.sparse)

    @property
    def tables(self) -> dict[str, int]:
        """Rows of each table, by name."""
        return {one.table_name: one.rows for one in self.sparse}

    @property
    def needs(self) -> list[str]:
        """The columns that a file must have, each once."""
        names = [self.label] if self.label else []  # samples that are only scored have none
        names += [one.column for one in self.dense]
        for one in self.sparse:
            names += [one.column] if one.weights is None else [one.column, one.weights]
        return list(dict.fromkeys(names))

    @classmethod
    def from_dict(cls, values: object, where: str = "schema") -> Self:
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$")
            path = path.rstrip("`").lstrip(".")
            raise ConfigError(f"{where}: {path + ': ' if path else ''}{problem}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """From a YAML file; the files of vocabularies lie beside it, unless they say where."""
        path = Path(path)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read {path}: {error}; expected YAML in UTF-8") from None
        schema = cls.from_dict(values, str(path))
        return msgspec.structs.replace(
            schema,
            sparse=tuple(
                one
                if one.vocabulary is None
                else msgspec.structs.replace(one, vocabulary=str(path.parent / one.vocabulary))
                for one in schema.sparse
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """As YAML and JSON have it, without what is as by default."""
        return _short(self)

    def save(self, path: str | os.PathLike[str], comment: str = "") -> None:
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        text = lines + _yaml(self.to_dict())
        write_atomically(Path(path), text.encode())


def _short(one: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(one):
        value = getattr(one, field.name)
        if value == field.default:
            continue
        if isinstance(value, tuple):
            value = [_short(item) if isinstance(item, msgspec.Struct) else item for item in value]
        found[field.name] = value
    return found


def _yaml(values: Mapping[str, Any]) -> str:
    """One line per column."""
    text = ""
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = (_flow(item) for item in value)
            text += f"{key}:\n" + "".join(f"  - {line}\n" for line in lines)
        else:
            text += f"{key}: {_flow(value)}\n"
    return text


def _flow(value: object) -> str:
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()
