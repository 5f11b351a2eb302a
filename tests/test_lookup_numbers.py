"""Late answers: a lookup has a number that no other lookup of its step has, whenever it is made."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from planaria.dense import DenseCopies
from planaria.layout import Layout
from planaria.torch.job import Job
from planaria.torch.step import Step
from planaria.trainer.job import TrainerJob
from planaria.trainer.machine import TrainerMachine
from planaria.wire.messages import Answer, Install, View

pytestmark = pytest.mark.torch

VIEW = View(1, 1)


def answer(part: int, value: float) -> Answer:
    weights = [np.full((1, 2), value, np.float32)]
    return Answer(view=VIEW, place=0, step=1, part=part, protected=0, whole=True, weights=weights)


@pytest.mark.parametrize(("second", "found"), [(2, 7.0), (1, 3.0)])
def test_an_answer_that_comes_twice_is_no_answer_to_the_next_lookup(
    second: int, found: float
) -> None:
    """The second case is the control: with one number for both, it passes for one."""
    dense = DenseCopies()
    dense.put(0, np.zeros(1, np.uint8))
    job = TrainerJob(Layout.fresh(1, 0), rows=[8], dims=[2])
    machine = TrainerMachine("trainer-0", job, dense, fresh_rank=0)
    install = Install(
        view=VIEW, committed=0, servers=["server-0"], trainers=["trainer-0"], rebuilding=[]
    )
    machine.receive("coordinator", install)
    machine.ask(1, 1, {0: [np.array([3])]})
    machine.receive("server-0", answer(1, 3.0))
    assert machine.rows(1, 1) is not None
    machine.ask(1, second, {0: [np.array([7])]})
    machine.receive("server-0", answer(1, 3.0))  # it was asked for again, and came again
    if second != 1:
        assert machine.rows(1, second) is None
        machine.receive("server-0", answer(second, 7.0))
    rows = machine.rows(1, second)
    assert rows is not None
    assert rows[0][0][0, 0] == found


class Asked:
    """A client and a router in one, which remember what was asked for."""

    rows: Any = ()
    layout: Any = None

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []

    def ask(self, step: int, part: int, rows: Any, layout: Any, exact: bool) -> None:
        self.keys.append((step, part))

    def route(self, rows: Any, layout: Any) -> Any:
        return self

    def gather(self, found: Any) -> Any:
        return found


def test_lookups_after_the_gradients_and_those_of_the_next_step_have_different_numbers() -> None:
    """An evaluation in the middle of a loop had the numbers that the next step begins with."""
    asked: Any = Asked()
    asked.rows = lambda step, part: []
    job: Any = object.__new__(Job)
    job._client = job._router = asked
    job._parts, job._has_left = count(1), False
    sparse: Any = None
    for step in (4, 5, 6):
        job._now = Step(step, sparse)
        job._lookup([])
        job._now.pushed = True
        job._lookup([])
        job._lookup([])
    steps = [step for step, _ in asked.keys]
    assert steps == [4, 5, 5, 5, 6, 6, 6, 7, 7]
    assert len({*asked.keys}) == len(asked.keys)
