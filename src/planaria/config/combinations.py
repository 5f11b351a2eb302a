"""What single values cannot say: rules about keys that must fit together.

A rule names the keys that it looks at, so that it is left out where one of them is wrong itself:
every line of a refusal is true, whatever else is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from planaria.data.criteo import TABLES as CRITEO_TABLES
from planaria.errors import LayoutError
from planaria.layout import default_k
from planaria.layout.groups import check_sizes

if TYPE_CHECKING:
    from planaria.config.job import Config

Rule = Callable[["Config"], str | None]
"""What is wrong, if anything."""

_RULES: list[tuple[frozenset[str], Rule]] = []


def wrong_combinations(config: Config, unsure: Collection[str]) -> list[str]:
    """unsure: keys whose values are not the given ones."""
    judged = [rule for keys, rule in _RULES if keys.isdisjoint(unsure)]
    return [problem for rule in judged if (problem := rule(config))]


def _looks_at(*keys: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.append((frozenset(keys), rule))
        return rule

    return add


@_looks_at("strategy", "servers", "parity", "k")
def _groups_fit(config: Config) -> str | None:
    if config.r:
        try:
            k = default_k(config.servers, config.r) if config.k is None else config.k
            check_sizes(config.servers, k, config.r)
        except LayoutError as error:
            return f"servers: {error}"
    return None


@_looks_at("batch", "trainers")
def _every_trainer_has_samples(config: Config) -> str | None:
    if config.batch >= config.trainers:
        return None
    return (
        f"batch: expected a sample for each trainer, {config.trainers} or more, got {config.batch}"
    )


@_looks_at("model.rows", "model.tables")
def _every_table_has_rows(config: Config) -> str | None:
    model = config.model
    if len(model.table_rows) == model.tables:
        return None
    return (
        f"model.rows: expected one number, or {model.tables}, as many as model.tables says, "
        f"got {len(model.table_rows)}"
    )


@_looks_at("data.source", "data.path")
def _a_path_is_of_criteo(config: Config) -> str | None:
    data = config.data
    if data.source == "criteo" or data.path is None:
        return None
    return f"data.source: expected criteo, because data.path is {data.path}, got {data.source}"


@_looks_at("data.source", "data.path")
def _criteo_has_a_path(config: Config) -> str | None:
    if config.data.source != "criteo" or config.data.path is not None:
        return None
    return "data.path: expected the path of Criteo's file, got null"


@_looks_at("data.source", "model.tables")
def _criteo_has_its_tables(config: Config) -> str | None:
    tables = config.model.tables
    if config.data.source != "criteo" or tables == CRITEO_TABLES:
        return None
    return f"model.tables: expected {CRITEO_TABLES}, as Criteo's data has, got {tables}"


@_looks_at("optimizer.schedule", "optimizer.warmup_steps", "steps")
def _a_linear_schedule_comes_down(config: Config) -> str | None:
    optimizer = config.optimizer
    if optimizer.schedule != "linear" or optimizer.warmup_steps < config.steps:
        return None
    return (
        f"optimizer.warmup_steps: expected fewer than steps, {config.steps}, because a linear "
        f"schedule has to come down again, got {optimizer.warmup_steps}"
    )


@_looks_at("strategy", "checkpoint.every_steps", "checkpoint.every_s")
def _checkpoints_are_taken(config: Config) -> str | None:
    survival = config.survival
    if not survival.needs_saves or survival.partial or config.checkpoint.saves:
        return None
    return (
        "checkpoint.every_steps: expected 1 or more, because strategy is checkpoint and "
        "checkpoint.every_s is null, got 0"
    )


@_looks_at("strategy", "checkpoint.every_steps", "checkpoint.every_s", "failures.mtbf_s")
def _cpr_knows_how_often(config: Config) -> str | None:
    known = config.checkpoint.saves or config.failures.mtbf_s is not None
    if not config.survival.partial or known:
        return None
    return (
        "failures.mtbf_s: expected a number, because strategy is cpr and neither "
        "checkpoint.every_steps nor checkpoint.every_s says how often to save, got null"
    )


@_looks_at("strategy", "checkpoint.every_s")
def _cpr_has_its_own_auto(config: Config) -> str | None:
    if not config.survival.partial or config.checkpoint.every_s != "auto":
        return None
    return (
        "checkpoint.every_s: expected a number above 0 or null, because strategy cpr follows from "
        "cpr.target_pls and failures.mtbf_s, got 'auto'"
    )


@_looks_at("strategy", "cpr.variant", "checkpoint.policy")
def _priorities_choose_the_rows(config: Config) -> str | None:
    policy = config.checkpoint.policy
    if not config.saves_priorities or policy == "full":
        return None
    return (
        f"checkpoint.policy: expected full, because cpr.variant is {config.cpr.variant}, which "
        f"chooses the rows itself, got {policy}"
    )


@_looks_at("checkpoint.every_steps", "checkpoint.every_s")
def _steps_or_seconds(config: Config) -> str | None:
    chosen = config.checkpoint
    if chosen.every_s is None or not chosen.every_steps:
        return None
    return (
        f"checkpoint.every_s: expected null, because checkpoint.every_steps is "
        f"{chosen.every_steps}, got {chosen.every_s}"
    )


@_looks_at("strategy", "checkpoint.path", "checkpoint.every_steps", "checkpoint.every_s")
def _saves_have_a_folder(config: Config) -> str | None:
    chosen = config.checkpoint
    if chosen.path is not None or not (chosen.saves or config.survival.partial):
        return None
    if config.survival.partial:
        why = "strategy is cpr"
    elif chosen.every_steps:
        why = f"checkpoint.every_steps is {chosen.every_steps}"
    else:
        why = f"checkpoint.every_s is {chosen.every_s}"
    return f"checkpoint.path: expected a folder or a URL, because {why}, got null"


@_looks_at("cluster.heartbeat_ms", "cluster.heartbeat_limit_ms")
def _silence_is_longer_than_a_beat(config: Config) -> str | None:
    cluster = config.cluster
    if cluster.heartbeat_limit_ms > cluster.heartbeat_ms:
        return None
    return (
        f"cluster.heartbeat_limit_ms: expected more than cluster.heartbeat_ms, "
        f"{cluster.heartbeat_ms}, got {cluster.heartbeat_limit_ms}"
    )


@_looks_at("cluster.deadline_s", "cluster.retry_ms")
def _there_is_time_for_a_retry(config: Config) -> str | None:
    cluster = config.cluster
    if cluster.deadline_s * 1000 > cluster.retry_ms:
        return None
    return (
        f"cluster.deadline_s: expected more than cluster.retry_ms, {cluster.retry_ms} ms, "
        f"got {cluster.deadline_s}"
    )
