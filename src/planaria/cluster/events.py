"""The one stream of what happens to a job: displays, reports, faults on purpose and tests read it.

`at` is a reading of the supervisor's clock, taken when it heard of the event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from planaria.control.children import Failure
from planaria.wire.control import Told
from planaria.wire.messages import Member

if TYPE_CHECKING:
    from planaria.cluster.attempt import Attempt


@dataclass(frozen=True)
class Exited:
    role: str
    code: int


@dataclass(frozen=True)
class Struck:
    """Somebody killed or froze a process on purpose."""

    who: str
    number: int | None
    step: int
    how: str


@dataclass(frozen=True)
class Note:
    """A line for whoever watches."""

    line: str


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the job to end, from another terminal."""


@dataclass(frozen=True)
class RolledBack:
    from_step: int
    to_step: int
    why: str


@dataclass(frozen=True)
class JobEvent:
    at: float
    member: Member  # who told it or whom it is about; "" for the job as a whole
    what: Told | Failure | Exited | Struck | Note | StopAsked | RolledBack


class Observer(Protocol):
    def on_event(self, event: JobEvent, processes: Attempt) -> None: ...
    def on_tick(self, now: float, processes: Attempt) -> None: ...
    def pauses_after(self) -> int:
        """The step that the job must not go beyond until this changes; 0 if there is none."""
        ...


class Watcher:
    """An observer that does nothing yet; override what you need."""

    def on_event(self, event: JobEvent, processes: Attempt) -> None: ...
    def on_tick(self, now: float, processes: Attempt) -> None: ...

    def pauses_after(self) -> int:
        return 0
