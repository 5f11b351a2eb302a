"""When to save, if that goes by time: every so many seconds, or as often as Young's rule says.

All processes must save at the same step, and only the supervisor looks at the clock. So it names a
step that is a little ahead, and tells everybody. Who learns of it too late says so; then the next
one is further ahead.

Young: what saves cost and what a failure makes one do again are together least at an interval of
sqrt(2 * duration of a save * mean time between failures).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from itertools import pairwise

from planaria.config import Config

MARGIN_S = 0.3  # how far ahead a step is named, at least
MARGIN_STEPS = 2
MAX_MARGIN = 1024  # times as far, after so many have come too late
STEPS_SEEN = 8  # from which the time of a step is told
STALLED = 10  # steps' time without a step: something has failed, and nobody knows for how long
LEAST_INTERVAL = 5  # times the duration of a save
TOLD_CHANGE = 0.2  # by which the interval changes before that is told
GIVEN_UP_S = 600.0  # after which a save that nobody has spoken of holds up no other


class Ahead:
    """A step that everybody can still be told of before it comes."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=16)

    def on_step(self, step: int, at: float) -> None:
        self._steps.append((step, at))

    @property
    def last(self) -> int:
        """The last step that is done, as far as is known."""
        return self._steps[-1][0] if self._steps else 0

    def next(self, now: float, margin: int = 1) -> int | None:
        """None while the time of a step is not known, or no step comes."""
        if len(self._steps) < STEPS_SEEN:
            return None
        step_s = statistics.median(b - a for (_, a), (_, b) in pairwise(self._steps))
        step, at = self._steps[-1]
        if now - at > max(STALLED * step_s, 1.0):
            return None
        ahead_s = margin * MARGIN_S + now - at
        return step + max(margin * MARGIN_STEPS, math.ceil(ahead_s / max(step_s, 1e-4)))


class Pace:
    """The clock of a job's saves. It goes on when all roll back. Times are of one clock."""

    def __init__(self, config: Config, observe: Callable[[str], None]) -> None:
        self.interval_s = 0.0
        """Between two saves; 0 for the first one of `auto`, which tells what a save costs."""
        self._auto = config.checkpoint.every_s == "auto"
        if isinstance(config.checkpoint.every_s, float):
            self.interval_s = config.checkpoint.every_s
            if config.saves_priorities:
                self.interval_s *= config.cpr.rho
        self._mtbf_s = config.failures.mtbf_s
        self._last_step = config.steps
        self.tell = observe
        self._began: float | None = None
        self._failures = 0
        self._save_s: float | None = None
        self._told_s: float | None = None
        self._margin = 1
        self._saved_at = 0.0  # when the last save was ordered
        self._ordered: int | None = None  # a step that is to be saved and is not closed yet
        self._ahead = Ahead()

    def on_step(self, step: int, at: float) -> None:
        if self._began is None:
            self._began = self._saved_at = at
        self._ahead.on_step(step, at)

    def on_lost(self, processes: int, now: float) -> None:
        """So many have failed and were replaced."""
        self._failures += processes
        self._choose(now)

    def on_published(self, seconds: float, now: float) -> None:
        self._ordered = None
        self._save_s = seconds
        self._choose(now)

    def on_given_up(self, late: bool, now: float) -> None:
        """late: somebody was told too late."""
        self._ordered = None
        if late:
            self._margin = min(2 * self._margin, MAX_MARGIN)
            self._saved_at = -math.inf  # again, at once
        else:  # it has cost something, too: whatever is amiss, do not try it all the time
            self._save_s = max(self._save_s or 0.0, now - self._saved_at)
        self._choose(now)

    def restart(self, now: float) -> None:
        """All roll back."""
        self._failures += 1
        self._ordered = None
        self._saved_at = now
        self._ahead = Ahead()

    def next(self, now: float) -> int | None:
        """The step to be saved next, once: if it is time for that."""
        if self._ordered is not None and now - self._saved_at < GIVEN_UP_S:
            return None
        if now - self._saved_at < self.interval_s:
            return None
        wanted = self._ahead.next(now, self._margin)
        if wanted is None or wanted > self._last_step:
            return None
        self._saved_at, self._ordered = now, wanted
        return wanted

    def _choose(self, now: float) -> None:
        """The interval of `auto`, from what is known by now."""
        if not self._auto or self._save_s is None or self._began is None:
            return
        mtbf_s = self._mtbf_s or (now - self._began) / (self._failures + 1)
        young_s = math.sqrt(2 * self._save_s * mtbf_s)
        self.interval_s = max(young_s, LEAST_INTERVAL * self._save_s)
        if self._told_s is None or abs(self.interval_s / self._told_s - 1) > TOLD_CHANGE:
            self._told_s = self.interval_s
            self.tell(
                f"a checkpoint every {self.interval_s:.1f} s from here on: one takes "
                f"{self._save_s:.2f} s, and {mtbf_s:.0f} s lie between failures"
            )
