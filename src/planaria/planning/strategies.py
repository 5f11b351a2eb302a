"""What each strategy does to a job, as numbers: what the formulas and the simulation go by."""

from __future__ import annotations

from planaria import formulas
from planaria.config import Config
from planaria.layout import default_k, least_scatter
from planaria.planning.inputs import MAX_PARITY, PlanInputs
from planaria.planning.memory import Memory, memory_of, priority_bytes
from planaria.planning.simulation import Behaviour
from planaria.strategies import CHECKPOINT

# Saves that take no time would be made all the time; a second apart is often enough.
LEAST_INTERVAL_HOURS = 1 / 3600
# Of samples, for what a loss would buy where none may be lost: CPR's own example.
OFFERED_LOSS_PERCENT = 10.0


def lost_samples_budget(inputs: PlanInputs) -> float:
    """The share of samples by which partial recovery plans its saves."""
    return (inputs.lost_samples_percent or OFFERED_LOSS_PERCENT) / 100


def behaviours(inputs: PlanInputs, mtbf: float) -> tuple[dict[str, Behaviour], list[str]]:
    """Every strategy that this job can use, by its name in the table; and why not the others."""
    repair, save = inputs.repair_hours, inputs.save_hours
    named = {"none": Behaviour("none", repair=inputs.restart_seconds / 3600)}
    left_out: list[str] = []
    for r in range(1, MAX_PARITY + 1):
        k = _k(inputs, r)
        if inputs.servers < k + r:
            left_out.append(f"erasure r={r} needs {k + r} servers or more, with k = {k}")
        else:
            named[f"erasure r={r}"] = _erasure(inputs, k, r)
    named["checkpoint"] = Behaviour(
        "checkpoint", interval=_every(inputs, save, mtbf), save=save, repair=repair
    )
    # A save must be written before the next one begins.
    every = max(_every(inputs, inputs.snapshot_hours, mtbf), min(save, inputs.hours))
    named["checkpoint async"] = Behaviour(
        "checkpoint", interval=every, save=inputs.snapshot_hours, lag=save, repair=repair
    )
    every = formulas.partial_interval(lost_samples_budget(inputs), mtbf, inputs.servers)
    named["cpr"] = Behaviour("cpr", interval=min(every, inputs.hours), save=save, pause=repair)
    # Partial recovery at the interval of full recovery: what the longer one is compared with.
    named["cpr naive"] = Behaviour(
        "cpr", interval=named["checkpoint"].interval, save=save, pause=repair
    )
    return named, left_out


def _k(inputs: PlanInputs, r: int) -> int:
    if inputs.k is not None:
        return inputs.k
    return default_k(inputs.servers, r) if inputs.servers > r else 1


def _erasure(inputs: PlanInputs, k: int, r: int) -> Behaviour:
    return Behaviour(
        "erasure",
        r=r,
        k=k,
        scatter=None if inputs.scatter is None else max(inputs.scatter, least_scatter(k, r)),
        protection=inputs.protection(r),
        pause=inputs.pause_seconds / 3600,
        rebuild=inputs.rebuild_hours(k, r),
        slowdown=inputs.slowdown_percent / 100,
        interval=min(inputs.backup_hours, inputs.hours),
        save=inputs.save_hours,
        repair=inputs.repair_hours,
    )


def _every(inputs: PlanInputs, save: float, mtbf: float) -> float:
    young = formulas.young_interval(save, mtbf)
    return min(max(young, LEAST_INTERVAL_HOURS), inputs.hours)


def overhead_by_formula(
    inputs: PlanInputs, what: Behaviour, mtbf: float, loss_rate: float
) -> float:
    if not what.strategy.rolls_back:
        return formulas.restart_overhead(inputs.hours, what.repair, mtbf)
    if what.strategy.partial:
        return formulas.partial_recovery_overhead(
            save=what.save, interval=what.interval, repair=what.pause, mtbf=mtbf
        )
    if not what.strategy.keeps_parity:
        return formulas.full_recovery_overhead(
            save=what.save, interval=what.interval, repair=what.repair, mtbf=mtbf, lag=what.lag
        )
    return formulas.erasure_overhead(
        protection=what.protection,
        pause=what.pause,
        rebuild=what.rebuild,
        slowdown=what.slowdown,
        mtbf=mtbf,
        save=what.save,
        interval=what.interval,
        repair=what.repair,
        loss_rate=loss_rate,
    )


def memory(inputs: PlanInputs, what: Behaviour) -> Memory:
    variant = inputs.cpr_variant if what.strategy.partial else "vanilla"
    return memory_of(
        records=inputs.server_gb * 1e9,
        touched=inputs.touched_mb * 1e6 / inputs.servers,
        history_steps=inputs.history_steps,
        k=what.k,
        r=what.r,
        in_background=what.lag > 0,
        priorities=priority_bytes(variant, inputs.server_rows, inputs.dim, inputs.rho),
    )


def bandwidth_mb_per_s(inputs: PlanInputs, what: Behaviour) -> float:
    rolls_back = what.strategy.rolls_back
    saved = inputs.server_gb * 1000 / (what.interval * 3600) if rolls_back else 0.0
    return saved + what.r * inputs.touched_mb / inputs.servers / inputs.step_seconds


def name_of(job: Config) -> str:
    """The strategy that a job has, as the table calls it."""
    if job.survival.keeps_parity:
        return f"erasure r={job.parity}"
    if job.survival is CHECKPOINT and job.checkpoint.mode == "async":
        return "checkpoint async"
    return job.strategy
