"""When a checkpoint is full and when it is a difference."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.checkpoints import POLICIES, Policy, Saved, SavePlan, plan_next
from planaria.errors import ArgumentError

FULL = 1000


def run(policy: Policy, sizes: list[int]) -> list[Saved]:
    """A job whose i-th difference after a baseline has sizes[i] bytes."""
    history: list[Saved] = []
    since_baseline = 0
    for step in range(12):
        plan = plan_next(policy, history)
        since_baseline = 0 if plan.full else since_baseline + 1
        size = FULL if plan.full else sizes[min(since_baseline, len(sizes)) - 1]
        history.append(Saved(step, size, plan.base))
    return history


def baselines(history: list[Saved]) -> list[int]:
    return [saved.step for saved in history if not saved.base]


def test_the_first_checkpoint_is_full() -> None:
    assert {plan_next(policy, []) for policy in POLICIES} == {SavePlan()}
    assert plan_next("one-shot", [Saved(4, 100, (3,))]) == SavePlan()  # its baseline is not known
    with pytest.raises(ArgumentError, match="one-shot, consecutive"):
        plan_next("twice", [])  # type: ignore[arg-type]


def test_full_is_always_full() -> None:
    assert baselines(run("full", [1])) == list(range(12))


def test_one_shot_differs_from_its_baseline_until_a_difference_is_as_large() -> None:
    history = run("one-shot", [100, 200, 300, 1000])
    assert baselines(history) == [0, 5, 10]
    assert [saved.base for saved in history[1:5]] == [(0,)] * 4
    assert baselines(run("one-shot", [999])) == [0]


def test_consecutive_differs_from_the_one_before_and_needs_them_all() -> None:
    history = run("consecutive", [300])
    assert baselines(history) == [0, 5, 10]
    assert [saved.base for saved in history[1:5]] == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert plan_next("consecutive", history[:4]).since == 3


def test_intermittent_follows_the_published_rule() -> None:
    # 1 + S_1 + ... + S_i <= (i + 1) * S_i: of equal differences none ever asks for a baseline,
    # because going on is always cheaper.
    assert baselines(run("intermittent", [500])) == [0]
    # Worked by hand: 0.25, 0.4, 0.5, 0.6: 1.25 > 0.5, 1.65 > 1.2, 2.15 > 2.0, 2.75 <= 3.0.
    history = run("intermittent", [250, 400, 500, 600, 700])
    assert baselines(history) == [0, 5, 10]
    assert [saved.base for saved in history[1:5]] == [(0,)] * 4


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(POLICIES), st.lists(st.integers(1, 1200), min_size=1, max_size=12))
def test_a_plan_always_rests_on_what_is_there(policy: Policy, sizes: list[int]) -> None:
    seen: dict[int, Saved] = {}
    for saved in run(policy, sizes):
        for number, base in enumerate(saved.base):
            assert seen[base].base == saved.base[:number]
        seen[saved.step] = saved
