"""The configuration of a job: one type, checked once at the door, trusted inside.

A key is a field with the kind of value that it takes beside its type and default, so this file says
everything about it but its meaning, which is in docs/config.md. `load` reads a small YAML file and
`--set path=value` overrides; `from_dict` takes what `to_dict` gave, without touching any file, so
that a configuration can travel to machines that do not have the data. A value that is wrong is
refused with its path, what was expected and what was found.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import yaml  # type: ignore[import-untyped]

from planaria.codes.code import MAX_K, MAX_R
from planaria.data.criteo import TABLES as CRITEO_TABLES
from planaria.errors import ConfigError, LayoutError
from planaria.layout import Layout, default_k
from planaria.layout.groups import check_sizes
from planaria.optimizers import NAMES as OPTIMIZERS
from planaria.optimizers import Optimizer
from planaria.tables import MAX_ROWS, Table

MAX_PROCESSES = 1024  # of one role
MAX_STEPS = 10**9
MAX_BATCH = 2**24
MAX_TABLES = 4096  # the interaction has half the square of it
MAX_WIDTH = 2**16
MAX_LAYERS = 16
DAY_MS = 86_400_000
DEFAULT_EPS = {"adam": 1e-8}  # torch's; 1e-10 for the others

# ------------------------------------------------------------------------------ kinds of values


class _Wrong(Exception):
    """The value is not of this kind."""


@dataclass(frozen=True)
class Kind:
    """What a key takes: in words, and as a function from a YAML value to the value kept."""

    expected: str
    read: Callable[[object], object]


def _whole(least: int, most: int) -> Kind:
    def read(value: object) -> int:
        # A bool is an int to Python; 400.0 and "400" are not whole numbers to us.
        if type(value) is not int or not least <= value <= most:
            raise _Wrong
        return value

    return Kind(f"a whole number from {least} to {most}", read)


# YAML 1.1 takes 1e-3 for a string, because it lacks a point.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _number(expected: str, holds: Callable[[float], bool]) -> Kind:
    """Kernels compute in float32, so what must hold holds for the value rounded to that, too."""

    def read(value: object) -> float:
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value)
        if type(value) not in (int, float):
            raise _Wrong
        try:
            number = float(value) + 0.0  # type: ignore[arg-type]  # -0.0 becomes 0.0
        except OverflowError:
            raise _Wrong from None
        with np.errstate(over="ignore"):
            rounded = float(np.float32(number))
        if not (math.isfinite(rounded) and holds(number) and holds(rounded)):
            raise _Wrong
        return number

    return Kind(expected, read)


def _choice(*names: str, later: Sequence[str] = ()) -> Kind:
    expected = f"{', '.join(names[:-1])} or {names[-1]}"

    def read(value: object) -> str:
        if isinstance(value, bool):  # YAML 1.1 takes on and off for booleans
            value = "on" if value else "off"
        if isinstance(value, str) and value in later:
            raise ConfigError(f"{value} is not available yet; use {expected}")
        if not isinstance(value, str) or value not in names:
            raise _Wrong
        return value

    return Kind(expected, read)


def _text(expected: str, pattern: str) -> Kind:
    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise _Wrong
        return value

    return Kind(expected, read)


def _several(item: Kind, least: int, most: int) -> Kind:
    def read(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise _Wrong
        return tuple(item.read(one) for one in value)

    return Kind(f"a list of {least} to {most} values, each {item.expected}", read)


def _rows() -> Kind:
    one = _whole(1, MAX_ROWS)
    several = _several(one, 1, MAX_TABLES)

    def read(value: object) -> object:
        return (one if isinstance(value, int) else several).read(value)

    return Kind(f"{one.expected}, or a list of them, one per table", read)


def _or_null(kind: Kind) -> Kind:
    return Kind(
        f"null or {kind.expected}",
        lambda value: None if value is None else kind.read(value),
    )


_POSITIVE = _number("a number above 0", lambda x: x > 0)
_NOT_NEGATIVE = _number("a number of 0 or more", lambda x: x >= 0)
_FRACTION = _number("a number from 0 to below 1", lambda x: 0 <= x < 1)
_HIDDEN_LAYERS = _several(_whole(1, MAX_WIDTH), 0, MAX_LAYERS)
_MILLISECONDS = _whole(1, DAY_MS)

# ------------------------------------------------------------------------------------- the keys


@dataclass(frozen=True)
class OptimizerConfig:
    name: Annotated[str, _choice(*OPTIMIZERS)] = "adagrad"
    lr: Annotated[float, _POSITIVE] = 0.02
    weight_decay: Annotated[float, _NOT_NEGATIVE] = 0.0
    eps: Annotated[float | None, _or_null(_POSITIVE)] = None
    momentum: Annotated[float, _FRACTION] = 0.9
    beta1: Annotated[float, _FRACTION] = 0.9
    beta2: Annotated[float, _FRACTION] = 0.999
    initial_accumulator: Annotated[float, _NOT_NEGATIVE] = 0.0
    schedule: Annotated[str, _choice("constant", "linear", "inverse_sqrt")] = "constant"
    warmup_steps: Annotated[int, _whole(0, MAX_STEPS)] = 0


@dataclass(frozen=True)
class ModelConfig:
    dim: Annotated[int, _whole(1, MAX_WIDTH)] = 16
    tables: Annotated[int, _whole(1, MAX_TABLES)] = 26
    rows: Annotated[int | tuple[int, ...], _rows()] = 10_000
    bottom: Annotated[tuple[int, ...], _HIDDEN_LAYERS] = (64, 32)
    top: Annotated[tuple[int, ...], _HIDDEN_LAYERS] = (64, 32)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table."""
        return (self.rows,) * self.tables if isinstance(self.rows, int) else self.rows


@dataclass(frozen=True)
class DataConfig:
    source: Annotated[str, _choice("synthetic", "criteo")] = "synthetic"
    path: Annotated[str | None, _or_null(_text("the path of a file", r"[^\0]+"))] = None
    zipf: Annotated[float, _number("a number from 0 to 1.5", lambda x: 0 <= x <= 1.5)] = 1.05
    test_samples: Annotated[int, _whole(0, 2**40)] = 20_000


@dataclass(frozen=True)
class ClusterConfig:
    transport: Annotated[str, _choice("ipc", "tcp")] = "ipc"
    host: Annotated[str, _text("a host name or IP address", r"[A-Za-z0-9._:%-]+")] = "127.0.0.1"
    encryption: Annotated[str, _choice("auto", "on", "off")] = "auto"
    heartbeat_ms: Annotated[int, _MILLISECONDS] = 200
    heartbeat_limit_ms: Annotated[int, _MILLISECONDS] = 2000
    retry_ms: Annotated[int, _MILLISECONDS] = 500
    deadline_s: Annotated[float, _POSITIVE] = 30.0

    @property
    def encrypted(self) -> bool:
        """Whether connections are: `auto` leaves out only what cannot leave this machine."""
        if self.encryption == "auto":
            return self.transport == "tcp" and not _is_loopback(self.host)
        return self.encryption == "on"


@dataclass(frozen=True)
class RebuildConfig:
    chunk: Annotated[int, _whole(1, 2**24)] = 4096
    jobs: Annotated[int, _whole(1, 1024)] = 2
    bytes_per_s: Annotated[int, _whole(0, 2**50)] = 0


@dataclass(frozen=True)
class HistoryConfig:
    steps: Annotated[int, _whole(1, 1024)] = 2


@dataclass(frozen=True)
class ScrubConfig:
    every_steps: Annotated[int, _whole(0, MAX_STEPS)] = 0


@dataclass(frozen=True)
class ThreadsConfig:
    server: Annotated[int, _whole(1, 1024)] = 1
    trainer: Annotated[int, _whole(1, 1024)] = 1


@dataclass(frozen=True)
class Config:
    """A job. Make one with `load` or `from_dict`: the constructor checks nothing."""

    strategy: Annotated[str, _choice("erasure", "none", later=("checkpoint", "cpr"))] = "erasure"
    servers: Annotated[int, _whole(1, MAX_PROCESSES)] = 6
    parity: Annotated[int, _whole(0, MAX_R)] = 1
    k: Annotated[int | None, _or_null(_whole(1, MAX_K))] = None
    spares: Annotated[int, _whole(0, MAX_PROCESSES)] = 1
    trainers: Annotated[int, _whole(1, MAX_PROCESSES)] = 2
    steps: Annotated[int, _whole(1, MAX_STEPS)] = 400
    batch: Annotated[int, _whole(1, MAX_BATCH)] = 256
    seed: Annotated[int, _whole(0, 2**64 - 1)] = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rebuild: RebuildConfig = field(default_factory=RebuildConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """The file at `path`, if any, with `path=value` overrides; the last one of a key wins."""
        values = {} if path is None else dict(_flat(_read_file(path)))
        values.update(_read_override(text) for text in overrides)
        config = _build(values)
        if config.data.source == "criteo" and not Path(str(config.data.path)).is_file():
            raise ConfigError(
                f"data.path: expected a file, but {config.data.path!r} does not exist or is none"
            )
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Config:
        """What `to_dict` gave, or any part of it; the rest has its default."""
        return _build(dict(_flat(values)))

    def to_dict(self) -> dict[str, Any]:
        """Every key, in sections, as JSON and YAML have them."""
        as_json: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return as_json

    def fingerprint(self) -> str:
        """SHA-256 of all values: equal for equal configurations, however they were written."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def r(self) -> int:
        """Parity records per stripe: `parity`, if the strategy keeps any."""
        return self.parity if self.strategy == "erasure" else 0

    @property
    def ranks(self) -> int:
        """Trainers and shadows: r + 1 replicas of the dense parameters at least."""
        return max(self.trainers, self.r + 1)

    @cached_property
    def layout(self) -> Layout:
        return Layout.fresh(self.servers, self.r, self.k if self.r else 1)

    @property
    def optimizer_rule(self) -> Optimizer:
        chosen = self.optimizer
        return Optimizer(
            name=chosen.name,
            lr=chosen.lr,
            weight_decay=chosen.weight_decay,
            eps=DEFAULT_EPS.get(chosen.name, 1e-10) if chosen.eps is None else chosen.eps,
            momentum=chosen.momentum,
            beta1=chosen.beta1,
            beta2=chosen.beta2,
            initial_accumulator=chosen.initial_accumulator,
        )

    @property
    def tables(self) -> list[Table]:
        rows = enumerate(self.model.table_rows)
        return [Table(f"table{number}", count, self.model.dim) for number, count in rows]

    def lr(self, step: int) -> float:
        """The learning rate of a step; steps count from 1.

        It rises for `warmup_steps` steps to optimizer.lr. Then `linear` falls to 0 at the last
        step, and `inverse_sqrt` with the square root of the step. Products, quotients and square
        roots of doubles: the same bits on every machine.
        """
        chosen, warmup = self.optimizer, self.optimizer.warmup_steps
        if step < warmup:
            return chosen.lr * (step / warmup)
        if chosen.schedule == "linear":
            return chosen.lr * (max(self.steps - step, 0) / (self.steps - warmup))
        if chosen.schedule == "inverse_sqrt":
            return chosen.lr * math.sqrt(max(warmup, 1) / step)
        return chosen.lr


# ------------------------------------------------------------------------------------- the door

_HINTS = get_type_hints(Config, include_extras=True)
_SECTIONS: dict[str, Any] = {name: hint for name, hint in _HINTS.items() if is_dataclass(hint)}


def _kinds_of(hints: Mapping[str, Any], prefix: str) -> dict[str, Kind]:
    return {
        prefix + name: hint.__metadata__[0]
        for name, hint in hints.items()
        if name not in _SECTIONS or prefix
    }


KINDS: dict[str, Kind] = _kinds_of(_HINTS, "")
"""What each key takes, by its path."""
for _name, _section in _SECTIONS.items():
    KINDS |= _kinds_of(get_type_hints(_section, include_extras=True), f"{_name}.")


def _flat(values: object) -> Iterator[tuple[str, object]]:
    """(path, value) of every key that is given; all of them are known."""
    for name, value in _mapping("", values).items():
        if isinstance(name, str) and name in _SECTIONS:
            for inner, found in _mapping(name, value).items():
                inner = inner if isinstance(inner, str) else _shown(inner)
                yield _known(f"{name}.{inner}"), found
        else:
            path = _known(name if isinstance(name, str) else _shown(name))
            section, dot, inner_name = path.partition(".")
            _require(not dot, f"{path}: expected {inner_name} below {section}:, not with a dot")
            yield path, value


def _mapping(path: str, value: object) -> Mapping[object, object]:
    if value is None:  # a section, or a file, in which everything is commented out
        return {}
    if not isinstance(value, Mapping):
        where = f"{path}: " if path else ""
        raise ConfigError(f"{where}expected keys with values, got {_shown(value)}")
    return value


def _known(path: str) -> str:
    if path in KINDS:
        return path
    if path in _SECTIONS:
        raise ConfigError(f"{path}: a section, not a key; set its keys, such as {_first_of(path)}")
    near = difflib.get_close_matches(path, [*KINDS, *_SECTIONS], n=1)
    # A key that is written without its section, or in a wrong one.
    near += [known for known in KINDS if known.split(".")[-1] == path.split(".")[-1]]
    shown = path if len(path) <= 80 else f"{path[:77]}..."
    if near:
        raise ConfigError(f"{shown}: unknown key; did you mean {near[0]}?")
    section = path.split(".")[0]
    keys = [known for known in KINDS if known.startswith(f"{section}.")]
    keys = keys or [known for known in KINDS if "." not in known] + list(_SECTIONS)
    raise ConfigError(f"{shown}: unknown key; known are {', '.join(keys)}")


def _first_of(section: str) -> str:
    return next(known for known in KINDS if known.startswith(f"{section}."))


def _build(values: Mapping[str, object]) -> Config:
    read: dict[str, dict[str, Any]] = {section: {} for section in ("", *_SECTIONS)}
    for path, found in values.items():
        section, _, name = path.rpartition(".")
        read[section][name] = _read_value(path, found)
    sections = {name: section(**read[name]) for name, section in _SECTIONS.items()}
    config = Config(**read[""], **sections)
    _check_together(config)
    return config


def _read_value(path: str, found: object) -> object:
    kind = KINDS[path]
    try:
        return kind.read(found)
    except _Wrong:
        raise ConfigError(f"{path}: expected {kind.expected}, got {_shown(found)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _shown(value: object) -> str:
    """A value as an error message quotes it: short, whatever it is."""
    words = {"None": "null", "True": "true", "False": "false"}
    short = reprlib.Repr()
    short.maxlevel, short.maxstring = 2, 60
    try:
        text = short.repr(value)
    except ValueError:  # more digits than Python is willing to print
        return "a number of thousands of digits"
    return words.get(text, text)


def _check_together(config: Config) -> None:
    """What single values cannot say."""
    model, data, cluster, optimizer = config.model, config.data, config.cluster, config.optimizer
    if config.r:
        try:
            k = default_k(config.servers, config.r) if config.k is None else config.k
            check_sizes(config.servers, k, config.r)
        except LayoutError as error:
            raise ConfigError(f"servers: {error}") from None
    _require(
        config.batch >= config.trainers,
        f"batch: expected a sample for each trainer, {config.trainers} or more, got {config.batch}",
    )
    _require(
        len(model.table_rows) == model.tables,
        f"model.rows: expected one number, or {model.tables}, as many as model.tables says, "
        f"got {len(model.table_rows)}",
    )
    if data.source == "criteo":
        _require(data.path is not None, "data.path: expected the path of Criteo's file, got null")
        _require(
            model.tables == CRITEO_TABLES,
            f"model.tables: expected {CRITEO_TABLES}, as Criteo's data has, got {model.tables}",
        )
    _require(
        optimizer.schedule != "linear" or optimizer.warmup_steps < config.steps,
        f"optimizer.warmup_steps: expected fewer than steps, {config.steps}, because a linear "
        f"schedule has to come down again, got {optimizer.warmup_steps}",
    )
    _require(
        cluster.heartbeat_limit_ms > cluster.heartbeat_ms,
        f"cluster.heartbeat_limit_ms: expected more than cluster.heartbeat_ms, "
        f"{cluster.heartbeat_ms}, got {cluster.heartbeat_limit_ms}",
    )
    _require(
        cluster.deadline_s * 1000 > cluster.retry_ms,
        f"cluster.deadline_s: expected more than cluster.retry_ms, {cluster.retry_ms} ms, "
        f"got {cluster.deadline_s}",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigError(otherwise)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; only this one is known not to leave the machine
        return host.lower() == "localhost"


# ------------------------------------------------------------------------------------ YAML text


def _read_file(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise ConfigError(f"cannot read {path}: {error}; it must be text in UTF-8") from None
    return _parse(text, str(path))


def _read_override(text: str) -> tuple[str, object]:
    path, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected path=value, as in --set steps=400")
    return _known(path.strip()), _parse(value, f"--set {text}")


def _parse(text: str, where: str) -> object:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(node, where)
            for _, inner in node.value:
                if isinstance(inner, yaml.MappingNode):
                    _refuse_twice(inner, where)
        return yaml.safe_load(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
        raise _syntax_error(where, line, column, error.reason) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _syntax_error(where, mark.line, mark.column, error.problem) from None
    except ConfigError:
        raise
    except Exception as error:  # PyYAML lets through what int(), date() and its own tables raise
        raise ConfigError(f"{where}: not a YAML value ({error}); put it in quotes") from None


def _refuse_twice(node: yaml.MappingNode, where: str) -> None:
    """YAML's own reader would keep the last of two equal keys, and drop the other in silence."""
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                mark = key.start_mark
                problem = f"{key.value!r} stands here twice"
                raise _syntax_error(where, mark.line, mark.column, problem)
            seen.add(key.value)


def _syntax_error(where: str, line: int, column: int, problem: str) -> ConfigError:
    return ConfigError(f"{where}, line {line + 1}, column {column + 1}: {problem}")
