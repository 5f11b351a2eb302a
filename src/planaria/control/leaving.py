"""Scripts leave their loops together, or those that go on would wait for the others for ever."""

from __future__ import annotations

from planaria.wire.control import LeftLoop
from planaria.wire.messages import Member

# A loop that an exception leaves is left as by a break; then its process ends within so long, and
# the one that replaces it has left nothing.
APART_S = 2.0
TOGETHER = (
    "all ranks must leave their loops at the same step: decide by job.step, or by something that "
    "is equal everywhere"
)


class Leaving:
    """Who has left, and who goes on."""

    def __init__(self, start: int) -> None:
        """start: the step that all trainers begin after."""
        self._start = start
        self._left: dict[Member, LeftLoop] = {}
        self._furthest: tuple[Member, int] = ("", start)  # a trainer that nobody is ahead of
        self._apart_at: float | None = None  # since when they are

    def on_left(self, trainer: Member, told: LeftLoop) -> None:
        self._left[trainer] = told

    def on_step(self, trainer: Member, step: int) -> None:
        """A trainer has computed this step, or waits for others in it."""
        if step >= self._furthest[1]:
            self._furthest = (trainer, step)

    def on_gone(self, trainer: Member) -> None:
        """Whoever replaces it will say so again."""
        self._left.pop(trainer, None)
        if self._furthest[0] == trainer:
            self._furthest = ("", self._start)

    def tick(self, now: float) -> str | None:
        """What is wrong for so long that it stays so, if anything."""
        wrong = self._wrong()
        if wrong is None:
            self._apart_at = None
        elif self._apart_at is None:
            self._apart_at = now
        elif now - self._apart_at >= APART_S:
            return wrong
        return None

    def _wrong(self) -> str | None:
        if not self._left:
            return None
        first, *others = self._left.values()
        for other in others:
            if other.step != first.step:
                return (
                    f"rank {first.rank} has left its loop after step {first.step}, and rank "
                    f"{other.rank} after step {other.step}; {TOGETHER}"
                )
        trainer, step = self._furthest
        if step <= first.step:
            return None
        return (
            f"{trainer} is in step {step}, but rank {first.rank} has left its loop after step "
            f"{first.step}; {TOGETHER}"
        )
