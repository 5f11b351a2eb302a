"""Sums of dense gradients in parts: the bits of a plain sum in rank order, whatever comes when."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.dense import KEEP, part_of, sum_in_rank_order
from planaria.kernels.types import Floats
from planaria.trainer.reducing import Reduction

Delivery = Callable[[], None]


def gradients_of(ranks: int, parameters: int, seed: int) -> list[Floats]:
    """Of many magnitudes, so that the order of a sum shows."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-6, 6, (ranks, parameters))
    return list((rng.normal(size=(ranks, parameters)) * scales).astype(np.float32))


def reduced(gradients: list[Floats], draw: random.Random, repeated: float) -> list[Reduction]:
    """All ranks of one step, with messages in any order, some of them twice."""
    ranks = [Reduction(len(gradients)) for _ in gradients]
    under_way: list[Delivery] = []

    def send(delivery: Delivery) -> None:
        under_way.extend([delivery] * (1 + (draw.random() < repeated)))

    def arrived(to: int) -> None:
        total = ranks[to].sum_part(1, to)
        if total is not None:
            for peer in set(range(len(ranks))) - {to}:
                send(lambda peer=peer, total=total: summed(peer, to, total))  # type: ignore[misc]
        ranks[to].gather(1)

    def contributed(to: int, rank: int, gradient: Floats) -> None:
        ranks[to].on_gradient(1, rank, gradient)
        arrived(to)

    def summed(to: int, part: int, gradient: Floats) -> None:
        ranks[to].on_sum(1, part, gradient)
        arrived(to)

    for rank, gradient in enumerate(gradients):
        ranks[rank].give(1, gradient)
        for to, part in ranks[rank].contributions(1):
            send(lambda to=to, rank=rank, part=part: contributed(to, rank, part))  # type: ignore[misc]
    while under_way:
        under_way.pop(draw.randrange(len(under_way)))()
    return ranks


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 7), st.integers(0, 40), st.integers(0, 2**32), st.floats(0, 1))
def test_parts_sum_to_the_sum_in_rank_order(
    ranks: int, parameters: int, seed: int, repeated: float
) -> None:
    gradients = gradients_of(ranks, parameters, seed)
    expected = sum_in_rank_order(gradients).tobytes()
    for reduction in reduced(gradients, random.Random(seed), repeated):
        assert reduction.sums[1].tobytes() == expected
        given_on = [total for _, total in reduction.parts(1)]
        assert np.concatenate(given_on).tobytes() == expected


def test_another_order_has_other_bits() -> None:
    """A control of the test above."""
    gradients = gradients_of(3, 40, 0)
    assert sum_in_rank_order(gradients).tobytes() != sum_in_rank_order(gradients[::-1]).tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_rank_sends_its_gradient_about_twice_however_many_there_are(ranks: int) -> None:
    """Parts for others, and then the part that it has summed to all of them."""
    parameters = 1000
    own = Reduction(ranks)
    own.give(1, np.ones(parameters, np.float32))
    sent = sum(len(part) for rank, part in own.contributions(1) if rank != 0)
    summed = part_of(parameters, 0, ranks)
    sent += (ranks - 1) * (summed.stop - summed.start)
    assert sent <= 2 * parameters


def test_a_new_view_forgets_what_others_gave_and_keeps_sums_and_its_own() -> None:
    one, other = gradients_of(2, 6, 0)
    reduction = Reduction(2)
    reduction.give(1, one)
    first, second = (part_of(6, part, 2) for part in range(2))
    reduction.on_gradient(1, 0, one[first])
    reduction.on_gradient(1, 1, other[first])
    before = reduction.sum_part(1, 0)
    assert before is not None
    assert reduction.sum_part(1, 0) is None  # it was summed already
    assert reduction.own_part(1, 0) is before
    reduction.start_over()
    assert reduction.own_part(1, 0) is None
    assert reduction.progress(1) == (0, 0)
    reduction.on_sum(1, 1, (one + other)[second])
    assert not reduction.gather(1)
    reduction.on_sum(1, 0, before)
    assert reduction.gather(1)
    reduction.start_over()
    np.testing.assert_array_equal(reduction.sums[1], one + other)
    assert reduction.own[1] is one


def test_sums_are_kept_by_step() -> None:
    reduction = Reduction(1)
    for step in range(1, 6):
        reduction.give(step, np.full(2, step, np.float32))
        reduction.on_gradient(step, 0, reduction.own[step])
        assert reduction.sum_part(step, 0) is not None
        assert reduction.gather(step)
        assert not reduction.gather(step)
    assert sorted(reduction.own) == sorted(reduction.sums) == [6 - KEEP, 5]


def test_what_no_rank_sends_is_left_alone() -> None:
    reduction = Reduction(2)
    reduction.on_gradient(1, 2, np.ones(1, np.float32))
    reduction.on_gradient(1, -1, np.ones(1, np.float32))
    reduction.on_sum(1, 7, np.ones(1, np.float32))
    assert reduction.progress(1) == (0, 0)
