"""Rolling back: what a job does when more is lost than its survivors can make good."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.strategies import Strategy

MOST_BARREN = 2  # so often may a set of processes be lost before it has done a single step


@dataclass
class RollBackMachine:
    """Decides where all start again. start: the step that the processes started from."""

    strategy: Strategy
    start: int
    barren: int = 0

    def on_lost(self, step: int, newest: int | None) -> int | None:
        """The step to start again from; None if the job must stop.

        step: how far the lost processes came. newest: the newest checkpoint of this job, if any.
        """
        self.barren = self.barren + 1 if step <= self.start else 0
        if self.barren >= MOST_BARREN:
            return None
        # Processes that have not done a step have lost nothing: they may start once more.
        back = self.start if step <= self.start else self.strategy.back_to(newest)
        if back is not None:
            self.start = back
        return back
