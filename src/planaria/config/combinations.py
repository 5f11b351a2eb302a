"""What single values cannot say: rules about keys that must fit together.

A rule names the keys that it looks at, so that it is left out where one of them is wrong itself:
every line of a refusal is true, whatever else is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from planaria.config.kinds import shown
from planaria.data.criteo import TABLES as CRITEO_TABLES
from planaria.data.presets import PRESETS
from planaria.layout import default_k, least_scatter

if TYPE_CHECKING:
    from planaria.config.job import Config

FROM_FILES = {
    "criteo": "the path of Criteo's file",
    "files": "the path of Parquet or CSV files: a file, a folder or a pattern",
}
Expected = Callable[["Config"], str | None]
"""What the first of a rule's keys ought to be, and why; None if it is."""


@dataclass(frozen=True)
class _Rule:
    keys: tuple[str, ...]  # that it looks at; the first is the one that it refuses
    where_unsure: str | None  # a key: only while nobody knows that one is the rule of use
    expected: Expected

    def applies(self, unsure: Collection[str]) -> bool:
        unknown = self.where_unsure
        return not any(key in unsure for key in self.keys) and (not unknown or unknown in unsure)

    def problem(self, config: Config) -> str | None:
        wanted = self.expected(config)
        if wanted is None:
            return None
        value: object = reduce(getattr, self.keys[0].split("."), config)
        found = shown(list(value) if isinstance(value, tuple) else value)
        return f"{self.keys[0]}: expected {wanted}, got {found}"


_RULES: list[_Rule] = []


def wrong_combinations(config: Config, unsure: Collection[str]) -> list[str]:
    """unsure: keys whose values are not the given ones."""
    judged = [rule for rule in _RULES if rule.applies(unsure)]
    return [problem for rule in judged if (problem := rule.problem(config))]


def _rule(*keys: str, where_unsure: str | None = None) -> Callable[[Expected], Expected]:
    def add(expected: Expected) -> Expected:
        _RULES.append(_Rule(keys, where_unsure, expected))
        return expected

    return add


@_rule("servers", "strategy", "parity")
def _parity_is_on_other_servers(config: Config) -> str | None:
    # With a k that was given, the next rule says it; one that is wrong itself is null here.
    if config.servers > config.r or config.k is not None:
        return None
    return f"{config.r + 1} or more, because parity is {config.r}"


@_rule("servers", "strategy", "parity", "k")
def _groups_fit(config: Config) -> str | None:
    if not config.r or config.k is None or config.servers >= config.k + config.r:
        return None
    return f"{config.k + config.r} or more, because k is {config.k} and parity is {config.r}"


@_rule("k", "strategy", "servers", where_unsure="parity")
def _groups_fit_with_the_least_parity(config: Config) -> str | None:
    if not config.survival.keeps_parity or config.k is None or config.k < config.servers:
        return None
    return f"less than servers, {config.servers}, unless parity is 0"


@_rule("scatter", "servers", "strategy", "parity", "k")
def _groups_fit_into_the_scatter_width(config: Config) -> str | None:
    if not config.r or config.scatter is None or config.servers <= config.r:
        return None
    k = config.k or default_k(config.servers, config.r)
    least = min(least_scatter(k, config.r), config.servers - 1)
    if config.scatter >= least:
        return None
    return f"{least} or more, because k is {k} and parity is {config.r}"


@_rule("rebuild.by", "servers", "strategy", "parity", "k")
def _survivors_are_enough(config: Config) -> str | None:
    if config.rebuild.by == "replacement" or config.servers <= config.r:
        return None
    least = (config.k or default_k(config.servers, config.r)) + config.r + 1
    if config.r and config.servers >= least:
        return None
    return f"replacement, unless there is parity and {least} servers or more, k + parity + 1"


@_rule("cluster.domains", "servers")
def _every_server_has_a_domain(config: Config) -> str | None:
    domains = config.cluster.domains
    if domains is None or len(domains) == config.servers:
        return None
    return f"{config.servers} labels, one for each of the servers"


@_rule("batch", "trainers")
def _every_trainer_has_samples(config: Config) -> str | None:
    if config.batch >= config.trainers:
        return None
    return f"a sample for each trainer, {config.trainers} or more"


@_rule("trainer.elastic", "strategy")
def _elastic_jobs_do_not_go_back(config: Config) -> str | None:
    if config.trainer.elastic == "off" or not config.survival.needs_saves:
        return None
    return f"off, because strategy is {config.strategy}, which may repeat steps with fewer trainers"


@_rule("model.rows", "model.tables", "tables")
def _every_table_has_rows(config: Config) -> str | None:
    model = config.model
    if config.declared_tables is not None or len(model.table_rows) == model.tables:
        return None
    return f"one number, or {model.tables}, as many as model.tables says"


@_rule("data.source", "data.path")
def _a_path_is_of_data(config: Config) -> str | None:
    if config.data.source in FROM_FILES or config.data.path is None:
        return None
    return f"criteo or files, because data.path is {config.data.path}"


@_rule("data.path", "data.source")
def _files_have_a_path(config: Config) -> str | None:
    if config.data.source not in FROM_FILES or config.data.path is not None:
        return None
    return FROM_FILES[config.data.source]


@_rule("data.schema", "data.source")
def _files_have_a_schema(config: Config) -> str | None:
    if config.data.source != "files" or config.data.schema is not None:
        return None
    return f"a schema's file, which planaria data inspect writes, or {', '.join(PRESETS)}"


@_rule("data.schema", "data.source")
def _a_schema_is_of_files(config: Config) -> str | None:
    if config.data.source in ("files", "script") or config.data.schema is None:
        return None
    return "null, unless data.source is files"


@_rule("data.epochs", "data.source")
def _epochs_are_of_files(config: Config) -> str | None:
    if config.data.source in ("files", "script") or config.data.epochs is None:
        return None
    return "null, unless data.source is files"


@_rule("batch", "trainers", "model.name", "data.source")
def _batches_are_alike(config: Config) -> str | None:
    if config.is_built_in or config.data.source == "script" or not config.batch % config.trainers:
        return None
    return (
        f"a multiple of trainers, {config.trainers}, for data.source {config.data.source} and "
        f"model.name {config.model.name}"
    )


@_rule("model.tables", "data.source", "tables")
def _criteo_has_its_tables(config: Config) -> str | None:
    if config.data.source != "criteo" or config.model.tables == CRITEO_TABLES:
        return None
    return f"{CRITEO_TABLES}, as Criteo's data has"


@_rule("optimizer.warmup_steps", "optimizer.schedule", "steps")
def _a_linear_schedule_comes_down(config: Config) -> str | None:
    if config.optimizer.schedule != "linear" or config.optimizer.warmup_steps < config.steps:
        return None
    return f"fewer than steps, {config.steps}, because a linear schedule has to come down again"


@_rule("checkpoint.every_steps", "strategy", "checkpoint.every_s")
def _checkpoints_are_taken(config: Config) -> str | None:
    survival = config.survival
    if not survival.needs_saves or survival.partial or config.checkpoint.saves:
        return None
    return "1 or more, because strategy is checkpoint and checkpoint.every_s is null"


@_rule("failures.mtbf_s", "strategy", "checkpoint.every_steps", "checkpoint.every_s")
def _cpr_knows_how_often(config: Config) -> str | None:
    known = config.checkpoint.saves or config.failures.mtbf_s is not None
    if not config.survival.partial or known:
        return None
    return (
        "a number, because strategy is cpr and neither checkpoint.every_steps nor "
        "checkpoint.every_s says how often to save"
    )


@_rule("checkpoint.every_s", "strategy")
def _cpr_has_its_own_auto(config: Config) -> str | None:
    if not config.survival.partial or config.checkpoint.every_s != "auto":
        return None
    return (
        "a number above 0 or null, because strategy cpr follows from cpr.target_pls and "
        "failures.mtbf_s"
    )


@_rule("checkpoint.policy", "strategy", "cpr.variant")
def _priorities_choose_the_rows(config: Config) -> str | None:
    if not config.saves_priorities or config.checkpoint.policy == "full":
        return None
    return f"full, because cpr.variant is {config.cpr.variant}, which chooses the rows itself"


@_rule("checkpoint.every_s", "checkpoint.every_steps")
def _steps_or_seconds(config: Config) -> str | None:
    chosen = config.checkpoint
    if chosen.every_s is None or not chosen.every_steps:
        return None
    return f"null, because checkpoint.every_steps is {chosen.every_steps}"


@_rule("checkpoint.path", "strategy", "checkpoint.every_steps", "checkpoint.every_s")
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
    return f"a folder or a URL, because {why}"


@_rule("tier.path", "tier.ram")
def _cold_records_have_a_folder(config: Config) -> str | None:
    if (config.tier.ram is None) == (config.tier.path is None):
        return None
    if config.tier.ram is None:
        return "null, unless tier.ram limits what is in memory"
    return f"a folder of a local disk, because tier.ram is {config.tier.ram}"


@_rule("rebuild.by", "tier.ram")
def _files_of_survivors_do_not_grow(config: Config) -> str | None:
    if config.tier.ram is None or config.rebuild.by == "replacement":
        return None
    return "replacement, because tier.ram is set, and survivors' disks may have no room for more"


@_rule("cpr.variant", "strategy", "tier.ram")
def _scar_keeps_all_weights_in_memory(config: Config) -> str | None:
    if config.tier.ram is None or not config.survival.partial or config.cpr.variant != "scar":
        return None
    return "vanilla, mfu or ssu, because tier.ram has no room for a copy of all weights"


@_rule("cluster.heartbeat_limit_ms", "cluster.heartbeat_ms")
def _silence_is_longer_than_a_beat(config: Config) -> str | None:
    if config.cluster.heartbeat_limit_ms > config.cluster.heartbeat_ms:
        return None
    return f"more than cluster.heartbeat_ms, {config.cluster.heartbeat_ms}"


@_rule("cluster.deadline_s", "cluster.retry_ms")
def _there_is_time_for_a_retry(config: Config) -> str | None:
    if config.cluster.deadline_s * 1000 > config.cluster.retry_ms:
        return None
    return f"more than cluster.retry_ms, {config.cluster.retry_ms} ms"
