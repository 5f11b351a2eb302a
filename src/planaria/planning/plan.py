"""A plan: what every strategy costs this job, and which one to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planaria import formulas
from planaria.errors import ConfigError
from planaria.planning.choosing import Estimate, choose, refusals
from planaria.planning.failures import (
    FailureModel,
    Renewal,
    Replay,
    exponential,
    fitted,
    with_mean,
)
from planaria.planning.fits import Findings, analyse
from planaria.planning.inputs import MAX_FAILURES, PlanInputs
from planaria.planning.network import NetworkEstimate, network_estimates
from planaria.planning.simulation import Behaviour, Simulated, simulate
from planaria.planning.strategies import (
    bandwidth_mb_per_s,
    behaviours,
    lost_samples_budget,
    memory,
    overhead_by_formula,
)
from planaria.planning.traces import Trace

Observer = Callable[[str, int, int], None]
"""Called with what is being simulated, the runs done, and of how many."""

Runner = Callable[[str, Sequence[Behaviour]], list[Simulated]]

MOST_FITS = 5  # times that saves are brought nearer to keep the budget of lost samples


@dataclass(frozen=True)
class Recommendation:
    inputs: PlanInputs
    notes: tuple[str, ...]  # where the inputs come from
    mtbf_hours: float
    findings: Findings | None
    failures: str
    formula_applies: bool  # the failures are those that the formulas assume
    estimates: tuple[Estimate, ...]
    network: tuple[NetworkEstimate, ...]
    left_out: tuple[str, ...]  # strategies that this job cannot use, and why
    recommended: str | None
    reasons: tuple[str, ...]

    @property
    def best(self) -> Estimate | None:
        return next((row for row in self.estimates if row.name == self.recommended), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: numbers that are not finite become null."""
        values: dict[str, Any] = _finite(dataclasses.asdict(self))
        for row, estimate in zip(values["estimates"], self.estimates, strict=True):
            row["memory"]["total"] = estimate.memory.total
        return values


def make_plan(
    inputs: PlanInputs,
    trace: Trace | None = None,
    observe: Observer = lambda what, done, of: None,
    *,
    notes: Sequence[str] = (),
    present: str | None = None,
) -> Recommendation:
    """notes: where the inputs come from. present: the strategy that the job has now."""
    inputs.check()
    findings = analyse(trace) if trace else None
    mtbf, model = _failures(inputs, trace, findings)
    if inputs.hours / mtbf > MAX_FAILURES:
        raise ConfigError(
            f"--hours: expected at most {MAX_FAILURES * mtbf:,.4g}, because one failure every "
            f"{mtbf:,.3g} h makes {MAX_FAILURES:,} of them; got {inputs.hours:g}"
        )
    named, left_out = behaviours(inputs, mtbf)
    estimates = _estimates(inputs, mtbf, model, named, observe)
    recommended, reasons = choose(inputs, estimates, present)
    return Recommendation(
        inputs,
        (*notes, trace.understood) if trace and trace.understood else tuple(notes),
        mtbf,
        findings,
        model.describe(),
        model == exponential(mtbf),
        estimates,
        network_estimates(inputs, named.items()),
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
        if inputs.trace_servers is not None:
            raise ConfigError("--trace-servers: there is no trace; give one with --trace")
        family = "exponential" if inputs.failures == "auto" else inputs.failures
        fit = with_mean(family, inputs.shape or 1.0, inputs.mtbf_hours)
        return inputs.mtbf_hours, Renewal(fit, inputs.burst_sizes)
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


def _estimates(
    inputs: PlanInputs,
    mtbf: float,
    model: FailureModel,
    named: dict[str, Behaviour],
    observe: Observer,
) -> tuple[Estimate, ...]:
    """Every strategy by both simulations."""
    runs = inputs.runs_for(mtbf)

    def run(what: str, kinds: Sequence[Behaviour], *, as_formula: bool = False) -> list[Simulated]:
        return simulate(
            kinds,
            inputs.hours,
            inputs.servers,
            exponential(mtbf) if as_formula else model,
            runs=runs,
            seed=inputs.seed,
            as_formula=as_formula,
            observe=lambda done: observe(what, done, runs),
        )

    whole = dict(zip(named, run("the whole job", list(named.values())), strict=True))
    named["cpr"], whole["cpr"] = _keep_budget(
        lost_samples_budget(inputs), named["cpr"], whole["cpr"], run
    )
    checked = run("as the formulas", list(named.values()), as_formula=True)
    return tuple(
        _estimate(inputs, mtbf, name, what, as_formula, whole[name])
        for (name, what), as_formula in zip(named.items(), checked, strict=True)
    )


def _keep_budget(
    budget: float, what: Behaviour, found: Simulated, run: Runner
) -> tuple[Behaviour, Simulated]:
    """Partial recovery with saves so near that the simulation does not see it over its budget.

    The formula's interval spends the budget exactly, under the formula's assumptions: it knows no
    bursts, nor that a job that takes longer meets more failures.
    """
    for _ in range(MOST_FITS):
        if not found.pls.exceeds(budget):
            break
        what = replace(what, interval=what.interval * budget / found.pls.mean)
        (found,) = run("the saves of cpr", [what])
    return what, found


def _estimate(
    inputs: PlanInputs,
    mtbf: float,
    name: str,
    what: Behaviour,
    checked: Simulated,
    whole: Simulated,
) -> Estimate:
    loss_rate = formulas.loss_rate(
        servers=inputs.servers,
        k=what.k,
        r=what.r,
        scatter=what.scatter,
        mtbf=mtbf,
        window=what.pause + what.rebuild,
    )
    machines = inputs.servers + max(inputs.trainers, what.r + 1)
    estimate = Estimate(
        name=name,
        behaviour=what,
        formula=overhead_by_formula(inputs, what, mtbf, loss_rate),
        checked=checked,
        whole=whole,
        memory=memory(inputs, what),
        bandwidth_mb_per_s=bandwidth_mb_per_s(inputs, what),
        exceeded=formulas.chance_within(inputs.hours, loss_rate),
        machine_hours_lost=whole.overhead.mean * inputs.hours * machines,
    )
    return replace(estimate, refused=refusals(inputs, estimate))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
