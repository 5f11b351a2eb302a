"""Samples are what one would get by going through bags one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data.samples import Samples, concat
from planaria.errors import ArgumentError

KEYS = ("user", "genres", "city")
Bag = list[tuple[int, float]]  # rows and their weights


def pack(bags: list[list[Bag]], weighted: bool) -> Samples:
    """bags[sample][key]; sample n has label n and the numbers n, -n."""
    n = len(bags)
    in_order = [bags[sample][key] for key in range(len(KEYS)) for sample in range(n)]
    flat = [item for bag in in_order for item in bag]
    numbers = np.arange(n, dtype=np.float32)
    return Samples(
        numbers,
        np.stack([numbers, -numbers], 1),
        KEYS,
        np.array([row for row, _ in flat], np.int64),
        np.array([len(bag) for bag in in_order], np.int32),
        np.array([weight for _, weight in flat], np.float32) if weighted else None,
    )


def unpack(samples: Samples) -> list[tuple[float, list[float], list[Bag]]]:
    weights = samples.weights
    if weights is None:
        weights = np.ones(len(samples.values), np.float32)
    items = list(zip(samples.values.tolist(), weights.tolist(), strict=True))
    bags: list[Bag] = []
    for length in samples.lengths.tolist():
        bags.append(items[:length])
        items = items[length:]
    n = len(samples)
    return [(float(samples.labels[i]), samples.dense[i].tolist(), bags[i::n]) for i in range(n)]


bag = st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.5, 1.0, 2.0])), max_size=3)
single = st.tuples(st.integers(0, 99), st.just(1.0)).map(lambda item: [item])
samples_of_any_shape = st.one_of(
    [st.lists(st.lists(one, min_size=3, max_size=3), max_size=6) for one in (bag, single)]
)


@settings(max_examples=150, deadline=None)
@given(samples_of_any_shape, st.booleans(), st.data())
def test_taken_samples_are_those_that_were_there(
    bags: list[list[Bag]], weighted: bool, data: st.DataObject
) -> None:
    samples = pack(bags, weighted)
    places = st.lists(st.integers(0, max(len(bags) - 1, 0)), max_size=8 if bags else 0)
    index = data.draw(places)
    wanted = unpack(samples)
    assert unpack(samples.take(np.array(index, np.int64))) == [wanted[i] for i in index]
    start, stop = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8)))
    assert unpack(samples.slice(start, stop)) == wanted[start:stop]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(samples_of_any_shape, st.booleans()), min_size=1, max_size=4))
def test_parts_put_together_are_all_samples_in_order(
    parts: list[tuple[list[list[Bag]], bool]],
) -> None:
    packed = [pack(*part) for part in parts]
    assert unpack(concat(packed)) == [one for part in packed for one in unpack(part)]


def test_taken_samples_share_no_memory_with_those_that_are_kept() -> None:
    samples = pack([[[(1, 1.0)]] * 3] * 4, weighted=False)
    taken = samples.slice(0, 4)
    taken.values[:] = 7
    taken.labels[:] = 7
    assert samples.values.max() == 1
    assert samples.labels.tolist() == [0, 1, 2, 3]


def test_the_bags_of_a_key_are_found() -> None:
    samples = pack([[[(1, 1.0)], [(2, 1.0), (3, 1.0)], []], [[(4, 1.0)], [], [(5, 1.0)]]], True)
    rows, lengths = samples.bags("genres")
    assert rows.tolist() == [2, 3]
    assert lengths.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lengths": np.array([1, -1, 2], np.int32)}, "key 'b', sample 0: expected a length of 0"),
        ({"lengths": np.array([1, 1], np.int32)}, "have 3 bags, but 2 lengths"),
        ({"lengths": np.array([1, 1, 1], np.int32)}, "add up to 3, but there are 2 rows"),
        ({"weights": np.ones(3, np.float32)}, "2 rows have 3 weights"),
        ({"dense": np.ones((2, 1), np.float32)}, "expected dense[1, any]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changed: dict[str, object], says: str) -> None:
    right = {
        "labels": np.ones(1, np.float32),
        "dense": np.ones((1, 0), np.float32),
        "keys": ("a", "b", "c"),
        "values": np.array([1, 2]),
        "lengths": np.array([1, 0, 1], np.int32),
    }
    Samples(**right)  # type: ignore[arg-type]  # control
    with pytest.raises(ArgumentError) as refused:
        Samples(**{**right, **changed})  # type: ignore[arg-type]
    assert says in str(refused.value)


def test_samples_with_other_keys_do_not_go_together() -> None:
    one = pack([[[], [], []]], False)
    other = Samples(one.labels, one.dense, ("x", "y", "z"), one.values, one.lengths)
    with pytest.raises(ArgumentError, match="do not go together"):
        concat([one, other])
    with pytest.raises(ArgumentError, match="one part at least"):
        concat([])
