"""A plan: what every strategy costs this job, and which one to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planaria import formulas
from planaria.errors import ConfigError
from planaria.layout import default_k
from planaria.planning.failures import (
    FailureModel,
    Renewal,
    Replay,
    exponential,
    fitted,
    with_mean,
)
from planaria.planning.fits import Findings, analyse
from planaria.planning.inputs import MAX_FAILURES, MAX_PARITY, PlanInputs
from planaria.planning.simulation import HORIZONS, Behaviour, Simulated, simulate
from planaria.planning.traces import Trace

Observer = Callable[[str, int, int], None]
"""Called with what is being simulated, the runs done, and of how many."""

# Saves that take no time would be made all the time; a second apart is often enough.
LEAST_INTERVAL_HOURS = 1 / 3600
HISTORY_STEPS = 2  # whose deltas a server keeps: history.steps of a job


@dataclass(frozen=True)
class Estimate:
    """One row of the table. Overheads, chances and lost samples are shares, not percent."""

    name: str
    behaviour: Behaviour
    formula: float  # overhead
    checked: Simulated  # failures and charges as the formula has them
    whole: Simulated  # the whole job
    memory_gb: float  # of one server, its records included
    bandwidth_mb_per_s: float  # of one server, for the strategy alone
    lost_samples: float
    exceeded: float  # the chance to lose more than r servers of a group at once
    machine_hours_lost: float
    refused: tuple[str, ...]  # why it is out of the question


@dataclass(frozen=True)
class Plan:
    inputs: PlanInputs
    mtbf_hours: float
    findings: Findings | None
    failures: str
    formula_applies: bool  # the failures are those that the formulas assume
    estimates: tuple[Estimate, ...]
    left_out: tuple[str, ...]  # strategies that this job cannot use, and why
    recommended: str | None
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: numbers that are not finite become null."""
        values: dict[str, Any] = _finite(dataclasses.asdict(self))
        return values


def make_plan(
    inputs: PlanInputs,
    trace: Trace | None = None,
    observe: Observer = lambda what, done, of: None,
) -> Plan:
    inputs.check()
    findings = analyse(trace) if trace else None
    mtbf, model = _failures(inputs, trace, findings)
    if inputs.hours / mtbf > MAX_FAILURES:
        raise ConfigError(
            f"--hours: expected at most {MAX_FAILURES * mtbf:,.4g}, because one failure every "
            f"{mtbf:,.3g} h makes {MAX_FAILURES:,} of them; got {inputs.hours:g}"
        )
    named, left_out = behaviours(inputs, mtbf)
    kinds, runs = list(named.values()), inputs.runs_for(mtbf)

    def run(what: str, model: FailureModel, *, as_formula: bool) -> list[Simulated]:
        return simulate(
            kinds,
            inputs.hours,
            inputs.servers,
            model,
            runs=runs,
            seed=inputs.seed,
            as_formula=as_formula,
            observe=lambda done: observe(what, done, runs),
        )

    checked = run("as the formulas", exponential(mtbf), as_formula=True)
    whole = run("the whole job", model, as_formula=False)
    estimates = tuple(
        _estimate(inputs, mtbf, name, what, *simulated)
        for (name, what), *simulated in zip(named.items(), checked, whole, strict=True)
    )
    recommended, reasons = recommend(estimates)
    return Plan(
        inputs,
        mtbf,
        findings,
        model.describe(),
        model == exponential(mtbf),
        estimates,
        tuple(left_out),
        recommended,
        reasons,
    )


def _failures(
    inputs: PlanInputs, trace: Trace | None, findings: Findings | None
) -> tuple[float, FailureModel]:
    """The mean time between failures of this job, and what its simulation draws them from."""
    if trace is None or findings is None:
        if inputs.failures == "replay":
            raise ConfigError("--failures: replay needs a trace; give one with --trace")
        family = "exponential" if inputs.failures == "auto" else inputs.failures
        shape = 1.0 if family == "exponential" else inputs.shape
        bursts = round(inputs.burst_percent)  # one size of a hundred is taken for each event
        sizes = (inputs.burst_servers,) * bursts + (1,) * (100 - bursts) if bursts else (1,)
        return inputs.mtbf_hours, Renewal(with_mean(family, shape, inputs.mtbf_hours), sizes)
    trace_servers = inputs.trace_servers or trace.named_servers
    if trace_servers < trace.named_servers:
        raise ConfigError(
            f"--trace-servers: expected {trace.named_servers} or more, for so many failed, "
            f"got {trace_servers}"
        )
    mtbf = trace.mtbf_hours * trace_servers / inputs.servers
    if inputs.failures in ("auto", "replay"):
        return mtbf, Replay(trace, trace_servers)
    return mtbf, fitted(findings, inputs.failures, trace_servers, inputs.servers)


# ------------------------------------------------------------------ what each strategy does


def behaviours(inputs: PlanInputs, mtbf: float) -> tuple[dict[str, Behaviour], list[str]]:
    """Every strategy that this job can use, by its name in the table; and why not the others."""
    repair, save = inputs.repair_hours, inputs.save_hours
    named = {"none": Behaviour("none", repair=inputs.restart_seconds / 3600)}
    left_out: list[str] = []
    for r in range(1, MAX_PARITY + 1):
        k = inputs.k
        if k is None:
            k = default_k(inputs.servers, r) if inputs.servers > r else 1
        if inputs.servers < k + r:
            left_out.append(f"erasure r={r} needs {k + r} servers or more, with k = {k}")
            continue
        named[f"erasure r={r}"] = Behaviour(
            "erasure",
            r=r,
            k=k,
            protection=inputs.protection(r),
            pause=inputs.pause_seconds / 3600,
            rebuild=inputs.rebuild_hours(k),
            slowdown=inputs.slowdown_percent / 100,
            interval=min(inputs.backup_hours, inputs.hours),
            save=save,
            repair=repair,
        )
    named["checkpoint"] = Behaviour(
        "checkpoint", interval=_every(inputs, save, mtbf), save=save, repair=repair
    )
    # A save must be written before the next one begins.
    every = max(_every(inputs, inputs.snapshot_hours, mtbf), min(save, inputs.hours))
    named["checkpoint async"] = Behaviour(
        "checkpoint", interval=every, save=inputs.snapshot_hours, lag=save, repair=repair
    )
    pls = inputs.lost_samples_percent / 100
    if pls == 0:
        left_out.append("cpr loses samples, and none may be lost")
        return named, left_out
    every = min(formulas.partial_interval(pls, mtbf, inputs.servers), inputs.hours)
    named["cpr"] = Behaviour("cpr", interval=every, save=save, pause=repair)
    # Partial recovery at the interval of full recovery: what the longer one is compared with.
    named["cpr naive"] = Behaviour(
        "cpr", interval=named["checkpoint"].interval, save=save, pause=repair
    )
    return named, left_out


def _every(inputs: PlanInputs, save: float, mtbf: float) -> float:
    young = formulas.young_interval(save, mtbf)
    return min(max(young, LEAST_INTERVAL_HOURS), inputs.hours)


def _estimate(
    inputs: PlanInputs,
    mtbf: float,
    name: str,
    what: Behaviour,
    checked: Simulated,
    whole: Simulated,
) -> Estimate:
    loss_rate = formulas.loss_rate(
        servers=inputs.servers, k=what.k, r=what.r, mtbf=mtbf, window=what.pause + what.rebuild
    )
    memory, bandwidth = _memory_gb(inputs, what), _bandwidth_mb_per_s(inputs, what)
    machines = inputs.servers + max(inputs.trainers, what.r + 1)
    estimate = Estimate(
        name=name,
        behaviour=what,
        formula=_formula(inputs, what, mtbf, loss_rate),
        checked=checked,
        whole=whole,
        memory_gb=memory,
        bandwidth_mb_per_s=bandwidth,
        lost_samples=(
            formulas.expected_pls(what.interval, mtbf, inputs.servers)
            if what.kind == "cpr"
            else 0.0
        ),
        exceeded=formulas.chance_within(inputs.hours, loss_rate),
        machine_hours_lost=whole.overhead.mean * inputs.hours * machines,
        refused=(),
    )
    return dataclasses.replace(estimate, refused=tuple(_refusals(inputs, estimate)))


def _formula(inputs: PlanInputs, what: Behaviour, mtbf: float, loss_rate: float) -> float:
    if what.kind == "none":
        return formulas.restart_overhead(inputs.hours, what.repair, mtbf)
    if what.kind == "cpr":
        return formulas.partial_recovery_overhead(
            save=what.save, interval=what.interval, repair=what.pause, mtbf=mtbf
        )
    if what.kind == "checkpoint":
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


def _memory_gb(inputs: PlanInputs, what: Behaviour) -> float:
    if what.kind == "erasure":
        deltas = HISTORY_STEPS * (1 + what.r) * inputs.touched_mb / 1000 / inputs.servers
        return inputs.server_gb * (1 + what.r / what.k) + deltas
    copies = 2 if what.kind == "checkpoint" and what.lag else 1  # the snapshot being written
    return copies * inputs.server_gb


def _bandwidth_mb_per_s(inputs: PlanInputs, what: Behaviour) -> float:
    saved = 0.0 if what.kind == "none" else inputs.server_gb * 1000 / (what.interval * 3600)
    return saved + what.r * inputs.touched_mb / inputs.servers / inputs.step_seconds


# ------------------------------------------------------------------ which one to take


def _refusals(inputs: PlanInputs, found: Estimate) -> list[str]:
    reasons = []
    if found.whole.unfinished:
        reasons.append(
            f"{found.whole.unfinished} of {found.whole.runs} runs had not ended after "
            f"{HORIZONS[-1]:g} times the job's length"
        )
    if found.memory_gb > inputs.memory_budget_gb:
        reasons.append(
            f"needs {found.memory_gb:,.1f} GB a server; the budget is "
            f"{inputs.memory_budget_gb:,.1f} GB"
        )
    lost = max(found.lost_samples, found.whole.pls.mean - found.whole.pls.error)
    if lost > inputs.lost_samples_percent / 100 * (1 + 1e-9):
        reasons.append(
            f"loses {100 * lost:.1f} % of the samples; the budget is "
            f"{inputs.lost_samples_percent:g} %"
        )
    if found.behaviour.kind == "erasure":
        # A rare loss may not show in any run; the formula sees it, but no bursts.
        chance = max(found.exceeded, found.whole.exceeded.mean)
        if chance > inputs.loss_percent / 100:
            reasons.append(
                f"loses more than {found.behaviour.r} at once with a chance of "
                f"{100 * chance:.2g} %; the budget is {inputs.loss_percent:g} %"
            )
    return reasons


def recommend(estimates: tuple[Estimate, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The least overhead of the whole job among what the budgets allow, and the reasons."""
    allowed = [found for found in estimates if not found.refused]
    refused = [f"{found.name}: {'; '.join(found.refused)}" for found in estimates if found.refused]
    if not allowed:
        return None, ("no strategy is within the budgets", *refused)
    ranked = sorted(allowed, key=lambda found: found.whole.overhead.mean)
    best = ranked[0]
    reasons = [
        f"{best.name} costs least of what the budgets allow: "
        f"{100 * best.whole.overhead.mean:.2f} % of the job, "
        f"{best.machine_hours_lost:,.0f} machine-hours"
    ]
    for other in ranked[1:]:
        more = other.whole.overhead.mean - best.whole.overhead.mean
        close = more <= other.whole.overhead.error + best.whole.overhead.error
        note = ", which the simulation cannot tell apart; more --runs can" if close else ""
        reasons.append(f"{other.name}: {100 * more:.2f} points more{note}")
    if best.lost_samples:
        reasons.append(
            f"{best.name} loses {100 * best.lost_samples:.2f} % of the samples, within the budget; "
            "--lost-samples-percent 0 asks for a strategy that loses none"
        )
    return best.name, (*reasons, *refused)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
