"""The included models compute what their papers write, and learn."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from plain_collections import PlainEmbeddingBagCollection

from planaria.errors import ArgumentError, ConfigError
from planaria.kernels.types import Floats
from planaria.models import DLRM, MODELS, DCNv2, DeepFM, WideAndDeep, load_model
from planaria.torch import KeyedJaggedTensor

pytestmark = pytest.mark.torch

DIM = 4
DENSE = 3
ROWS = 11
# "user" is looked up in two tables; "genre" has bags of any length, by their mean.
TABLES: list[tuple[Any, ...]] = [
    ("users", ROWS, DIM, ["user"]),
    ("films", ROWS, DIM, ["film", "user"]),
    ("genres", ROWS, DIM, ["genre"], "mean"),
]
FEATURES = [(name, table) for name, _, _, features, *_ in TABLES for table in features]
SIZES: dict[str, dict[str, Any]] = {
    "dlrm": {"dense_arch_layer_sizes": (5, DIM), "over_arch_layer_sizes": (6, 1)},
    "dcn_v2": {"over_arch_layer_sizes": (6, 1), "cross_layers": 2, "cross_rank": 3},
    "deepfm": {"deep_layer_sizes": (6, 1)},
    "wide_and_deep": {"deep_layer_sizes": (6, 1)},
}


def make(name: str, dense: int = DENSE, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = MODELS[name](PlainEmbeddingBagCollection(TABLES), dense, **sizes_of(name, dense))
    with torch.no_grad():
        for parameter in model.parameters():  # zeros would hide a term
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def sizes_of(name: str, dense: int) -> dict[str, Any]:
    return {k: v for k, v in SIZES[name].items() if dense or k != "dense_arch_layer_sizes"}


def batch(samples: int, dense: int = DENSE, seed: int = 1) -> tuple[torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.cat(
        [
            torch.ones(2 * samples, dtype=torch.int64),
            torch.randint(0, 4, (samples,), generator=generator),
        ]
    )
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    sparse = KeyedJaggedTensor.from_lengths_sync(["user", "film", "genre"], ids, lengths)
    return torch.randn(samples, dense, generator=generator), sparse


# ------------------------------------------------------------------ formulas, sample by sample


def pooled_rows(model: Any, sparse: KeyedJaggedTensor, sample: int) -> list[Floats]:
    """The vector of each feature, in the order of the tables, added up id by id."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    rows = []
    for table, feature in FEATURES:
        total = np.zeros(DIM, np.float32)
        ids = sparse[feature].to_dense()[sample].tolist()
        for one in ids:
            total += weights[f"embedding_bag_collection.embedding_bags.{table}.weight"][one]
        if table == "genres":
            total /= max(len(ids), 1)
        rows.append(total)
    return rows


def mlp_oracle(model: Any, name: str, x: Floats, *, last_relu: bool) -> Floats:
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    layers = sorted({int(key.split(".")[1]) for key in weights if key.startswith(f"{name}.")})
    for layer in layers:
        x = weights[f"{name}.{layer}.weight"] @ x + weights[f"{name}.{layer}.bias"]
        if last_relu or layer != layers[-1]:
            x = np.maximum(x, 0)
    return x


def dlrm_oracle(model: Any, dense: Floats, rows: list[Floats]) -> float:
    vectors = list(rows)
    top: list[float] = []
    if len(dense):
        bottom = mlp_oracle(model, "dense_arch", dense, last_relu=True)
        vectors.insert(0, bottom)
        top += bottom.tolist()
    for i in range(len(vectors)):
        for j in range(i):
            top.append(float(vectors[i] @ vectors[j]))
    return float(mlp_oracle(model, "over_arch", np.array(top, np.float32), last_relu=False)[0])


def dcn_v2_oracle(model: Any, dense: Floats, rows: list[Floats]) -> float:
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    x0 = np.concatenate([dense, *rows])
    x = x0
    for layer in range(SIZES["dcn_v2"]["cross_layers"]):
        full = weights[f"cross.{layer}.up.weight"] @ weights[f"cross.{layer}.down.weight"]
        x = x0 * (full @ x + weights[f"cross.{layer}.up.bias"]) + x
    return float(mlp_oracle(model, "over_arch", x, last_relu=False)[0])


def deepfm_oracle(model: Any, dense: Floats, rows: list[Floats]) -> float:
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    logit = float(weights["bias"])
    fields = []
    for row in rows:
        logit += float(row[0])
        fields.append(row[1:])
    for i, x in enumerate(dense):
        logit += float(x * weights["dense_weights"][i])
        fields.append(x * weights["dense_vectors"][i])
    for one, other in combinations(fields, 2):
        logit += float(one @ other)
    deep = np.concatenate([dense, *(row[1:] for row in rows)])
    return logit + float(mlp_oracle(model, "deep", deep, last_relu=False)[0])


def wide_and_deep_oracle(model: Any, dense: Floats, rows: list[Floats]) -> float:
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    wide = weights["bias"] + dense @ weights["dense_weights"] + sum(row[0] for row in rows)
    deep = np.concatenate([dense, *(row[1:] for row in rows)])
    return float(wide + mlp_oracle(model, "deep", deep, last_relu=False)[0])


ORACLES = {
    "dlrm": dlrm_oracle,
    "dcn_v2": dcn_v2_oracle,
    "deepfm": deepfm_oracle,
    "wide_and_deep": wide_and_deep_oracle,
}


@pytest.mark.parametrize("dense_in", [DENSE, 0])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_its_formula(name: str, dense_in: int) -> None:
    model = make(name, dense_in)
    dense, sparse = batch(5, dense_in)
    logits = model(dense, sparse)
    assert logits.shape == (5,)
    expected = [
        ORACLES[name](model, dense[i].numpy(), pooled_rows(model, sparse, i)) for i in range(5)
    ]
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    others = [
        ORACLES[name](model, dense[i].numpy(), pooled_rows(model, sparse, (i + 1) % 5))
        for i in range(5)
    ]
    assert not np.allclose(logits.detach().numpy(), others, rtol=1e-4, atol=1e-5)  # control


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = make(name)
    model(*batch(40)).square().sum().backward()
    still = [key for key, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert still == []


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_a_rule_in_50_steps(name: str) -> None:
    torch.manual_seed(3)
    model = MODELS[name](PlainEmbeddingBagCollection(TABLES), DENSE, **SIZES[name])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    dense, sparse = batch(256)
    # A click is an even user, unless the first number is large.
    even = torch.stack(sparse["user"].to_dense()).squeeze(1) % 2 == 0
    labels = (even ^ (dense[:, 0] > 0.5)).float()
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(dense, sparse), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * min(losses[0], np.log(2))


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_brings_a_model_back(name: str) -> None:
    model, other = make(name, seed=0), make(name, seed=9)
    dense, sparse = batch(6)
    assert not torch.equal(model(dense, sparse), other(dense, sparse))  # control
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(dense, sparse), other(dense, sparse))
    # Only what was learnt is in it, so that TorchRec's names and sizes are all there is.
    assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}


@pytest.mark.parametrize("model", [DCNv2, WideAndDeep])
def test_tables_of_several_dims(model: Any) -> None:
    tables = [("users", ROWS, 2, ["user"]), ("films", ROWS, 5, ["film", "genre"])]
    made = model(PlainEmbeddingBagCollection(tables), DENSE)
    dense, sparse = batch(4)
    logits = made(dense, sparse)
    assert logits.shape == (4,)
    rows = made.embedding_bag_collection(sparse).values().detach().numpy()
    if model is WideAndDeep:
        split = [np.split(row, [2, 7]) for row in rows]
        expected = [wide_and_deep_oracle(made, dense[i].numpy(), split[i]) for i in range(4)]
        np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_sizes_of_its_own(name: str) -> None:
    model = MODELS[name](PlainEmbeddingBagCollection(TABLES), DENSE)
    assert model(*batch(2)).shape == (2,)


# ------------------------------------------------------------------------- the plain collection


def test_weights_multiply_the_rows_of_a_bag() -> None:
    collection = PlainEmbeddingBagCollection([("films", ROWS, 2, ["film"])], is_weighted=True)
    features = KeyedJaggedTensor(
        ["film"], torch.tensor([3, 3, 5]), torch.tensor([0.5, 2.0, -1.0]), torch.tensor([3, 0])
    )
    table = collection.embedding_bags["films"].weight
    expected = torch.stack([2.5 * table[3] - table[5], torch.zeros(2)])
    torch.testing.assert_close(collection(features)["film"], expected)


def test_a_shared_feature_is_named_by_its_table() -> None:
    collection = PlainEmbeddingBagCollection(TABLES)
    assert collection(batch(2)[1]).keys() == ["user@users", "film", "user@films", "genre"]


# ------------------------------------------------------------------------------ what is refused


def over(*dims: int) -> PlainEmbeddingBagCollection:
    names = ["user", "film", "genre"]
    return PlainEmbeddingBagCollection(
        [(name, ROWS, dim, [name]) for name, dim in zip(names, dims, strict=False)]
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: DLRM(over(2, 4), 1), r"DLRM needs tables of one embedding_dim, not \[2, 4\]"),
        (lambda: DeepFM(over(2, 4), 1), r"DeepFM needs tables of one embedding_dim"),
        (lambda: DeepFM(over(1, 1), 1), "embedding_dim of 2 or more"),
        (lambda: WideAndDeep(over(3, 1), 1), "embedding_dim of 2 or more"),
        (lambda: DLRM(over(4), 0), "two features or more"),
        (lambda: DLRM(over(4), 1, (5, 5)), r"dense_arch_layer_sizes .* last of them 4; got \[5"),
        (lambda: DLRM(over(4), 1, (4,), (5, 2)), "over_arch_layer_sizes .* last of them 1"),
        (lambda: DCNv2(over(4), 1, ()), "over_arch_layer_sizes must be"),
        (lambda: DCNv2(over(4), 1, (0, 1)), "over_arch_layer_sizes must be"),
        (lambda: DCNv2(over(4), 1, cross_layers=0), "cross_layers and cross_rank"),
        (lambda: DLRM(over(4), -1), "dense_in_features must be 0 or more"),
        (lambda: DLRM(over(), 1), "one feature or more"),
        (lambda: DLRM(torch.nn.Linear(1, 1), 1), "Linear has none"),
        (lambda: make("dlrm")(batch(4)[0][:3], batch(4)[1]), r"shape \[4, 3\], .* got \[3, 3\]"),
        (lambda: make("dlrm")(torch.zeros(4, 9), batch(4)[1]), r"got \[4, 9\]"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(wrong: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        wrong()


# -------------------------------------------------------------------------------- models by name


def test_models_are_found_by_name_and_the_users_own_by_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\nclass Tower(nn.Module): pass\nnot_a_model = 3\n"
    )
    (tmp_path / "my_broken.py").write_text("import no_such_dependency\n")
    assert load_model("dlrm") is DLRM
    assert load_model("my_models:Tower") is sys.modules["my_models"].Tower
    for name, says in {
        "dlmr": "no model 'dlmr'; did you mean dlrm\\? expected dlrm, dcn_v2",
        "transformer": "no model 'transformer'; expected dlrm",
        "my_models": "or module:Class",
        ":Tower": "or module:Class",
        "no_such_module:Tower": "there is no module no_such_module; start the job",
        "my_models.deep:Tower": "there is no module my_models.deep",
        "my_models:Spire": "the module my_models has no Spire",
        "my_models:not_a_model": "must be a class derived from torch.nn.Module",
    }.items():
        with pytest.raises(ConfigError, match=says):
            load_model(name)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_model("my_broken:Tower")
