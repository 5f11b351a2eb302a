"""Options of a command that are the fields of a dataclass: declared once, beside their limits.

    @dataclass(frozen=True)
    class Inputs:
        servers: Annotated[int, Option("Embedding servers.", least=1, most=1000)] = 8

`check_options` refuses a value that is out of bounds and names its option; `takes_options_of` gives
a command an option for every field.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from planaria.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """What the option of a field means and takes: a number from `least` to `most`, or a name."""

    help: str
    panel: str = "Options"
    least: float = 0.0
    most: float = math.inf
    above: bool = False  # `least` itself is too little
    names: tuple[str, ...] = ()
    limits: str = ""  # whose they are

    @property
    def expected(self) -> str:
        if self.names:
            return f"one of {', '.join(self.names)}"
        if self.above:
            limit = "" if math.isinf(self.most) else f", up to {self.most:g}"
            return f"a number above {self.least:g}{limit}"
        return f"a number from {self.least:g} to {self.most:g}{self.limits}"

    def takes(self, value: Any) -> bool:
        if self.names:
            return value in self.names
        enough = value > self.least if self.above else value >= self.least
        return bool(enough and value <= self.most and math.isfinite(value))


def check_options(inputs: Any) -> None:
    """Raises ConfigError for the first field that is out of bounds; None is a field not given."""
    for name, (_, option) in _declared(type(inputs)).items():
        value = getattr(inputs, name)
        if value is not None:
            require(option.takes(value), name, option.expected, value)


def require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(f"{flag(name)}: expected {expected}, got {shown}")


def flag(name: str) -> str:
    """The option of a field, as it is written."""
    return f"--{name.replace('_', '-')}"


def refuse_existing(option: str, path: Path, *, force: bool) -> None:
    """What somebody made earlier is not replaced without a word."""
    if path.exists() and not force:
        raise ConfigError(f"{option}: {path} exists; name another, or add --force to replace it")


Command = Callable[..., None]


def takes_options_of(inputs: type) -> Callable[[Command], Command]:
    """A command with an option for each field; its parameter `given` has those that were given."""
    declared = _declared(inputs)
    defaults = {field.name: field.default for field in fields(inputs)}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            options = {name: arguments.pop(name) for name in declared}
            given = {name: value for name, value in options.items() if value is not None}
            command(given=given, **arguments)

        own = inspect.signature(command, eval_str=True).parameters
        parameters = {name: found for name, found in own.items() if name != "given"}
        for name, (kind, option) in declared.items():
            parameters[name] = inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, _offered(option, defaults[name])],
            )
        # Typer reads these two; the function that was wrapped has neither of the options.
        signature = [
            found.replace(kind=inspect.Parameter.KEYWORD_ONLY) for found in parameters.values()
        ]
        run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        run.__annotations__ = {name: found.annotation for name, found in parameters.items()}
        del run.__wrapped__
        return run

    return decorate


def _offered(option: Option, default: object) -> Any:
    """Its default is shown in the text: None, the command's own, means that it was not given."""
    note = "" if default is None or default is MISSING else f" Default {_shown(default)}."
    return typer.Option(help=option.help + note, rich_help_panel=option.panel, show_default=False)


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, int | float) else str(default)


def _declared(inputs: type) -> Mapping[str, tuple[type, Option]]:
    """The type and the option of each field that has one."""
    found = {}
    for name, hint in get_type_hints(inputs, include_extras=True).items():
        options = [extra for extra in get_args(hint)[1:] if isinstance(extra, Option)]
        if options:
            kinds = [kind for kind in get_args(get_args(hint)[0]) if kind is not NoneType]
            found[name] = (kinds[0] if kinds else get_args(hint)[0], options[0])
    return found
