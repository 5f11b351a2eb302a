"""What a coordinator on another machine must remember: the supervisor does it for it.

A coordinator beside the supervisor claims its epoch and saves its states in the job's folder. One
on another machine has no such folder. It asks until it is answered, and does nothing else
meanwhile, as if its disk were slow; the supervisor does in the folder what it would have done. So
all that holds for epochs, claims and states in one folder holds for both (see cluster/files.py).
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from planaria.errors import ClusterError
from planaria.wire.control import (
    ClaimEpoch,
    CoordinatorState,
    EpochClaimed,
    SaveState,
    StateSaved,
)

AGAIN_S = 0.25  # between two times that the same is asked
ANSWER_S = 30.0  # within which there must be an answer
REPLACED = "the supervisor has replaced this coordinator"

Asked: TypeAlias = ClaimEpoch | SaveState
Answered: TypeAlias = EpochClaimed | StateSaved


class Claims(Protocol):
    """The job's folder, as a coordinator uses it. What cannot be done is a ClusterError, or an
    OSError.
    """

    def claim(self, owner: str) -> int:
        """An epoch above all others, which is the owner's alone."""
        ...

    def load(self) -> CoordinatorState | None:
        """The newest state that was saved; after the claim."""
        ...

    def save(self, state: CoordinatorState, owner: str) -> None:
        """Refused when a later epoch was claimed."""
        ...


class Question:
    """The coordinator's side: one thing that it asks, until `answer` is there."""

    def __init__(self, asked: Asked, now: float) -> None:
        self.asked = asked
        self.answer: Answered | None = None
        self._began, self._sent = now, now - AGAIN_S

    def due(self, now: float) -> bool:
        """Whether it must be sent now. ClusterError: nobody has answered for too long."""
        if now - self._began > ANSWER_S:
            raise ClusterError(f"the supervisor has not answered for {ANSWER_S:.0f} s")
        if now - self._sent < AGAIN_S:
            return False
        self._sent = now
        return True

    def receive(self, answer: Answered) -> None:
        """It may be one that comes late, of an earlier question."""
        match self.asked, answer:
            case ClaimEpoch(owner=owner), EpochClaimed():
                fits = answer.owner == owner
            case SaveState(owner=owner, number=number), StateSaved():
                fits = (answer.owner, answer.number) == (owner, number)
            case _:
                fits = False
        if fits:
            self.answer = answer


class Remembering:
    """The supervisor's side. Whatever is asked again gets the same answer, and is done once."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._owner, self._epoch = "", 0
        self._number = 0  # of what this owner has saved

    def answer(self, asked: Asked, *, current: bool) -> Answered:
        """current: whether it comes from the one coordinator that the supervisor wants. Another
        must not claim an epoch above that one's.
        """
        refused = "" if current else REPLACED
        try:
            if not refused:
                return self._claim(asked) if isinstance(asked, ClaimEpoch) else self._save(asked)
        except (ClusterError, OSError) as error:
            refused = str(error)
        if isinstance(asked, ClaimEpoch):
            return EpochClaimed(owner=asked.owner, refused=refused)
        return StateSaved(owner=asked.owner, number=asked.number, refused=refused)

    def _claim(self, asked: ClaimEpoch) -> EpochClaimed:
        if asked.owner != self._owner:
            self._epoch = self._claims.claim(asked.owner)
            self._owner, self._number = asked.owner, 0
        return EpochClaimed(owner=asked.owner, epoch=self._epoch, state=self._claims.load())

    def _save(self, asked: SaveState) -> StateSaved:
        if asked.owner != self._owner or asked.number > self._number:
            self._claims.save(asked.state, asked.owner)
            self._number = asked.number
        # Else it was sent twice, and the first has arrived: what came after it stays.
        return StateSaved(owner=asked.owner, number=asked.number)
