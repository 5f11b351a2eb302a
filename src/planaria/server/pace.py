"""How fast a replacement rebuilds what nobody waits for.

Rebuilding takes cores, memory and network from training, on whatever machines the mates are. How
much that hurts shows in one figure that every server sees: how long a step takes, against how long
it took before the loss. So a paced sweep works for a share of the time, which shrinks when steps
take longer than training can bear, and grows as long as they do not. Where they take long although
the sweep hardly works, something else is to blame, and that is how long a step takes now. Records
that only move are in no danger: then the share begins small, grows slowly, and yields more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

PRIORITIES = ("training", "balanced", "redundancy")
BLAMELESS = 3  # slow steps at the least share, before another cause is looked for
NEWEST = 0.5  # the weight of the newest step: single ones scatter


class Manner(NamedTuple):
    """How it treats training."""

    kept_speed: float  # of training, while it is paced for
    first_share: float
    least_share: float
    grows: float
    shrinks: float
    believes: float  # of a step that was faster than ever: it may be chance


URGENT = Manner(0.9, 1 / 2, 1 / 16, 1.5, 0.6, believes=1 / 4)  # something is lost
CALM = Manner(0.95, 1 / 32, 1 / 64, 1.2, 0.5, believes=1.0)


def is_paced(priority: str, r: int, lost: int) -> bool:
    """Whether training comes before redundancy. lost: places that are not whole.

    Balanced: as long as one more loss can be borne. When none can, nothing is as urgent.
    """
    return priority == "training" or (priority == "balanced" and lost < r)


class Pace:
    """Of one sweep. step_s: how long a step took before; 0: as fast as it can go."""

    def __init__(self, step_s: float, manner: Manner = URGENT) -> None:
        self._manner = manner
        self.share = manner.first_share if step_s else 1.0
        self._calm_s = step_s or math.inf  # how long a step would take without the sweep
        self._took_s = 0.0  # how long they take, smoothed
        self._blameless = 0  # slow steps in a row, at the least share
        self._step: tuple[int, float] | None = None  # the last one, and since when
        self._works_since: float | None = None
        self._now = self._rests_until = 0.0

    def look(self, now: float, step: int, *, works: bool) -> None:
        """Time passes. works: something of the sweep is under way."""
        self._now = now
        if works and self._works_since is None:
            self._works_since = now
        elif not works and self._works_since is not None:
            self._rests_until = now + (now - self._works_since) * (1 / self.share - 1)
            self._works_since = None
        if self._step is None:
            self._step = (step, now)
        elif step > self._step[0]:
            self._stepped((now - self._step[1]) / (step - self._step[0]))
            self._step = (step, now)

    def _stepped(self, took_s: float) -> None:
        self._took_s += (took_s - self._took_s) * NEWEST if self._took_s else took_s
        kept_speed, _, least, grows, shrinks, believes = self._manner
        slow = self._took_s > self._calm_s / kept_speed
        self._blameless = self._blameless + 1 if slow and self.share == least else 0
        if self._blameless >= BLAMELESS:
            self._calm_s = self._took_s
        elif self._took_s < self._calm_s < math.inf:
            self._calm_s += (self._took_s - self._calm_s) * believes
        self.share = min(max(self.share * (shrinks if slow else grows), least), 1.0)

    def pieces(self, most: int) -> int:
        """How many may be under way now. One at a time, as long as it must rest between them."""
        return 0 if self._now < self._rests_until else most if self.share == 1.0 else 1

    @property
    def rests_s(self) -> float:
        """For how long nothing will be asked for."""
        return max(self._rests_until - self._now, 0.0)
