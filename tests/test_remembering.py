"""What a coordinator on another machine must remember, and what goes wrong if a rule is broken."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from planaria.cluster.files import JobFiles
from planaria.config import Config
from planaria.control.acting import Kill, Start
from planaria.control.children import Ended
from planaria.control.remembering import (
    AGAIN_S,
    ANSWER_S,
    REPLACED,
    Answered,
    Asked,
    Question,
    Remembering,
)
from planaria.control.supervising import END_S, SupervisorMachine
from planaria.coordinator.state import first_state
from planaria.errors import ClusterError
from planaria.simulator.control import ControlWorld
from planaria.simulator.control_campaigns import run_control_seed
from planaria.wire.control import (
    ClaimEpoch,
    CoordinatorState,
    EpochClaimed,
    Finished,
    Listening,
    SaveState,
    StateSaved,
)

SEARCHED = range(200)  # by a control, until one fails
KINDS = ("kill", "kill coordinator", "cut coordinator", "sleep")


def state(epoch: int, n: int = 1) -> CoordinatorState:
    return CoordinatorState(epoch, n, first_state(epoch, ["server-0"], ["trainer-0"]).install)


def claimed(found: Answered) -> EpochClaimed:
    assert isinstance(found, EpochClaimed)
    return found


# ---------------------------------------------------------------------------- the supervisor's


def test_a_claim_that_is_asked_for_again_is_the_same(tmp_path: Path) -> None:
    remembering = Remembering(JobFiles(tmp_path))
    for _ in range(3):
        found = claimed(remembering.answer(ClaimEpoch(owner="one"), current=True))
        assert (found.epoch, found.state, found.refused) == (1, None, "")
    assert claimed(remembering.answer(ClaimEpoch(owner="two"), current=True)).epoch == 2


def test_what_was_saved_is_there_for_the_next_one_wherever_that_is(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    remembering = Remembering(files)
    remembering.answer(ClaimEpoch(owner="one"), current=True)
    remembering.answer(SaveState(owner="one", number=1, state=state(1, n=7)), current=True)
    found = claimed(remembering.answer(ClaimEpoch(owner="two"), current=True))
    assert (found.epoch, found.state) == (2, state(1, n=7))
    assert (files.claim("beside"), files.load()) == (3, state(1, n=7))
    late = remembering.answer(SaveState(owner="two", number=1, state=state(2)), current=True)
    assert "epoch 3 has replaced" in late.refused


def test_a_state_that_comes_late_does_not_undo_a_later_one(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    remembering = Remembering(files)
    remembering.answer(ClaimEpoch(owner="one"), current=True)
    for number in (1, 2, 1):
        asked = SaveState(owner="one", number=number, state=state(1, n=number))
        answer = remembering.answer(asked, current=True)
        assert answer == StateSaved(owner="one", number=number)
    assert files.load() == state(1, n=2)


def test_who_was_replaced_gets_nothing_and_changes_nothing(tmp_path: Path) -> None:
    """Its claim would be above that of the coordinator which has replaced it."""
    files = JobFiles(tmp_path)
    remembering = Remembering(files)
    remembering.answer(ClaimEpoch(owner="one"), current=True)
    asked: list[Asked] = [
        ClaimEpoch(owner="zombie"),
        SaveState(owner="one", number=1, state=state(1)),
    ]
    for one in asked:
        assert remembering.answer(one, current=False).refused == REPLACED
    assert (files.load(), files.claim("next")) == (None, 2)


def test_a_disk_that_fails_is_a_refusal_and_not_the_supervisors_end(tmp_path: Path) -> None:
    gone = Remembering(JobFiles(tmp_path / "removed"))
    assert "No such file" in gone.answer(ClaimEpoch(owner="one"), current=True).refused


# ---------------------------------------------------------------------------- the coordinator's


def test_a_question_is_asked_until_its_own_answer_comes_but_not_for_ever() -> None:
    question = Question(SaveState(owner="one", number=2, state=state(1)), 100.0)
    assert question.due(100.0)
    assert not question.due(100.0 + AGAIN_S / 2)
    assert question.due(100.0 + AGAIN_S)
    for other in (
        EpochClaimed(owner="one", epoch=1),
        StateSaved(owner="one", number=1),
        StateSaved(owner="two", number=2),
    ):
        question.receive(other)
        assert question.answer is None
    question.receive(StateSaved(owner="one", number=2))
    assert question.answer == StateSaved(owner="one", number=2)
    with pytest.raises(ClusterError, match="has not answered"):
        Question(ClaimEpoch(owner="one"), 0.0).due(ANSWER_S + 0.1)


# ---------------------------------------------------------------------------- replacing it


def test_the_next_coordinator_does_not_wait_for_the_end_of_one_whose_host_is_gone() -> None:
    machine = SupervisorMachine(Config.from_dict({"servers": 3, "trainers": 1}), 0, 0.0)
    machine.receive("coordinator-0", Listening(role="coordinator", address="there"), 0.0)
    machine.take()
    killed_at, started_at = 0.0, 0.0
    for tenth in range(1, 100):
        machine.tick(tenth / 10)
        for action in machine.take():
            match action:
                case Kill(member="coordinator-0"):
                    killed_at = tenth / 10
                case Start(role="coordinator"):
                    started_at = tenth / 10
    assert killed_at > 0
    assert END_S < started_at - killed_at < END_S + 0.3
    assert [one.who for one in machine.failures] == ["coordinator"]
    machine.receive("coordinator-0", Finished(failure=None), 10.0)  # it was only cut off
    assert machine.verdict is None
    machine.on_exit("coordinator-0", Ended(-signal.SIGKILL), 10.0)
    assert (machine.coordinator, len(machine.failures)) == ("coordinator-1", 1)


# ---------------------------------------------------------------------------- controls


class SpeaksFirst(Question):
    """What is to be saved is said before there is an answer."""

    def __init__(self, asked: Asked, now: float) -> None:
        super().__init__(asked, now)
        if isinstance(asked, SaveState):
            self.answer = StateSaved(owner=asked.owner, number=asked.number)


class ClaimsAgain(Remembering):
    """A claim that is asked for again is another one."""

    def answer(self, asked: Asked, *, current: bool) -> Answered:
        if isinstance(asked, ClaimEpoch):
            self._owner = ""
        return super().answer(asked, current=current)


CONTROLS: list[dict[str, Any]] = [
    {"question_class": SpeaksFirst},
    {"remembering_class": ClaimsAgain},
]


@pytest.mark.parametrize(
    "broken", CONTROLS, ids=[next(iter(c.values())).__name__ for c in CONTROLS]
)
def test_a_broken_rule_is_found(broken: dict[str, Any]) -> None:
    world = type("BrokenWorld", (ControlWorld,), broken)
    for seed in SEARCHED:
        if run_control_seed(seed, world, kinds=KINDS):
            assert run_control_seed(seed, kinds=KINDS) is None
            return
    pytest.fail("no schedule fails without this rule")
