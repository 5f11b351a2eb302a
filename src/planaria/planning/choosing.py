"""Which strategy to take: what the budgets rule out, what costs least, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planaria.planning.inputs import PlanInputs
from planaria.planning.memory import Memory
from planaria.planning.simulation import HORIZONS, Behaviour, Interval99, Simulated
from planaria.planning.strategies import OFFERED_LOSS_PERCENT


@dataclass(frozen=True)
class Estimate:
    """One row of the table. Overheads, chances and lost samples are shares, not percent."""

    name: str
    behaviour: Behaviour
    formula: float  # overhead
    checked: Simulated  # failures and charges as the formula has them
    whole: Simulated  # the whole job
    memory: Memory  # of one server
    bandwidth_mb_per_s: float  # of one server, for the strategy alone
    exceeded: float  # the chance that more than r servers of a group fail at once, by formula
    machine_hours_lost: float
    refused: tuple[str, ...] = ()  # why it is out of the question

    @property
    def memory_gb(self) -> float:
        return self.memory.total / 1e9

    @property
    def lost_samples(self) -> Interval99:
        """What the table shows, the verdict goes by and the reason names."""
        return self.whole.pls

    @property
    def beyond(self) -> float:
        """The chance that more than r servers of a group fail at once, as the table shows it.

        What the runs saw; a chance so small that none did is the formula's, which knows no bursts.
        """
        return self.whole.exceeded.mean or self.exceeded


def refusals(inputs: PlanInputs, found: Estimate) -> tuple[str, ...]:
    """The budgets that a strategy does not keep; none, and it can be taken."""
    reasons = []
    if found.whole.unfinished:
        reasons.append(
            f"{found.whole.unfinished} of {found.whole.runs} runs had not ended after "
            f"{HORIZONS[-1]:g} times the job's length"
        )
    budget_gb = inputs.memory_budget_gb
    if budget_gb is not None and found.memory_gb > budget_gb:
        reasons.append(
            f"needs {found.memory_gb:,.1f} GB a server; the budget is {budget_gb:,.1f} GB"
        )
    if loses_too_much(inputs, found):
        reasons.append(
            f"loses {lost_text(found.lost_samples)} % of the samples; the budget is "
            f"{inputs.lost_samples_percent:g} %"
        )
    if nothing_beneath(inputs, found) and found.beyond > inputs.loss_percent / 100:
        parity = found.behaviour.strategy.keeps_parity
        why = f" with --backup-hours {inputs.backup_hours:g}" if parity else ""
        reasons.append(
            f"loses all that was trained with a chance of {beyond_text(found)} %, because no "
            f"checkpoint is beneath it{why}; the budget is {inputs.loss_percent:g} %"
        )
    return tuple(reasons)


def nothing_beneath(inputs: PlanInputs, found: Estimate) -> bool:
    """Whether a failure that it does not bear ends the job, because nothing was saved before.

    Where there is something, all roll back to it and no sample is lost: what that costs is in the
    overhead, and no other budget is due.
    """
    what = found.behaviour
    return what.interval >= inputs.hours and not what.strategy.from_nothing


def loses_too_much(inputs: PlanInputs, found: Estimate) -> bool:
    """Where none may be lost, whatever loses any. Else what the simulation says is over the budget:
    one that plans to spend it exactly is over it in every second simulation by chance.
    """
    if inputs.lost_samples_percent == 0:
        return found.behaviour.strategy.partial
    return found.lost_samples.exceeds(inputs.lost_samples_percent / 100)


def choose(
    inputs: PlanInputs, estimates: Sequence[Estimate], present: str | None = None
) -> tuple[str | None, tuple[str, ...]]:
    """The least overhead of the whole job among what the budgets allow, and the reasons.

    present: the strategy that the job has now. It stays where the simulation cannot tell that
    another costs less: noise is no reason to change a job.
    """
    allowed = [found for found in estimates if not found.refused]
    refused = [f"{found.name}: {'; '.join(found.refused)}" for found in estimates if found.refused]
    if not allowed:
        return None, ("no strategy is within the budgets", *_offer(inputs, estimates), *refused)
    ranked = sorted(allowed, key=_overhead)
    least = ranked[0]
    alike = [found for found in ranked if found.name == present and _alike(found, least)]
    best = alike[0] if alike else least
    costs = (
        f"{100 * _overhead(best):.2f} % of the job, {best.machine_hours_lost:,.0f} machine-hours"
    )
    if best is least:
        why = f"{best.name} costs least of what the budgets allow: {costs}"
    else:
        why = (
            f"{best.name} stays, for the job has it and the simulation cannot tell that "
            f"{least.name} costs less: {costs}"
        )
    reasons = [why, *_offer(inputs, estimates, best)]
    if best.behaviour.strategy.keeps_parity and not nothing_beneath(inputs, best):
        reasons.append(
            f"{best.name} rolls back with a chance of {beyond_text(best)} %: where more than "
            f"{best.behaviour.r} of a group fail at once, to the checkpoint beneath; what that "
            "costs is counted"
        )
    if best.behaviour.strategy.partial:
        reasons.append(
            f"{best.name} loses {lost_text(best.lost_samples)} % of the samples; the budget is "
            f"{inputs.lost_samples_percent:g} %"
        )
    if present is not None:
        reasons.append(f"the job as it is has {present}")
    for other in ranked:
        if other is not best:
            points = 100 * (_overhead(other) - _overhead(best))
            more = f"{abs(points):.2f} points {'less' if points < 0 else 'more'}"
            alike_note = ", which the simulation cannot tell apart; more --runs can"
            reasons.append(f"{other.name}: {more}{alike_note if _alike(other, best) else ''}")
    return best.name, (*reasons, *refused)


def _offer(
    inputs: PlanInputs, estimates: Sequence[Estimate], best: Estimate | None = None
) -> list[str]:
    """What a loss of samples would buy, where none may be lost."""
    if inputs.lost_samples_percent:
        return []
    allowing = replace(inputs, lost_samples_percent=OFFERED_LOSS_PERCENT)
    cheapest = min(
        (
            found
            for found in estimates
            if found.behaviour.strategy.partial and not refusals(allowing, found)
        ),
        key=_overhead,
        default=None,
    )
    if cheapest is None:
        return []
    offer = (
        f"with --lost-samples-percent {OFFERED_LOSS_PERCENT:g}, {cheapest.name} would cost "
        f"{100 * _overhead(cheapest):.2f} % of the job"
    )
    if best is None:
        return [offer]
    if _overhead(cheapest) >= _overhead(best):
        return [f"a loss of samples would buy nothing: {offer}"]
    return [f"{offer} instead of {100 * _overhead(best):.2f} %"]


def _alike(one: Estimate, other: Estimate) -> bool:
    """Whether their overheads differ by no more than both intervals (99 %) leave open."""
    open_to = one.whole.overhead.error + other.whole.overhead.error
    return abs(_overhead(one) - _overhead(other)) <= open_to


def _overhead(found: Estimate) -> float:
    return found.whole.overhead.mean


def lost_text(pls: Interval99) -> str:
    """Lost samples in percent, as everything prints them that speaks of them."""
    return short(100 * pls.mean)


def beyond_text(found: Estimate) -> str:
    """`beyond` in percent, as everything prints it that speaks of it."""
    return f"{100 * found.beyond:.{3 if found.whole.exceeded.mean else 1}g}"


def short(number: float) -> str:
    """Three digits of what is large, two behind the point, one of what is tiny."""
    if abs(number) < 0.01 or not math.isfinite(number):
        return f"{number:.1g}"
    return f"{number:,.{max(0, min(2, 2 - math.floor(math.log10(abs(number)))))}f}"
