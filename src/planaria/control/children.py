"""What a supervisor knows of one of its processes, and how that has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planaria.wire.messages import Member

# What a script works at, before it says anything itself.
FIRST_BATCH = "up to its first batch"
IDLE_S = 300.0  # a script may do nothing at all for so long before its first batch


WAITS = "waits for room"  # as its state

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


@dataclass(frozen=True)
class Failure:
    """A process that had a part in the job is lost to it. who: "server:2", "coordinator"."""

    who: str
    member: Member
    role: str
    number: int | None
    step: int
    reason: str


@dataclass
class Child:
    role: str
    number: int | None
    heard_at: float  # when it last said anything, or was started
    listening: bool = False
    ready_at: float | None = None
    placed: bool = False  # whether a view names it, or it began the job
    waits: bool = False  # for room: it was not even started
    condemned: str = ""  # why it was killed, if it was
    condemned_at: float = 0.0
    retired_at: float | None = None  # when the job had no more use for it
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
        if self.retired_at is not None:
            return "leaves"
        if self.waits:
            return WAITS
        ready = self.listening if self.role == "coordinator" else self.ready
        return "ready" if ready else "starts"

    @property
    def starts(self) -> bool:
        """Whether it will be there to take a place, if all goes well."""
        return not (self.placed or self.ready or self.condemned)

    @property
    def bides(self) -> bool:
        """Whether it says nothing for long, and is all right."""
        return self.waits or self.nears_its_first_batch

    @property
    def nears_its_first_batch(self) -> bool:
        """Whether it is a script that runs, and cannot say anything itself so far."""
        return self.work[0] == FIRST_BATCH and not self.listening and not self.condemned
