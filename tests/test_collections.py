"""Collections: what they return, what they learn, and that it is what plain torch does.

torch's dense Adam moves rows that no sample named, ours only those that one did, with the bias
correction of their own count. The two are comparable, and compared, where every row is named in
every step; momentum, whose buffer moves unnamed rows in torch, likewise.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from plain_collections import PlainEmbeddingBagCollection
from store_jobs import StoreJob, copy_weights
from torch import nn

from planaria import Optimizer
from planaria.torch import (
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

pytestmark = pytest.mark.torch

SGD = Optimizer("sgd", lr=0.1)
STEPS = 200
# name, rows, dim, features; two sizes, a table of two features, a feature of two tables
TABLES: list[tuple[Any, ...]] = [
    ("films", 13, 4, ["film", "liked"]),
    ("users", 7, 6, ["user"], "mean"),
    ("tastes", 7, 4, ["user"], "mean"),
    ("genres", 5, 6, ["genre"]),
]
KEYS = ["genre", "film", "nobody", "user", "liked"]


def configs(tables: list[tuple[Any, ...]], *, sums: bool = False) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            rows,
            dim,
            name,
            features,
            pooling=PoolingType.MEAN if pooling and not sums else PoolingType.SUM,
        )
        for name, rows, dim, features, *pooling in tables
    ]


def batch(seed: int, samples: int = 9, *, weighted: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids below 5, some of them twice in a bag."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(KEYS) * samples,), generator=generator)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths)


def plain(tables: list[tuple[Any, ...]], *, weighted: bool = False) -> PlainEmbeddingBagCollection:
    sums = [table[:4] if weighted else table for table in tables]
    return PlainEmbeddingBagCollection(sums, is_weighted=weighted)


def pair(
    optimizer: Optimizer, *, weighted: bool = False
) -> tuple[EmbeddingBagCollection, StoreJob, PlainEmbeddingBagCollection]:
    ours = EmbeddingBagCollection(configs(TABLES, sums=weighted), is_weighted=weighted)
    job, theirs = StoreJob(optimizer, ours), plain(TABLES, weighted=weighted)
    copy_weights(job, theirs.embedding_bags)
    return ours, job, theirs


def assert_same_tables(job: StoreJob, bags: Any) -> None:
    for name, bag in bags.items():
        torch.testing.assert_close(job.weights(name), bag.weight.detach(), rtol=2e-4, atol=2e-5)


# ------------------------------------------------------------------ as plain torch


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 9])
def test_results_are_torchs_and_named_as_torchrecs(weighted: bool, samples: int) -> None:
    ours, job, theirs = pair(SGD, weighted=weighted)
    features = batch(3, samples, weighted=weighted)
    got, expected = ours(features), theirs(features)
    assert got.keys() == ["film", "liked", "user@users", "user@tastes", "genre"] == expected.keys()
    assert got.length_per_key() == [4, 4, 6, 4, 6]
    torch.testing.assert_close(got.values(), expected.values())
    assert job.lookups == [[len(index) for index in ours.prepare(features).rows]]
    assert list(ours.parameters()) == []
    assert ours.is_weighted() == weighted
    assert [one.name for one in ours.embedding_bag_configs()] == [table[0] for table in TABLES]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_a_model_learns_what_it_learns_in_plain_torch(name: str, weighted: bool) -> None:
    optimizer = Optimizer(name, lr=0.05)
    ours, job, theirs = pair(optimizer, weighted=weighted)
    torch.manual_seed(1)
    dense = nn.Linear(24, 1)
    twin = copy.deepcopy(dense)
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    mine = torch.optim.SGD(dense.parameters(), lr=0.05)
    others = [kind(theirs.parameters(), lr=0.05), torch.optim.SGD(twin.parameters(), lr=0.05)]
    for step in range(STEPS):
        features = batch(step, weighted=weighted)
        losses = []
        for collection, top in ((ours, dense), (theirs, twin)):
            loss = (top(collection(features).values()) - 1).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)
        job.finish()
        for one in (mine, *others):
            one.step()
            one.zero_grad()
    assert_same_tables(job, theirs.embedding_bags)


class Everything:
    """Batches that name every row of two tables, of two sizes, in every step: see the top."""

    TABLES = (("a", 5, 4, ["a"]), ("b", 7, 3, ["b"], "mean"))

    def __init__(self, optimizer: Optimizer) -> None:
        self.ours = EmbeddingBagCollection(configs(list(self.TABLES)))
        self.job, self.theirs = StoreJob(optimizer, self.ours), plain(list(self.TABLES))
        copy_weights(self.job, self.theirs.embedding_bags)
        self.targets = torch.randn(6, 7, generator=torch.Generator().manual_seed(5))

    def batch(self, step: int) -> KeyedJaggedTensor:
        """Six bags of a, of which one is empty, and six of b; the ids are dealt anew."""
        generator = torch.Generator().manual_seed(step)
        a, b = (torch.randperm(rows, generator=generator) for rows in (5, 7))
        ids = torch.cat([a, a[:2], b])
        lengths = torch.tensor([1, 2, 0, 1, 2, 1, 1, 1, 1, 1, 1, 2])
        return KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)

    def loss(self, collection: nn.Module, step: int) -> torch.Tensor:
        return (collection(self.batch(step)).values() - self.targets).square().sum()


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.1)),
        (Optimizer("momentum", lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
        (Optimizer("adagrad", lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (Optimizer("adam", lr=0.01, eps=1e-8), lambda p: torch.optim.Adam(p, lr=0.01)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_optimizer_takes_torchs_steps(optimizer: Optimizer, make: Any) -> None:
    both = Everything(optimizer)
    torchs = make(both.theirs.parameters())
    for step in range(STEPS):
        both.loss(both.ours, step).backward()
        both.loss(both.theirs, step).backward()
        both.job.finish()
        torchs.step()
        torchs.zero_grad()
    assert_same_tables(both.job, both.theirs.embedding_bags)


def test_weights_that_need_a_gradient_get_torchs() -> None:
    ours, _, theirs = pair(SGD, weighted=True)
    gradients = []
    for collection in (ours, theirs):
        features = batch(4, weighted=True)
        weights = features.weights().clone().requires_grad_()
        keyed = KeyedJaggedTensor(KEYS, features.values(), weights, features.lengths())
        collection(keyed).values().square().sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients)
    assert bool(gradients[0].any())


# ------------------------------------------------------------------ one table, unpooled rows


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_one_table_is_called_as_torchs_is(mode: str) -> None:
    bag, torchs = EmbeddingBag(10, 3, mode=mode), nn.EmbeddingBag(10, 3, mode=mode)
    last = EmbeddingBag(10, 3, mode=mode, include_last_offset=True, name="last")
    job = StoreJob(SGD, nn.ModuleList([bag, last]))
    assert [table.name for table in job.tables] == ["embedding_bag_0", "last"]
    assert 0.5 < float(job.weights("last").std()) < 1.5, "nn.EmbeddingBag starts with N(0, 1)"
    copy_weights(job, {"embedding_bag_0": torchs})
    ids, offsets = torch.tensor([9, 9, 1, 2, 3]), torch.tensor([0, 3, 3])
    square = torch.tensor([[1, 2], [2, 2], [0, 9]], dtype=torch.int32)
    for arguments in ((ids, offsets), (square,)):
        got, expected = bag(*arguments), torchs(*arguments)
        torch.testing.assert_close(got, expected)
        (got.square().sum()).backward()
        (expected.square().sum()).backward()
    ((rows, gradients),) = job.finish()
    torch.testing.assert_close(torch.from_numpy(gradients), torchs.weight.grad[rows])
    copy_weights(job, {"last": torchs})
    torch.testing.assert_close(
        last(ids, torch.tensor([0, 3, 3, 5])), torchs(ids, torch.tensor([0, 3, 3]))
    )


def test_weighted_bags_of_one_table_are_torchs() -> None:
    bag, torchs = EmbeddingBag(10, 3, mode="sum"), nn.EmbeddingBag(10, 3, mode="sum")
    copy_weights(StoreJob(SGD, bag), {"embedding_bag_0": torchs})
    square, found = torch.tensor([[1, 2], [2, 2]]), []
    for module in (bag, torchs):
        weights = torch.tensor([[1.0, 2], [3, 4]], requires_grad=True)
        result = module(square, per_sample_weights=weights)
        result.square().sum().backward()
        found.append((result, weights.grad))
    torch.testing.assert_close(*found)


def test_rows_that_are_not_pooled_are_those_of_their_ids() -> None:
    tables = [
        EmbeddingConfig(13, 4, "films", ["film", "liked"]),
        EmbeddingConfig(7, 6, "users", ["user"]),
        EmbeddingConfig(7, 4, "tastes", ["user"]),
    ]
    ours = EmbeddingCollection(tables)
    job, features = StoreJob(SGD, ours), batch(2)
    assert ours.embedding_configs() == tables
    found = ours(features)
    assert list(found) == ["film", "liked", "user@users", "user@tastes"]
    theirs = {one.name: nn.Embedding(one.num_embeddings, one.embedding_dim) for one in tables}
    copy_weights(job, theirs)
    loss, expected_loss = torch.zeros(()), torch.zeros(())
    for result, table in zip(found, ["films", "films", "users", "tastes"], strict=True):
        ids = features[result.partition("@")[0]]
        expected = theirs[table](ids.values())
        torch.testing.assert_close(found[result].values(), expected)
        assert found[result].lengths().tolist() == ids.lengths().tolist()
        loss = loss + found[result].values().square().sum()
        expected_loss = expected_loss + expected.square().sum()
    loss.backward()
    expected_loss.backward()
    job.finish()
    with torch.no_grad():
        for one in theirs.values():
            one.weight -= 0.1 * one.weight.grad
    for name, one in theirs.items():
        torch.testing.assert_close(job.weights(name), one.weight.detach())


def test_a_thousand_tables_of_three_sizes_are_two_calls_per_arena() -> None:
    tables = [(f"t{n}", 3 + n % 5, (2, 4, 8)[n % 3], [f"f{n}"]) for n in range(1000)]
    ours = EmbeddingBagCollection(configs(tables))
    job, theirs = StoreJob(SGD, ours), plain(tables)
    copy_weights(job, theirs.embedding_bags)
    ids = torch.arange(3000) % 3
    features = KeyedJaggedTensor(
        [f"f{n}" for n in range(1000)], ids, lengths=torch.tensor([2, 0, 1] * 1000)
    )
    for collection in (ours, theirs):
        collection(features).values().square().sum().backward()
    torch.testing.assert_close(ours(features).values(), theirs(features).values())
    gradients = job.finish()
    assert [len(rows) for rows, _ in gradients] == [
        len(rows) for rows in ours.prepare(features).rows
    ]
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert_same_tables(job, dict(list(theirs.embedding_bags.items())[::97]))
    assert np.diff([arena.rows for arena in job.arenas]).any()
