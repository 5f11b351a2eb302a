"""What a supervisor knows of one of its processes, and how that has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a script works at, before it says anything itself.
FIRST_BATCH = "up to its first batch"
IDLE_S = 300.0  # a script may do nothing at all for so long before its first batch


EXIT_DONE = 0
EXIT_FAILED = 1  # with an exception, which is in the log
EXIT_ORPHAN = 5
EXIT_FENCED = 6
EXIT_REFUSED = 7  # for a reason that its last words tell the user


@dataclass(frozen=True)
class Ended:
    """How a process has ended: its exit code, negative for a signal, and its last words."""

    code: int
    last_words: str = ""

    @property
    def kind(self) -> Literal["error", "signal"]:
        return "signal" if self.code < 0 else "error"

    @property
    def reason(self) -> str:
        """In words, for a line and the report."""
        if self.code < 0:
            return self.last_words or f"killed by signal {-self.code}"
        words = f": {self.last_words}" if self.last_words else ""
        return f"ended with code {self.code}{words}"


@dataclass
class Child:
    role: str
    number: int | None
    heard_at: float  # when it last said anything, or was started
    listening: bool = False
    ready_at: float | None = None
    placed: bool = False  # whether a view names it, or it began the job
    condemned: str = ""  # why it was killed, if it was
    obeyed: int = 0
    sent: tuple[int, float] = (0, 0.0)  # the orders that it was sent last, and when
    work: tuple[object, int] = ("", -1)  # what it does, and how much of it was done

    @property
    def ready(self) -> bool:
        return self.ready_at is not None

    @property
    def state(self) -> str:
        """In a word, for whoever asks."""
        if self.condemned:
            return "is ended"
        ready = self.listening if self.role == "coordinator" else self.ready
        return "ready" if ready else "starts"

    @property
    def nears_its_first_batch(self) -> bool:
        """Whether it is a script that runs, and cannot say anything itself so far."""
        return self.work[0] == FIRST_BATCH and not self.listening and not self.condemned
