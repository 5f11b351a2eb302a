"""Rolling back: what a job does when more is lost than its survivors can make good."""

from __future__ import annotations

from dataclasses import dataclass, field

from planaria.strategies import Strategy

MOST_BARREN = 4  # so many times in a row may all be lost without one step that was not done before


@dataclass
class RollBackMachine:
    """Decides where all start again. start: the step that the processes started from."""

    strategy: Strategy
    start: int
    barren: int = 0
    furthest: int = field(init=False)

    def __post_init__(self) -> None:
        self.furthest = self.start

    def on_lost(self, step: int, newest: int | None) -> int | None:
        """The step to start again from; None if the job must stop.

        step: how far the lost processes came. newest: the newest checkpoint of this job, if any.
        """
        self.barren = self.barren + 1 if step <= self.furthest else 0
        self.furthest = max(self.furthest, step)
        if self.barren >= MOST_BARREN:
            return None
        # Processes that have not done a step have lost nothing: they may start once more.
        back = self.start if step <= self.start else self.strategy.back_to(newest)
        if back is not None:
            self.start = back
        return back
