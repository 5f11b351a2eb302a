"""Tables that a job declares one by one, each with its own dim, optimizer and initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from planaria.checkpoints.names import name_problem
from planaria.config.kinds import (
    NOT_NEGATIVE,
    Kind,
    Wrong,
    WrongInside,
    choice,
    mapping,
    number,
    or_null,
    several,
    shown,
    whole,
)
from planaria.config.optimizer import OptimizerConfig
from planaria.kernels.types import Distribution
from planaria.optimizers import Optimizer
from planaria.tables import MAX_DIM, MAX_ROWS, Initial, Table

MAX_TABLES = 4096  # the built-in model multiplies each with each
MAX_GROUPS = 2**20


def _optimizer_of(group: int = 0, **keys: Any) -> Optimizer:
    return replace(OptimizerConfig(**keys).rule, group=group)


def _optimizer_kinds() -> dict[str, Kind]:
    """Those of the section `optimizer`, but for the schedule, which is one for the whole job."""
    hints = get_type_hints(OptimizerConfig, include_extras=True)
    own = {field.name for field in fields(Optimizer)}
    kinds: dict[str, Kind] = {k: hint.__metadata__[0] for k, hint in hints.items() if k in own}
    # A user's scheduler may start at 0.
    return kinds | {"lr": NOT_NEGATIVE, "group": whole(0, MAX_GROUPS)}


def _name() -> Kind:
    def read(value: object) -> str:
        if not isinstance(value, str):
            raise Wrong
        if problem := name_problem(value):
            raise Wrong(f": {problem}")
        return value

    return Kind("a name that a file can have", read)


_ANY = number("a number", lambda x: True)
_INITIAL = {
    "distribution": choice(*(one.name.lower() for one in Distribution)),
    "a": _ANY,
    "b": _ANY,
}
_TABLE = {
    "name": _name(),
    "rows": whole(1, MAX_ROWS),
    "dim": whole(1, MAX_DIM),
    "initial": or_null(mapping(_INITIAL, {"distribution"}, Initial)),
    "optimizer": or_null(mapping(_optimizer_kinds(), set(), _optimizer_of)),
}
_LIST = several(mapping(_TABLE, {"name", "rows", "dim"}, Table), 1, MAX_TABLES)


def _read(value: object) -> Sequence[Table]:
    tables: Any = _LIST.read(value)
    first: dict[str, int] = {}
    twins: list[tuple[str, str]] = []
    for number_, table in enumerate(tables):
        if first.setdefault(table.name, number_) != number_:
            other = f"tables.{first[table.name]}.name"
            twins.append((f"{number_}.name", f"expected another than {other}, {shown(table.name)}"))
    if twins:
        raise WrongInside(twins)
    found: Sequence[Table] = tables
    return found


TABLES = Kind(f"a list of 1 to {MAX_TABLES} tables, each with {', '.join(_TABLE)}", _read)
