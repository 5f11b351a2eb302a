"""Dense gradients on their way to their sums: a reduce-scatter and an all-gather, without I/O.

A rank sends every other one the part that this one sums, and each gives its summed part to all. A
sum is kept for as long as somebody may have to be given it: a trainer that was replaced, or one
that was slower. Whoever has it gives all of it; nobody sums again what somebody has summed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planaria.dense import KEEP, part_of, sum_in_rank_order
from planaria.errors import StateError
from planaria.kernels.types import Floats


class Reduction:
    """The gradients of the last steps: a trainer's own, what came of others, and the sums."""

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.own: dict[int, Floats] = {}
        self.sums: dict[int, Floats] = {}
        self._came: dict[int, dict[int, Floats]] = {}  # step -> rank: of the part summed here
        self._parts: dict[int, dict[int, Floats]] = {}  # step -> part: summed

    def progress(self, step: int) -> tuple[int, int]:
        """Changes whenever something of this step comes."""
        return len(self._came.get(step, ())), len(self._parts.get(step, ()))

    def give(self, step: int, gradient: Floats) -> None:
        """This trainer's own. Kept like everything here: written by nobody from now on."""
        self.own[step] = gradient
        for kept in (self.own, self.sums):
            for old in [other for other in kept if other <= step - KEEP]:
                del kept[old]

    def start_over(self) -> None:
        """A new view: what others gave is forgotten, and sent again by those who live."""
        self._came.clear()
        self._parts.clear()

    def contributions(self, step: int) -> Iterator[tuple[int, Floats]]:
        """What each rank is to sum of this trainer's gradient."""
        gradient = self.own[step]
        for rank in range(self.trainers):
            yield rank, gradient[part_of(len(gradient), rank, self.trainers)]

    def parts(self, step: int) -> Iterator[tuple[int, Floats]]:
        """The sum, as whoever lacks it is given it."""
        total = self.sums[step]
        for part in range(self.trainers):
            yield part, total[part_of(len(total), part, self.trainers)]

    def on_gradient(self, step: int, rank: int, gradient: Floats) -> None:
        if step not in self.sums and 0 <= rank < self.trainers:
            self._came.setdefault(step, {})[rank] = gradient

    def on_sum(self, step: int, part: int, gradient: Floats) -> None:
        if step not in self.sums and 0 <= part < self.trainers:
            self._parts.setdefault(step, {})[part] = gradient

    def sum_part(self, step: int, rank: int) -> Floats | None:
        """The part that this rank sums, as soon as all have contributed; None later as well."""
        came = self._came.get(step, {})
        if len(came) < self.trainers or rank in self._parts.get(step, ()):
            return None
        if len({gradient.shape for gradient in came.values()}) > 1:
            raise StateError(
                f"ranks give dense gradients of different sizes in step {step}: all must train the "
                "same parameters, with buffers of the same shapes; freeze and unfreeze on all "
                "ranks alike, by job.step >= N rather than =="
            )
        total = sum_in_rank_order([came[other] for other in range(self.trainers)])
        self._parts.setdefault(step, {})[rank] = total
        return total

    def own_part(self, step: int, rank: int) -> Floats | None:
        """The same, where it was summed before."""
        return self._parts.get(step, {}).get(rank)

    def gather(self, step: int) -> bool:
        """Whether the sum is there now, and was not before."""
        parts = self._parts.get(step, {})
        if step in self.sums or step not in self.own or len(parts) < self.trainers:
            return False
        self.sums[step] = np.concatenate([parts[part] for part in range(self.trainers)])
        self._came.pop(step, None)
        self._parts.pop(step, None)
        return True
