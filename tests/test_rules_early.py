"""Early answers: rows of the next step come while gradients of this one leave; no bit differs.

As in test_rules.py: break a rule, and the simulator finds a schedule that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from broken_rules import Control, assert_found, broken

from planaria.dense import DenseCopies
from planaria.kernels.types import Floats, Index, Mask
from planaria.layout import Layout
from planaria.server.early import EarlyRows, LookupKey, Marks
from planaria.server.machine import ServerMachine
from planaria.simulator import ToyJob, World
from planaria.simulator.campaigns import run_seed, schedule
from planaria.simulator.driving import is_evaluated
from planaria.trainer.early import EarlyParts, Part, Shapes
from planaria.trainer.job import Gradients, TrainerJob
from planaria.trainer.machine import TrainerMachine
from planaria.wire.messages import Answer, Early, Install, Lookup, Member, Message, View

ON: dict[str, Any] = {"early_answers": True}
LOSSY: dict[str, Any] = {**ON, "steps": 8, "drop": 0.1, "duplicate": 0.2}
UNEVEN: dict[str, Any] = {**ON, "steps": 8, "trainers": 3, "network": "ragged"}


class SeesNoChange(EarlyRows):
    """Of the rows that were given early, those that the step has changed are given again: changed
    since then, that is, and not since the step for which the answer is.
    """

    def rest(self, key: LookupKey, lookup: Lookup) -> list[Mask]:
        self.changed.add(lookup.step - 1, [index[:0] for index in lookup.indices])
        return super().rest(key, lookup)


class ServerSeesNoChange(ServerMachine):
    def _take_place(self, place: int, blank_at: int | None, layout: Layout | None = None) -> None:
        super()._take_place(place, blank_at, layout)
        assert self.store
        self.early = SeesNoChange(self.store)


class Careless(EarlyParts):
    def complete(
        self, part: Part, place: int, answer: Answer, wanted: Shapes
    ) -> list[Floats] | None:
        nothing = Early(
            view=answer.view,
            place=place,
            step=answer.step,
            part=answer.part,
            which=[np.packbits(np.ones(count, np.bool_)) for count, _ in wanted],
            weights=[np.zeros(shape, np.float32) for shape in wanted],
        )
        if place not in self._begun.get(part, {}):
            self.put(part, place, nothing, wanted)
        return super().complete(part, place, answer, wanted)


class TakesHalfAnAnswer(TrainerMachine):
    """An answer that leaves out what came early is none without it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.arrivals.early = Careless()


CONTROLS: list[Control] = [
    ("what changed follows", broken(ServerSeesNoChange), 0, UNEVEN),
    ("half an answer", broken(TakesHalfAnAnswer), 0, LOSSY),
]


@pytest.mark.parametrize(
    ("_rule", "world", "seed", "campaign"), CONTROLS, ids=[c[0] for c in CONTROLS]
)
def test_a_broken_rule_of_early_answers_is_found(
    _rule: str, world: type[World], seed: int, campaign: dict[str, Any]
) -> None:
    assert_found(world, seed, campaign)


@pytest.mark.parametrize("campaign", [ON, LOSSY, UNEVEN], ids=["drawn", "lossy", "uneven"])
def test_early_answers_change_no_bit(campaign: dict[str, Any]) -> None:
    outcomes = [run_seed(seed, **campaign) for seed in range(15)]
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []


def test_campaigns_have_them_in_half_of_their_schedules() -> None:
    chosen = [schedule(seed).job.early_answers for seed in range(200)]
    assert 70 < sum(chosen) < 130


class Counted(World):
    """Counts the rows that come early, and the others."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.rows = {Early: 0, Answer: 0}
        super().__init__(*arguments, **named)

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if isinstance(message, Early | Answer):
            self.rows[type(message)] += sum(map(len, message.weights))


@pytest.mark.parametrize("on", [True, False])
def test_rows_come_early_and_hardly_any_twice(on: bool) -> None:
    calm: dict[str, Any] = {"count": 0, "drop": 0.0, "duplicate": 0.0, "steps": 12, "trainers": 2}
    worlds: list[Any] = [
        schedule(seed, early_answers=on, lossy=False, **calm).world(Counted).run()
        for seed in range(5)
    ]
    early, late = (sum(world.rows[kind] for world in worlds) for kind in (Early, Answer))
    wanted = sum(
        len(index) * (2 if step > 1 and is_evaluated(step - 1, rank) else 1)
        for world in worlds
        for (step, rank), batch in world.oracle.reference.batches.items()
        for rows in batch.ids.values()
        for index in rows
    )
    assert (early > wanted / 5) == on  # where the lookup arrives before the gradients
    assert wanted * 0.7 < early + late < wanted * 1.2


# ---------------------------------------------------------------- a trainer, message by message

FIRST, SECOND = View(1, 1), View(1, 2)
ROWS = {0: [np.arange(10), np.arange(3)]}
DIMS = [2, 4]


def masks(*marked: Sequence[int]) -> list[Mask]:
    which = [np.zeros(count, np.bool_) for count in (10, 3)]
    for mask, positions in zip(which, marked, strict=True):
        mask[list(positions)] = True
    return which


def of(kind: type[Any], value: float, which: list[Mask], view: View = FIRST, **more: Any) -> Any:
    weights = [
        np.full((np.count_nonzero(mask), dim), value, np.float32)
        for mask, dim in zip(which, DIMS, strict=True)
    ]
    bits = [np.packbits(mask) for mask in which]
    return kind(view=view, place=0, step=2, part=0, which=bits, weights=weights, **more)


def early(value: float, *marked: Sequence[int], view: View = FIRST) -> Early:
    message: Early = of(Early, value, masks(*marked), view)
    return message


def rest(value: float, *marked: Sequence[int], view: View = FIRST) -> Answer:
    message: Answer = of(Answer, value, masks(*marked), view, protected=1, whole=True)
    return message


class KeepsEarlyParts(TrainerMachine):
    """Rule 11: what was said in an earlier view is forgotten, early or not."""

    def on_install(self, old: Install | None, new: Install) -> None:
        kept = dict(self.arrivals.early._begun)
        super().on_install(old, new)
        self.arrivals.early._begun.update(kept)


def installed(trainer: TrainerMachine, view: View) -> list[Message]:
    install = Install(
        view=view, committed=0, servers=["server-0"], trainers=["trainer-0"], rebuilding=[]
    )
    return [message for _, message in trainer.receive("coordinator", install)]


def asking(kind: type[TrainerMachine] = TrainerMachine) -> TrainerMachine:
    """Its first step is over, and the rows of the second are asked for."""
    dense = DenseCopies()
    dense.put(0, np.zeros(4, np.uint8))
    trainer = kind("trainer-0", TrainerJob(Layout.fresh(1, 0), [8, 8], DIMS), dense, fresh_rank=0)
    installed(trainer, FIRST)
    trainer.ask(2, 0, ROWS)
    nothing = {0: [rows[:0] for rows in ROWS[0]]}
    gradients = {0: [np.zeros((0, dim), np.float32) for dim in DIMS]}
    sparse = Gradients(nothing, gradients, [0.1, 0.1])
    trainer.give_gradients(1, sparse, np.zeros(1, np.float32))
    assert Lookup in [type(message) for _, message in trainer.take_outbox()]
    return trainer


def found(trainer: TrainerMachine) -> list[list[float]] | None:
    rows = trainer.rows(2, 0)
    return None if rows is None else [weights[:, 0].tolist() for weights in rows[0]]


def test_both_halves_are_put_together_and_the_later_one_wins() -> None:
    trainer = asking()
    for _ in range(2):  # whatever comes twice
        trainer.receive("server-0", early(1.0, [0, 1, 2, 5], [0, 2]))
    assert found(trainer) is None
    for _ in range(2):
        trainer.receive("server-0", rest(2.0, [2, 3, 4, 6, 7, 8, 9], [1, 2]))
    assert found(trainer) == [[1, 1, 2, 2, 2, 1, 2, 2, 2, 2], [1, 2, 2]]


@pytest.mark.parametrize(
    "before", [None, early(1.0, [0], [])], ids=["nothing came", "a row is in neither"]
)
def test_what_is_not_whole_is_asked_for_again(before: Early | None) -> None:
    trainer = asking()
    if before:
        trainer.receive("server-0", before)
    sent = trainer.receive("server-0", rest(2.0, [2, 3, 4], [0, 1, 2]))
    assert [type(message) for _, message in sent] == [Lookup]
    assert (found(trainer), trainer.protected) == (None, [1])  # it is a vote all the same
    whole = rest(3.0, range(10), range(3))
    whole.which = []
    trainer.receive("server-0", whole)
    assert found(trainer) == [[3.0] * 10, [3.0] * 3]


@pytest.mark.parametrize(
    ("kind", "mixed"), [(TrainerMachine, False), (KeepsEarlyParts, True)], ids=["", "control"]
)
def test_early_rows_of_another_view_are_not_taken(kind: type[TrainerMachine], mixed: bool) -> None:
    """Under partial recovery a server's replacement has other rows."""
    trainer = asking(kind)
    trainer.receive("server-0", early(1.0, [0, 1], []))
    assert Lookup in map(type, installed(trainer, SECOND))
    sent = trainer.receive("server-0", rest(2.0, range(2, 10), range(3), view=SECOND))
    assert ([type(message) for _, message in sent] == [Lookup]) != mixed
    assert (found(trainer) is not None) == mixed


@pytest.mark.parametrize("kind", [early, rest])
def test_bits_and_rows_that_do_not_fit_are_ignored(kind: Any) -> None:
    trainer = asking()
    for spoil in ("which", "weights"):
        message = kind(1.0, range(10), range(3))
        setattr(message, spoil, [part[:1] for part in getattr(message, spoil)])
        trainer.receive("server-0", message)
        assert found(trainer) is None


# ---------------------------------------------------------------- servers


def test_marks_belong_to_one_step() -> None:
    marks, index = Marks([10, 4]), [np.array([1, 3, 9]), np.array([0], np.int64)]
    nothing: list[Index] = [np.array([3, 4]), np.array([], np.int64)]
    marks.add(5, index)
    marks.add(5, nothing)
    assert [mask.tolist() for mask in marks.among(index)] == [[True] * 3, [True]]
    marks.add(6, nothing)
    assert [mask.tolist() for mask in marks.among(index)] == [[False, True, False], [False]]


@pytest.mark.parametrize("on", [True, False])
def test_a_server_gives_early_once_what_can_be_given(on: bool) -> None:
    job = ToyJob(servers=3, k=1, r=1, trainers=1, early_answers=on)
    server = ServerMachine("server-2", job.server_job(1.0), fresh_place=2)
    install = Install(
        view=FIRST,
        committed=0,
        servers=[f"server-{place}" for place in range(3)],
        trainers=["trainer-0"],
        rebuilding=[],
    )
    server.receive("coordinator", install)
    lookup = Lookup(view=FIRST, rank=0, step=2, part=0, indices=[np.arange(3)])
    sent = [message for _, message in server.receive("trainer-0", lookup)]
    assert [type(message) for message in sent] == ([Early] if on else [])
    assert server.receive("trainer-0", lookup) == []
