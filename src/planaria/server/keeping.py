"""The copies of the dense state on a server of the first places, where trainers are too few.

They are taken one after the other, beginning with that of the committed step. So a keeper that has
any has that of the committed step, from which a new trainer starts.
"""

from __future__ import annotations

from planaria.dense import DenseCopies
from planaria.kernels.types import Bytes


class KeptCopies(DenseCopies):
    due = False  # whether this server is to have them

    def ask_for(self, *, due: bool) -> None:
        """From now on. Whoever need not have any is not held up by what it has."""
        self.due = due
        if not due:
            self.states.clear()

    @property
    def complete(self) -> bool:
        """Whether there is a copy, if there should be one."""
        return bool(self) or not self.due

    def protects(self, step: int, committed: int) -> int:
        """Up to which step this server can vote, which holds all else up to `step`."""
        return min(step, max(self.step, committed)) if self.due else step

    def wanted(self, step: int, committed: int) -> int | None:
        """The next one that is lacking, of a server that has applied `step`."""
        lacks = self._next(committed)
        return lacks if self.due and lacks <= step else None

    def take(self, step: int, state: Bytes, committed: int) -> bool:
        """Whether this was the next one, and is kept."""
        if not self.due or step != self._next(committed):
            return False
        self.put(step, state)
        return True

    def _next(self, committed: int) -> int:
        return self.step + 1 if self else committed
