"""Telling something until it is heard, over a network that may lose it.

A `Teller` numbers what a process tells and sends it again until the other side has heard it; a
`Listener` passes each on once, in order. Neither has a clock or a socket.
"""

from __future__ import annotations

from collections import OrderedDict

from planaria.wire.control import Heard, Tell, Told

AGAIN_S = 1.0
AGAIN_AT_ONCE = 100
MOST_UNHEARD = 10_000  # beyond that the oldest are forgotten: nobody has listened for long


class Teller:
    """What a process has told and nobody has heard yet."""

    def __init__(self) -> None:
        self._number = 0
        self._unheard: OrderedDict[int, tuple[Tell, float]] = OrderedDict()  # and when it was sent

    def tell(self, what: Told, now: float) -> Tell:
        """The message to send now."""
        self._number += 1
        message = Tell(number=self._number, what=what)
        self._unheard[self._number] = (message, now)
        if len(self._unheard) > MOST_UNHEARD:
            self._unheard.popitem(last=False)
        return message

    def heard(self, up_to: int) -> None:
        while self._unheard and next(iter(self._unheard)) <= up_to:
            self._unheard.popitem(last=False)

    @property
    def unheard(self) -> int:
        return len(self._unheard)

    def due(self, now: float) -> list[Tell]:
        """What to send again."""
        late = [n for n, (_, sent) in self._unheard.items() if now - sent >= AGAIN_S][
            :AGAIN_AT_ONCE
        ]
        for number in late:
            self._unheard[number] = (self._unheard[number][0], now)
        return [self._unheard[number][0] for number in late]


class Listener:
    """What one process tells, each once and in order."""

    def __init__(self) -> None:
        self._up_to = 0
        self._early: dict[int, Told] = {}

    def receive(self, message: Tell) -> list[Told]:
        """What can be passed on now."""
        if message.number > self._up_to:
            self._early[message.number] = message.what
        if len(self._early) >= MOST_UNHEARD:  # the teller has forgotten what is missing
            self._up_to = min(self._early) - 1
        found: list[Told] = []
        while self._up_to + 1 in self._early:
            self._up_to += 1
            found.append(self._early.pop(self._up_to))
        return found

    def heard(self) -> Heard:
        return Heard(number=self._up_to)
