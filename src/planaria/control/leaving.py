"""Scripts leave their loops together, or those that go on would wait for the others for ever."""

from __future__ import annotations

from planaria.wire.control import LeftLoop
from planaria.wire.messages import Member

TOGETHER = (
    "all ranks must leave their loops at the same step: decide by job.step, or by something that "
    "is equal everywhere"
)


class Leaving:
    """Who has left, and who goes on. Each method returns what is wrong with that, if anything."""

    def __init__(self, start: int) -> None:
        """start: the step that all trainers begin after."""
        self._left: LeftLoop | None = None
        self._furthest: tuple[Member, int] = ("", start)  # a trainer that nobody is ahead of

    def on_left(self, told: LeftLoop) -> str | None:
        first, self._left = self._left or told, told
        if first.step != told.step:
            return (
                f"rank {first.rank} has left its loop after step {first.step}, and rank "
                f"{told.rank} after step {told.step}; {TOGETHER}"
            )
        return self.on_step(*self._furthest)

    def on_step(self, trainer: Member, step: int) -> str | None:
        """A trainer has computed this step, or waits for others in it."""
        if step >= self._furthest[1]:
            self._furthest = (trainer, step)
        if self._left is None or step <= self._left.step:
            return None
        return (
            f"{trainer} is in step {step}, but rank {self._left.rank} has left its loop after step "
            f"{self._left.step}; {TOGETHER}"
        )
