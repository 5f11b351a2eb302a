"""The features of the next batch are found wherever they are, and their rows asked for once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_jobs import StoreJob
from torch import nn

from planaria import Optimizer
from planaria.errors import ArgumentError, RowError
from planaria.kernels.types import Floats, Index
from planaria.torch import (
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from planaria.torch.looking_ahead import Ahead, find_features

pytestmark = pytest.mark.torch

SGD = Optimizer("sgd", lr=0.1)


def collection(name: str, dim: int = 2, feature: str = "") -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(10, dim, name, [f"{feature or name}_id"])
    return EmbeddingBagCollection([config])


def keyed(**bags: list[int]) -> KeyedJaggedTensor:
    """One sample: by feature, its ids."""
    return KeyedJaggedTensor(
        [f"{name}_id" for name in bags],
        torch.tensor([one for ids in bags.values() for one in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in bags.values()]),
    )


@dataclass
class Batch:
    features: Any
    label: torch.Tensor


class Named(NamedTuple):
    features: Any
    label: torch.Tensor


LABEL = torch.zeros(1)
CONTAINERS: list[Callable[[Any], Any]] = [
    lambda found: found,
    lambda found: (LABEL, found),
    lambda found: [LABEL, [found]],
    lambda found: {"label": LABEL, "features": found},
    lambda found: Batch(found, LABEL),
    lambda found: Named(found, LABEL),
    lambda found: {"train": (LABEL, Batch([found], LABEL))},
]


@pytest.mark.parametrize("number", range(len(CONTAINERS)))
def test_features_are_found_in_whatever_a_batch_is(number: int) -> None:
    users = collection("user")
    StoreJob(SGD, users)
    [prepared] = find_features(CONTAINERS[number](keyed(user=[1, 3, 1])), [users.tables])
    assert prepared.rows[0].tolist() == [1, 3]


@pytest.mark.parametrize(
    "batch", [None, 3, "user_id", (LABEL, LABEL), Batch, [[[[["deep"]]]]], {}, ()]
)
def test_a_batch_without_features_asks_for_nothing(batch: Any) -> None:
    users = collection("user")
    StoreJob(SGD, users)
    assert find_features(batch, [users.tables]) == []


def test_each_collection_gets_the_features_that_have_all_of_its_keys() -> None:
    users, items = collection("user"), collection("item")
    both = collection("other", 3, "user")
    StoreJob(SGD, nn.ModuleList([users, items, both]))
    collections = [users.tables, items.tables, both.tables]
    batch = (keyed(user=[1], item=[2]), keyed(item=[7]))
    found = [(one.collection, one.sources[0]) for one in find_features(batch, collections)]
    assert found == [
        (users.tables, batch[0]),
        (items.tables, batch[0]),
        (both.tables, batch[0]),
        (items.tables, batch[1]),
    ]


def test_a_batch_that_holds_the_same_features_twice_gives_the_same_results() -> None:
    users = collection("user")
    job = StoreJob(SGD, users)
    features = keyed(user=[4, 2])
    ahead, asked = looking_ahead(job, [(features, features)], users)
    direct = users(features).values()
    ahead.arrive(lambda rows: job.lookup(rows), job.new_step())
    assert torch.equal(users(features).values(), direct)
    assert asked == [[[2, 4]]]


def looking_ahead(
    job: StoreJob, batches: list[Any], *collections: EmbeddingBagCollection
) -> tuple[Ahead, list[list[list[int]]]]:
    """It has looked at the first batch; and what was asked for, by arena."""
    asked: list[list[list[int]]] = []

    def ask(rows: list[Index]) -> list[Index]:
        asked.append([sorted(own.tolist()) for own in rows])
        return rows

    def iterate() -> Generator[Any, None, None]:
        yield from batches

    ahead = Ahead(iterate())
    ahead.look([own.tables for own in collections], ask)
    return ahead, asked


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.integers(0, 9), max_size=6),
)
def test_rows_that_were_asked_for_ahead_are_those_that_forward_asks_for(
    users: list[int], items: list[int], more: list[int]
) -> None:
    """Several collections, of two sizes, one of them over two features of the batch."""
    first, second, third = collection("user"), collection("item", 3), collection("more")
    job = StoreJob(SGD, nn.ModuleList([first, second, third]))
    batch: dict[str, Any] = {
        "one": keyed(user=users, item=items),
        "two": Batch(keyed(more=more), LABEL),
    }
    with torch.no_grad():
        alone = [
            own(features).values()
            for own, features in (
                (first, batch["one"]),
                (second, batch["one"]),
                (third, batch["two"].features),
            )
        ]
    ahead, asked = looking_ahead(job, [batch], first, second, third)
    step = job.new_step()
    before = len(job.lookups)

    def take(rows: list[Index]) -> list[Floats]:
        return [job.store.lookup(arena, index) for arena, index in enumerate(rows)]

    ahead.arrive(take, step)
    found = [first(batch["one"]), second(batch["one"]), third(batch["two"].features)]
    assert len(job.lookups) == before, "forward has asked again"
    assert all(torch.equal(a, b.values()) for a, b in zip(alone, found, strict=True))
    assert len(asked) == 1
    assert sum(map(len, asked[0])) == sum(len(set(ids)) for ids in (users, items, more))


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda ids: ids.fill_(5),
    lambda ids: ids.data.fill_(5),  # of these two torch does not know
    lambda ids: ids.numpy().fill(5),
]


@pytest.mark.parametrize("number", range(len(WRITES)))
@pytest.mark.parametrize("inference", [False, True])
def test_ids_that_were_written_to_after_they_were_asked_for_are_looked_up_again(
    number: int, inference: bool
) -> None:
    """Some writes were not noticed: the rows of other ids were trained, and a trainer that had
    replaced another one, and had not looked ahead, trained the right ones.
    """
    users = collection("user")
    job = StoreJob(SGD, users)
    with torch.inference_mode(inference):
        features = keyed(user=[4])
    ahead, _ = looking_ahead(job, [features], users)
    ahead.arrive(lambda rows: job.lookup(rows), job.new_step())
    before = len(job.lookups)
    with torch.inference_mode(inference):
        WRITES[number](features.values())
    assert torch.equal(users(features).values()[0], job.weights("user")[5])
    assert len(job.lookups) > before


def test_ids_that_no_table_has_are_refused_by_forward_only() -> None:
    """A loop may take their remainders first. The rows of other features are asked for all the
    same.
    """
    users, items = collection("user"), collection("item")
    job = StoreJob(SGD, nn.ModuleList([users, items]))
    features = keyed(user=[3, 17], item=[2])
    ahead, asked = looking_ahead(job, [features], users, items)
    assert asked == [[[12]]]  # of both tables' arena, in which items follow ten users
    ahead.arrive(lambda rows: job.lookup(rows), job.new_step())
    with pytest.raises(RowError, match="table user has no row 17, which feature 'user_id' names"):
        users(features)
    found = users(keyed(user=[3, 7])).values()
    assert torch.allclose(found[0], job.weights("user")[[3, 7]].sum(0))


def test_ids_of_a_wrong_type_are_refused_by_forward_only() -> None:
    users = collection("user")
    job = StoreJob(SGD, users)
    wrong = KeyedJaggedTensor(["user_id"], torch.tensor([3.0]), lengths=torch.tensor([1]))
    ahead, asked = looking_ahead(job, [wrong], users)
    assert asked == []
    ahead.arrive(lambda rows: job.lookup(rows), job.new_step())
    with pytest.raises(ArgumentError, match="ids must be int64 or int32"):
        users(wrong)


def test_the_batches_are_closed_with_it() -> None:
    ended = []

    def iterate() -> Generator[Any, None, None]:
        try:
            yield np.zeros(1)
        finally:
            ended.append(True)

    ahead = Ahead(iterate())
    ahead.look([], lambda rows: rows)
    ahead.close()
    assert ended == [True]


# ------------------------------------------------------------------------------------ habits


class Loop:
    """Steps of a loop over batches, one of them looked at ahead, as a job does it."""

    def __init__(self, batches: list[Any], *bags: EmbeddingBag) -> None:
        self.job = StoreJob(SGD, nn.ModuleList(bags))
        self.asked: list[list[Index]] = []
        self._ahead = Ahead(one for one in batches)
        self._tables = [bag.tables for bag in bags]
        self._look()

    def _look(self) -> None:
        self._ahead.look(self._tables, self._ask)

    def _ask(self, rows: list[Index]) -> list[Index]:
        self.asked.append(rows)
        return rows

    def step(self, forward: Callable[[Any], Any], *, last: bool = False) -> int:
        """How many lookups forward has made by itself."""
        if not last:
            self._look()
        step = self.job.new_step()
        self._ahead.arrive(lambda rows: [self.job.store.lookup(0, own) for own in rows], step)
        before = len(self.job.lookups)
        forward(self._ahead.batch)
        return len(self.job.lookups) - before


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


FORWARDS: list[tuple[str, Callable[[EmbeddingBag, Any], torch.Tensor]]] = [
    ("whole", lambda bag, batch: bag(batch["ids"])),
    ("column", lambda bag, batch: bag(batch["ids"][:, 1:2])),
    ("column of one dimension", lambda bag, batch: bag(batch["ids"][:, 1], batch["offsets"])),
    ("unsqueezed", lambda bag, batch: bag(batch["ids"][:, 0].unsqueeze(1))),
    ("first half", lambda bag, batch: bag(batch["ids"][:1])),
    ("offsets", lambda bag, batch: bag(batch["flat"], batch["offsets"])),
]


@pytest.mark.parametrize("name", dict(FORWARDS))
def test_what_a_bag_is_called_with_is_asked_for_ahead_once_it_was_seen(name: str) -> None:
    batches = [
        {
            "ids": ids([n, n + 1], [n + 2, 9]),
            "flat": torch.tensor([n, n, 7]),
            "offsets": torch.tensor([0, 2]),
        }
        for n in range(5)
    ]
    bag = EmbeddingBag(10, 2)
    loop = Loop(batches, bag)
    forward = dict(FORWARDS)[name]
    results = []

    def step(batch: Any) -> None:
        results.append(forward(bag, batch))

    # The second batch was looked at before the first step was done.
    assert [loop.step(step, last=n == 4) for n in range(5)] == [1, 1, 0, 0, 0]
    loop.job.new_step()
    assert all(torch.equal(a, forward(bag, b)) for a, b in zip(results, batches, strict=True))


def test_all_bags_of_a_batch_are_one_lookup() -> None:
    bags = [EmbeddingBag(10, 2) for _ in range(5)]
    loop = Loop([ids(*[[n, 3, 4, 5, 6]] * 3) for n in range(4)], *bags)

    def forward(batch: torch.Tensor) -> None:
        for column, bag in enumerate(bags):
            bag(batch[:, column : column + 1])

    assert [loop.step(forward, last=n == 3) for n in range(4)] == [5, 5, 0, 0]
    assert [len(rows[0]) for rows in loop.asked] == [5, 5]


def test_a_guess_that_is_wrong_is_not_used_and_not_made_for_ever() -> None:
    """Ids that the loop changes before it uses them: seen in the batch, but with other values."""
    bag = EmbeddingBag(10, 2)
    loop = Loop([ids([n % 10]) for n in range(30)], bag)
    results = []

    def forward(batch: torch.Tensor) -> None:
        results.append((int(batch), bag(batch.add_(1).remainder_(10))))

    assert [loop.step(forward) for _ in range(29)] == [1] * 29, "each was looked up in its step"
    weights = loop.job.weights("embedding_bag_0")
    assert all(torch.equal(own[0], weights[(n + 1) % 10]) for n, own in results)
    assert 1 <= len(loop.asked) <= 6


def test_ids_that_are_not_of_the_batch_are_not_guessed() -> None:
    bag = EmbeddingBag(10, 2)
    loop = Loop([ids([n]) for n in range(6)], bag)
    assert [loop.step(lambda batch: bag(batch.clone())) for _ in range(5)] == [1] * 5
    assert loop.asked == []


def test_wrong_ids_of_a_guess_are_refused_by_forward_only() -> None:
    bag, other = EmbeddingBag(10, 2), EmbeddingBag(10, 2)
    loop = Loop([ids([n]) for n in (1, 2, 99, 3, 4, 5)], bag, other)
    assert loop.step(bag) == 1
    assert loop.step(bag) == 1
    with pytest.raises(RowError, match="has no row 99"):
        loop.step(bag)


def test_a_batch_of_another_shape_is_not_cut_like_the_ones_before() -> None:
    bag = EmbeddingBag(10, 2)
    loop = Loop([ids([1, 2]), ids([3, 4]), ids([5, 6, 7]), ids([8, 9])], bag)
    found = [loop.step(lambda batch: bag(batch[:, -1:]), last=n == 3) for n in range(4)]
    assert found == [1, 1, 1, 0]


def test_tensors_of_a_batch_that_share_memory_are_not_taken_for_each_other() -> None:
    """The second one was found as a view of the first, beyond its end: that is no view of a batch
    whose tensors have memory of their own.
    """
    bag = EmbeddingBag(10, 2)
    shared = [tuple(ids([n, n + 1], [n + 2, n + 3]).split(1)) for n in range(3)]
    apart = [tuple(one.clone() for one in pair) for pair in shared]
    loop = Loop([*shared, *apart], bag)
    found = [loop.step(lambda batch: bag(batch[1]), last=n == 5) for n in range(6)]
    assert found == [1, 1, 0, 0, 0, 0]


def test_a_view_of_ids_that_were_written_to_is_looked_up_again() -> None:
    bag = EmbeddingBag(10, 2)
    job = StoreJob(SGD, bag)
    batch = ids([1, 2], [3, 4])
    bag(batch[:, 1:])
    batch.fill_(5)
    assert torch.equal(bag(batch[:, 1:])[0], job.weights("embedding_bag_0")[5])
