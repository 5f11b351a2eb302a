"""A job from start to end under failures: saves, rebuilds, second failures, bursts.

Nothing ticks. Between two failures all that happens follows from the time between them, so a run is
a few operations on arrays with one entry per failure, whatever the number of servers and hours.

Two ways to count:

- `run_job`, the whole job. Failures strike whenever they strike: during a save, a repair, a
  rebuild, while lost work is done again.
- `count_as_formula`, the formulas' assumptions. Failures come in undisturbed training time,
  each is charged once, and nothing goes wrong while one is repaired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planaria.formulas import share_of_sets
from planaria.planning.failures import FailureModel, Failures
from planaria.strategies import STRATEGIES, Strategy

Floats = npt.NDArray[np.float64]

# For so many times the job's length failures are drawn, then for more; the last is the end of it.
HORIZONS = (1.25, 2.5, 5.0, 10.0)
# A strategy whose first runs were all given up is not tried again.
HOPELESS_AFTER = 10
# Standard errors to either side: 99 % of such intervals hold the true mean.
INTERVAL_ERRORS = 2.576


@dataclass(frozen=True)
class Behaviour:
    """What a strategy does, as numbers. Times are hours of wall-clock time."""

    kind: str  # the strategy's name, which a plan as JSON shows
    r: int = 0
    k: int = 1
    scatter: int | None = None  # how many mates a server has; None: as many as by default
    protection: float = 0.0  # a step takes this share longer
    pause: float = 0.0  # at a failure that rolls nothing back
    rebuild: float = 0.0  # the time after it until the place is whole
    slowdown: float = 0.0  # of training during a rebuild
    interval: float = math.inf  # training time between saves
    save: float = 0.0  # how long training stops for a save
    lag: float = 0.0  # from there until the save is whole
    repair: float = 0.0  # at a failure that rolls back: loading and rescheduling

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.kind]


@dataclass(frozen=True)
class Run:
    overhead: float  # share of the job's length
    exceeded: bool  # more than r servers of a group failed at once
    pls: float  # portion of lost samples
    finished: bool = True


def rolls_back(what: Behaviour, failures: Failures, servers: int) -> npt.NDArray[np.bool_]:
    """Which failures take more than the strategy can bear, [F].

    With erasure: those that find r others open whose places share a group with theirs. A place
    that fails again while it is rebuilt is one place. After a fall-back a further failure within
    the window falls back again, as it does when it strikes the reload.
    """
    count = len(failures.hours)
    if not what.strategy.keeps_parity:
        return np.full(count, not what.strategy.partial)
    window = what.pause + what.rebuild
    fresh = np.flatnonzero(failures.since_same_place > window)
    at = failures.hours[fresh]
    others = np.arange(len(at)) - np.searchsorted(at, at - window)
    crowded = np.flatnonzero(others >= what.r)
    sets = np.ones(len(crowded))  # how many sets of r the others make
    for taken in range(what.r):
        sets *= (others[crowded] - taken) / (taken + 1)
    chance = 1 - (1 - share_of_sets(servers, what.k, what.r, what.scatter)) ** sets
    result = np.zeros(count, np.bool_)
    result[fresh[crowded]] = failures.luck[fresh[crowded]] < chance
    return result


def run_job(what: Behaviour, hours: float, servers: int, failures: Failures) -> Run | None:
    """The whole job, or None if it has not ended when the drawn failures do."""
    hard = rolls_back(what, failures, servers)
    # Interval i follows failure i - 1; the first follows none. Each is a pause, then training at a
    # lower rate, then at the full one, cut short by the next failure.
    starts = np.concatenate([[0.0], failures.hours])
    lengths = np.diff(starts, append=failures.until_hours)
    after = np.concatenate([[False], hard])
    pauses = np.where(after, what.repair, what.pause)
    slows = np.where(after, 0.0, what.rebuild)
    pauses[0] = slows[0] = 0.0
    idle = np.minimum(lengths, pauses)
    slow = np.minimum(lengths - idle, slows)
    trained = slow * (1 - what.slowdown) + (lengths - idle - slow)
    trained /= 1 + what.protection

    # A stretch lies between two roll-backs. What it keeps is what its saves hold.
    stretch = np.cumsum(after)
    totals = np.bincount(stretch, trained)
    interval = min(what.interval, hours)
    kept = np.floor(np.maximum(totals - what.lag, 0) / (interval + what.save)) * interval
    left = hours - (np.cumsum(kept) - kept)
    needed = left + (np.ceil(left / interval - 1e-9) - 1) * what.save
    ends = totals >= needed
    if not ends.any():
        return None
    last = int(np.argmax(ends))

    inside = np.flatnonzero(stretch == last)
    done = np.cumsum(trained[inside])
    final = inside[int(np.searchsorted(done, needed[last]).clip(max=len(inside) - 1))]
    missing = (needed[last] - (done[final - inside[0]] - trained[final])) * (1 + what.protection)
    at_low_rate = slow[final] * (1 - what.slowdown)
    if missing <= at_low_rate:
        missing /= 1 - what.slowdown
    else:
        missing += slow[final] - at_low_rate
    end = float(starts[final] + idle[final] + missing)

    struck = int(np.searchsorted(failures.hours, end))
    exceeded = bool(hard[:struck].any()) if what.strategy.keeps_parity else struck > 0
    pls = 0.0
    if what.strategy.partial:
        phase = np.cumsum(trained)[:struck] % (interval + what.save)
        pls = float(np.minimum(phase, interval).sum()) / (hours * servers)
    return Run(end / hours - 1, exceeded, pls)


def count_as_formula(what: Behaviour, hours: float, servers: int, failures: Failures) -> Run:
    """Every failure charged once, by the time since the last save at which it came."""
    hard = rolls_back(what, failures, servers)
    interval = min(what.interval, hours)
    since_save = failures.hours % interval
    lost = (since_save + what.lag + what.repair)[hard].sum()
    lost += (what.pause + what.slowdown * what.rebuild) * np.count_nonzero(~hard)
    lost += what.save * hours / interval  # the formulas count parts of a save
    exceeded = bool(hard.any()) if what.strategy.keeps_parity else len(hard) > 0
    pls = float(since_save.sum()) / (hours * servers) if what.strategy.partial else 0.0
    return Run(what.protection + float(lost) / hours, exceeded, pls)


# ------------------------------------------------------------------ many runs


@dataclass(frozen=True)
class Interval99:
    """A mean, and how far to either side the true one may lie (99 %)."""

    mean: float
    error: float

    def holds(self, value: float) -> bool:
        return abs(value - self.mean) <= self.error

    def exceeds(self, value: float) -> bool:
        """Whether the true mean is above, as far as can be told; rounding is no excess."""
        return self.mean - self.error > value * (1 + 1e-9)

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval99:
        if len(values) < 2:
            return cls(float(np.mean(values)), math.inf)
        spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return cls(float(np.mean(values)), INTERVAL_ERRORS * spread)

    @classmethod
    def of_share(cls, hits: int, runs: int) -> Interval99:
        """Wilson's interval, made symmetric: no hit at all is no proof of chance zero."""
        z2 = INTERVAL_ERRORS**2
        share = hits / runs
        middle = (share + z2 / (2 * runs)) / (1 + z2 / runs)
        half = math.sqrt(z2 * share * (1 - share) / runs + z2 * z2 / (4 * runs * runs))
        return cls(share, half / (1 + z2 / runs) + abs(middle - share))


@dataclass(frozen=True)
class Simulated:
    runs: int
    unfinished: int  # given up after the last of HORIZONS, and counted with that
    overhead: Interval99
    exceeded: Interval99  # the chance that more than r servers of a group fail at once
    pls: Interval99


def summarise(what: Behaviour, hours: float, runs: Sequence[Run]) -> Simulated:
    overhead = Interval99.of([run.overhead for run in runs])
    exceeded = Interval99.of_share(sum(run.exceeded for run in runs), len(runs))
    if what.strategy.keeps_parity and exceeded.mean == 0:
        # No run fell back, but the runs do not exclude that one would: its cost, at that chance.
        falls_back = (what.repair + min(what.interval, hours) / 2) / hours
        overhead = Interval99(overhead.mean, overhead.error + exceeded.error * falls_back)
    return Simulated(
        len(runs),
        sum(not run.finished for run in runs),
        overhead,
        exceeded,
        Interval99.of([run.pls for run in runs]),
    )


def simulate(
    behaviours: Sequence[Behaviour],
    hours: float,
    servers: int,
    model: FailureModel,
    *,
    runs: int,
    seed: int,
    as_formula: bool = False,
    observe: Callable[[int], None] = lambda done: None,
) -> list[Simulated]:
    """Every behaviour under the same failures, so that they differ by what they do alone."""
    found: list[list[Run]] = [[] for _ in behaviours]
    for number in range(runs):
        drawn: dict[float, Failures] = {}

        def draw(until: float, drawn: dict[float, Failures] = drawn, run: int = number) -> Failures:
            if until not in drawn:
                drawn[until] = model.draw([seed, run], until, servers)
            return drawn[until]

        for what, results in zip(behaviours, found, strict=True):
            if len(results) == HOPELESS_AFTER and not any(run.finished for run in results):
                continue
            if (
                as_formula and what.strategy.rolls_back
            ):  # the formula of restarts assumes no such thing
                results.append(count_as_formula(what, hours, servers, draw(hours)))
            else:
                results.append(_run_to_the_end(what, hours, servers, draw))
        observe(number + 1)
    return [
        summarise(what, hours, results) for what, results in zip(behaviours, found, strict=True)
    ]


def _run_to_the_end(
    what: Behaviour, hours: float, servers: int, draw: Callable[[float], Failures]
) -> Run:
    for times in HORIZONS:
        run = run_job(what, hours, servers, draw(times * hours))
        if run is not None:
            return run
    return Run(HORIZONS[-1] - 1, exceeded=True, pls=0.0, finished=False)
