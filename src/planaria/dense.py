"""The dense state: opaque bytes that some members keep, and gradients that all trainers sum.

Nobody looks inside the state. Every trainer has it as of its last two steps, and where trainers are
fewer than r + 1, the servers of the first places keep copies as well: so there are r + 1 of them.

The gradient is one vector of floats. It is cut into as many parts as there are trainers; each rank
sums one part, in rank order, and gives it to the others. So a trainer sends the vector about twice,
however many trainers there are, and the bits do not depend on who sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria.kernels.checks import array, require
from planaria.kernels.types import Bytes, Floats

KEEP = 2  # steps of which everybody who has the dense state keeps it


def keepers(parity: int, trainers: int) -> int:
    """How many servers must keep the dense state, beside so many trainers."""
    return max(parity + 1 - trainers, 0)


def part_of(parameters: int, part: int, parts: int) -> slice:
    """Where a part lies in the vector."""
    return slice(parameters * part // parts, parameters * (part + 1) // parts)


def sum_in_rank_order(gradients: Sequence[Floats]) -> Floats:
    """The sum over ranks, a new float32[n]: the first contribution, plus the second, and so on.

    A float sum depends on its order, so the order is that of the ranks. Slices of gradients sum to
    slices of the sum.
    """
    require(len(gradients) > 0, "no rank contributed a gradient; give at least one rank samples")
    for rank, gradient in enumerate(gradients):
        array(f"gradient of rank {rank}", gradient, np.float32, 1, shape=gradients[0].shape)
    total = gradients[0].copy()
    for gradient in gradients[1:]:
        total += gradient
    return total


class DenseCopies:
    """The dense state as of the last steps. The bytes belong to it and are never written again."""

    def __init__(self) -> None:
        self.states: dict[int, Bytes] = {}

    def __bool__(self) -> bool:
        return bool(self.states)

    @property
    def step(self) -> int:
        """The last one; 0 where there is none."""
        return max(self.states) if self.states else 0

    def put(self, step: int, state: Bytes) -> None:
        self.states[step] = state
        for old in [other for other in self.states if other <= step - KEEP]:
            del self.states[old]

    def as_of(self, step: int) -> Bytes | None:
        return self.states.get(step)
