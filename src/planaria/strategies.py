"""How a job survives failures: one object per strategy, which the rest of Planaria asks.

none         nothing is kept: a lost server ends the job
erasure      parity on the other servers; beyond what it bears, the last checkpoint
checkpoint   at a failure all roll back to the last checkpoint, to the beginning if need be
cpr          a lost server alone goes back to its last save; the others go on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planaria.formulas import full_recovery_overhead, partial_recovery_overhead

Overhead = Callable[..., float]
"""Of save, interval, repair and mtbf, all in one unit of time: a share of the job's length."""


@dataclass(frozen=True)
class Strategy:
    name: str
    keeps_parity: bool = False
    rolls_back: bool = False
    """Whether all go back to a checkpoint where more is lost than the survivors can make good."""
    from_nothing: bool = False
    """Whether they go back to the beginning where there is no checkpoint yet."""
    partial: bool = False
    """Whether a lost server alone goes back to its last save."""
    needs_saves: bool = False
    """Whether it is pointless without saves now and then."""
    overhead: Overhead | None = None
    """What its saves and failures cost by CPR's formulas, where those have a word on it."""

    def parity(self, wanted: int) -> int:
        """Parity records per stripe, of `wanted` that the configuration asks for."""
        return wanted if self.keeps_parity else 0

    def back_to(self, newest: int | None) -> int | None:
        """The step that all go back to, when the newest checkpoint is of that step; None: stop."""
        if not self.rolls_back:
            return None
        if newest is None:
            return 0 if self.from_nothing else None
        return newest


NONE = Strategy("none")
ERASURE = Strategy("erasure", keeps_parity=True, rolls_back=True)
CHECKPOINT = Strategy(
    "checkpoint",
    rolls_back=True,
    from_nothing=True,
    needs_saves=True,
    overhead=full_recovery_overhead,
)
CPR = Strategy(
    "cpr",
    rolls_back=True,
    from_nothing=True,
    partial=True,
    needs_saves=True,
    overhead=partial_recovery_overhead,
)

STRATEGIES = {one.name: one for one in (ERASURE, CHECKPOINT, CPR, NONE)}
