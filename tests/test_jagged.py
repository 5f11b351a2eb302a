"""Jagged tensors are what nested lists are, and say what is wrong with their arguments."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagged_bags import Bags, bags, parts, samples_of

from planaria.errors import ArgumentError
from planaria.torch import JaggedTensor, KeyedJaggedTensor, KeyedTensor

pytestmark = pytest.mark.torch


def as_bags(kjt: KeyedJaggedTensor) -> Bags:
    return {key: [one.tolist() for one in jt.to_dense()] for key, jt in kjt.to_dict().items()}


def as_weights(kjt: KeyedJaggedTensor) -> dict[str, list[list[float]]]:
    found = {key: jt.to_dense_weights() for key, jt in kjt.to_dict().items()}
    return {key: [one.tolist() for one in some or []] for key, some in found.items()}


# ------------------------------------------------------------------------ keyed jagged tensors


@settings(deadline=None)
@given(bags(), st.booleans(), st.booleans())
def test_a_keyed_jagged_tensor_holds_each_keys_bags(
    content: Bags, weighted: bool, by_offsets: bool
) -> None:
    kjt = KeyedJaggedTensor(**parts(content, weighted=weighted, by_offsets=by_offsets))
    assert as_bags(kjt) == content
    assert kjt.keys() == list(content)
    assert kjt.stride() == samples_of(content)
    assert kjt.stride_per_key() == [samples_of(content)] * len(content)
    counts = [sum(len(bag) for bag in slices) for slices in content.values()]
    assert kjt.length_per_key() == counts
    assert kjt.offset_per_key() == [0, *np.cumsum(counts, dtype=int).tolist()]
    assert kjt.lengths().tolist() == [len(bag) for some in content.values() for bag in some]
    assert kjt.offsets().tolist() == [0, *np.cumsum(kjt.lengths().numpy(), dtype=int).tolist()]
    assert kjt.lengths().dtype == kjt.offsets().dtype == torch.int32
    if weighted and content:
        flat = [w for some in as_weights(kjt).values() for bag in some for w in bag]
        assert flat == kjt.weights().tolist()
    for key, index in kjt.index_per_key().items():
        assert list(content)[index] == key
        assert [one.tolist() for one in kjt[key].to_dense()] == content[key]
        assert kjt[key].offsets()[0] == 0


@settings(deadline=None)
@given(bags(min_keys=1), st.booleans(), st.data())
def test_splits_and_permutations_take_the_bags_along(
    content: Bags, weighted: bool, data: st.DataObject
) -> None:
    kjt = KeyedJaggedTensor(**parts(content, weighted=weighted))
    order = data.draw(st.permutations(range(len(content))))
    order = order[: data.draw(st.integers(0, len(order)))]
    permuted = kjt.permute(order)
    assert as_bags(permuted) == {list(content)[i]: list(content.values())[i] for i in order}
    assert permuted.stride() == kjt.stride()
    cut = data.draw(st.integers(0, len(content)))
    left, right = kjt.split([cut, len(content) - cut])
    assert [*left.keys(), *right.keys()] == list(content)
    assert {**as_bags(left), **as_bags(right)} == content
    again = KeyedJaggedTensor.concat([left, right])
    assert as_bags(again) == content
    assert again.stride() == left.stride() == right.stride() == kjt.stride()
    by_key = KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert as_bags(by_key) == content
    if weighted:
        expected = as_weights(kjt)
        assert {**as_weights(left), **as_weights(right)} == expected
        assert as_weights(again) == as_weights(by_key) == expected
        assert as_weights(permuted) == {list(content)[i]: expected[list(content)[i]] for i in order}


def test_lengths_and_offsets_are_computed_when_asked_for() -> None:
    content = {"a": [[1, 2], []], "b": [[3], [4, 5]]}
    by_lengths = KeyedJaggedTensor(**parts(content))
    assert by_lengths.offsets_or_none() is None
    assert by_lengths.offsets().tolist() == [0, 2, 2, 3, 5]
    assert by_lengths.offsets_or_none() is by_lengths.offsets()
    by_offsets = KeyedJaggedTensor(**parts(content, by_offsets=True))
    assert by_offsets.lengths_or_none() is None
    assert by_offsets.lengths().tolist() == [2, 0, 1, 2]
    assert by_offsets.weights_or_none() is None
    synced = KeyedJaggedTensor.from_lengths_sync(["a"], torch.arange(3), torch.tensor([1, 2]))
    assert synced.offset_per_key() == [0, 3]
    again = KeyedJaggedTensor.from_offsets_sync(["a"], torch.arange(3), torch.tensor([0, 1, 3]))
    assert as_bags(again) == as_bags(synced) == {"a": [[0], [1, 2]]}


def test_a_copy_on_a_device_is_the_same_and_only_weights_change_their_type() -> None:
    kjt = KeyedJaggedTensor(**parts({"a": [[1, 2], []], "b": [[3], []]}, weighted=True)).sync()
    copy = kjt.to(torch.device("cpu"), dtype=torch.float64)
    assert copy.device() == torch.device("cpu")
    assert as_bags(copy) == as_bags(kjt)
    assert copy.values().dtype == torch.int64
    assert copy.weights().dtype == torch.float64
    elsewhere = kjt.to(torch.device("meta"))
    assert elsewhere.device().type == "meta"
    assert elsewhere.keys() == ["a", "b"]
    assert elsewhere.offset_per_key() == [0, 2, 3]  # known before, so nothing waits for a device


def test_pinning_pins_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    kjt = KeyedJaggedTensor(["a"], torch.tensor([5]), torch.tensor([0.5]), torch.tensor([1]))
    pinned = kjt.pin_memory()
    tensors = (pinned.values(), pinned.weights(), pinned.lengths())
    assert [tensor.tolist() for tensor in tensors] == [[6], [1.5], [2]]
    assert kjt.values().tolist() == [5]  # control


def test_a_data_loaders_worker_can_send_one() -> None:
    content = {"a": [[1, 2], []], "b": [[3], []]}
    kjt = KeyedJaggedTensor(**parts(content, weighted=True))
    assert as_bags(pickle.loads(pickle.dumps(kjt))) == content


def test_empty_ones_have_no_keys() -> None:
    nothing = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert nothing.keys() == []
    assert nothing.stride() == 0
    assert nothing.to_dict() == {}
    assert nothing.offset_per_key() == [0]
    assert len(nothing.weights()) == len(nothing.lengths()) == 0
    assert KeyedJaggedTensor.from_jt_dict({}).keys() == []
    assert KeyedJaggedTensor.empty().weights_or_none() is None


def test_keyed_jagged_tensors_can_be_read() -> None:
    content = {"a": [[1, 2], []], "b": [[3], []]}
    assert str(KeyedJaggedTensor(**parts(content))) == (
        'KeyedJaggedTensor({\n    "a": [[1, 2], []],\n    "b": [[3], []]\n})\n'
    )
    weighted = str(KeyedJaggedTensor(**parts({"a": [[10], []]}, weighted=True)))
    assert '"weights": [[1.0], []]' in weighted


# ------------------------------------------------------------------------------ jagged tensors


@settings(deadline=None)
@given(bags(min_keys=1), st.none() | st.integers(0, 4), st.booleans())
def test_a_jagged_tensor_is_a_list_of_slices(
    content: Bags, width: int | None, by_offsets: bool
) -> None:
    (slices, *_) = content.values()
    given = parts({"a": slices}, weighted=True, by_offsets=by_offsets)
    jt = JaggedTensor(*(given.get(key) for key in ("values", "weights", "lengths", "offsets")))
    assert [one.tolist() for one in jt.to_dense()] == slices
    weights = [one.tolist() for one in jt.to_dense_weights() or []]
    columns = width if width is not None else max((len(one) for one in slices), default=0)
    padded = [(one + [-1] * columns)[:columns] for one in slices]
    assert jt.to_padded_dense(width, -1).tolist() == padded
    padded_weights = [(one + [-1.0] * columns)[:columns] for one in weights]
    found = jt.to_padded_dense_weights(width, -1)
    assert found is not None
    assert found.tolist() == padded_weights
    if slices:
        again = JaggedTensor.from_dense(jt.to_dense(), jt.to_dense_weights())
        assert again.values().tolist() == jt.values().tolist()
        assert again.weights().tolist() == jt.weights().tolist()
        assert again.lengths().tolist() == jt.lengths().tolist()
        dense = JaggedTensor.from_dense_lengths(
            jt.to_padded_dense(), jt.lengths(), jt.to_padded_dense_weights()
        )
        assert [one.tolist() for one in dense.to_dense()] == slices
        assert dense.weights().tolist() == jt.weights().tolist()


def test_gradients_flow_through_padding_to_the_embeddings() -> None:
    values = torch.arange(8.0).reshape(4, 2).requires_grad_()
    jt = JaggedTensor(values, lengths=torch.tensor([1, 0, 3]))
    padded = jt.to_padded_dense(desired_length=2)
    assert padded.tolist() == [
        [[0.0, 1.0], [0.0, 0.0]],
        [[0.0, 0.0], [0.0, 0.0]],
        [[2.0, 3.0], [4.0, 5.0]],
    ]
    padded.sum().backward()
    assert values.grad.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]  # the last one was cut off


def test_a_jagged_tensor_moves_and_can_be_read() -> None:
    jt = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([2, 0])).to(torch.device("cpu"))
    assert str(jt) == "JaggedTensor({\n    [[1, 2], []]\n})\n"
    assert jt.device() == torch.device("cpu")
    assert jt.to_dense_weights() is None
    assert jt.to_padded_dense_weights() is None
    assert JaggedTensor.empty(is_weighted=True).to_dense() == []


# ------------------------------------------------------------------------------- keyed tensors


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_a_keyed_tensor_gives_back_each_keys_columns(
    widths: list[int], samples: int, data: st.DataObject
) -> None:
    tensors = [torch.randn(samples, width) for width in widths]
    keys = [f"k{i}" for i in range(len(widths))]
    kt = KeyedTensor.from_tensor_list(keys, tensors)
    assert kt.keys() == keys
    assert kt.length_per_key() == widths
    assert kt.offset_per_key() == [0, *np.cumsum(widths).tolist()]
    for key, tensor in zip(keys, tensors, strict=True):
        assert torch.equal(kt[key], tensor)
        assert torch.equal(kt.to_dict()[key], tensor)
    cut = data.draw(st.integers(0, len(keys)))
    halves = [
        KeyedTensor.from_tensor_list(keys[part], tensors[part])
        for part in (slice(0, cut), slice(cut, None))
        if keys[part]
    ]
    group = st.lists(st.integers(0, len(keys) - 1), min_size=1, max_size=5)
    groups = data.draw(st.lists(group, max_size=3))
    names = [[keys[i] for i in group] for group in groups]
    regrouped = KeyedTensor.regroup(halves, names)
    for group_tensor, chosen in zip(regrouped, groups, strict=True):
        assert torch.equal(group_tensor, torch.cat([tensors[i] for i in chosen], dim=1))
    by_name = KeyedTensor.regroup_as_dict(halves, names, [f"g{i}" for i in range(len(groups))])
    assert [tensor.tolist() for tensor in by_name.values()] == [one.tolist() for one in regrouped]


def test_a_keyed_tensor_may_have_its_keys_in_any_dimension() -> None:
    kt = KeyedTensor(["a", "b"], [1, 2], torch.arange(6).reshape(3, 2), key_dim=0)
    assert kt["b"].tolist() == [[2, 3], [4, 5]]
    assert kt.key_dim() == 0
    moved = kt.to(torch.device("cpu"))
    assert moved.device() == torch.device("cpu")
    assert KeyedTensor.regroup([moved], [["b", "a"]])[0].tolist() == [[2, 3], [4, 5], [0, 1]]
    assert str(kt) == 'KeyedTensor({\n    "a": [[0, 1]],\n    "b": [[2, 3], [4, 5]]\n})\n'


# ---------------------------------------------------------------------------- what is refused

FIVE = torch.arange(5)
TWO_KEYS = KeyedJaggedTensor(["a", "b"], FIVE, lengths=torch.tensor([2, 0, 1, 2]))
WEIGHTED = KeyedJaggedTensor(["c"], FIVE, FIVE / 2, lengths=torch.tensor([5, 0]))
COLUMNS = KeyedTensor(["a", "b"], [1, 2], torch.zeros(4, 3))


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def keyed(*keys: str, **others: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(keys), FIVE, **others)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: keyed("a"), "needs lengths or offsets"),
        (lambda: keyed("a", lengths=ints(2, 2)), "lengths sum to 4, but there are 5 values"),
        (lambda: keyed("a", "b", lengths=ints(2, 2, 1)), "3 lengths for 2 keys"),
        (lambda: keyed("a", "b", "a", lengths=ints(2, 2, 1)), "'a' stands there twice"),
        (lambda: keyed("a", lengths=ints(6, -1)), r"lengths\[1\] is -1"),
        (lambda: keyed("a", lengths=ints(2, 3), stride=3), "need 3 lengths; got 2"),
        (lambda: keyed(lengths=ints(5)), "0 keys with 0 samples"),
        (lambda: keyed("a", offsets=ints(0, 3, 2, 5)), r"offsets\[2\] is 2, less than 3"),
        (lambda: keyed("a", offsets=ints(0, 3)), "from 0 to 5, .* not from 0 to 3"),
        (lambda: keyed("a", offsets=ints(1, 5)), "not from 1 to 5"),
        (lambda: keyed("a", offsets=ints()), "offsets must be int32 or int64"),
        (lambda: keyed("a", offsets=ints().long()), "begin with 0"),
        (lambda: keyed("a", lengths=ints(5, 0), offsets=ints(0, 4, 5)), "different things"),
        (lambda: keyed("a", lengths=ints(5), offsets=ints(0, 4, 5)), "different things"),
        (lambda: keyed("a", lengths=torch.tensor([5.0])), "int32 or int64, not torch.float32"),
        (lambda: keyed("a", lengths=ints(5).unsqueeze(0)), r"one dimension, not \[1, 1\]"),
        (lambda: keyed("a", lengths=[5]), "a tensor of one dimension"),
        (lambda: keyed("a", weights=FIVE[:4] / 2, lengths=ints(5)), "as many weights; got 4"),
        (lambda: keyed("a", weights=[1.0] * 5, lengths=ints(5)), "weights must be a tensor"),
        (lambda: KeyedJaggedTensor("ab", FIVE, lengths=ints(2, 3)), "a list of names"),
        (lambda: KeyedJaggedTensor(["a"], [1], lengths=ints(1)), "values must be a tensor"),
        (lambda: TWO_KEYS.weights(), "this KeyedJaggedTensor has no weights"),
        (lambda: TWO_KEYS["c"], "no key 'c'; the keys are a, b"),
        (lambda: TWO_KEYS.permute([0, 0]), "'a' stands there twice"),
        (lambda: TWO_KEYS.permute([2]), "no key number 2 among 2"),
        (lambda: TWO_KEYS.split([1, 2]), "sum to 2 keys at most"),
        (lambda: TWO_KEYS.split([-1, 2]), "0 or more"),
        (lambda: KeyedJaggedTensor.concat([]), "one KeyedJaggedTensor or more"),
        (lambda: KeyedJaggedTensor.concat([TWO_KEYS, TWO_KEYS]), "'a' stands there twice"),
        (lambda: KeyedJaggedTensor.concat([TWO_KEYS, WEIGHTED]), "'a, b' has none"),
        (
            lambda: KeyedJaggedTensor.concat([TWO_KEYS, keyed("c", lengths=ints(5))]),
            "same number of samples, with empty slices; a, b: 2; c: 1",
        ),
        (
            lambda: KeyedJaggedTensor.from_jt_dict(
                {"a": TWO_KEYS["a"], "c": JaggedTensor(FIVE, lengths=ints(5))}
            ),
            "same number of samples, with empty slices; a: 2; c: 1",
        ),
        (
            lambda: KeyedJaggedTensor.from_jt_dict({"a": TWO_KEYS["a"], "c": WEIGHTED["c"]}),
            "'a' has none",
        ),
        (lambda: JaggedTensor(FIVE), "a jagged tensor needs lengths or offsets"),
        (lambda: JaggedTensor.from_dense([]), "a tensor or more"),
        (lambda: JaggedTensor.from_dense([FIVE], [FIVE[:4]]), r"expected \[5\], got \[4\]"),
        (lambda: JaggedTensor.from_dense_lengths(FIVE, ints(5)), r"values must be \[B, longest\]"),
        (lambda: JaggedTensor.from_dense_lengths(FIVE.view(1, 5), ints(6)), "from 0 to 5"),
        (
            lambda: JaggedTensor.from_dense_lengths(FIVE.view(1, 5), ints(5), FIVE),
            "the shape of values",
        ),
        (lambda: KeyedTensor(["a"], [1, 2], torch.zeros(4, 3)), "1 keys need as many lengths"),
        (lambda: KeyedTensor(["a"], [2], torch.zeros(4, 3)), "sum to the 3 columns"),
        (lambda: KeyedTensor(["a", "a"], [1, 2], torch.zeros(4, 3)), "stands there twice"),
        (lambda: KeyedTensor(["a"], [2], torch.zeros(2)), "have no dimension 1"),
        (lambda: COLUMNS["c"], "no key 'c'; the keys are a, b"),
        (lambda: KeyedTensor.from_tensor_list([], []), "one tensor or more"),
        (lambda: KeyedTensor.from_tensor_list(["a"], [FIVE], 0), "must be equal"),
        (lambda: KeyedTensor.regroup([], [["a"]]), "one KeyedTensor or more"),
        (lambda: KeyedTensor.regroup([COLUMNS], [["c"]]), "no key 'c'"),
        (lambda: KeyedTensor.regroup([COLUMNS], [[]]), "one key or more"),
        (lambda: KeyedTensor.regroup([COLUMNS, COLUMNS], [["a"]]), "stands there twice"),
        (lambda: KeyedTensor.regroup_as_dict([COLUMNS], [["a"]], []), "1 groups need as many"),
    ],
)
def test_bad_arguments_get_a_sentence(wrong: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        wrong()
