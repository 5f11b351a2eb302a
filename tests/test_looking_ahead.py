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
from planaria.kernels.types import Floats, Index
from planaria.torch import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
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
    ahead.advance([own.tables for own in collections], ask)
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
    both, last = keyed(user=users, item=items), keyed(more=more)
    calls = [(first, both), (second, both), (third, last)]
    batch = {"one": both, "two": Batch(last, LABEL)}
    with torch.no_grad():
        alone = [own(features).values() for own, features in calls]
    ahead, asked = looking_ahead(job, [batch], first, second, third)
    step = job.new_step()
    before = len(job.lookups)

    def take(rows: list[Index]) -> list[Floats]:
        return [job.store.lookup(arena, index) for arena, index in enumerate(rows)]

    ahead.arrive(take, step)
    found = [own(features) for own, features in calls]
    assert len(job.lookups) == before, "forward has asked again"
    assert all(torch.equal(a, b.values()) for a, b in zip(alone, found, strict=True))
    assert len(asked) == 1
    assert sum(map(len, asked[0])) == sum(len(set(ids)) for ids in (users, items, more))


def test_ids_that_were_written_to_after_they_were_asked_for_are_looked_up_again() -> None:
    users = collection("user")
    job = StoreJob(SGD, users)
    features = keyed(user=[4])
    ahead, _ = looking_ahead(job, [features], users)
    ahead.arrive(lambda rows: job.lookup(rows), job.new_step())
    before = len(job.lookups)
    features.values().fill_(5)
    assert torch.equal(users(features).values()[0], job.weights("user")[5])
    assert len(job.lookups) > before


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
