"""Sources: a sample is the same whoever reads it, in whatever pieces, on whatever machine."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.data import DENSE, Batch, CriteoFile, Source, Synthetic, auc, criteo, sample_range
from planaria.data.synthetic import _stride
from planaria.errors import ArgumentError, DataError, PlanariaError
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
    assert batch.dense.shape == (samples, DENSE)
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


@given(st.integers(1, 10**6), st.integers(1, 40), st.integers(0, 3), st.integers(1, 5000))
def test_the_ranks_of_a_step_read_each_sample_of_its_batch_once(
    step: int, trainers: int, shadows: int, batch: int
) -> None:
    at = (step - 1) * batch
    for rank in range(trainers + shadows):
        start, count = sample_range(step, rank, trainers, batch)
        assert start == at
        assert (
            count == 0 if rank >= trainers else count in (batch // trainers, -(-batch // trainers))
        )
        at += count
    assert at == step * batch
    assert sample_range(step + 1, 0, trainers, batch)[0] == at


def test_equal_shares_would_lose_samples() -> None:
    """The control: the obvious batch // trainers per rank does not add up."""
    assert sum(sample_range(5, rank, 3, 100)[1] for rank in range(3)) == 100
    assert sum(100 // 3 for _ in range(3)) != 100


@pytest.mark.parametrize("wrong", [(0, 0, 1, 1), (1, -1, 1, 1), (1, 0, 0, 1), (1, 0, 1, 0)])
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
    weights, squares = np.zeros((2, rows * len(source.tables) + DENSE))
    for step in range(steps):
        sample = source.read(step * batch, batch)
        columns, dense = sample.ids + offsets, sample.dense - 2
        logits = weights[columns].sum(axis=1) + dense @ weights[-DENSE:] - 1.1
        wrong = 1 / (1 + np.exp(-logits)) - relabel(sample.labels)
        gradient = np.bincount(columns.ravel(), np.repeat(wrong, columns.shape[1]), len(weights))
        gradient[-DENSE:] = wrong @ dense / 64
        squares += gradient**2
        weights -= 0.06 * gradient / np.sqrt(squares + 1e-8)
    test = source.read(10**9, 20_000)
    scores = weights[test.ids + offsets].sum(axis=1) + (test.dense - 2) @ weights[-DENSE:]
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


# ---------------------------------------------------------------------------- Criteo's files

ROWS = [1, 2, 3, 1000, *[10_000] * 20, 10**7, 2**40]
GOOD = "\t".join(["1", *"0123456789", "10", "", "-2", *["68fd1e64"] * 25, ""])


def line_of(number: int) -> str:
    """A line with all that occurs: missing fields, negative and long numbers, both cases."""
    rng = np.random.default_rng(number)
    integers = [str(x) for x in (rng.pareto(0.6, DENSE) * 10).astype(int) - 2]
    ids = [f"{x:08x}" for x in rng.integers(0, 2**32, criteo.TABLES)]
    ids[3], ids[4], ids[5] = ids[3].upper(), f"{number:x}", "f" * 16
    fields = [str(number % 2), *integers, *ids]
    for empty in rng.integers(1, len(fields), 4):
        fields[empty] = ""
    return "\t".join(fields)


LINES = [line_of(i) for i in range(400)]


def oracle_row(field: str, table: int, rows: int) -> int:
    """The row of an id, in Python's integers."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    if not field or rows == 1:
        return 0
    key = mixed((table + 1) * 0x9E3779B97F4A7C15 % 2**64)
    return 1 + mixed((int(field, 16) + key) % 2**64) % (rows - 1)


def oracle(lines: list[str]) -> Batch:
    fields = [line.split("\t") for line in lines]
    dense = [[math.log1p(max(int(x or 0), 0)) for x in f[1 : 1 + DENSE]] for f in fields]
    ids = [[oracle_row(x, t, ROWS[t]) for t, x in enumerate(f[1 + DENSE :])] for f in fields]
    return Batch(
        np.array(dense, np.float32).reshape(-1, DENSE),
        np.array(ids, np.int64).reshape(-1, criteo.TABLES),
        np.array([float(f[0]) for f in fields], np.float32),
    )


WANTED = oracle(LINES)


def part(batch: Batch, start: int, count: int) -> Batch:
    own = slice(start, start + count)
    return Batch(batch.dense[own], batch.ids[own], batch.labels[own])


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small file has many."""
    monkeypatch.setattr(criteo, "CHUNK_BYTES", 4096)


@pytest.fixture(params=["day.tsv", "day.gz"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / str(request.param), "\n".join(LINES) + "\n")


def test_a_criteo_file_reads_as_its_fields_say(log: Path) -> None:
    with CriteoFile(log, ROWS) as source:
        batch = source.read(0, 10**6)
        check_shape(source, batch, len(LINES))
    assert np.array_equal(batch.ids, WANTED.ids)
    assert np.array_equal(batch.labels, WANTED.labels)
    np.testing.assert_allclose(batch.dense, WANTED.dense, rtol=2e-7)
    assert not np.array_equal(batch.ids[1:], WANTED.ids[:-1])  # control


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 450), st.integers(0, 120)), max_size=8))
def test_any_lines_in_any_order_are_those_of_one_pass(
    log: Path, reads: list[tuple[int, int]]
) -> None:
    with CriteoFile(log, ROWS) as source:
        for start, count in reads:
            batch = source.read(start, count)
            assert len(batch) == max(0, min(count, len(LINES) - start))
            assert np.array_equal(batch.ids, part(WANTED, start, count).ids)
            assert np.array_equal(batch.labels, part(WANTED, start, count).labels)


def test_a_reader_keeps_a_few_chunks_only(log: Path) -> None:
    with CriteoFile(log, ROWS) as source:
        for start in (0, 390, 200, 0, 399):
            source.read(start, 1)
            assert len(source._lines._kept) <= criteo.CHUNKS_KEPT
        assert len(source._lines._offsets) > 3 * criteo.CHUNKS_KEPT  # control


def test_samples_are_counted_and_reading_past_them_gives_fewer(log: Path) -> None:
    with CriteoFile(log, ROWS) as source:
        first = source.read(0, 10)
        assert source.samples == len(LINES)
        assert len(source.read(395, 10)) == 5
        assert len(source.read(400, 10)) == len(source.read(10**15, 10)) == 0
        assert same(source.read(0, 10), first)


@pytest.mark.parametrize("name", ["day.tsv", "day.gz"])
def test_line_ends_may_be_of_either_kind_and_the_last_may_lack(tmp_path: Path, name: str) -> None:
    for ending, last in (("\r\n", "\r\n"), ("\n", ""), ("\r\n", "")):
        path = write(tmp_path / name, ending.join(LINES) + last)
        with CriteoFile(path, ROWS) as source:
            assert source.samples == len(LINES)
            assert np.array_equal(source.read(0, 400).ids, WANTED.ids)


@pytest.mark.parametrize("name", ["day.tsv", "day.gz"])
def test_an_empty_file_has_no_samples(tmp_path: Path, name: str) -> None:
    with CriteoFile(write(tmp_path / name, ""), ROWS) as source:
        assert source.samples == 0
        check_shape(source, source.read(0, 5), 0)


def test_row_0_is_for_missing_ids_alone(tmp_path: Path) -> None:
    ids = [f"{x:x}" for x in range(500)]
    lines = ["\t".join(["0", *[""] * DENSE, x, *[""] * 25]) for x in ids]
    with CriteoFile(write(tmp_path / "day", "\n".join(lines)), [4] * 26) as source:
        batch = source.read(0, 500)
    assert set(batch.ids[:, 0].tolist()) == {1, 2, 3}
    assert (batch.ids[:, 1:] == 0).all()
    assert (batch.dense == 0).all()


@pytest.mark.parametrize("bad_line", [1, 300])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (GOOD + "\t", "41 fields; expected 40 between tabs"),
        (GOOD.rpartition("\t")[0], "39 fields"),
        ("", "1 fields"),
        ("2" + GOOD[1:], "field 1: the label is '2'; expected 0 or 1"),
        (GOOD[1:], "field 1: the label is ''"),
        ("01" + GOOD[1:], "the label is '01'"),
        ("/" + GOOD[1:], "the label is '/'"),
        (GOOD.replace("\t10\t", "\t1.5\t"), "field 12: integer 11 is '1.5'; expected up to 18"),
        (GOOD.replace("\t10\t", "\ta\t"), "integer 11 is 'a'"),
        (GOOD.replace("\t10\t", "\t-\t"), "integer 11 is '-'"),
        (GOOD.replace("\t10\t", "\t--1\t"), "integer 11 is '--1'"),
        (GOOD.replace("\t10\t", "\t" + "9" * 19 + "\t"), "integer 11 is '9999999999999999999'"),
        (GOOD + "68fd1g64", "field 40: id 26 is '68fd1g64'; expected up to 16 hexadecimal"),
        (GOOD + "0" * 17, "id 26 is"),
        (GOOD + "é", "id 26 is 'é'"),
        (GOOD + "1\r", r"id 26 is '1\r'"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_expected(
    tmp_path: Path, line: str, says: str, bad_line: int
) -> None:
    lines = list(LINES)
    lines[bad_line - 1] = line + "\r" if line.endswith("\r") else line
    path = write(tmp_path / "day.tsv", "\n".join(lines) + "\n")
    with CriteoFile(path, ROWS) as source:
        with pytest.raises(DataError) as refusal:
            source.read(0, 400)
        assert str(refusal.value).startswith(f"{path}, line {bad_line}")
        assert says in str(refusal.value)
        with pytest.raises(DataError, match=f"line {bad_line}[:,]"):
            source.read(bad_line - 1, 1)
        assert same(source.read(bad_line, 20), source.read(bad_line, 20))  # the others still read


def test_the_line_that_the_wrong_ones_were_made_of_is_right(tmp_path: Path) -> None:
    """The control of the test above."""
    with CriteoFile(write(tmp_path / "day.tsv", GOOD), ROWS) as source:
        assert len(source.read(0, 5)) == 1


def test_a_file_that_changes_is_refused(log: Path) -> None:
    with CriteoFile(log, ROWS) as source:
        source.read(0, 10)
        source.read(0, 10)  # control
        with log.open("ab") as file:
            file.write(b"more")
        with pytest.raises(DataError, match="written to while it was read"):
            source.read(0, 10)


def test_a_file_that_shrinks_is_refused(log: Path) -> None:
    with CriteoFile(log, ROWS) as source:
        assert source.samples == len(LINES)
        os.truncate(log, 5000)
        with pytest.raises(DataError, match="5000 now"):
            source.read(0, 400)


def test_a_file_that_vanishes_is_refused(log: Path) -> None:
    with CriteoFile(log, ROWS) as source:
        source.read(0, 10)
        log.unlink()
        with pytest.raises(DataError, match="is gone"):
            source.read(10, 10)


def test_a_file_that_is_not_there_or_not_readable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot open .*nowhere.*check the path"):
        CriteoFile(tmp_path / "nowhere", ROWS)
    with pytest.raises(DataError, match="cannot open"):
        CriteoFile(tmp_path, ROWS)
    assert issubclass(DataError, PlanariaError)


def test_half_a_gzip_file_and_a_file_without_lines_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "day.gz", "\n".join(LINES))
    path.write_bytes(path.read_bytes()[:8000])
    with CriteoFile(path, ROWS) as source, pytest.raises(DataError, match="restore the file"):
        source.read(0, 400)
    path = write(tmp_path / "noise", "x" * 10_000)
    with CriteoFile(path, ROWS) as source, pytest.raises(DataError, match="no line end in 4096"):
        source.read(0, 1)


def test_criteo_has_26_tables(log: Path) -> None:
    with pytest.raises(ArgumentError, match="26 tables"):
        CriteoFile(log, [10] * 25)
    with CriteoFile(log, ROWS) as source, pytest.raises(ArgumentError, match="sample -1"):
        source.read(-1, 1)
