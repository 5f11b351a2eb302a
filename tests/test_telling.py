"""What is told until it is heard comes once and in order, whatever the network does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.wire import telling
from planaria.wire.control import Heard, Refused, Tell, Told
from planaria.wire.telling import AGAIN_AT_ONCE, AGAIN_S, Listener, Teller


class Line:
    """Two ends and a network that does as it is told with what is on its way."""

    def __init__(self) -> None:
        self.teller = Teller()
        self.listener = Listener()
        self.now = 0.0
        self.sent = 0
        self.passed_on: list[Told] = []
        self.under_way: list[Tell | Heard] = []

    def tell(self) -> None:
        what = Refused(what=str(self.sent))
        self.sent += 1
        self.under_way.append(self.teller.tell(what, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.under_way += self.teller.due(self.now)

    def arrive(self, at: int, twice: bool) -> None:
        message = self.under_way[at] if twice else self.under_way.pop(at)
        if isinstance(message, Heard):
            self.teller.heard(message.number)
        else:
            self.passed_on += self.listener.receive(message)
            self.under_way.append(self.listener.heard())

    def settle(self) -> None:
        """From here on nothing is lost."""
        for _ in range(1 + self.sent // AGAIN_AT_ONCE):
            self.wait(2 * AGAIN_S)
            while self.under_way:
                self.arrive(0, twice=False)

    @property
    def expected(self) -> list[Told]:
        return [Refused(what=str(number)) for number in range(self.sent)]


doings = st.lists(
    st.tuples(
        st.sampled_from(["tell", "tell", "wait", "arrive", "arrive twice", "lose"]),
        st.integers(0, 1000),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(doings)
def test_what_is_told_is_passed_on_once_and_in_order_whatever_the_network_does(
    steps: list[tuple[str, int]],
) -> None:
    line = Line()
    for what, number in steps:
        if what == "tell":
            line.tell()
        elif what == "wait":
            line.wait(number / 400)
        elif line.under_way:
            at = number % len(line.under_way)
            if what == "lose":
                del line.under_way[at]
            else:
                line.arrive(at, twice=what == "arrive twice")
        assert line.passed_on == line.expected[: len(line.passed_on)]
    line.settle()
    assert line.passed_on == line.expected
    assert line.teller.unheard == 0


def test_what_is_not_heard_is_sent_again_at_intervals_and_some_at_a_time() -> None:
    line = Line()
    for _ in range(AGAIN_AT_ONCE + 5):
        line.tell()
    assert line.teller.due(AGAIN_S / 2) == []
    first, second = line.teller.due(AGAIN_S), line.teller.due(AGAIN_S)
    assert (len(first), len(second)) == (AGAIN_AT_ONCE, 5)
    assert line.teller.due(1.5 * AGAIN_S) == []
    line.teller.heard(AGAIN_AT_ONCE + 3)
    assert [message.number for message in line.teller.due(2 * AGAIN_S)] == [
        AGAIN_AT_ONCE + 4,
        AGAIN_AT_ONCE + 5,
    ]


@pytest.mark.parametrize("told", [5, 6, 7, 50])
def test_what_was_forgotten_because_nobody_listened_does_not_hold_up_the_rest(
    monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    monkeypatch.setattr(telling, "MOST_UNHEARD", 5)
    line = Line()
    for _ in range(told):
        line.tell()
    line.under_way.clear()
    assert line.teller.unheard == 5
    line.settle()
    assert line.passed_on == line.expected[-5:]
    assert line.teller.unheard == 0
    line.tell()
    line.settle()
    assert line.passed_on == line.expected[-6:]
