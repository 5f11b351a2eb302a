"""Where a job starts: at the beginning, or at the newest whole checkpoint that fits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from planaria.checkpoints import RAW_BITS, Checkpoint, Found, Manifest, latest
from planaria.cluster.archive import is_mixed
from planaria.config import Config
from planaria.config.text import read_override
from planaria.errors import CheckpointError, ConfigError
from planaria.exactness import Fingerprint
from planaria.tables import Table

# What decides the bits of a step beside tables and optimizer; servers, parity and k do not.
MUST_STAY = (
    *("seed", "batch", "trainers", "model.name", "model.bottom", "model.top"),
    *("data.source", "data.schema", "data.shuffle", "data.validation", "data.zipf"),
)
# What may change, and makes another model than an uninterrupted run gives.
MAY_CHANGE = (
    *("optimizer.lr", "optimizer.schedule", "optimizer.warmup_steps", "data.path"),
    *("wire.lookups", "wire.tables", "wire.bounds", "wire.decay_steps", "wire.sample_steps"),
)
AS_BEFORE = "give the same job file and --set as before, or none"


@dataclass(frozen=True)
class Resumption:
    """The step that a job goes on from, and what it was until then."""

    step: int
    bytes: int = 0  # of the checkpoint
    notes: tuple[str, ...] = ()  # what the user should know
    pls: float = 0.0  # what partial recovery had lost by then; see control.losses
    pls_updates: float = 0.0
    job: str = ""  # its identity
    imported: bool = False  # a model that was imported: a checkpoint of step 0
    fingerprint: Fingerprint | None = None  # what the bits of its steps depend on
    wire: Mapping[str, Any] | None = None  # how its rows travelled

    @property
    def restores(self) -> bool:
        """Whether there is a checkpoint to start from."""
        return self.step > 0 or self.imported


FROM_THE_BEGINNING = Resumption(0)


def find_start(config: Config, *, resume: bool) -> Resumption:
    """Raises ConfigError if there is nothing to resume from, or something that is in the way."""
    folder = config.checkpoint.path
    if folder is None:
        if resume:
            raise ConfigError("checkpoint.path: expected a folder or a URL for --resume, got null")
        return FROM_THE_BEGINNING
    try:
        if not resume and not config.saves:
            return FROM_THE_BEGINNING
        # Every byte is read before anything is started: servers read it again, in memory mostly.
        found = latest(folder, verify=resume)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.path: {error}") from None
    if resume:
        return _resume(config, folder, found)
    if found.checkpoint:
        raise ConfigError(
            f"checkpoint.path: expected a folder without checkpoints, got {folder}, which has one "
            f"of step {found.checkpoint.step}; go on from it with --resume, or choose another"
        )
    return FROM_THE_BEGINNING


def load_saved(overrides: Sequence[str]) -> tuple[Config, Sequence[str]]:
    """A job that is resumed without its file: as it was saved, with overrides on top; and what the
    user should know of that. Where nothing was saved, as if it were not resumed.
    """
    given = [text for text in overrides if text.partition("=")[0].strip() == "checkpoint.path"]
    folder = read_override(given[-1])[1] if given else None
    if not isinstance(folder, str):
        return Config.load(None, overrides), ()
    try:
        found = latest(folder).checkpoint
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.path: {error}") from None
    if found is None or not found.manifest.config:
        return Config.load(None, overrides), ()
    saved = found.manifest.config
    try:
        Config.from_dict(saved)
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint.path: the settings that step {found.step} in {folder} was saved with are "
            f"not known here; give the job file\n{error}"
        ) from None
    note = (
        f"no job file was given: the settings are those that step {found.step} in {folder} was "
        "saved with, and --set on top"
    )
    return Config.load(None, overrides, saved), [note]


def _resume(config: Config, folder: str, found: Found) -> Resumption:
    notes = [f"passed over step {step}: {why}" for step, _, why in found.passed_over]
    checkpoint = found.checkpoint
    if checkpoint is None:
        raise ConfigError(
            ". ".join([f"checkpoint.path: there is nothing to resume from in {folder}", *notes])
        )
    _require_fit(config, checkpoint)
    imported = checkpoint.step == 0
    notes.append(
        f"starting with the model that was imported into {folder}"
        if imported
        else f"resuming from step {checkpoint.step} in {folder}"
    )
    if checkpoint.step == config.steps:
        left = "but to judge the model" if config.is_built_in else "to train"
        notes.append(f"all steps are done: nothing is left {left}; raise steps, or epochs")
    if checkpoint.manifest.bits < RAW_BITS:
        notes.append(
            f"its weights have {checkpoint.manifest.bits} bits: the digest will be another than "
            "that of an uninterrupted run"
        )
    if is_mixed(checkpoint.manifest.extra):
        notes.append(
            "priority saves made it, and its rows are of different steps: the digest will be "
            "another than that of an uninterrupted run"
        )
    notes += _changes(config, checkpoint.manifest)
    manifest, extra = checkpoint.manifest, checkpoint.manifest.extra
    return Resumption(
        checkpoint.step,
        manifest.bytes,
        tuple(notes),
        float(extra.get("pls", 0)),
        float(extra.get("pls_updates", 0)),
        manifest.job,
        imported,
        msgspec.convert(extra["fingerprint"], Fingerprint) if "fingerprint" in extra else None,
        manifest.config.get("wire"),
    )


def _require_fit(config: Config, checkpoint: Checkpoint) -> None:
    saved, step = checkpoint.manifest, checkpoint.step
    before, after = _shapes(saved.tables), _shapes(config.tables)
    if before != after or not _same_arenas(config, saved):
        key = "model" if config.declared_tables is None else "tables"
        raise ConfigError(
            f"{key}: expected the tables of the checkpoint of step {step}, {_said(saved.tables)}, "
            f"got {_said(config.tables)}; {AS_BEFORE}"
        )
    was, now = asdict(saved.optimizer), asdict(config.optimizer_rule)
    pairs = [(f"optimizer.{name}", was[name], now[name]) for name in was if name != "lr"]
    pairs += [(path, *_both(config, saved, path)) for path in MUST_STAY]
    for path, before, after in pairs:
        if before != after:
            raise ConfigError(
                f"{path}: expected {before}, as in the checkpoint of step {step}, got {after}; "
                f"{AS_BEFORE}"
            )
    if config.steps < step:
        raise ConfigError(
            f"steps: expected {step} or more, because the checkpoint is of that step, got "
            f"{config.steps}"
        )
    if step and not saved.dense_parts:
        raise ConfigError(f"checkpoint.path: step {step} has no dense network; choose another")


def _changes(config: Config, saved: Manifest) -> list[str]:
    paths = [*MAY_CHANGE, *(["steps"] if config.optimizer.schedule == "linear" else [])]
    found = [(path, *_both(config, saved, path)) for path in paths]
    for number, (old, new) in enumerate(zip(saved.tables, config.tables, strict=True)):
        if old.optimizer and new.optimizer:
            found.append((f"tables.{number}.optimizer.lr", old.optimizer.lr, new.optimizer.lr))
    return [
        f"{path} was {before} and is {after} from here on: the digest will be another"
        for path, before, after in found
        if before != after
    ]


def _both(config: Config, saved: Manifest, path: str) -> tuple[Any, Any]:
    """The value of a key in the checkpoint's configuration, and in this one."""
    section, dot, name = path.partition(".")
    now, then = config.to_dict()[section], saved.config.get(section)
    if not dot:
        return then, now
    # A key that did not exist when it was saved had its default.
    return (then or {}).get(name, Config().to_dict()[section][name]), now[name]


def _shapes(tables: Sequence[Table]) -> list[Table]:
    """Without learning rates, which may change."""
    return [
        table
        if table.optimizer is None
        else replace(table, optimizer=replace(table.optimizer, lr=0))
        for table in tables
    ]


def _same_arenas(config: Config, saved: Manifest) -> bool:
    """Learning rates that have become equal, or different, put tables together otherwise."""
    old, new = ([a.table_ids.tolist() for a in some] for some in (saved.arenas(), config.arenas))
    return old == new


def _said(tables: Sequence[Table]) -> str:
    sizes = ", ".join(
        f"{t.rows} x {t.dim}" + (f" ({t.optimizer.name})" if t.optimizer else "")
        for t in tables[:4]
    )
    return f"{len(tables)} ({sizes}{', ...' if len(tables) > 4 else ''})"
