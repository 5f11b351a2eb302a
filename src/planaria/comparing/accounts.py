"""What a run cost, in hours of the job that it stands for, and what several runs say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from planaria.comparing.emulation import Contender, Emulation

WINDOW_STEPS = 10  # over which steps are timed: single ones alternate

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom; for more, the last is a little wide.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Account:
    """Overhead by its parts, in emulated hours."""

    save: float
    load: float
    lost_work: float
    reschedule: float
    protection: float

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


PARTS = tuple(field.name for field in fields(Account))


@dataclass(frozen=True)
class Interval95:
    """A mean, and how far to either side 95 % of such intervals reach; None of a single value."""

    mean: float
    error: float | None


@dataclass(frozen=True)
class Protection:
    """What a strategy adds to every step, as a share of it, and how that is known."""

    source: str  # one of the words below
    share: Interval95 | None = None  # None: not measured

    @property
    def is_known(self) -> bool:
        """Else it stands in no overhead."""
        return self.source in (GIVEN, MEASURED, NO_PROTECTION)

    @property
    def charged(self) -> float:
        return self.share.mean if self.share and self.is_known else 0.0


GIVEN, NO_PROTECTION = "given", "none"
MEASURED, NOISE, NOT_MEASURED = "measured", "noise", "not measured"


def protection_of(
    emulation: Emulation, contender: Contender, slowdowns: Sequence[float | None]
) -> Protection:
    """Only of strategies that do something in every step: what a slow-down of others shows is
    their saves, which are charged already, and noise.

    slowdowns: how much longer the steps of each run took than those of its undisturbed one. A
    single one says nothing of how far it may be off, so it is no measurement; nor are several whose
    interval has 0 in it.
    """
    if not contender.works_every_step:
        return Protection(NO_PROTECTION, Interval95(0.0, None))
    if contender.parity and emulation.protection_percent is not None:
        share = contender.parity * emulation.protection_percent / 100
        return Protection(GIVEN, Interval95(share, None))
    found = interval([share for share in slowdowns if share is not None])
    if found is None or found.error is None:
        return Protection(NOT_MEASURED)
    return Protection(MEASURED if found.mean > found.error else NOISE, found)


def account_of(
    emulation: Emulation,
    contender: Contender,
    hours_per_step: float,
    report: Mapping[str, Any],
    protection: Protection,
) -> Account:
    """The account of a run that reached its end."""
    repairs = repairs_of(contender, report)
    redone = sum(back["from_step"] - back["to_step"] for back in report["rollbacks"])
    return Account(
        save=saves_of(report) * emulation.save_min / 60,
        load=repairs * emulation.load_min / 60,
        lost_work=redone * hours_per_step + pause_hours(contender, report),
        reschedule=repairs * emulation.reschedule_min / 60,
        protection=protection.charged * emulation.hours,
    )


def failures_of(report: Mapping[str, Any]) -> int:
    """Servers that were killed at one step are one failure."""
    return len({failure["step"] for failure in report["failures"]})


def repairs_of(contender: Contender, report: Mapping[str, Any]) -> int:
    """Failures after which somebody loaded a save: with parity only those that it did not bear."""
    return len(report["rollbacks"]) if contender.strategy.keeps_parity else failures_of(report)


def saves_of(report: Mapping[str, Any]) -> float:
    """In whole saves: one that writes a part of the records costs that part.

    One that failed took its time as well, and how far it came is not known: it counts as whole.
    """
    whole = report["bytes_records"]
    return float(
        sum(
            min(save["bytes"] / whole, 1.0) if "bytes" in save and whole else 1.0
            for save in report["checkpoints"]
        )
    )


def pause_hours(contender: Contender, report: Mapping[str, Any]) -> float:
    """With parity: from each kill to the next step, in real time.

    It is a matter of heartbeats and messages and does not grow with the job, so it is not scaled.
    The others' pauses stand in loading and rescheduling.
    """
    if not contender.strategy.keeps_parity:
        return 0.0
    longest: dict[int, float] = {}
    for failure in report["failures"]:
        gap = failure["gap_ms"] or 0.0
        longest[failure["step"]] = max(gap, longest.get(failure["step"], 0.0))
    return sum(longest.values()) / 3_600_000


def step_seconds(step_at: Sequence[tuple[int, float]]) -> float | None:
    """The time of a step; step_at: (step, when it was done), in the order of time.

    The lower quartile, because what else the machine does only ever adds. The first tenth is left
    out, because it starts up, and so is what rolled back; a pause is in few of the windows.
    """
    steady = step_at[len(step_at) // 10 :]
    times = [
        (until - since) / WINDOW_STEPS
        for (first, since), (last, until) in zip(steady, steady[WINDOW_STEPS:], strict=False)
        if last - first == WINDOW_STEPS
    ]
    return float(np.percentile(times, 25)) if times else None


def slowdown_of(step_s: float | None, undisturbed_s: float | None) -> float | None:
    """How much longer a step takes, as a share; below 0 it is noise, or another machine's rest."""
    if step_s is None or not undisturbed_s:
        return None
    return step_s / undisturbed_s - 1


def mean_account(accounts: Sequence[Account]) -> Account | None:
    if not accounts:
        return None
    columns = zip(*map(astuple, accounts), strict=True)
    return Account(*(statistics.fmean(column) for column in columns))


def interval(values: Sequence[float]) -> Interval95 | None:
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval95(mean, None)
    t = T_95[min(count - 1, len(T_95)) - 1]
    return Interval95(mean, t * statistics.stdev(values) / math.sqrt(count))
