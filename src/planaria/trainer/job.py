"""What every trainer of a job must agree on, and what one of them gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planaria.layout import Layout
from planaria.trainer.bounds import USUAL_RULE, BoundRule
from planaria.trainer.rerouting import FloatsByPlace, RowsByPlace
from planaria.wire.coding import EXACTLY, Coding
from planaria.wire.rounding import EXACT, rounded


@dataclass(frozen=True)
class TrainerJob:
    layout: Layout  # that the job begins with
    rows: Sequence[int]  # of the arenas
    dims: Sequence[int]
    retry_s: float = 1.0
    coding: Coding = EXACTLY  # of rows, on their way here
    bound_rule: BoundRule = USUAL_RULE  # of those that are within a bound
    rounding: str = EXACT  # of what is pushed of rows


@dataclass(frozen=True)
class Gradients:
    """What a step pushes. layout: whose places it is named by, if not that of the beginning."""

    rows: RowsByPlace
    gradients: FloatsByPlace
    lrs: Sequence[float]  # of the arenas
    layout: Layout | None = None

    def rounded(self, kind: str) -> Gradients:
        if kind == EXACT:
            return self
        gradients = {
            place: [rounded(one, kind) for one in arenas]
            for place, arenas in self.gradients.items()
        }
        return replace(self, gradients=gradients)
