"""The job's folder, as a coordinator on another machine has it: the supervisor is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from planaria.cluster.line import Line
from planaria.cluster.transport import Transport
from planaria.control.remembering import Answered, Asked, Question
from planaria.errors import ClusterError
from planaria.wire.codec import Envelope
from planaria.wire.control import (
    ClaimEpoch,
    CoordinatorState,
    EpochClaimed,
    Heard,
    SaveState,
    StateSaved,
)

POLL_MS = 20
MOST_WAITING = 10_000  # messages; what matters of the others is sent again


class Distant:
    """As JobFiles, for claims and states. Every call returns when the supervisor has answered."""

    def __init__(self, transport: Transport, line: Line, beat: Callable[[float], None]) -> None:
        """beat: the heart goes on meanwhile, so that nobody takes this for a hung process."""
        self.waiting: list[Envelope] = []  # what came meanwhile, for whoever takes it
        self._transport = transport
        self._line = line
        self._beat = beat
        self._state: CoordinatorState | None = None
        self._saves = 0

    def claim(self, owner: str) -> int:
        answer = self._ask(ClaimEpoch(owner=owner))
        assert isinstance(answer, EpochClaimed)
        self._state = answer.state
        return answer.epoch

    def load(self) -> CoordinatorState | None:
        """As of the claim, or later."""
        return self._state

    def save(self, state: CoordinatorState, owner: str) -> None:
        self._saves += 1
        self._ask(SaveState(owner=owner, number=self._saves, state=state))

    def _ask(self, asked: Asked) -> Answered:
        question = Question(asked, time.monotonic())
        while question.answer is None:
            now = time.monotonic()
            if question.due(now):
                self._line.say(asked)
            self._beat(now)
            self._transport.poll(POLL_MS)
            for envelope in self._transport.receive():
                match envelope.message:
                    case EpochClaimed() | StateSaved():
                        question.receive(envelope.message)
                    case Heard():
                        self._line.heard(envelope.message.number)
                    case _ if len(self.waiting) < MOST_WAITING:
                        self.waiting.append(envelope)
        if question.answer.refused:
            raise ClusterError(question.answer.refused)
        return question.answer
