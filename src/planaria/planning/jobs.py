"""From a job's configuration to a plan, and from a plan back to a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from planaria.cluster.preflight import dense_bytes
from planaria.config import Config, HistoryConfig
from planaria.planning.inputs import LEAST_HOURS, PlanInputs
from planaria.planning.memory import WORD, Memory, memory_of, priority_bytes
from planaria.planning.plan import Recommendation

SAVED_IN = "checkpoints"  # where a job that names no folder saves


def inputs_of(job: Config, step_seconds: float) -> dict[str, Any]:
    """What a job says of a plan's inputs. Its length is that of its steps."""
    sizes = _sizes(job)
    found: dict[str, Any] = {
        "servers": job.servers,
        "trainers": job.trainers,
        "hours": max(job.steps * step_seconds / 3600, LEAST_HOURS),
        "model_gb": sizes.model / 1e9,
        "dim": _mean_dim(job),
        "optimizer": max(job.arenas, key=lambda arena: arena.rows * arena.words).optimizer.name,
        "touched_mb": sizes.touched / 1e6,
        "dense_mb": dense_bytes(job)[1] / 1e6,
        "k": job.k,
        "scatter": job.scatter,
        "rebuild_by": job.rebuild.by,
        "history_steps": job.history.steps,
        "cpr_variant": job.cpr.variant,
        "rho": job.cpr.rho,
        "save_seconds": job.failures.save_s,
        "load_seconds": job.failures.load_s,
        "restart_seconds": job.failures.reschedule_s,
        "mtbf_hours": job.failures.mtbf_s and job.failures.mtbf_s / 3600,
        # Who has chosen partial recovery has said how much may be lost.
        "lost_samples_percent": 100 * job.cpr.target_pls if job.survival.partial else None,
        "backup_hours": _backup_hours(job, step_seconds),
    }
    return {name: value for name, value in found.items() if value is not None}


def memory_of_job(job: Config) -> Memory:
    """Of one of its servers, by the same reckoning as a plan's."""
    sizes, servers = _sizes(job), job.servers
    variant = job.cpr.variant if job.survival.partial else "vanilla"
    rows = sum(arena.rows for arena in job.arenas) / servers
    return memory_of(
        records=sizes.model / servers,
        touched=sizes.touched / servers,
        history_steps=job.history.steps,
        k=job.layout.k,
        r=job.r,
        in_background=job.checkpoint.saves and job.checkpoint.mode == "async",
        priorities=priority_bytes(variant, rows, _mean_dim(job), job.cpr.rho),
    )


class _Sizes(NamedTuple):
    """Bytes of all servers: all records, and those that one step changes."""

    model: int
    touched: int


def _sizes(job: Config) -> _Sizes:
    model = touched = 0
    tables = job.tables
    for arena in job.arenas:
        model += arena.rows * WORD * arena.words
        # At most: every sample has another row of every table.
        rows = sum(min(job.batch, tables[number].rows) for number in arena.table_ids)
        touched += rows * WORD * arena.words
    return _Sizes(model, touched)


def _mean_dim(job: Config) -> int:
    """Of a row: a plan knows one dim."""
    weights = sum(arena.rows * arena.dim for arena in job.arenas)
    return max(1, round(weights / sum(arena.rows for arena in job.arenas)))


def _backup_hours(job: Config, step_seconds: float) -> float | None:
    """How far apart the checkpoints beneath erasure are, if the job says so."""
    chosen = job.checkpoint
    if not job.survival.keeps_parity or not chosen.saves or chosen.every_s == "auto":
        return None
    every_s = chosen.every_s if isinstance(chosen.every_s, float) else None
    return (every_s or chosen.every_steps * step_seconds) / 3600


def base_job(inputs: PlanInputs, job: Config | None) -> Config:
    """The job of a plan, whatever its strategy; checked, because options may not fit it."""
    made = replace(
        Config() if job is None else job,
        servers=inputs.servers,
        trainers=inputs.trainers,
        batch=max(Config().batch, inputs.trainers) if job is None else job.batch,
        strategy="none",
        parity=0,
        k=inputs.k,
        scatter=None,  # which means nothing without parity
        history=HistoryConfig(inputs.history_steps),
    )
    return Config.from_dict(made.to_dict())


def job_of(made: Recommendation, base: Config) -> Config:
    """The recommended strategy as a job that `planaria train` takes."""
    best = made.best
    assert best is not None
    what, inputs = best.behaviour, made.inputs
    saves = replace(
        base.checkpoint,
        path=base.checkpoint.path or SAVED_IN,
        every_steps=0,
        every_s=round(what.interval * 3600, 3) if what.strategy.rolls_back else None,
        mode="async" if what.lag else "sync",
    )
    chosen = replace(
        base,
        strategy=what.kind,
        parity=what.r,
        scatter=what.scatter,
        checkpoint=saves if what.strategy.rolls_back else base.checkpoint,
        failures=replace(base.failures, mtbf_s=made.mtbf_hours * 3600),
    )
    if what.strategy.partial:
        target = inputs.lost_samples_percent / 100
        cpr = replace(base.cpr, variant=inputs.cpr_variant, rho=inputs.rho, target_pls=target)
        policy = base.checkpoint.policy if inputs.cpr_variant == "vanilla" else "full"
        chosen = replace(chosen, cpr=cpr, checkpoint=replace(saves, policy=policy))
    return Config.from_dict(chosen.to_dict())


def as_yaml(job: Config, title: str) -> str:
    """The keys that differ from their defaults, and the strategy's own; title: what to say first.

    What a reader sees is what was decided, not a hundred keys.
    """
    defaults, values = Config().to_dict(), job.to_dict()
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            own = {key: inner for key, inner in value.items() if inner != defaults[name][key]}
            if own:
                kept[name] = own
        elif value != defaults[name] or name in ("strategy", "servers", "parity", "trainers"):
            kept[name] = value
    text: str = yaml.safe_dump(kept, sort_keys=False)
    return "".join(f"# {line}\n" for line in title.splitlines()) + text
