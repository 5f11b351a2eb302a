"""Failures to come: drawn from a distribution, or a trace replayed.

A model draws the failures of `hours` hours from a seed. More hours with the same seed give the same
failures and later ones, so that a simulation can ask for more when a job takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planaria.planning.fits import BURST_HOURS, Findings, Fit
from planaria.planning.traces import Trace

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

# A job does not start at the moment of a failure: the time before it starts is drawn and dropped.
BEFORE_GAPS = 20


@dataclass(frozen=True)
class Failures:
    """Failures in order of time; one of several servers stands there once for each."""

    until_hours: float
    hours: Floats  # [F], below until_hours
    places: Places  # [F], the server that fails
    luck: Floats  # [F], 0 to 1: decides what a simulation leaves to chance

    @cached_property
    def since_same_place(self) -> Floats:
        """Hours since the same server failed before, [F]; infinite if it did not."""
        order = np.lexsort((self.hours, self.places))
        gaps = np.where(np.diff(self.places[order]) == 0, np.diff(self.hours[order]), math.inf)
        since = np.full(len(order), math.inf)
        since[order[1:]] = gaps
        return since


class FailureModel(Protocol):
    def draw(self, seed: Sequence[int], hours: float, servers: int) -> Failures: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Renewal:
    """Events with independent gaps between them, each taking one server or several at once."""

    fit: Fit
    burst_sizes: tuple[int, ...] = (1,)  # one is taken at random for each event
    least_gap_hours: float = 0.0  # added to each gap
    kept: float = 1.0  # the share of an event's servers that are in this job

    def draw(self, seed: Sequence[int], hours: float, servers: int) -> Failures:
        gaps, sizes, kept, places, luck = (
            np.random.default_rng([*seed, stream]) for stream in range(5)
        )
        at = self._events(gaps, hours)
        size = np.asarray(self.burst_sizes, np.int64)[
            sizes.integers(len(self.burst_sizes), size=len(at))
        ]
        if self.kept < 1:
            size = kept.binomial(size, self.kept)
        size = np.minimum(size, servers)
        first = np.repeat(places.integers(servers, size=len(at)), size)
        within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        taken = (first + within) % servers  # neighbours: different servers without a search
        return Failures(hours, np.repeat(at, size), taken, luck.random(len(taken)))

    def _events(self, rng: np.random.Generator, hours: float) -> Floats:
        mean = self.fit.mean_hours + self.least_gap_hours
        before = 0.0 if self.fit.shape == 1 else BEFORE_GAPS * mean
        state = rng.bit_generator.state
        count = int(1.2 * (before + hours) / mean) + 50
        while True:
            rng.bit_generator.state = state
            at = np.cumsum(self._gaps(rng, count)) - before
            if at[-1] >= hours:
                return at[(at >= 0) & (at < hours)]
            count *= 2

    def _gaps(self, rng: np.random.Generator, count: int) -> Floats:
        shape, scale = self.fit.shape, self.fit.scale_hours
        if self.fit.family == "weibull":
            gaps = scale * rng.weibull(shape, count)
        elif self.fit.family == "gamma":
            gaps = rng.gamma(shape, scale, count)
        else:
            gaps = rng.exponential(scale, count)
        return gaps + self.least_gap_hours

    def describe(self) -> str:
        text = f"{self.fit.family} failures"
        if self.fit.family != "exponential":
            text += f" of shape {self.fit.shape:.2f}"
        return text + (", in bursts" if max(self.burst_sizes) > 1 else ", one by one")


@dataclass(frozen=True)
class Replay:
    """A trace again, begun at a random moment and repeated when it ends.

    A smaller job runs on servers picked at random from the trace's; a larger one on several such
    clusters, each with the trace begun at a moment of its own.
    """

    trace: Trace
    trace_servers: int  # of the cluster, those that never failed included
    lap_hours: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lap_hours", float(self.trace.hours[-1]) + self.trace.mtbf_hours)

    def draw(self, seed: Sequence[int], hours: float, servers: int) -> Failures:
        rng = np.random.default_rng([*seed, 0])
        copies = math.ceil(servers / self.trace_servers)
        place_of = rng.permutation(copies * self.trace_servers)
        begins = rng.random(copies) * self.lap_hours
        times, places = [], []
        for copy, begin in enumerate(begins):
            laps = np.arange(math.ceil((hours + begin) / self.lap_hours))
            at = (self.trace.hours + laps[:, None] * self.lap_hours - begin).ravel()
            place = np.tile(place_of[copy * self.trace_servers + self.trace.servers], len(laps))
            inside = (at >= 0) & (at < hours) & (place < servers)
            times.append(at[inside])
            places.append(place[inside])
        hit_at, place = np.concatenate(times), np.concatenate(places)
        order = np.argsort(hit_at, kind="stable")
        luck = np.random.default_rng([*seed, 1]).random(len(order))
        return Failures(hours, hit_at[order], place[order].astype(np.int64), luck)

    def describe(self) -> str:
        return f"the trace, replayed ({len(self.trace.hours):,} failures)"


def exponential(mtbf_hours: float) -> Renewal:
    """Failures as the formulas have them: exponential, one server each."""
    return Renewal(Fit("exponential", 1.0, mtbf_hours, 0.0))


def with_mean(family: str, shape: float, mean_hours: float) -> Fit:
    """The distribution of a family and shape whose mean is this."""
    per_scale = Fit(family, shape, 1.0, 0.0).mean_hours
    return Fit(family, shape, mean_hours / per_scale, 0.0)


def fitted(findings: Findings, family: str, trace_servers: int, servers: int) -> Renewal:
    """What was fitted to a trace, for a job of so many servers.

    Each server of a smaller job fails as often as one of the trace's, so it keeps some of the
    victims of each event; a larger job has more events.
    """
    fit = next((fit for fit in findings.fits if fit.family == family), findings.fit)
    if family == "exponential":
        fit = with_mean(family, 1.0, findings.fit.mean_hours)
    ratio = servers / trace_servers
    more = max(ratio, 1.0)
    fit = Fit(fit.family, fit.shape, fit.scale_hours / more, fit.log_likelihood)
    return Renewal(fit, findings.burst_sizes, BURST_HOURS / more, min(ratio, 1.0))
