"""What a supervisor knows of one of its processes."""

from __future__ import annotations

from dataclasses import dataclass

# What a script works at, before it says anything itself.
FIRST_BATCH = "up to its first batch"
IDLE_S = 300.0  # a script may do nothing at all for so long before its first batch


@dataclass
class Child:
    role: str
    number: int | None
    heard_at: float  # when it last said anything, or was started
    listening: bool = False
    ready: bool = False
    placed: bool = False  # whether a view names it, or it began the job
    condemned: str = ""  # why it was killed, if it was
    obeyed: int = 0
    sent: tuple[int, float] = (0, 0.0)  # the orders that it was sent last, and when
    work: tuple[object, int] = ("", -1)  # what it does, and how much of it was done

    @property
    def nears_its_first_batch(self) -> bool:
        """Whether it is a script that runs, and cannot say anything itself so far."""
        return self.work[0] == FIRST_BATCH and not self.listening and not self.condemned
