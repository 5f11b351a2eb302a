"""Bags: numbered as row by row, pooled as torch does, for several features at once."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_arrays import HUGE, floats, ints
from test_kernels import bag_offsets, everywhere, properties

from planaria import kernels
from planaria.errors import ArgumentError, RowError
from planaria.kernels.types import PooledFeatures, Pooling


@properties
@given(st.data(), st.integers(0, 4))
def test_bags_are_numbered_as_their_rows_would_be_one_by_one(
    data: st.DataObject, samples: int
) -> None:
    content = [  # by key, then by sample
        [data.draw(st.lists(st.integers(0, 6), max_size=4)) for _ in range(samples)]
        for _ in range(3)
    ]
    keys = data.draw(st.lists(st.integers(0, 2), max_size=4))
    tables = sorted(data.draw(st.lists(st.integers(0, 3), min_size=len(keys), max_size=len(keys))))
    bags = [bag for slices in content for bag in slices]
    offsets = np.cumsum([0, *map(len, bags)])
    ids = np.array([one for bag in bags for one in bag], np.int64)
    limits, first_rows = np.full(len(keys), 7), np.array([9 * t for t in tables], np.int64)
    rows, inverse, of_bags = everywhere(
        lambda: tuple(
            kernels.number_bags(ids, offsets, samples, np.array(keys, np.int64), limits, first_rows)
        )
    )
    named = [(9 * t, bag) for k, t in zip(keys, tables, strict=True) for bag in content[k]]
    expected = [first + one for first, bag in named for one in bag]
    assert rows.tolist() == list(dict.fromkeys(expected))
    assert rows[inverse].tolist() == expected
    assert of_bags.tolist() == np.cumsum([0, *(len(bag) for _, bag in named)]).tolist()


SORTED = "features must be sorted by table, and tables have no row in common"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *(
            ({"ids": ints(4, bad, 0)}, "feature 0 has an id outside 0 to 4")
            for bad in (-1, 5, HUGE)
        ),
        ({"limits": ints(5, 4)}, "feature 1 has an id outside 0 to 3"),
        *(({"keys": ints(0, bad)}, "keys must be numbers from 0 to 0") for bad in (-1, 1, HUGE)),
        *(({"first_rows": ints(*rows)}, SORTED) for rows in ((5, 0), (0, 4), (-1, 5), (0, 0))),
        *(({"limits": ints(5, bad)}, "limits must be 0 to 2^40") for bad in (-1, 2**40 + 1)),
        ({"samples": 0}, "offsets needs an entry per key and sample, and one more, not 3"),
        ({"samples": -1}, "offsets needs an entry per key and sample, and one more, not 3"),
        ({"samples": 3}, "offsets needs an entry per key and sample, and one more, not 3"),
    ],
)
def test_ids_and_features_that_do_not_fit_are_refused(
    level: str, wrong: dict[str, object], says: str
) -> None:
    batch = {"ids": ints(4, 0, 4), "offsets": ints(0, 2, 3), "samples": 2}
    features = {"keys": ints(0, 0), "limits": ints(5, 6), "first_rows": ints(0, 5)}
    kernels.number_bags(**batch, **features)  # type: ignore[arg-type]
    error = RowError if "has an id" in says else ArgumentError
    with pytest.raises(error, match=re.escape(says)):
        kernels.number_bags(**{**batch, **features, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "poolings", "says"),
    [
        ((0, 2), (0, 0), "columns must rise by 3 or more, within the 7 of out"),
        ((0, 5), (0, 0), "columns must rise by 3 or more, within the 7 of out"),
        ((-1, 3), (0, 0), "columns must rise by 3 or more, within the 7 of out"),
        ((0, HUGE), (0, 0), "columns must rise by 3 or more, within the 7 of out"),
        ((0, 3, 6), (0, 0, 0), "4 bags cannot be shared by 3 features"),
        ((), (), "4 bags cannot be shared by 0 features"),
        ((0, 3), (0, 2), "weights go with weighted pooling, and only with it"),
        ((0, 3), (0, 9), "there is no pooling 9"),
        ((0, 3), (0,), "columns must have shape"),
    ],
)
def test_features_that_do_not_fit_the_pooled_rows_are_refused(
    level: str, columns: tuple[int, ...], poolings: tuple[int, ...], says: str
) -> None:
    out = floats(2, 7)
    before = out.copy()
    features = PooledFeatures(ints(*poolings), ints(*columns))
    with pytest.raises(ArgumentError, match=re.escape(says)):
        kernels.pool(floats(5, 3), ints(1, 2, 3), ints(0, 1, 1, 2, 3), None, features, out)
    assert np.array_equal(out, before)


def test_columns_of_nobody_are_left_alone(level: str) -> None:
    out = np.full((2, 8), 7, np.float32)
    features = PooledFeatures(ints(Pooling.SUM, Pooling.MEAN), ints(1, 5))
    values = np.array([[1, 2], [3, 4]], np.float32)
    kernels.pool(values, ints(0, 0, 1, 1), ints(0, 1, 1, 1, 4), None, features, out)
    mean = ((values[0] + values[1] + values[1]) / np.float32(3)).tolist()
    assert out.tolist() == [[7, 1, 2, 7, 7, 0, 0, 7], [7, 0, 0, 7, 7, *mean, 7]]


# ---------------------------------------------------------------------------- pooling, by torch


@pytest.mark.torch
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("dim", [1, 16, 65])
def test_pooling_and_its_gradients_are_torchs(level: str, pooling: Pooling, dim: int) -> None:
    import torch

    rng = np.random.default_rng(dim)
    rows, ids, bags = 50, 300, 40
    values = rng.standard_normal((rows, dim)).astype(np.float32)
    index, offsets = rng.integers(0, rows, ids), bag_offsets(rng, bags, ids)
    weights = rng.random(ids).astype(np.float32) if pooling == Pooling.WEIGHTED else None
    grads = rng.standard_normal((bags, dim)).astype(np.float32)

    table = torch.from_numpy(values).requires_grad_()
    torch_weights = None if weights is None else torch.from_numpy(weights).requires_grad_()
    pooled = torch.nn.functional.embedding_bag(
        torch.from_numpy(index),
        table,
        torch.from_numpy(offsets),
        mode="mean" if pooling == Pooling.MEAN else "sum",
        per_sample_weights=torch_weights,
        include_last_offset=True,
    )
    pooled.backward(torch.from_numpy(grads))

    got = kernels.pool(values, index, offsets, weights, pooling)
    np.testing.assert_allclose(got, pooled.detach().numpy(), rtol=1e-5, atol=1e-6)
    unique, inverse = kernels.dedup(index)
    out = np.empty((len(unique), dim), np.float32)
    kernels.pool_backward(grads, inverse, offsets, out, weights, pooling)
    np.testing.assert_allclose(out, table.grad.numpy()[unique], rtol=1e-5, atol=1e-5)
    if torch_weights is not None:
        dots = kernels.weight_backward(grads, values, index, offsets)
        np.testing.assert_allclose(dots, torch_weights.grad.numpy(), rtol=1e-4, atol=1e-5)
