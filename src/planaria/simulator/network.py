"""How long messages take in a schedule, and which do not arrive."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from planaria.wire.messages import Member

BURST_DROP = 0.9


@dataclass(frozen=True)
class Network:
    """How long messages take, and about how long a step then takes when none is lost."""

    delays: tuple[tuple[float, float], ...]
    """(cumulative probability, mean of an exponential distribution in s)"""
    step_s: float
    echo_s: float = 0.0  # if set: so late on average is the second copy of a message

    def mean_s(self, kind: float) -> float:
        """Of the messages that `kind`, from 0 to below 1, stands for."""
        for below, mean_s in self.delays[:-1]:
            if kind < below:
                return mean_s
        return self.delays[-1][1]


NETWORKS = {
    "even": Network(((1.0, 0.002),), 0.04),
    "uneven": Network(((0.6, 0.002), (0.9, 0.02), (1.0, 0.1)), 0.25),
    "ragged": Network(((0.8, 0.001), (0.97, 0.03), (1.0, 0.5)), 0.22),
    "echoing": Network(((0.95, 0.001), (1.0, 0.05)), 0.1, echo_s=0.3),
}


@dataclass(frozen=True)
class Cut:
    """Nothing gets out of, or into, the inside; or neither."""

    until: float
    inside: frozenset[Member]
    out: bool = True
    into: bool = True

    def stops(self, sender: Member, to: Member) -> bool:
        from_inside, to_inside = sender in self.inside, to in self.inside
        return (self.out and from_inside and not to_inside) or (
            self.into and to_inside and not from_inside
        )


class Links:
    """The network between all processes. The supervisor's pipes are no part of it."""

    def __init__(self, network: Network, drop: float, duplicate: float) -> None:
        self.network = network
        self.drop = drop
        self.duplicate = duplicate
        self.cuts: list[Cut] = []
        self.burst_until = 0.0

    def delays(self, draw: random.Random, now: float) -> list[float]:
        """Of each copy of a message that is sent now; none if it is lost."""
        drop = BURST_DROP if now < self.burst_until else self.drop
        if drop and draw.random() < drop:
            return []
        mean_s = self.network.mean_s(draw.random())
        delays = [-math.log(1.0 - draw.random()) * mean_s]
        if self.duplicate and draw.random() < self.duplicate:
            mean_s = self.network.echo_s or self.network.mean_s(draw.random())
            delays.append(-math.log(1.0 - draw.random()) * mean_s)
        return delays

    def passes(self, sender: Member, to: Member, now: float) -> bool:
        if not self.cuts:
            return True
        self.cuts = [cut for cut in self.cuts if cut.until > now]
        return not any(cut.stops(sender, to) for cut in self.cuts)
