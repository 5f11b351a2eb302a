"""Partial recovery, as a job's supervisor sees it: whether to use it, what each failure cost, and
when it is too much.

PLS, the portion of lost samples, is CPR's measure: a server that goes back to a save of S steps ago
has lost S of the job's steps, for one server's share of the model. `pls_updates` weighs the same
loss by what was really lost: the share of the job's row updates that the server had made since.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from planaria.checkpoints.folders import open_folder
from planaria.config import Config
from planaria.errors import CheckpointError
from planaria.formulas import (
    full_recovery_overhead,
    partial_interval,
    partial_recovery_overhead,
    young_interval,
)
from planaria.tables import make_arenas

PROBE_BYTES = 32_000_000


@dataclass(frozen=True)
class Costs:
    """Seconds that a save, and the repair after a failure, take away from training."""

    save: float
    repair: float


@dataclass(frozen=True)
class Decision:
    partial: bool
    interval_s: float
    why: str


def decide(config: Config, costs: Costs) -> Decision:
    """Partial recovery where CPR's model of the overhead says that it wins, else full recovery.

    Both are charged as if training stopped for a save; partial recovery saves as often as its
    budget of lost samples demands, full recovery at Young's interval.
    """
    mtbf, budget = config.failures.mtbf_s, config.cpr.target_pls
    assert mtbf is not None
    intervals = {
        "partial": partial_interval(budget, mtbf, config.servers),
        "full": young_interval(costs.save, mtbf),
    }
    overheads = {
        name: overhead(save=costs.save, interval=intervals[name], repair=costs.repair, mtbf=mtbf)
        for name, overhead in (
            ("partial", partial_recovery_overhead),
            ("full", full_recovery_overhead),
        )
    }
    chosen = "partial" if overheads["partial"] < overheads["full"] else "full"
    told = [
        f"{name} recovery would cost {overheads[name]:.2%}, saving every {intervals[name]:,.1f} s"
        for name in ("partial", "full")
    ]
    why = f"{'; '.join(told)}: {chosen} recovery it is (PLS up to {budget:g}, MTBF {mtbf:,.0f} s)"
    return Decision(chosen == "partial", intervals[chosen], why)


def settle(config: Config) -> tuple[Config, str]:
    """The job that is run, and why: with partial or full recovery, and how often it saves.

    Who says how often to save gets partial recovery without a question.
    """
    if config.strategy != "cpr" or config.checkpoint.saves:
        return config, ""
    decision = decide(config, expected_costs(config))
    saves = replace(config.checkpoint, every_s=decision.interval_s)
    strategy = "cpr" if decision.partial else "checkpoint"
    return replace(config, strategy=strategy, checkpoint=saves), decision.why


def expected_costs(config: Config) -> Costs:
    """As configured, or else from the size of the job and the measured speed of its folder."""
    failures = config.failures
    if failures.save_s is not None and failures.load_s is not None:
        return Costs(failures.save_s, failures.load_s + failures.reschedule_s)
    arenas = make_arenas(config.tables, config.optimizer_rule)
    size = sum(arena.rows * arena.words * 4 for arena in arenas)
    seconds = size / _bytes_per_s(config, min(size, PROBE_BYTES))
    save = seconds if failures.save_s is None else failures.save_s
    # A lost server loads its own share alone.
    load = seconds / config.servers if failures.load_s is None else failures.load_s
    return Costs(save, load + failures.reschedule_s)


def _bytes_per_s(config: Config, size: int) -> float:
    """How fast the checkpoints' folder takes in bytes that must last."""
    assert config.checkpoint.path is not None
    folder, name = open_folder(config.checkpoint.path), f"speed-{secrets.token_hex(4)}.probe"
    content = secrets.token_bytes(size)  # nothing that storage could make smaller
    began = time.monotonic()
    try:
        folder.write(name, content)
        seconds = time.monotonic() - began
        folder.remove(name)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.path: nothing can be saved in {folder}: {error}; make room or choose "
            "another"
        ) from error
    return size / seconds


@dataclass(frozen=True)
class Updates:
    """What a server has said of its work: row updates in so many steps; and by step of a save, how
    many there were then, and how many of those it lacks.
    """

    steps: int
    total: int
    saves: dict[int, tuple[int, int]]

    def lost(self, saved: int) -> int:
        """Those that are gone if it goes back to a save."""
        total, unsaved = self.saves.get(saved, (0, 0))
        return unsaved + self.total - total


@dataclass
class Losses:
    """The losses of one job so far."""

    config: Config
    pls: float = 0.0
    pls_updates: float = 0.0
    over_budget: bool = False
    reloads: list[dict[str, Any]] = field(default_factory=list)
    _said: dict[int, Updates] = field(default_factory=dict)  # by place, the latest

    def on_updates(self, facts: dict[str, Any]) -> None:
        saves = {int(step): (total, lacks) for step, (total, lacks) in facts["saves"].items()}
        self._said[facts["place"]] = Updates(facts["steps"], facts["total"], saves)

    def on_reloaded(self, facts: dict[str, Any], since: int) -> str:
        """A place went back to a save; returns what to tell.

        since: the last step by which every row had its turn to be saved. What priority saves have
        saved after it is not counted as saved, as CPR does not count it.
        """
        config, place = self.config, facts["place"]
        lost_steps = facts["step"] - since
        pls = lost_steps / (config.steps * config.servers)
        updates = self._lost_updates(place, facts["saved"])
        self.pls += pls
        self.pls_updates += updates
        self.reloads.append(
            {
                "place": place,
                "step": facts["step"],
                "saved_step": facts["saved"],
                "since_step": since,
                "pls": pls,
                "pls_updates": updates,
                "seconds": facts["seconds"],
            }
        )
        source = f"its save of step {facts['saved']}" if facts["saved"] else "its initial values"
        ago = f"{facts['step'] - facts['saved']} steps ago"
        if since < facts["saved"]:
            ago += f" (all rows had their turn by step {since})"
        return (
            f"server:{place} goes on from {source}, {ago}; PLS is {self.pls:.4f} of "
            f"{config.cpr.target_pls:g}, by updates {self.pls_updates:.4f}"
        )

    def to_save(self) -> dict[str, float]:
        """What a checkpoint remembers, for a job that is resumed."""
        return {"pls": self.pls, "pls_updates": self.pls_updates} if self.pls else {}

    def passes_budget(self) -> bool:
        """Whether the budget was passed just now."""
        passed = not self.over_budget and self.pls > self.config.cpr.target_pls
        self.over_budget |= passed
        return passed

    def _lost_updates(self, place: int, saved: int) -> float:
        """As a share of all row updates that the job will make, at the rate of those so far."""
        said = self._said.pop(place, None)
        steps = sum(other.steps for other in self._said.values())
        updates = sum(other.total for other in self._said.values())
        if said is None or not steps or not updates:
            return 0.0
        per_server_step = updates / steps
        return said.lost(saved) / (per_server_step * self.config.servers * self.config.steps)
