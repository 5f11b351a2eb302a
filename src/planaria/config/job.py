"""The keys of a job, their defaults, and the door at which they are checked."""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from planaria.checkpoints.encodings import BITS, RAW_BITS
from planaria.checkpoints.policy import POLICIES, Policy
from planaria.codes import MAX_K, MAX_R
from planaria.config.kinds import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Kind,
    Wrong,
    auto_or,
    choice,
    number,
    one_of,
    one_or_several,
    or_null,
    several,
    shown,
    text,
    whole,
)
from planaria.config.text import read_file, read_override
from planaria.data.criteo import TABLES as CRITEO_TABLES
from planaria.errors import ConfigError, LayoutError
from planaria.layout import Layout, default_k
from planaria.layout.groups import check_sizes
from planaria.optimizers import NAMES as OPTIMIZERS
from planaria.optimizers import Optimizer
from planaria.strategies import STRATEGIES, Strategy
from planaria.tables import MAX_ROWS, Table

MAX_PROCESSES = 1024  # of one role
MAX_STEPS = 10**9
MAX_BATCH = 2**24
MAX_TABLES = 4096  # the model multiplies each with each
MAX_WIDTH = 2**16
DEFAULT_EPS = {"adam": 1e-8}  # as torch's; the others' is 1e-10

Reproducible = Literal["same", "portable", "off"]
REPRODUCIBLE: tuple[Reproducible, ...] = get_args(Reproducible)

MILLISECONDS = whole(1, 86_400_000)
ROWS = one_or_several(whole(1, MAX_ROWS), MAX_TABLES)
HIDDEN_LAYERS = several(whole(1, MAX_WIDTH), 0, 16)


@dataclass(frozen=True)
class OptimizerConfig:
    name: Annotated[str, choice(*OPTIMIZERS)] = "adagrad"
    lr: Annotated[float, POSITIVE] = 0.02
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    eps: Annotated[float | None, or_null(POSITIVE)] = None
    momentum: Annotated[float, FRACTION] = 0.9
    beta1: Annotated[float, FRACTION] = 0.9
    beta2: Annotated[float, FRACTION] = 0.999
    initial_accumulator: Annotated[float, NOT_NEGATIVE] = 0.0
    schedule: Annotated[str, choice("constant", "linear", "inverse_sqrt")] = "constant"
    warmup_steps: Annotated[int, whole(0, MAX_STEPS)] = 0


@dataclass(frozen=True)
class ModelConfig:
    dim: Annotated[int, whole(1, MAX_WIDTH)] = 16
    tables: Annotated[int, whole(1, MAX_TABLES)] = 26
    rows: Annotated[int | tuple[int, ...], ROWS] = 10_000
    bottom: Annotated[tuple[int, ...], HIDDEN_LAYERS] = (64, 32)
    top: Annotated[tuple[int, ...], HIDDEN_LAYERS] = (64, 32)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table."""
        return (self.rows,) * self.tables if isinstance(self.rows, int) else self.rows


@dataclass(frozen=True)
class DataConfig:
    source: Annotated[str, choice("synthetic", "criteo")] = "synthetic"
    path: Annotated[str | None, or_null(text("the path of a file", r"[^\0]+"))] = None
    zipf: Annotated[float, number("a number from 0 to 1.5", lambda x: 0 <= x <= 1.5)] = 1.05
    test_samples: Annotated[int, whole(0, 2**40)] = 20_000


@dataclass(frozen=True)
class ClusterConfig:
    transport: Annotated[str, choice("ipc", "tcp")] = "ipc"
    host: Annotated[str, text("a host name or IP address", r"[A-Za-z0-9._:%-]+")] = "127.0.0.1"
    encryption: Annotated[str, choice("auto", "on", "off")] = "auto"
    heartbeat_ms: Annotated[int, MILLISECONDS] = 200
    heartbeat_limit_ms: Annotated[int, MILLISECONDS] = 2000
    retry_ms: Annotated[int, MILLISECONDS] = 500
    deadline_s: Annotated[float, POSITIVE] = 30.0
    hang_limit_s: Annotated[float, POSITIVE] = 30.0

    @property
    def encrypted(self) -> bool:
        """Whether connections are: `auto` leaves out only what cannot leave this machine."""
        if self.encryption == "auto":
            return self.transport == "tcp" and not _is_loopback(self.host)
        return self.encryption == "on"


@dataclass(frozen=True)
class RebuildConfig:
    chunk: Annotated[int, whole(1, 2**24)] = 16384
    jobs: Annotated[int, whole(1, 1024)] = 2
    bytes_per_s: Annotated[int, whole(0, 2**50)] = 0


@dataclass(frozen=True)
class HistoryConfig:
    steps: Annotated[int, whole(1, 1024)] = 2


@dataclass(frozen=True)
class ScrubConfig:
    every_steps: Annotated[int, whole(0, MAX_STEPS)] = 0


@dataclass(frozen=True)
class CheckpointConfig:
    path: Annotated[str | None, or_null(text("a folder or a URL", r"[^\0]+"))] = None
    every_steps: Annotated[int, whole(0, MAX_STEPS)] = 0
    keep_last: Annotated[int, whole(1, 10**6)] = 2
    bits: Annotated[int, one_of(*BITS)] = RAW_BITS
    mode: Annotated[str, choice("async", "sync")] = "async"
    policy: Annotated[Policy, choice(*POLICIES)] = "full"
    every_s: Annotated[float | str | None, or_null(auto_or(POSITIVE))] = None
    last_step: Annotated[str, choice("save", "if_due")] = "save"
    stall_s: Annotated[float, POSITIVE] = 600.0

    @property
    def saves(self) -> bool:
        """Whether the job saves by itself, now and then."""
        return self.every_steps > 0 or self.every_s is not None


@dataclass(frozen=True)
class CprConfig:
    variant: Annotated[str, choice("vanilla", "scar", "mfu", "ssu")] = "vanilla"
    target_pls: Annotated[float, number("a number above 0, up to 1", lambda x: 0 < x <= 1)] = 0.1
    rho: Annotated[float, number("a number above 0, up to 1", lambda x: 0 < x <= 1)] = 0.125
    large_share: Annotated[float, number("a number from 0 to 1", lambda x: 0 <= x <= 1)] = 0.99


@dataclass(frozen=True)
class FailuresConfig:
    """What is expected of the machines: all strategies but erasure plan their saves by it."""

    mtbf_s: Annotated[float | None, or_null(POSITIVE)] = None
    save_s: Annotated[float | None, or_null(POSITIVE)] = None
    load_s: Annotated[float | None, or_null(NOT_NEGATIVE)] = None
    reschedule_s: Annotated[float, NOT_NEGATIVE] = 1.0


@dataclass(frozen=True)
class ThreadsConfig:
    server: Annotated[int, whole(1, 1024)] = 1
    trainer: Annotated[int, whole(1, 1024)] = 1


@dataclass(frozen=True)
class Config:
    """A job. Make one with `load` or `from_dict`: the constructor checks nothing."""

    strategy: Annotated[str, choice(*STRATEGIES)] = "erasure"
    servers: Annotated[int, whole(1, MAX_PROCESSES)] = 6
    parity: Annotated[int, whole(0, MAX_R)] = 1
    k: Annotated[int | None, or_null(whole(1, MAX_K))] = None
    spares: Annotated[int, whole(0, MAX_PROCESSES)] = 1
    trainers: Annotated[int, whole(1, MAX_PROCESSES)] = 2
    steps: Annotated[int, whole(1, MAX_STEPS)] = 400
    batch: Annotated[int, whole(1, MAX_BATCH)] = 256
    seed: Annotated[int, whole(0, 2**64 - 1)] = 0
    reproducible: Annotated[Reproducible, choice(*REPRODUCIBLE)] = "same"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rebuild: RebuildConfig = field(default_factory=RebuildConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cpr: CprConfig = field(default_factory=CprConfig)
    failures: FailuresConfig = field(default_factory=FailuresConfig)

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """The file at `path`, if any, with `path=value` overrides; the last one of a key wins."""
        values = {} if path is None else dict(_flat(read_file(path)))
        for override in overrides:
            key, value = read_override(override)
            values[_known(key)] = value
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
        return self.survival.parity(self.parity)

    @property
    def survival(self) -> Strategy:
        """The strategy, as an object that knows what it does."""
        return STRATEGIES[self.strategy]

    @property
    def saves(self) -> bool:
        """Whether the job saves by itself: now and then, or in the end."""
        return self.checkpoint.saves or self.survival.partial or self.saves_last_step

    @property
    def saves_last_step(self) -> bool:
        """Whether the trained model is saved, whatever is due by then."""
        return self.checkpoint.path is not None and self.checkpoint.last_step == "save"

    @property
    def saves_priorities(self) -> bool:
        """Whether saves have the rows that matter most, instead of all that changed."""
        return self.survival.partial and self.cpr.variant != "vanilla"

    @property
    def save_every_steps(self) -> int:
        """Priority saves share an interval among them, so that it writes as much as one save."""
        every = self.checkpoint.every_steps
        return max(1, round(every * self.cpr.rho)) if every and self.saves_priorities else every

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
                inner = inner if isinstance(inner, str) else shown(inner)
                yield _known(f"{name}.{inner}"), found
        else:
            path = _known(name if isinstance(name, str) else shown(name))
            section, dot, inner_name = path.partition(".")
            _require(not dot, f"{path}: expected {inner_name} below {section}:, not with a dot")
            yield path, value


def _mapping(path: str, value: object) -> Mapping[object, object]:
    if value is None:  # a section, or a file, in which everything is commented out
        return {}
    if not isinstance(value, Mapping):
        where = f"{path}: " if path else ""
        raise ConfigError(f"{where}expected keys with values, got {shown(value)}")
    return value


def _known(path: str) -> str:
    if path in KINDS:
        return path
    if path in _SECTIONS:
        raise ConfigError(f"{path}: a section, not a key; set one of {', '.join(_in(path))}")
    section, _, name = path.rpartition(".")
    misplaced = [known for known in KINDS if known.rpartition(".")[2] == name]
    if section in _SECTIONS:
        listed = _in(section)
        near = difflib.get_close_matches(name, [known.partition(".")[2] for known in listed], n=1)
        guesses = [*misplaced, *(f"{section}.{inner}" for inner in near)]
    else:
        listed = [*_in(""), *_SECTIONS]
        guesses = difflib.get_close_matches(path, [*KINDS, *_SECTIONS], n=1) + misplaced
    advice = f"did you mean {guesses[0]}?" if guesses else f"known are {', '.join(listed)}"
    raise ConfigError(f"{path[:80]}: unknown key; {advice}")


def _in(section: str) -> list[str]:
    """The paths of a section's keys; those outside all sections for ""."""
    return [known for known in KINDS if known.rpartition(".")[0] == section]


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
    except Wrong as wrong:
        raise ConfigError(f"{path}: expected {kind.expected}, got {shown(found)}{wrong}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


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
    _require(
        data.source == "criteo" or data.path is None,
        f"data.source: expected criteo, because data.path is {data.path}, got {data.source}",
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
    _check_checkpoint(config)
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


def _check_checkpoint(config: Config) -> None:
    chosen, survival = config.checkpoint, config.survival
    _require(
        not survival.needs_saves or survival.partial or chosen.saves,
        "checkpoint.every_steps: expected 1 or more, because strategy is checkpoint and "
        "checkpoint.every_s is null, got 0",
    )
    _require(
        not survival.partial or chosen.saves or config.failures.mtbf_s is not None,
        "failures.mtbf_s: expected a number, because strategy is cpr and neither "
        "checkpoint.every_steps nor checkpoint.every_s says how often to save, got null",
    )
    _require(
        not survival.partial or chosen.every_s != "auto",
        "checkpoint.every_s: expected a number above 0 or null, because strategy cpr follows from "
        "cpr.target_pls and failures.mtbf_s, got 'auto'",
    )
    _require(
        not survival.partial or chosen.path is not None,
        "checkpoint.path: expected a folder or a URL, because strategy is cpr, got null",
    )
    _require(
        not config.saves_priorities or chosen.policy == "full",
        f"checkpoint.policy: expected full, because cpr.variant is {config.cpr.variant}, which "
        f"chooses the rows itself, got {chosen.policy}",
    )
    _require(
        chosen.every_s is None or not chosen.every_steps,
        f"checkpoint.every_s: expected null, because checkpoint.every_steps is "
        f"{chosen.every_steps}, got {chosen.every_s}",
    )
    key, given = (
        ("every_steps", chosen.every_steps) if chosen.every_steps else ("every_s", chosen.every_s)
    )
    _require(
        chosen.path is not None or not chosen.saves,
        f"checkpoint.path: expected a folder or a URL, because checkpoint.{key} is {given}, "
        "got null",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigError(otherwise)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; only this one is known not to leave the machine
        return host.lower() == "localhost"
