"""Sources: a sample is the same whoever reads it, in whatever pieces, on whatever machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data import DENSE_FEATURES, Batch, Source, Synthetic, auc, sample_range
from planaria.data.synthetic import _stride
from planaria.errors import ArgumentError
from planaria.kernels.types import Floats

MIXED = [1, 3, 50, 10_000, 10_000_000, 2**40]  # rows of tables, from the smallest to the largest


def same(a: Batch, b: Batch) -> bool:
    return all(
        np.array_equal(x, y) for x, y in ((a.dense, b.dense), (a.ids, b.ids), (a.labels, b.labels))
    )


def joined(batches: list[Batch]) -> Batch:
    return Batch(
        np.concatenate([b.dense for b in batches]),
        np.concatenate([b.ids for b in batches]),
        np.concatenate([b.labels for b in batches]),
    )


def fingerprint(batch: Batch) -> str:
    """As if little-endian, whatever the machine."""
    digest = hashlib.sha256()
    for array, kind in ((batch.dense, "<f4"), (batch.ids, "<i8"), (batch.labels, "<f4")):
        digest.update(np.ascontiguousarray(array, kind).tobytes())
    return digest.hexdigest()


def check_shape(source: Source, batch: Batch, samples: int) -> None:
    assert len(batch) == samples
    assert batch.dense.shape == (samples, DENSE_FEATURES)
    assert batch.ids.shape == (samples, len(source.tables))
    assert batch.labels.shape == (samples,)
    assert batch.dense.dtype == batch.labels.dtype == np.float32
    assert batch.ids.dtype == np.int64
    assert all(array.flags.c_contiguous for array in (batch.dense, batch.ids, batch.labels))
    assert (batch.ids >= 0).all()
    assert (batch.ids < np.array(source.tables)).all()
    assert np.isin(batch.labels, [0, 1]).all()
    assert (batch.dense >= 0).all()


# ---------------------------------------------------------------------------- who reads what


@given(st.integers(1, 10**6), st.integers(1, 40), st.integers(1, 5000))
def test_the_ranks_of_a_step_read_each_sample_of_its_batch_once(
    step: int, trainers: int, batch: int
) -> None:
    at = (step - 1) * batch
    for rank in range(trainers):
        start, count = sample_range(step, rank, trainers, batch)
        assert start == at
        assert count in (batch // trainers, -(-batch // trainers))
        at += count
    assert at == step * batch
    assert sample_range(step + 1, 0, trainers, batch)[0] == at


def test_equal_shares_would_lose_samples() -> None:
    """The control: the obvious batch // trainers per rank does not add up."""
    assert sum(sample_range(5, rank, 3, 100)[1] for rank in range(3)) == 100
    assert sum(100 // 3 for _ in range(3)) != 100


@pytest.mark.parametrize("wrong", [(0, 0, 1, 1), (1, -1, 1, 1), (1, 0, 0, 1), (1, 0, 1, -1)])
def test_a_wrong_step_rank_or_batch_is_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ArgumentError, match="count from 1"):
        sample_range(*wrong)


# ---------------------------------------------------------------------------- synthetic


def test_the_generator_never_changes() -> None:
    """Another fingerprint is other data under the same seed: published figures would not hold."""
    batch = Synthetic(MIXED, seed=7).read(123_456_789, 1000)
    assert fingerprint(batch) == FROZEN
    assert fingerprint(Synthetic(MIXED, seed=8).read(123_456_789, 1000)) != FROZEN  # control
    assert fingerprint(Synthetic(MIXED, seed=7).read(123_456_788, 1000)) != FROZEN


FROZEN = "ca73f37f5bee263cc0b9b7419635875901a62af6aa1979b9e60997f35f79da16"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**61), st.lists(st.integers(0, 700), min_size=1, max_size=6))
def test_a_synthetic_sample_does_not_depend_on_how_it_is_read(start: int, sizes: list[int]) -> None:
    whole = SOURCE.read(start, sum(sizes))
    ends = np.cumsum(sizes)
    pieces = [
        SOURCE.read(start + int(end) - size, size) for end, size in zip(ends, sizes, strict=True)
    ]
    assert same(joined(pieces), whole)
    if sum(sizes) > 1:
        assert not same(SOURCE.read(start + 1, sum(sizes)), whole)  # control


SOURCE = Synthetic(MIXED, seed=1)


def test_synthetic_batches_fit_their_tables() -> None:
    batch = SOURCE.read(0, 20_000)
    check_shape(SOURCE, batch, 20_000)
    assert SOURCE.samples is None
    assert (batch.ids[:, 0] == 0).all()
    assert batch.ids[:, -1].max() > 2**39
    assert 0.03 < (batch.dense == 0).mean() < 0.05
    check_shape(SOURCE, SOURCE.read(5, 0), 0)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 1.5])
def test_ids_follow_zipfs_law(exponent: float) -> None:
    """Frequencies of the first ranks, and of all beyond, against Zipf's own."""
    rows, samples = 5000, 20_000
    ids = Synthetic([rows] * 10, exponent=exponent).read(0, samples).ids
    law = np.arange(1, rows + 1) ** -exponent
    law /= law.sum()
    for cut in (1, 10, 100, 1000):
        top = [np.sort(np.bincount(table, minlength=rows))[::-1][:cut].sum() for table in ids.T]
        share, expected = np.mean(top) / samples, law[:cut].sum()
        if expected * samples / cut > 30:  # sorting noise would look like skew
            assert share == pytest.approx(expected, rel=0.12)
    other = np.arange(1, rows + 1) ** -(exponent + 0.5)  # control: a neighbouring law does not fit
    if exponent >= 1:
        top_ten = np.mean([np.sort(np.bincount(t))[::-1][:10].sum() for t in ids.T]) / samples
        assert top_ten != pytest.approx(other[:10].sum() / other.sum(), rel=0.12)


def test_every_row_of_a_table_can_come_and_uniform_ids_are_uniform() -> None:
    ids = Synthetic([997, 1000], exponent=0.0).read(0, 200_000).ids
    for table, rows in enumerate((997, 1000)):
        counts = np.bincount(ids[:, table], minlength=rows)
        chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert abs(chi_square - rows) < 6 * math.sqrt(2 * rows)
    skewed = np.bincount(Synthetic([997]).read(0, 200_000).ids[:, 0], minlength=997)  # control
    assert ((skewed - skewed.mean()) ** 2 / skewed.mean()).sum() > 1e5


@given(st.integers(1, 2**40))
def test_ranks_and_rows_are_one_to_one(rows: int) -> None:
    stride = _stride(rows)
    assert math.gcd(stride, rows) == 1
    assert (rows - 1) * stride + rows < 2**63
    if rows <= 3000:
        assert len(np.unique(np.arange(rows) * stride % rows)) == rows


@pytest.mark.parametrize("rows", [10_000, 10_000_000, 2**40])
def test_hot_rows_are_spread_over_the_table(rows: int) -> None:
    ids = Synthetic([rows]).read(0, 100_000).ids[:, 0]
    values, counts = np.unique(ids, return_counts=True)
    hot = values[np.argsort(-counts, kind="stable")[:128]]
    for k in (2, 3, 4, 5, 6, 8, 12):
        assert np.bincount(hot % k, minlength=k).max() < 2.2 * 128 / k
    assert np.bincount(np.arange(0, 128 * 12, 12) % 12, minlength=12).max() == 128  # control
    assert len(np.unique(hot)) == 128
    assert (np.diff(np.sort(hot)) > 1).mean() > 0.9


@pytest.mark.parametrize("tables", [(10_000,) * 26, MIXED, [1], [5, 5]])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_quarter_clicks_and_the_planted_model_has_an_auc_of_0_80(
    tables: list[int], seed: int
) -> None:
    source = Synthetic(tables, seed=seed)
    labels, chance = source.read(0, 40_000).labels, source.click_chance(0, 40_000)
    assert labels.mean() == pytest.approx(0.25, abs=0.015)
    assert auc(labels, chance) == pytest.approx(0.80, abs=0.02)
    assert auc(np.roll(labels, 1), chance) == pytest.approx(0.5, abs=0.02)  # control


def test_labels_come_as_often_as_the_planted_model_says() -> None:
    labels, chance = SOURCE.read(0, 100_000).labels, SOURCE.click_chance(0, 100_000)
    for low in np.arange(0.0, 0.9, 0.1):
        bin_ = (chance >= low) & (chance < low + 0.1)
        deviation = math.sqrt(0.25 / bin_.sum())
        assert labels[bin_].mean() == pytest.approx(chance[bin_].mean(), abs=5 * deviation)
    assert labels.mean() != pytest.approx((chance > 0.5).mean(), abs=0.02)  # control


def learn(source: Synthetic, relabel: Callable[[Floats], Floats], steps: int = 150) -> float:
    """AUC on new samples after one pass of logistic regression on one-hot ids, by Adagrad."""
    batch, rows = 2048, source.tables[0]
    offsets = np.arange(len(source.tables)) * rows
    weights, squares = np.zeros((2, rows * len(source.tables) + DENSE_FEATURES))
    for step in range(steps):
        sample = source.read(step * batch, batch)
        columns, dense = sample.ids + offsets, sample.dense - 2
        logits = weights[columns].sum(axis=1) + dense @ weights[-DENSE_FEATURES:] - 1.1
        wrong = 1 / (1 + np.exp(-logits)) - relabel(sample.labels)
        gradient = np.bincount(columns.ravel(), np.repeat(wrong, columns.shape[1]), len(weights))
        gradient[-DENSE_FEATURES:] = wrong @ dense / 64
        squares += gradient**2
        weights -= 0.06 * gradient / np.sqrt(squares + 1e-8)
    test = source.read(10**9, 20_000)
    scores = weights[test.ids + offsets].sum(axis=1) + (test.dense - 2) @ weights[-DENSE_FEATURES:]
    return auc(test.labels, scores)


def test_one_pass_of_a_linear_model_learns_the_planted_one() -> None:
    assert learn(Synthetic(seed=3), lambda labels: labels) > 0.65
    assert learn(Synthetic(seed=3), lambda labels: np.roll(labels, 1), 30) < 0.55  # control


def test_a_bounded_source_ends() -> None:
    bounded, endless = Synthetic(MIXED, seed=1, samples=1000), SOURCE
    assert bounded.samples == 1000
    assert same(bounded.read(900, 500), endless.read(900, 100))
    assert len(bounded.read(1000, 5)) == len(bounded.read(10**12, 5)) == 0
    assert len(bounded.click_chance(900, 500)) == 100
    assert len(endless.read(900, 500)) == 500  # control


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Synthetic([]), "at least one table"),
        (lambda: Synthetic([4, 0]), "table 1: rows must be"),
        (lambda: Synthetic([2**40 + 1]), r"1 to 2\^40"),
        (lambda: Synthetic([4], seed=-1), "seed"),
        (lambda: Synthetic([4], exponent=1.6), "exponent"),
        (lambda: Synthetic([4], exponent=math.nan), "exponent"),
        (lambda: Synthetic([4], samples=-1), "samples"),
        (lambda: SOURCE.read(-1, 4), "from sample -1"),
        (lambda: SOURCE.read(0, -4), "-4 samples"),
        (lambda: SOURCE.read(2**62, 1), "2.62"),
    ],
)
def test_wrong_arguments_get_a_sentence(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()
