"""The keys of a job, their defaults, and the door at which they are checked."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from planaria.checkpoints.encodings import BITS, RAW_BITS
from planaria.checkpoints.policy import POLICIES, Policy
from planaria.codes import MAX_K, MAX_R
from planaria.config.combinations import wrong_combinations
from planaria.config.declared import MAX_TABLES, TABLES
from planaria.config.door import Door, Reading
from planaria.config.kinds import (
    NOT_NEGATIVE,
    POSITIVE,
    auto_or,
    choice,
    number,
    one_of,
    one_or_several,
    or_null,
    several,
    shown,
    size,
    text,
    whole,
)
from planaria.config.optimizer import MAX_STEPS, OptimizerConfig
from planaria.config.text import read_file, read_override
from planaria.config.wire import WireConfig
from planaria.data.presets import PRESETS
from planaria.data.split import MAX_SHARE
from planaria.errors import ConfigError
from planaria.layout import Layout, default_k
from planaria.optimizers import Optimizer
from planaria.strategies import STRATEGIES, Strategy
from planaria.tables import MAX_ROWS, Arena, Table, make_arenas

MAX_PROCESSES = 1024  # of one role
ELASTIC_TIMES = 8  # as many trainers as a job begins with, it may have later
LABEL = text("a label without spaces", r"\S{1,200}")
MAX_BATCH = 2**24
MAX_WIDTH = 2**16
KEYS = {"declared_tables": "tables"}  # where a field cannot be called like its key

Reproducible = Literal["same", "portable", "off"]
REPRODUCIBLE: tuple[Reproducible, ...] = get_args(Reproducible)

DEVICES = "cpu, cuda, mps or xpu, with a number if need be, such as cuda:0"
MILLISECONDS = whole(1, 86_400_000)
ROWS = one_or_several(whole(1, MAX_ROWS), MAX_TABLES)
HIDDEN_LAYERS = several(whole(1, MAX_WIDTH), 0, 16)
MODEL_NAME = r"[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?"
SHARE = number(f"a number from 0 to {MAX_SHARE}", lambda x: 0 <= x <= MAX_SHARE)


@dataclass(frozen=True)
class ModelConfig:
    name: Annotated[str, text("a model's name, or module:Class", MODEL_NAME)] = "dlrm"
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
    source: Annotated[str, choice("synthetic", "criteo", "files", "script")] = "synthetic"
    path: Annotated[str | None, or_null(text("the path of a file", r"[^\0]+"))] = None
    schema: Annotated[str | None, or_null(text("a schema's file, or a preset", r"[^\0]+"))] = None
    epochs: Annotated[int | None, or_null(whole(1, MAX_STEPS))] = None
    shuffle: Annotated[str, choice("off", "on")] = "on"
    validation: Annotated[float, SHARE] = 0.1
    zipf: Annotated[float, number("a number from 0 to 1.5", lambda x: 0 <= x <= 1.5)] = 1.05
    test_samples: Annotated[int, whole(0, 2**40)] = 20_000


@dataclass(frozen=True)
class ScriptConfig:
    """A trainer that is a user's script: its spares, and what it has declared of itself."""

    spares: Annotated[int, whole(0, MAX_PROCESSES)] = 1
    resume: Annotated[str, choice("off", "on")] = "off"
    parameters: Annotated[int | None, or_null(whole(0, 2**40))] = None
    ids: Annotated[int, whole(0, 2**40)] = 0


@dataclass(frozen=True)
class ClusterConfig:
    transport: Annotated[str, choice("ipc", "tcp")] = "ipc"
    host: Annotated[str, text("a host name or IP address", r"[A-Za-z0-9._:%-]+")] = "127.0.0.1"
    encryption: Annotated[str, choice("auto", "on", "off")] = "auto"
    domains: Annotated[tuple[str, ...] | None, or_null(several(LABEL, 1, MAX_PROCESSES))] = None
    require: Annotated[str, choice("server", "host")] = "server"
    early_answers: Annotated[str, choice("off", "on")] = "off"
    heartbeat_ms: Annotated[int, MILLISECONDS] = 200
    heartbeat_limit_ms: Annotated[int, MILLISECONDS] = 2000
    retry_ms: Annotated[int, MILLISECONDS] = 500
    deadline_s: Annotated[float, POSITIVE] = 30.0
    join_s: Annotated[float, POSITIVE] = 600.0
    hang_limit_s: Annotated[float, POSITIVE] = 30.0

    @property
    def encrypted(self) -> bool:
        """Whether connections are: `auto` leaves out only what cannot leave this machine."""
        return self.encryption == "on" or (self.encryption == "auto" and self.leaves_machine)

    @property
    def leaves_machine(self) -> bool:
        """Whether processes talk over something slower, and less private, than its memory."""
        return self.transport == "tcp" and not _is_loopback(self.host)


@dataclass(frozen=True)
class RebuildConfig:
    priority: Annotated[str, choice("training", "balanced", "redundancy")] = "balanced"
    chunk: Annotated[int, whole(1, 2**24)] = 16384
    jobs: Annotated[int, whole(1, 1024)] = 2
    bytes_per_s: Annotated[int, whole(0, 2**50)] = 0
    by: Annotated[str, choice("replacement", "survivors")] = "replacement"


@dataclass(frozen=True)
class HistoryConfig:
    steps: Annotated[int, whole(1, 1024)] = 2


@dataclass(frozen=True)
class TierConfig:
    """Records that have no room in a server's memory lie in a file."""

    ram: Annotated[int | None, or_null(size(1, 2**50))] = None
    path: Annotated[str | None, or_null(text("a folder of a local disk", r"[^\0]+"))] = None


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
class TrainerConfig:
    """device: of a script's collections, which name none themselves."""

    device: Annotated[str, text(DEVICES, r"(cpu|cuda|mps|xpu)(:[0-9]+)?")] = "cpu"
    elastic: Annotated[str, choice("off", "on")] = "off"


@dataclass(frozen=True)
class Config:
    """A job. Make one with `load` or `from_dict`: the constructor checks nothing."""

    strategy: Annotated[str, choice(*STRATEGIES)] = "erasure"
    servers: Annotated[int, whole(1, MAX_PROCESSES)] = 6
    parity: Annotated[int, whole(0, MAX_R)] = 1
    k: Annotated[int | None, or_null(whole(1, MAX_K))] = None
    scatter: Annotated[int | None, or_null(whole(1, MAX_PROCESSES))] = None
    spares: Annotated[int, whole(0, MAX_PROCESSES)] = 1
    trainers: Annotated[int, whole(1, MAX_PROCESSES)] = 2
    steps: Annotated[int, whole(1, MAX_STEPS)] = 400
    batch: Annotated[int, whole(1, MAX_BATCH)] = 256
    seed: Annotated[int, whole(0, 2**64 - 1)] = 0
    reproducible: Annotated[Reproducible, choice(*REPRODUCIBLE)] = "same"
    declared_tables: Annotated[tuple[Table, ...] | None, or_null(TABLES)] = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    script: ScriptConfig = field(default_factory=ScriptConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    rebuild: RebuildConfig = field(default_factory=RebuildConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    tier: TierConfig = field(default_factory=TierConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cpr: CprConfig = field(default_factory=CprConfig)
    failures: FailuresConfig = field(default_factory=FailuresConfig)

    @classmethod
    def load(
        cls,
        path: Path | Mapping[str, object] | None = None,
        overrides: Sequence[str] = (),
        base: Mapping[str, object] | None = None,
    ) -> Config:
        """The file at `path`, or what was in one, with `path=value` overrides; the last one of a
        key wins.

        base: what `to_dict` gave of the job whose values the others override. Whatever is wrong is
        said at once, one problem per line.
        """
        reading = Reading(_DOOR)
        reading.take_all(base)
        if isinstance(path, Path):
            try:
                reading.take_all(read_file(path))
            except ConfigError as error:  # it may have said anything about any key
                reading.refuse(error, KINDS)
        else:
            reading.take_all(path)
        for override in overrides:
            try:
                reading.take(*read_override(override))
            except ConfigError as error:
                reading.refuse(error, [override.partition("=")[0].strip()])
        config = _build(reading)
        reading.problems += _missing_data(config, reading.unsure)
        reading.check()
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Config:
        """What `to_dict` gave, or any part of it; the rest has its default."""
        reading = Reading(_DOOR)
        reading.take_all(values)
        config = _build(reading)
        reading.check()
        return config

    def to_dict(self) -> dict[str, Any]:
        """Every key, in sections, as JSON and YAML have them."""
        values = {KEYS.get(name, name): value for name, value in asdict(self).items()}
        as_json: dict[str, Any] = json.loads(json.dumps(values))
        return as_json

    def fingerprint(self) -> str:
        """SHA-256 of all values: equal for equal configurations, however they were written."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def is_built_in(self) -> bool:
        """Whether trainers run the loop that is made for one model, of Criteo's shape."""
        return self.model.name == "dlrm" and self.data.source in ("synthetic", "criteo")

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

    @cached_property
    def layout(self) -> Layout:
        scatter = self.scatter if self.r else None
        domains = self.cluster.domains if self.keeps_domains_apart else None
        if domains and len(set(domains)) == self.servers:
            domains = None  # nothing to keep apart
        return Layout.fresh(self.servers, self.r, self.k if self.r else 1, domains, scatter)

    @property
    def keeps_domains_apart(self) -> bool:
        """Whether no two members of a group share a fault domain: there are enough of them."""
        k = self.k or default_k(self.servers, self.r)
        return self.r > 0 and len(set(self.cluster.domains or ())) >= k + self.r

    @property
    def packs(self) -> bool:
        """Whether record numbers, and changes of records, are packed before they are sent."""
        chosen = self.wire.packing
        return chosen == "on" or (chosen == "auto" and self.cluster.leaves_machine)

    @property
    def is_elastic(self) -> bool:
        """Whether trainers may come and go."""
        return self.trainer.elastic == "on"

    @property
    def most_trainers(self) -> int:
        """So many there may be; each has a sample in every step."""
        return min(self.batch, ELASTIC_TIMES * self.trainers) if self.is_elastic else self.trainers

    @property
    def optimizer_rule(self) -> Optimizer:
        """Of the tables that have none of their own, and of the dense network."""
        return self.optimizer.rule

    @property
    def tables(self) -> list[Table]:
        """As declared, or else as `model` says."""
        if self.declared_tables is not None:
            return list(self.declared_tables)
        rows = enumerate(self.model.table_rows)
        return [Table(f"table{number}", count, self.model.dim) for number, count in rows]

    @cached_property
    def arenas(self) -> list[Arena]:
        return make_arenas(self.tables, self.optimizer_rule)

    def lrs(self, step: int) -> list[float]:
        """The learning rates of a step, one per arena: each optimizer's own on one schedule."""
        return [self.lr(step, arena.optimizer.lr) for arena in self.arenas]

    def lr(self, step: int, highest: float | None = None) -> float:
        """The learning rate of a step; steps count from 1. highest: instead of optimizer.lr.

        It rises for `warmup_steps` steps to optimizer.lr. Then `linear` falls to 0 at the last
        step, and `inverse_sqrt` with the square root of the step. Products, quotients and square
        roots of doubles: the same bits on every machine.
        """
        chosen, warmup = self.optimizer, self.optimizer.warmup_steps
        lr = chosen.lr if highest is None else highest
        if step < warmup:
            return lr * (step / warmup)
        if chosen.schedule == "linear":
            return lr * (max(self.steps - step, 0) / (self.steps - warmup))
        if chosen.schedule == "inverse_sqrt":
            return lr * math.sqrt(max(warmup, 1) / step)
        return lr


_DOOR = Door(Config, KEYS)
KINDS = _DOOR.kinds
"""What each key takes, by its path."""


def _build(reading: Reading) -> Config:
    """With defaults for what is wrong; the caller asks `reading` whether anything was."""
    values = reading.values()
    sections = {name: section(**values[name]) for name, section in _DOOR.sections.items()}
    own = {name: values[""].pop(key) for name, key in KEYS.items() if key in values[""]}
    config = Config(**values[""], **own, **sections)
    if config.declared_tables is not None:
        config = _with_fitting_model(config, reading)
    reading.problems += wrong_combinations(config, reading.unsure)
    return config


def _with_fitting_model(config: Config, reading: Reading) -> Config:
    """What `model` says of tables is what the declared ones are, so that nobody has to choose."""
    model, tables = config.model, config.tables
    said: dict[str, Any] = {"tables": len(tables), "rows": tuple(t.rows for t in tables)}
    if len({table.dim for table in tables}) == 1:
        said["dim"] = tables[0].dim
    given: dict[str, Any] = {"tables": model.tables, "rows": model.rows, "dim": model.dim}
    if isinstance(model.rows, int):
        given["rows"] = (model.rows,) * len(tables)
    for name, value in said.items():
        path, is_default = f"model.{name}", getattr(model, name) == getattr(ModelConfig(), name)
        if not is_default and given[name] != value and path not in reading.unsure:
            wanted, found = (list(v) if isinstance(v, tuple) else v for v in (value, given[name]))
            problem = f"{path}: expected {shown(wanted)}, as tables says, got {shown(found)}"
            reading.refuse(f"{problem}; leave it out", [path])
    return replace(config, model=replace(model, **said))


def _missing_data(config: Config, unsure: Collection[str]) -> list[str]:
    """Only where the job is started: a configuration travels to machines without the data."""
    source, path, schema = config.data.source, config.data.path, config.data.schema
    if source not in ("criteo", "files") or {"data.source", "data.path", "data.schema"} & set(
        unsure
    ):
        return []
    problems, here = [], f"here, in {Path.cwd()}"
    if source == "criteo" and path is not None and not Path(path).is_file():
        problems.append(f"data.path: expected a file, but {path!r} does not exist or is none")
    if source == "files" and path is not None and not (Path(path).exists() or glob(path)):
        problems.append(f"data.path: expected files, but there are no {path!r} {here}")
    if schema is not None and schema not in PRESETS and not Path(schema).is_file():
        problems.append(f"data.schema: expected a file, but there is no {schema!r} {here}")
    return problems


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; only this one is known not to leave the machine
        return host.lower() == "localhost"
