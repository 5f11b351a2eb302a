"""The kinds of values that keys take, and how a value of another kind is quoted."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from planaria.errors import ArgumentError

Make = Callable[..., Any]
Key = TypeVar("Key", int, str)

# YAML 1.1 takes 1e-3 for a string, because it lacks a point.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SIZE = re.compile(r"([0-9]+|[0-9]*\.[0-9]+) ?([kMGT]i?B)", re.IGNORECASE)
_UNITS = {f"{unit}b": 1000 ** (power + 1) for power, unit in enumerate("kmgt")}
_UNITS |= {f"{unit}ib": 1024 ** (power + 1) for power, unit in enumerate("kmgt")}


class Wrong(Exception):
    """The value is not of this kind; the text, if any, follows the value in the message."""


class WrongInside(Wrong):
    """Something in the value is wrong; problems: its path in the value, and what is wrong."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("")
        self.problems = problems


class Named(dict[str, Any]):
    """Names with values, as part of a configuration: never changed, so it has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class Kind:
    """What a key takes: in words, and as a function from a YAML value to the value kept, which
    raises Wrong."""

    expected: str
    read: Callable[[object], object]


def whole(least: int, most: int) -> Kind:
    def read(value: object) -> int:
        # A bool is an int to Python; 400.0 and "400" are not whole numbers to us.
        if type(value) is not int or not least <= value <= most:
            raise Wrong
        return value

    return Kind(f"a whole number from {least} to {most}", read)


def one_of(*numbers: int) -> Kind:
    def read(value: object) -> int:
        if type(value) is not int or value not in numbers:
            raise Wrong
        return value

    return Kind(f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}", read)


def number(expected: str, holds: Callable[[float], bool]) -> Kind:
    """Kernels compute in float32, so what must hold must hold in float32 as well."""

    def read(value: object) -> float:
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Wrong
        try:
            exact = float(value) + 0.0  # -0.0 becomes 0.0
        except OverflowError:
            raise Wrong from None
        if not holds(exact):
            raise Wrong
        with np.errstate(over="ignore"):
            rounded = float(np.float32(exact))
        if not (math.isfinite(rounded) and holds(rounded)):
            raise Wrong(f", which is {rounded} in float32")
        return exact

    return Kind(expected, read)


def size(least: int, most: int) -> Kind:
    """Of bytes: a number, or one with a unit."""

    def read(value: object) -> int:
        if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
            value = round(float(match[1]) * _UNITS[match[2].lower()])
        if type(value) is not int or not least <= value <= most:
            raise Wrong
        return value

    return Kind("a size such as 64GB, 1.5GiB, or a number of bytes", read)


def choice(*names: str) -> Kind:
    expected = f"{', '.join(names[:-1])} or {names[-1]}"

    def read(value: object) -> str:
        if isinstance(value, bool):  # YAML 1.1 takes on and off for booleans
            value = "on" if value else "off"
        if not isinstance(value, str) or value not in names:
            raise Wrong
        return value

    return Kind(expected, read)


def text(expected: str, pattern: str) -> Kind:
    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise Wrong
        return value

    return Kind(expected, read)


def several(one: Kind, least: int, most: int) -> Kind:
    def read(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise Wrong
        return tuple(_read_each(enumerate(value), lambda _: one).values())

    return Kind(f"a list of {least} to {most} values, each {one.expected}", read)


def mapping(kinds: Mapping[str, Kind], needed: Collection[str], make: Make) -> Kind:
    """Keys with values of these kinds, as what `make` makes of them."""

    def read(value: object) -> object:
        if not isinstance(value, Mapping):
            raise Wrong
        problems = [_about_unknown(key, kinds) for key in value if key not in kinds]
        problems += [(key, f"expected {kinds[key].expected}, got nothing") for key in kinds
                     if key in needed and key not in value]  # fmt: skip
        known = [(key, value[key]) for key in kinds if key in value]
        try:
            found = _read_each(known, kinds.__getitem__, told=True)
        except WrongInside as wrong:
            problems += wrong.problems
        if problems:
            raise WrongInside(problems)
        try:
            return make(**found)
        except ArgumentError as error:  # of values that do not fit together
            raise WrongInside([("", str(error))]) from None

    return Kind(f"keys with values, of {', '.join(kinds)}", read)


def named(one: Kind, of: str) -> Kind:
    """Any names, each with a value of one kind. of: what a name is of."""

    def read(value: object) -> object:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise Wrong
        return Named(_read_each(value.items(), lambda _: one, told=True))

    return Kind(f"names of {of} with values, each {one.expected}", read)


def _about_unknown(key: object, kinds: Mapping[str, Kind]) -> tuple[str, str]:
    near = difflib.get_close_matches(str(key), kinds, n=1)
    advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(kinds)}"
    return str(key)[:80], f"unknown key; {advice}"


def _read_each(
    items: Iterable[tuple[Key, object]], kind_of: Callable[[Key], Kind], told: bool = False
) -> dict[Key, object]:
    """told: a value that is wrong is told by its path; else all of it is wrong."""
    found: dict[Key, object] = {}
    problems: list[tuple[str, str]] = []
    for key, value in items:
        kind = kind_of(key)
        try:
            found[key] = kind.read(value)
        except WrongInside as wrong:
            problems += [(f"{key}.{at}".rstrip("."), problem) for at, problem in wrong.problems]
        except Wrong as wrong:
            if not told:
                raise
            problems.append((str(key), f"expected {kind.expected}, got {shown(value)}{wrong}"))
    if problems:
        raise WrongInside(problems)
    return found


def one_or_several(one: Kind, most: int) -> Kind:
    many = several(one, 1, most)

    def read(value: object) -> object:
        return (many if isinstance(value, list | tuple) else one).read(value)

    return Kind(f"{one.expected}, or a list of such numbers", read)


def or_null(kind: Kind) -> Kind:
    def read(value: object) -> object:
        return None if value is None else kind.read(value)

    return Kind(f"null or {kind.expected}", read)


def auto_or(kind: Kind) -> Kind:
    def read(value: object) -> object:
        return value if isinstance(value, str) and value == "auto" else kind.read(value)

    return Kind(f"auto or {kind.expected}", read)


POSITIVE = number("a number above 0", lambda x: x > 0)
NOT_NEGATIVE = number("a number of 0 or more", lambda x: x >= 0)
FRACTION = number("a number from 0 to below 1", lambda x: 0 <= x < 1)


def shown(value: object) -> str:
    """A value as a message quotes it: short, whatever it is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring = 2, 60
    try:
        quoted = short.repr(value)
    except ValueError:  # more digits than Python is willing to print
        return "a number of thousands of digits"
    return {"None": "null", "True": "true", "False": "false"}.get(quoted, quoted)
