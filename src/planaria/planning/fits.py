"""What a trace says about failures: fits by maximum likelihood, and whether they come in bursts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planaria.planning.traces import Trace

Floats = npt.NDArray[np.float64]

# Failures of one cause (a switch, a power supply, a wrong update) rarely come further apart, and
# rebuilding a server takes about as long.
BURST_HOURS = 1 / 6
SHAPES = (1e-3, 1e3)  # between which a shape is searched
SURE = 0.01  # an exponential is called something else in one trace of a hundred, at most


@dataclass(frozen=True)
class Fit:
    """A distribution of the time between failures; shape 1 is the exponential in both families."""

    family: str  # exponential, weibull or gamma
    shape: float
    scale_hours: float
    log_likelihood: float

    @property
    def mean_hours(self) -> float:
        if self.family == "weibull":
            return self.scale_hours * math.gamma(1 + 1 / self.shape)
        return self.scale_hours * self.shape


def fit_exponential(gaps: Floats) -> Fit:
    mean = float(gaps.mean())
    return Fit("exponential", 1.0, mean, -len(gaps) * (math.log(mean) + 1))


def fit_weibull(gaps: Floats) -> Fit:
    """The shape at which the likelihood's slope is zero; the scale follows from it."""
    logs = np.log(gaps)
    highest = float(logs.max())

    def weights(shape: float) -> Floats:
        return np.exp(shape * (logs - highest))  # at most 1: no overflow for any shape

    def slope(shape: float) -> float:
        weight = weights(shape)
        return float((weight * logs).sum() / weight.sum() - 1 / shape - logs.mean())

    shape = _root(slope)
    scale = math.exp(highest) * float(weights(shape).mean()) ** (1 / shape)
    relative = logs - math.log(scale)
    likelihood = len(gaps) * math.log(shape / scale) + float(
        ((shape - 1) * relative - np.exp(shape * relative)).sum()
    )
    return Fit("weibull", shape, scale, likelihood)


def fit_gamma(gaps: Floats) -> Fit:
    """The shape at which ln(shape) - digamma(shape) is ln(mean) - mean(ln)."""
    mean, logs = float(gaps.mean()), np.log(gaps)
    target = math.log(mean) - float(logs.mean())
    shape = _root(lambda shape: target - (math.log(shape) - digamma(shape)))
    scale = mean / shape
    likelihood = float(((shape - 1) * logs - gaps / scale).sum()) - len(gaps) * (
        math.lgamma(shape) + shape * math.log(scale)
    )
    return Fit("gamma", shape, scale, likelihood)


def digamma(x: float) -> float:
    """The derivative of lgamma: its recurrence up to 6, then the asymptotic series."""
    below = 0.0
    while x < 6:
        below -= 1 / x
        x += 1
    square = 1 / (x * x)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    return below + math.log(x) - 0.5 / x - series


def _root(rises: Callable[[float], float]) -> float:
    """Where a rising function of the shape crosses zero, by bisection of its logarithm."""
    low, high = map(math.log, SHAPES)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(math.exp(middle)) < 0 else (low, middle)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class Findings:
    """What a trace says. Bursts are failures less than BURST_HOURS apart, taken as one event."""

    failures: int
    named_servers: int
    mtbf_hours: float
    median_hours: float
    variation: float  # standard deviation of the gaps over their mean; 1 if exponential
    near_share: float  # of the failures: those with another within BURST_HOURS
    near_share_if_exponential: float
    daily_dispersion: float  # variance of the failures per day over their mean; 1 if exponential
    burst_sizes: tuple[int, ...]  # of each event, 1 included
    fits: tuple[Fit, ...]  # of the gaps between events, less BURST_HOURS; the likeliest first
    exponential_p: float  # the chance of gaps like these, or odder, if they were exponential

    @property
    def fit(self) -> Fit:
        return self.fits[0]

    @property
    def is_bursty(self) -> bool:
        """More uneven than chance: between events, or because events take several at once."""
        uneven = self.exponential_p < SURE and self.fit.shape < 1
        usual = self.failures * self.near_share_if_exponential
        # Two near failures count twice, so their number varies twice as much as a count does.
        clustered = self.failures * self.near_share > usual + 5 * math.sqrt(2 * usual + 1)
        return uneven or clustered

    def sentences(self) -> list[str]:
        return [
            f"{self.failures:,} failures of {self.named_servers:,} servers, one every "
            f"{self.mtbf_hours:.1f} h on average, median {self.median_hours:.1f} h",
            f"the trace is {'bursty' if self.is_bursty else 'not bursty'}: the gaps' standard "
            f"deviation is {self.variation:.2f} of their mean (exponential: 1), and "
            f"{100 * self.near_share:.0f} % of the failures have another within "
            f"{BURST_HOURS * 60:.0f} min (exponential: "
            f"{100 * self.near_share_if_exponential:.0f} %), up to {max(self.burst_sizes)} in one "
            f"burst; days differ {self.daily_dispersion:.1f} times as much as they would by chance",
            f"best fit between bursts: {self.fit.family}, shape {self.fit.shape:.2f}, scale "
            f"{self.fit.scale_hours:.1f} h; exponential gaps like these have a chance of "
            f"{self.exponential_p:.2g}",
        ]


def analyse(trace: Trace) -> Findings:
    hours = trace.hours
    gaps = np.diff(hours)
    near = gaps <= BURST_HOURS
    has_near = np.concatenate([near, [False]]) | np.concatenate([[False], near])
    starts = np.flatnonzero(np.concatenate([[True], ~near]))
    sizes = np.diff(np.concatenate([starts, [len(hours)]]))
    # What remains of an exponential gap after BURST_HOURS is exponential again.
    between = gaps[~near] - BURST_HOURS
    if len(between) < 3:
        between = np.array([trace.mtbf_hours])  # one burst: nothing to fit
    plain = fit_exponential(between)
    fits = [plain]
    if len(between) >= 3:
        fits = sorted(
            [fit_weibull(between), fit_gamma(between)], key=lambda fit: -fit.log_likelihood
        )
    gain = max(fits[0].log_likelihood - plain.log_likelihood, 0.0)
    daily = np.unique(hours // 24, return_counts=True)[1]  # days without a failure are left out
    days = hours[-1] // 24 + 1
    daily_mean = len(hours) / days
    return Findings(
        failures=len(hours),
        named_servers=trace.named_servers,
        mtbf_hours=trace.mtbf_hours,
        median_hours=float(np.median(gaps)),
        variation=float(gaps.std() / gaps.mean()),
        near_share=float(has_near.mean()),
        near_share_if_exponential=-math.expm1(-2 * BURST_HOURS / trace.mtbf_hours),
        daily_dispersion=float((daily**2).sum() / days / daily_mean - daily_mean),
        burst_sizes=tuple(map(int, sizes)),
        fits=tuple(fits),
        # Twice the gain is chi-square with one degree of freedom, for one parameter more.
        exponential_p=math.erfc(math.sqrt(gain)),
    )
