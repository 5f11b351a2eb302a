"""Where TorchRec is installed: ours hold what theirs hold, and its models take either."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagged_bags import Bags, bags, parts
from plain_collections import PlainEmbeddingBagCollection

import planaria.torch as pt
from planaria.errors import ArgumentError
from planaria.models import MODELS
from planaria.torch import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from planaria.torch.bridge import as_keyed, like

with warnings.catch_warnings():  # of parts of FBGEMM that need a GPU
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "torchrec",
        exc_type=ImportError,
        reason="TorchRec is not installed; docs/own-model.md says how",
    )
    from torchrec.models.dlrm import DLRM as TheirDLRM  # noqa: N811
    from torchrec.models.dlrm import DLRM_DCN
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.sparse import jagged_tensor as theirs

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def assert_same(ours: Any, other: Any) -> None:
    """Every tensor of two jagged tensors, types included."""
    pairs = [
        (ours.values(), other.values()),
        (ours.lengths(), other.lengths()),
        (ours.offsets(), other.offsets()),
        (ours.weights_or_none(), other.weights_or_none()),
    ]
    for one, two in pairs:
        assert (one is None) == (two is None)
        if one is not None:
            assert one.dtype == two.dtype
            assert one.tolist() == two.tolist()
    assert str(ours) == str(other)


def assert_same_keyed(ours: KeyedJaggedTensor, other: Any) -> None:
    assert ours.keys() == other.keys()
    assert ours.stride() == other.stride()
    assert ours.length_per_key() == other.length_per_key()
    if ours.keys():  # without keys, theirs forget the 0
        assert ours.offset_per_key() == other.offset_per_key()
        assert_same(ours, other)
    assert ours.index_per_key() == other.index_per_key()
    assert ours.stride_per_key() == other.stride_per_key()
    for key in ours.index_per_key():
        assert_same(ours[key], other[key])
        assert_same(ours.to_dict()[key], other.to_dict()[key])


@settings(deadline=None)
@given(bags(min_keys=1, min_samples=1), st.booleans(), st.booleans(), st.data())
def test_keyed_jagged_tensors_are_as_theirs(
    content: Bags, weighted: bool, by_offsets: bool, data: st.DataObject
) -> None:
    arguments = parts(content, weighted=weighted, by_offsets=by_offsets)
    ours, other = KeyedJaggedTensor(**arguments), theirs.KeyedJaggedTensor(**arguments)
    assert_same_keyed(ours, other)
    order = data.draw(st.permutations(range(len(content))))
    order = order[: data.draw(st.integers(1, len(order)))]
    assert_same_keyed(ours.permute(order), other.permute(order))
    cut = data.draw(st.integers(0, len(content)))
    segments = [cut, len(content) - cut]
    for one, two in zip(ours.split(segments), other.split(segments), strict=True):
        assert_same_keyed(one, two)
    assert_same_keyed(
        KeyedJaggedTensor.from_jt_dict(ours.to_dict()),
        theirs.KeyedJaggedTensor.from_jt_dict(other.to_dict()),
    )
    assert_same_keyed(
        KeyedJaggedTensor.concat(ours.split([1] * len(content))),
        theirs.KeyedJaggedTensor.concat(other.split([1] * len(content))),
    )
    cpu = torch.device("cpu")
    fresh = theirs.KeyedJaggedTensor(**arguments)  # theirs keeps the old type in what to_dict gave
    assert_same_keyed(ours.to(cpu, dtype=torch.float64), fresh.to(cpu, dtype=torch.float64))


@settings(deadline=None)
@given(bags(min_keys=1), st.none() | st.integers(1, 4), st.booleans())
def test_jagged_tensors_are_as_theirs(content: Bags, width: int | None, by_offsets: bool) -> None:
    (slices, *_) = content.values()
    given = parts({"a": slices}, weighted=True, by_offsets=by_offsets)
    arguments = [given.get(key) for key in ("values", "weights", "lengths", "offsets")]
    ours, other = JaggedTensor(*arguments), theirs.JaggedTensor(*arguments)
    assert_same(ours, other)
    assert_lists(ours.to_dense(), other.to_dense())
    assert_lists(ours.to_dense_weights(), other.to_dense_weights())
    if not slices:
        return
    assert_lists(ours.to_padded_dense(width, 7), other.to_padded_dense(width, 7.0))
    assert_lists(ours.to_padded_dense_weights(width), other.to_padded_dense_weights(width))
    dense = ours.to_dense(), ours.to_dense_weights()
    assert_same(JaggedTensor.from_dense(*dense), theirs.JaggedTensor.from_dense(*dense))
    padded = ours.to_padded_dense(), ours.lengths(), ours.to_padded_dense_weights()
    assert_same(
        JaggedTensor.from_dense_lengths(*padded), theirs.JaggedTensor.from_dense_lengths(*padded)
    )


def assert_lists(ours: Any, other: Any) -> None:
    assert [one.tolist() for one in ours] == [one.tolist() for one in other]


CPU = torch.device("cpu")


@settings(deadline=None)
@given(bags(min_keys=1, min_samples=1), st.booleans(), st.booleans())
def test_what_models_ask_of_memory_is_answered_as_by_theirs(
    content: Bags, weighted: bool, by_offsets: bool
) -> None:
    arguments = parts(content, weighted=weighted, by_offsets=by_offsets)
    ours, other = KeyedJaggedTensor(**arguments), theirs.KeyedJaggedTensor(**arguments)
    assert ours.size_in_bytes() == other.size_in_bytes()
    for question in (
        "variable_stride_per_key",
        "stride_per_key_per_rank",
        "inverse_indices_or_none",
    ):
        assert getattr(ours, question)() == getattr(other, question)()
    first = next(iter(content))
    pairs: list[tuple[Any, Any]] = [(ours, other), (ours[first], other[first])]
    for one, two in pairs:
        one.record_stream(None)  # nothing of it is on a device
        assert shape(type(one).empty_like(one)) == shape(type(two).empty_like(two))
        assert shape(type(one).empty_like(one, CPU)) == shape(type(two).empty_like(two, CPU))
    assert_same_keyed(ours.flatten_lengths(), other.flatten_lengths())


def shape(jagged: Any) -> list[Any]:
    """All but the values, which are those of any memory."""
    tensors = [jagged.values(), jagged.weights_or_none(), jagged.lengths_or_none()]
    found = [None if one is None else (one.dtype, one.shape, one.device) for one in tensors]
    is_keyed = hasattr(jagged, "keys")
    return [*found, *([jagged.keys(), jagged.stride()] if is_keyed else [])]


def test_a_collection_of_rows_says_of_itself_what_theirs_says() -> None:
    tables = [(20, 4, "t0", ["a", "b"]), (30, 4, "t1", ["a"])]
    ours = pt.EmbeddingCollection([pt.EmbeddingConfig(*table) for table in tables])
    other = EmbeddingCollection(
        tables=[
            EmbeddingConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=names)
            for rows, dim, name, names in tables
        ]
    )
    for question in ("embedding_dim", "need_indices", "embedding_names_by_table"):
        assert getattr(ours, question)() == getattr(other, question)()
    sizes = [pt.EmbeddingConfig(9, dim, f"t{dim}", [f"f{dim}"]) for dim in (8, 4)]
    with pytest.raises(ArgumentError, match="the tables have several, 4, 8; ask embedding_configs"):
        pt.EmbeddingCollection(sizes).embedding_dim()


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_keyed_tensors_are_as_theirs(widths: list[int], data: st.DataObject) -> None:
    keys = [f"k{i}" for i in range(len(widths))]
    tensors = [torch.randn(3, width) for width in widths]
    ours = KeyedTensor.from_tensor_list(keys, tensors)
    other = theirs.KeyedTensor.from_tensor_list(keys, tensors)
    assert torch.equal(ours.values(), other.values())
    assert ours.offset_per_key() == other.offset_per_key()
    assert ours.key_dim() == other.key_dim()
    assert str(ours) == str(other)
    assert_lists(ours.to_dict().values(), other.to_dict().values())
    group = st.lists(st.sampled_from(keys), min_size=1, unique=True)
    groups = data.draw(st.lists(group, min_size=1, max_size=3))
    assert_lists(KeyedTensor.regroup([ours], groups), theirs.KeyedTensor.regroup([other], groups))
    names = [f"g{i}" for i in range(len(groups))]
    found = KeyedTensor.regroup_as_dict([ours], groups, names)
    expected = theirs.KeyedTensor.regroup_as_dict([other], groups, names)
    assert found.keys() == expected.keys()
    assert_lists(found.values(), expected.values())


@settings(deadline=None)
@given(bags(min_samples=1), st.booleans(), st.booleans())
def test_theirs_come_in_with_all_that_they_hold(
    content: Bags, weighted: bool, by_offsets: bool
) -> None:
    arguments = parts(content, weighted=weighted, by_offsets=by_offsets)
    keyed, came_from_torchrec = as_keyed(theirs.KeyedJaggedTensor(**arguments))
    assert came_from_torchrec
    assert_same_keyed(keyed, theirs.KeyedJaggedTensor(**arguments))


def test_theirs_with_a_number_of_samples_per_key_are_refused() -> None:
    varying = theirs.KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ArgumentError, match=r"different numbers of samples, \[2, 1\]"):
        as_keyed(varying)
    nothing = theirs.KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([3]))
    assert as_keyed(nothing.split([0, 1])[0])[0].keys() == []


def test_theirs_go_out_as_jagged_tensors_of_theirs() -> None:
    jagged = JaggedTensor(torch.ones(3, 2, requires_grad=True), lengths=torch.tensor([1, 2]))
    (out,) = like({"a": jagged}, True).values()
    assert isinstance(out, theirs.JaggedTensor)
    assert_same(jagged, out)
    assert out.values().requires_grad


# ------------------------------------------------------------------------------------- models

TABLES: list[tuple[Any, ...]] = [("users", 20, 4, ["user"]), ("films", 30, 4, ["film", "user"])]


def collections() -> tuple[PlainEmbeddingBagCollection, Any]:
    """Ours in this process, and theirs with the same weights."""
    ours = PlainEmbeddingBagCollection(TABLES)
    other = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features
            )
            for name, rows, dim, features in TABLES
        ]
    )
    other.load_state_dict(ours.state_dict())
    return ours, other


def features(kind: Any) -> Any:
    lengths = torch.tensor([1, 0, 3, 2, 2, 0])
    return kind(["user", "film"], torch.randint(0, 20, (8,)), lengths=lengths)


def test_the_plain_collection_is_as_theirs() -> None:
    ours, other = collections()
    given = features(theirs.KeyedJaggedTensor)
    found, expected = ours(given), other(given)
    assert isinstance(found, theirs.KeyedTensor)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_our_models_take_their_collection(name: str) -> None:
    ours, other = collections()
    model = MODELS[name](other, 3)
    dense, given = torch.randn(3, 3), features(theirs.KeyedJaggedTensor)
    expected = model(dense, given)
    model.embedding_bag_collection = ours
    torch.testing.assert_close(model(dense, as_keyed(given)[0]), expected)


@pytest.mark.parametrize(("model", "sizes"), [(TheirDLRM, []), (DLRM_DCN, [2, 3])])
@pytest.mark.parametrize("kind", [KeyedJaggedTensor, theirs.KeyedJaggedTensor])
def test_their_models_take_our_collection(model: Any, sizes: list[int], kind: Any) -> None:
    # Their SparseArch knows no feature of two tables, in their collection either.
    ours = PlainEmbeddingBagCollection([("users", 20, 4, ["user"]), ("films", 30, 4, ["film"])])
    made = model(ours, 3, [5, 4], [6, 1], *sizes)
    logits = made(torch.randn(3, 3), features(kind))
    assert logits.shape == (3, 1)
    logits.sum().backward()
    assert ours.embedding_bags["films"].weight.grad.any()
