"""Every sample once, whoever reads it and wherever they begin; batches as a DataLoader's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from planaria.data.samples import Samples
from planaria.data.synthetic import Synthetic
from planaria.errors import ArgumentError, DataError
from planaria.torch.batches import AHEAD_PER_WORKER, Batches

pytestmark = pytest.mark.torch


class Numbers:
    """A map-style dataset: sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index


class Rows:
    """A source of blocks, as files are."""

    def __init__(self, size: int, block: int = 7) -> None:
        self.samples = size
        self.blocks = np.arange(0, size, block)
        self.readers = 0

    def read(self, start: int, count: int) -> Samples:
        return self.take(range(start, min(start + count, self.samples)))

    def take(self, numbers: Any) -> Samples:
        assert self.readers == 0, "two threads read at once"
        self.readers += 1
        labels = np.asarray(numbers, np.float32)
        n = len(labels)
        found = Samples(
            labels, np.zeros((n, 1), np.float32), ("k",), np.arange(n), np.ones(n, np.int32)
        )
        self.readers -= 1
        return found


class Forever(Rows):
    samples: Any = None

    def __init__(self) -> None:
        self.readers = 0

    def read(self, start: int, count: int) -> Samples:
        return self.take(range(start, start + count))


def numbers(batch: Any) -> list[int]:
    return [int(i) for i in (batch.labels if isinstance(batch, Samples) else batch)]


def ranks(dataset: Any, batch_size: int, world_size: int, **options: Any) -> list[Batches]:
    return [
        Batches(dataset, batch_size, world_size=world_size, rank=rank, **options)
        for rank in range(world_size)
    ]


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 120),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
    source=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_each_epoch_has_each_sample_once(
    size: int, batch_size: int, world_size: int, shuffle: bool, source: bool, seed: int
) -> None:
    dataset = Rows(size) if source else Numbers(size)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "epochs": 2}
    everyone = ranks(dataset, batch_size, world_size, drop_last=False, **options)
    (steps,) = {one.steps for one in everyone}
    assert steps is not None
    read: list[list[int]] = [[], []]
    in_steps = []
    for step in range(1, steps + 1):
        parts = [numbers(one.batch(step)) for one in everyone]
        assert [len(part) for part in parts] == [one.size(step) for one in everyone]
        assert max(map(len, parts)) <= batch_size
        in_steps.append([i for part in parts for i in part])
        read[everyone[0].epoch_of(step)] += in_steps[-1]
    assert [sorted(epoch) for epoch in read] == [list(range(size))] * 2
    whole = [step for step in in_steps if len(step) == batch_size * world_size]
    if whole:
        dropping = ranks(dataset, batch_size, world_size, **options)
        found = zip(*dropping, strict=True)  # all ranks have as many steps
        assert [[i for part in parts for i in numbers(part)] for parts in found] == whole
    alone = Batches(dataset, batch_size * world_size, drop_last=False, **options)
    assert [numbers(batch) for batch in alone] == in_steps


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("dataset", [Numbers(50), Rows(50)])
def test_it_does_not_matter_where_one_begins(dataset: Any, workers: int) -> None:
    def made() -> Batches:
        return Batches(dataset, 4, epochs=2, shuffle=True, workers=workers, world_size=2, rank=1)

    every = [numbers(batch) for batch in made()]
    assert len(every) == made().steps == 12
    for step in range(1, 14):
        assert [numbers(batch) for batch in made().from_step(step)] == every[step - 1 :]
    assert [numbers(made().batch(step)) for step in (12, 3, 7)] == [every[11], every[2], every[6]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_step_has_the_same_samples_whatever_the_number_of_ranks(shuffle: bool) -> None:
    """Batches of two ranks, shared by three, and by one."""
    first = [Batches(Numbers(100), 10, shuffle=shuffle, world_size=2, rank=rank) for rank in (0, 1)]
    of_step = np.concatenate([batches.indices(3) for batches in first])
    for world_size in (3, 1):
        found = []
        for rank in range(world_size):
            batches = Batches(Numbers(100), 10, shuffle=shuffle, world_size=2)
            batches.take_seat(rank, world_size)
            found.append(batches.indices(3))
            assert batches.steps == first[0].steps
        assert np.array_equal(np.concatenate(found), of_step)
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    one, same, other = (
        [numbers(batch) for batch in Batches(Numbers(64), 8, epochs=2, shuffle=True, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert one == same != other
    assert one[:8] != one[8:]


def test_a_large_dataset_is_mixed_as_a_whole() -> None:
    found = numbers(Batches(Numbers(10**7), 1000, shuffle=True).indices(1))
    assert min(found) < 10**5
    assert max(found) > 99 * 10**5


class Pair(NamedTuple):
    left: Any
    right: Any


class Mixed(Numbers):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return {
            "number": index,
            "real": index / 2,
            "tensor": torch.full((2, 3), index),
            "array": np.full(2, index, np.float32),
            "text": str(index),
            "pair": Pair(index, (torch.tensor(index), "x")),
        }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Mixed(23), TensorDataset(torch.rand(23, 2), torch.ones(23))])
def test_batches_are_those_of_a_data_loader(dataset: Any, workers: int, drop_last: bool) -> None:
    ours = list(Batches(dataset, 5, drop_last=drop_last, workers=workers))
    assert equal(ours, list(DataLoader(dataset, 5, drop_last=drop_last)))


def test_a_collate_function_is_used() -> None:
    assert list(Batches(Numbers(6), 3, collate_fn=sum)) == [3, 12]
    assert list(Batches(Rows(6), 3, collate_fn=len)) == [3, 3]


def test_datasets_that_give_many_at_once_are_asked_so() -> None:
    class Many(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [100 + i for i in indices]

    assert numbers(Batches(Many(6), 3).batch(2)) == [103, 104, 105]


def test_a_rank_without_samples_gets_an_empty_batch_of_the_same_shape() -> None:
    last = ranks(Mixed(9), 4, 2, drop_last=False)[0]
    assert (last.steps, last.size(2)) == (2, 0)
    found = last.batch(2)
    assert found["tensor"].shape == (0, 2, 3)
    assert found["array"].dtype == torch.float32
    assert found["text"] == []
    assert (len(found["pair"].left), found["pair"].right[1]) == (0, [])
    rows = ranks(Rows(9), 4, 2, drop_last=False)[0].batch(2)
    assert len(rows) == 0
    summing = ranks(Numbers(9), 4, 2, drop_last=False, collate_fn=sum)[0]
    assert summing.batch(2) == 0
    with pytest.raises(DataError, match="collate_fn cannot make a batch of none"):
        ranks(Numbers(9), 4, 2, drop_last=False, collate_fn=max)[0].batch(2)


def test_samples_without_end_have_steps_without_end() -> None:
    both = ranks(Forever(), 3, 2, workers=2)
    assert both[0].steps is None
    assert numbers(both[1].batch(10**6)) == [5999997, 5999998, 5999999]
    iterator = both[0].from_step(2)
    assert [numbers(next(iterator)) for _ in range(2)] == [[6, 7, 8], [12, 13, 14]]
    iterator.close()
    synthetic = Batches(Synthetic([10, 20], seed=1), 4)
    assert len(next(iter(synthetic)).labels) == 4
    assert synthetic.epoch_of(10**9) == 0


# ------------------------------------------------------------------------------------ threads


def preparing() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("preparing")]


def test_as_many_steps_as_are_asked_for_over_as_many_epochs_as_it_takes() -> None:
    some = Batches(Numbers(10), 4, steps=5, shuffle=True, seed=3)
    epochs = Batches(Numbers(10), 4, epochs=3, shuffle=True, seed=3)
    assert (some.steps, epochs.steps) == (5, 6)
    assert [one.tolist() for one in some] == [one.tolist() for one in epochs][:5]
    assert some.epoch_of(5) == 2


def test_no_more_is_prepared_than_the_bound() -> None:
    asked: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return index

    iterator = Batches(Watched(1000), 1, workers=2).from_step(1)
    for taken in range(1, 20):
        next(iterator)
        assert max(asked) < taken + 2 * AHEAD_PER_WORKER
    iterator.close()
    assert not preparing()
    assert len(asked) < 19 + 2 * AHEAD_PER_WORKER + 1


def test_threads_end_with_their_iterator() -> None:
    batches = Batches(Numbers(100), 5, workers=3)
    list(batches)
    assert not preparing()
    for batch in batches:
        assert numbers(batch) == [0, 1, 2, 3, 4]
        assert preparing()
        break
    assert not preparing()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_is_raised_with_its_batch(workers: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 7:
                raise RuntimeError("sample 7 is rotten")
            return index

    iterator = Batches(Broken(20), 2, workers=workers).from_step(1)
    assert [numbers(next(iterator)) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(RuntimeError, match="sample 7 is rotten"):
        next(iterator)
    assert not preparing()


# ----------------------------------------------------------------------------------- refusals


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class InOrder:
    samples = 100

    def read(self, start: int, count: int) -> list[int]:
        return list(range(start, min(start + count, 50)))


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Numbers(7), {"world_size": 2}, "has 7 samples, but a step needs 8: 2 trainers with batch"),
        (Numbers(0), {"drop_last": False}, "has 0 samples, but a step needs 1"),
        (Stream(), {}, "a Stream cannot be read from any place on"),
        ({1, 2}, {}, "a set cannot be read"),
        (Forever(), {"shuffle": True}, "samples that never end"),
        (Forever(), {"epochs": 2}, "samples that never end"),
        (InOrder(), {"shuffle": True}, r"needs take\(numbers\)"),
        (Numbers(9), {"rank": 1}, "rank must be 0 to"),
        (Numbers(9), {"epochs": 0}, "epochs and steps must be 1 or more"),
        (Numbers(9), {"workers": -1}, "workers 0 or more"),
        (Numbers(9), {"seed": -1}, "seed must be"),
    ],
)
def test_what_cannot_be_is_refused(dataset: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=says):
        Batches(dataset, 4, **options)


def test_steps_that_are_not_there_are_refused() -> None:
    batches = Batches(Numbers(10), 5)
    for step in (0, 3):
        with pytest.raises(ArgumentError, match="they are 1 to 2"):
            batches.batch(step)
    with pytest.raises(ArgumentError, match="they are 1 to 2"):
        batches.from_step(4)
    assert list(batches.from_step(3)) == []


def test_a_source_that_ends_too_early_is_found_out() -> None:
    batches = Batches(InOrder(), 20)
    assert len(batches.batch(2)) == 20
    with pytest.raises(DataError, match="20 samples were asked for, the first being 40, and 10 ca"):
        batches.batch(3)
