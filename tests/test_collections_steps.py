"""What a step records: each row's gradients once, in the order of the forwards, and no others;
what may be prepared ahead; and what is refused."""

from __future__ import annotations

import copy
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from store_jobs import StoreJob
from test_bridge import Called, TheirKeyedJagged
from torch import nn

from planaria import Initial, Optimizer
from planaria.errors import ArgumentError, OutsideJob, RowError
from planaria.torch import (
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from planaria.torch.bridge import THEIRS
from planaria.torch.features import made_tables

pytestmark = pytest.mark.torch

SGD = Optimizer("sgd", lr=0.1)


def collection(name: str = "t", dim: int = 2, features: int = 1) -> EmbeddingBagCollection:
    names = [f"{name}{n}" for n in range(features)]
    return EmbeddingBagCollection([EmbeddingBagConfig(10, dim, name, names)])


def bag(*ids: int, name: str = "t0") -> KeyedJaggedTensor:
    return KeyedJaggedTensor([name], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


def recorded(job: StoreJob) -> list[dict[int, list[float]]]:
    return [
        dict(zip(rows.tolist(), gradients.tolist(), strict=True))
        for rows, gradients in job.finish()
    ]


# ------------------------------------------------------------------ what is recorded


def test_a_row_has_one_gradient_however_often_it_is_named() -> None:
    own, other = collection(features=2), collection("u")
    job = StoreJob(SGD, nn.ModuleList([own, other]))
    ids = torch.tensor([1, 1, 2, 1, 3])
    both = KeyedJaggedTensor(["t0", "t1"], ids, lengths=torch.tensor([3, 0, 1, 1]))
    (own(both).values() * torch.tensor([1.0, 1, 10, 10])).sum().backward()
    second = KeyedJaggedTensor.concat([bag(3, 1), bag(9, name="t1")])
    (100 * own(second).values()[0, 0]).backward()
    other(bag(1, name="u0")).values().sum().backward()
    (gradients,) = recorded(job)  # one arena: u's rows lie behind t's
    assert gradients == {1: [112, 12], 2: [1, 1], 3: [110, 10], 9: [0, 0], 11: [1, 1]}
    assert job.lookups == [[3], [3], [1]]


def test_gradients_are_summed_in_the_order_of_the_forwards() -> None:
    own = collection(dim=1)
    job = StoreJob(SGD, own)
    large, small, back = (own(bag(5)).values() for _ in range(3))
    for result, gradient in ((back, -1e8), (small, 1.0), (large, 1e8)):
        result.backward(torch.full((1, 1), gradient))
    # 1e8 + 1 - 1e8, in this order, is 0 in float32; in the order of the backwards it is 8 or 1.
    assert recorded(job) == [{5: [0]}]


def test_a_forward_without_backward_contributes_nothing() -> None:
    own = collection()
    job = StoreJob(SGD, own)
    own(bag(1))
    own(bag(2)).values().sum().backward()
    assert recorded(job) == [{2: [1, 1]}]
    assert recorded(job) == [{}]


def test_a_second_backward_adds_to_the_first() -> None:
    own = collection()
    job = StoreJob(SGD, own)
    loss = own(bag(1, 1)).values().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert recorded(job) == [{1: [4, 4]}]


def test_two_towers_share_the_rows_of_a_batch_and_sum_what_they_learn() -> None:
    own = collection()
    towers = nn.ModuleList([own, copy.deepcopy(own)])
    job, features = StoreJob(SGD, towers), bag(4, 5)
    results = [tower(features).values().sum() for tower in towers]
    (results[1] * 10 + results[0]).backward()
    assert recorded(job) == [{4: [11, 11], 5: [11, 11]}]
    assert job.lookups == [[2]]


def test_evaluation_reads_and_records_nothing() -> None:
    own = collection()
    job = StoreJob(SGD, own)
    with torch.no_grad():
        assert not own(bag(1)).values().requires_grad
    with torch.inference_mode():
        own(bag(1))
    assert recorded(job) == [{}]
    job.new_step(recording=False)
    assert not own(bag(1)).values().requires_grad
    assert recorded(job) == [{}]


def test_a_collection_of_rows_learns_from_the_features_that_were_used() -> None:
    own = EmbeddingCollection(
        [EmbeddingConfig(10, 2, "a", ["x"]), EmbeddingConfig(10, 3, "b", ["y"])]
    )
    job = StoreJob(SGD, own)
    features = KeyedJaggedTensor(["x", "y"], torch.tensor([1, 1, 2]), lengths=torch.tensor([2, 1]))
    own(features)["x"].values().sum().backward()
    assert recorded(job) == [{1: [2, 2]}, {}]


def test_what_comes_after_its_step_is_refused() -> None:
    own = collection()
    job = StoreJob(SGD, own)
    late = own(bag(1)).values().sum()
    step = job.step
    job.finish()
    with pytest.raises(OutsideJob, match="a backward came after its step had ended"):
        late.backward()
    job.step = step
    with pytest.raises(OutsideJob, match="a forward came after its step had ended"):
        own(bag(2))


# ------------------------------------------------------------------ ahead of time


def test_a_batch_prepared_by_a_thread_is_taken_with_its_rows() -> None:
    own, single = collection(), EmbeddingBag(10, 3)
    job = StoreJob(SGD, nn.ModuleList([own, single]))
    features, ids = bag(3, 4, 3), torch.tensor([[1, 2]])
    prepared: list[Any] = []
    thread = threading.Thread(
        target=lambda: prepared.extend([own.prepare(features), single.prepare(ids)])
    )
    thread.start()
    thread.join()
    assert [rows.tolist() for rows in prepared[0].rows] == [[3, 4], []]
    assert [rows.tolist() for rows in prepared[1].rows] == [[], [1, 2]]
    for one in prepared:
        job.step.expect(
            one,
            [
                np.full((len(rows), dim), 1, np.float32)
                for rows, dim in zip(one.rows, (2, 3), strict=True)
            ],
        )
    assert own(features).values().tolist() == [[3, 3]]
    assert single(ids).tolist() == [[1, 1, 1]]
    assert job.lookups == []
    own(bag(3, 4, 3))
    assert job.lookups == [[2, 0]], "other objects, though equal, are looked up"


def test_ids_that_were_written_to_are_prepared_again() -> None:
    own = collection()
    job, features = StoreJob(SGD, own), bag(1, 2)
    job.step.expect(own.prepare(features))
    features.values()[0] = 7
    own(features).values().sum().backward()
    assert list(recorded(job)[0]) == [7, 2]


# ------------------------------------------------------------------ what is refused


def test_forward_outside_a_job_says_what_to_do() -> None:
    own = collection("lonely")
    with pytest.raises(OutsideJob, match=r"forward outside a job.*lonely.*connect\(\)"):
        own(bag(1, name="lonely0"))
    assert made_tables()[-1] is own.tables
    StoreJob(SGD, own)
    assert own.tables not in made_tables()


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_an_id_that_its_table_lacks_is_named(bad: int) -> None:
    own = EmbeddingBagCollection(
        [EmbeddingBagConfig(99, 2, "big", ["a"]), EmbeddingBagConfig(10, 2, "small", ["b"])]
    )
    job = StoreJob(SGD, own)
    features = KeyedJaggedTensor(
        ["b", "a"], torch.tensor([3, bad, 98]), lengths=torch.tensor([2, 1])
    )
    with pytest.raises(RowError, match=f"table small has no row {bad}, which feature 'b' names"):
        own(features)
    assert job.lookups == []


def test_batches_that_do_not_fit_are_refused() -> None:
    own = collection()
    weighted = EmbeddingBagCollection([EmbeddingBagConfig(10, 2, "w", ["w0"])], is_weighted=True)
    StoreJob(SGD, nn.ModuleList([own, weighted]))
    with pytest.raises(ArgumentError, match="the batch has no feature 't0'; its keys are u"):
        own(bag(1, name="u"))
    with pytest.raises(ArgumentError, match="has no weights"):
        weighted(bag(1, name="w0"))
    with pytest.raises(ArgumentError, match="ids must be int64 or int32"):
        own(KeyedJaggedTensor(["t0"], torch.tensor([1.0]), lengths=torch.tensor([1])))
    with pytest.raises(ArgumentError, match="must be a KeyedJaggedTensor"):
        own(torch.tensor([1]))


def one_table(**changes: Any) -> EmbeddingBagCollection:
    given = {"num_embeddings": 10, "embedding_dim": 2, "name": "t", "feature_names": ["f"]}
    return EmbeddingBagCollection([EmbeddingBagConfig(**{**given, **changes})])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: one_table(name=""), "a table needs a name"),
        (lambda: one_table(num_embeddings=0), "rows must be 1 to"),
        (lambda: one_table(embedding_dim=0.5), "dim must be 1 to"),
        (lambda: one_table(feature_names=[]), "feature_names must be a list of one name or more"),
        (lambda: one_table(feature_names="f"), "feature_names must be a list of one name or more"),
        (lambda: one_table(feature_names=["f", "f"]), "a feature stands twice"),
        (lambda: one_table(pooling="max"), "pooling must be PoolingType.SUM or"),
        (lambda: one_table(init_fn=nn.init.xavier_uniform_), "cannot run on the servers"),
        (lambda: one_table(weight_init_min=2, weight_init_max=1), "turned around"),
        (lambda: EmbeddingBagCollection([]), "a list of one EmbeddingBagConfig or more"),
        (
            lambda: EmbeddingBagCollection([EmbeddingConfig(9, 2, "t", ["f"])]),  # type: ignore[list-item]
            "expected EmbeddingBagConfig, got EmbeddingConfig",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "t", ["f"])] * 2),
            "two tables are called 't'",
        ),
        (
            lambda: EmbeddingBagCollection(
                [EmbeddingBagConfig(9, 2, "t", ["f"], pooling=PoolingType.MEAN)], is_weighted=True
            ),
            "weights go with PoolingType.SUM",
        ),
        (lambda: EmbeddingBag(9, 2, mode="max"), "mode must be 'sum' or 'mean', not 'max'"),
        (lambda: EmbeddingBag(9, 2, padding_idx=0), "padding_idx is not supported"),
        (lambda: StoreJob(SGD, nn.ModuleList([collection(), collection()])), "two tables are"),
    ],
)
def test_tables_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()


def test_one_table_refuses_what_torchs_refuses() -> None:
    own = EmbeddingBag(9, 2)
    StoreJob(SGD, own)
    ids = torch.tensor([1, 2])
    for arguments, says in (
        ((ids,), "or one with offsets"),
        ((ids[None], torch.tensor([0])), "omit offsets"),
        ((ids[None], None, torch.ones(1, 2)), "per_sample_weights go with mode='sum'"),
        ((ids, torch.tensor([1])), "offsets must go from 0"),
    ):
        with pytest.raises(ArgumentError, match=says):
            own(*arguments)


# ------------------------------------------------------------------ initial weights, TorchRec


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, -(10**-0.5), 10**-0.5),
        ({"weight_init_min": 3, "weight_init_max": 4}, 3, 4),
        ({"init_fn": Initial.uniform(5, 6)}, 5, 6),
        ({"init_fn": partial(nn.init.uniform_, a=7, b=8)}, 7, 8),
        ({"init_fn": partial(nn.init.normal_, mean=9, std=0.01)}, 8.9, 9.1),
        ({"init_fn": Initial()}, 0, 0),
    ],
)
def test_tables_start_as_they_are_told_to(given: dict[str, Any], low: float, high: float) -> None:
    weights = StoreJob(SGD, one_table(**given)).weights("t")
    assert low <= float(weights.min()) <= float(weights.max()) <= high


def test_torchrecs_objects_come_out_where_they_go_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins; tests/test_jagged_torchrec.py holds the bridge to TorchRec itself."""
    theirs = SimpleNamespace(
        KeyedJaggedTensor=TheirKeyedJagged, KeyedTensor=Called, JaggedTensor=Called
    )
    monkeypatch.setitem(sys.modules, THEIRS, theirs)
    config = SimpleNamespace(  # TorchRec's fields, its own default for init_fn
        num_embeddings=10,
        embedding_dim=2,
        name="t",
        feature_names=["t0"],
        pooling=SimpleNamespace(value="MEAN"),
        data_type=SimpleNamespace(value="FP32"),
        init_fn=partial(nn.init.uniform_, a=-0.5, b=0.5),
        need_pos=False,
    )
    pooled = EmbeddingBagCollection([config])  # type: ignore[list-item]
    rows = EmbeddingCollection([EmbeddingConfig(10, 2, "u", ["t0"])])
    StoreJob(SGD, nn.ModuleList([pooled, rows]))
    assert pooled.embedding_bag_configs()[0].pooling == PoolingType.MEAN
    features = TheirKeyedJagged(["t0"], [1, 2], 2)
    result = pooled(features)
    assert isinstance(result, Called)
    assert result.given[0] == ["t0"]
    assert isinstance(rows(features)["t0"], Called)
    config.data_type.value = "FP16"
    with pytest.raises(ArgumentError, match="data_type must be FP32, not FP16"):
        EmbeddingBagCollection([config])  # type: ignore[list-item]


def test_an_evaluation_of_any_number_of_batches_holds_one_of_them() -> None:
    own = collection()
    job = StoreJob(SGD, own)
    step = job.new_step(recording=False)
    for number in range(20):
        with torch.no_grad():
            own(bag(number % 10))
    assert len(step._expected) == len(step._values) == 1
