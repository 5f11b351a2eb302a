"""Every training sample once per epoch, in an order that anybody can compute from a few numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data import order as order_module
from planaria.data.order import Order, permuted
from planaria.data.split import Split
from planaria.errors import ArgumentError
from planaria.kernels.types import Index


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few samples make many."""
    monkeypatch.setattr(order_module, "WINDOW", 64)
    monkeypatch.setattr(order_module, "BLOCK", 10)


def read(order: Order, epoch: int) -> list[list[int]]:
    """The samples of each step of an epoch, by all ranks in turn."""
    first = epoch * order.steps_per_epoch + 1
    return [
        [int(i) for rank in range(order.trainers) for i in order.indices(step, rank)]
        for step in range(first, first + order.steps_per_epoch)
    ]


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 700),
    batch=st.integers(1, 90),
    trainers=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.1, 0.3, 1 / 3, 0.5]),
    sizes=st.none() | st.lists(st.integers(0, 60), min_size=1, max_size=20),
)
def test_each_epoch_has_each_training_sample_once_and_no_other(
    samples: int,
    batch: int,
    trainers: int,
    shuffle: bool,
    seed: int,
    share: float,
    sizes: list[int] | None,
) -> None:
    blocks = None
    if sizes is not None:
        samples = sum(sizes) or 1
        blocks = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    order = Order(
        samples,
        batch,
        trainers=trainers,
        epochs=2,
        shuffle=shuffle,
        seed=seed,
        validation_share=share,
        drop_last=False,
        blocks=blocks,
    )
    held_out = set(order.held_out(0, samples).tolist())
    assert len(held_out) == order.split.held_out
    assert abs(len(held_out) - samples * share) <= 1
    for epoch in range(2):
        steps = read(order, epoch)
        assert sorted(i for step in steps for i in step) == sorted(set(range(samples)) - held_out)
        assert all(len(step) == batch for step in steps[:-1])
    dropping = Order(
        samples, batch, shuffle=shuffle, seed=seed, validation_share=share, blocks=blocks
    )
    assert read(dropping, 0) == [step for step in read(order, 0) if len(step) == batch]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.integers(4, 60), st.booleans(), st.integers(0, 100))
def test_a_step_has_the_same_samples_whatever_the_number_of_trainers(
    samples: int, batch: int, shuffle: bool, seed: int
) -> None:
    def steps(trainers: int) -> list[list[int]]:
        order = Order(
            samples,
            batch,
            trainers=trainers,
            shuffle=shuffle,
            seed=seed,
            validation_share=0.1,
            drop_last=False,
        )
        return read(order, 0)

    assert steps(1) == steps(2) == steps(4)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def shuffled(seed: int) -> Order:
        return Order(500, 50, epochs=2, shuffle=True, seed=seed)

    assert read(shuffled(1), 0) == read(shuffled(1), 0)
    assert read(shuffled(1), 0) != read(shuffled(1), 1)
    assert read(shuffled(1), 0) != read(shuffled(2), 0)
    plain = Order(500, 50, epochs=2)
    assert read(plain, 0) == read(plain, 1)  # control
    assert plain.indices(1, 0) == range(50)


def test_shuffled_batches_stay_in_the_blocks_of_their_window() -> None:
    """Or every batch would decode the whole file."""
    order = Order(6400, 32, shuffle=True, blocks=np.arange(0, 6400, 16))
    blocks = [{i // 16 for i in step} for step in read(order, 0)]
    assert max(len(found) for found in blocks) <= 4  # a window has 64 samples
    assert len(set.union(*blocks[:2])) > 1
    visits = [found for step in blocks for found in step]
    assert max(visits.count(block) for block in set(visits)) <= 2  # 64 / 32 batches per window


def test_a_window_has_two_blocks_at_least() -> None:
    order = Order(3000, 1000, shuffle=True, blocks=np.arange(0, 3000, 500))
    assert all(len({i // 500 for i in step}) == 2 for step in read(order, 0))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_keyed_permutation_is_one(size: int, key: int) -> None:
    found = permuted(np.arange(size), size, np.array([key], np.uint64))
    assert np.array_equal(np.sort(found), np.arange(size))


def test_a_keyed_permutation_mixes() -> None:
    """Neighbours end far apart: a third of the range on average, as in random orders."""
    size = 10_000
    found = permuted(np.arange(size), size, np.array([7], np.uint64))
    assert abs(np.abs(np.diff(found)).mean() / size - 1 / 3) < 0.02
    assert (found == np.arange(size)).sum() < 10


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(1, 500_000), st.integers(0, 9))
def test_what_is_held_out_depends_on_the_sample_and_the_seed_alone(
    samples: int, millionths: int, seed: int
) -> None:
    def held_out(count: int) -> Index:
        split = Split(count, millionths / 10**6, seed)
        return split.held_out_sample(np.arange(split.held_out))

    short, long = held_out(samples), held_out(10 * samples)
    assert np.array_equal(short, long[: len(short)])


def test_training_samples_before_a_sample_are_counted() -> None:
    split = Split(1000, 0.07, 3)
    trained = split.training_sample(np.arange(split.training))
    wanted = np.searchsorted(trained, np.arange(1001))
    assert np.array_equal(split.training_before(np.arange(1001)), wanted)


def test_other_seeds_hold_out_other_samples() -> None:
    one, other = (Split(10_000, 0.1, seed).held_out_sample(np.arange(1000)) for seed in (1, 2))
    assert 50 < len(np.intersect1d(one, other)) < 200  # a tenth, by chance


def test_an_order_of_many_samples_needs_no_memory_for_them() -> None:
    order = Order(
        10**12, 4096, shuffle=True, validation_share=0.01, blocks=np.arange(0, 10**12, 10**8)
    )
    found = np.asarray(order.indices(10**8, 0))
    assert len(np.unique(found)) == 4096
    assert found.min() >= 0
    assert found.max() < 10**12


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch": 0}, "must be 1 or more"),
        ({"validation_share": 0.6}, "must be 0 to 0.5"),
        ({"samples": -1}, "samples must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, float], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Order(**{"samples": 10, "batch": 2, **arguments})  # type: ignore[arg-type]


def test_there_are_no_steps_behind_the_last() -> None:
    order = Order(10, 3, epochs=2)
    assert (order.steps, order.epoch(3), order.epoch(4)) == (6, 0, 1)
    for step in (0, 7):
        with pytest.raises(ArgumentError, match="they are 1 to 6"):
            order.indices(step, 0)
    with pytest.raises(ArgumentError, match="ranks from 0 to trainers - 1"):
        order.indices(6, 5)
