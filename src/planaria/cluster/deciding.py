"""Partial or full recovery: the decision before a job, by what saves and failures will cost."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from planaria.checkpoints.folders import open_folder
from planaria.config import Config
from planaria.errors import CheckpointError
from planaria.formulas import partial_interval, young_interval
from planaria.strategies import CHECKPOINT, CPR

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
        for name, overhead in (("partial", CPR.overhead), ("full", CHECKPOINT.overhead))
        if overhead is not None
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
    if not config.survival.partial or config.checkpoint.saves:
        return config, ""
    decision = decide(config, expected_costs(config))
    saves = replace(config.checkpoint, every_s=decision.interval_s)
    strategy = CPR if decision.partial else CHECKPOINT
    return replace(config, strategy=strategy.name, checkpoint=saves), decision.why


def expected_costs(config: Config) -> Costs:
    """As configured, or else from the size of the job and the measured speed of its folder."""
    failures = config.failures
    if failures.save_s is not None and failures.load_s is not None:
        return Costs(failures.save_s, failures.load_s + failures.reschedule_s)
    arenas = config.arenas
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
