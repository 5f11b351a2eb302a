"""Criteo's files: any line at any time, and every wrong one named with what was expected."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.data import DENSE_FEATURES, Batch, CriteoFile, Source, criteo, lines
from planaria.data.lines import Text
from planaria.errors import ArgumentError, DataError, PlanariaError

ROWS = [1, 2, 3, 1000, *[10_000] * 20, 10**7, 2**40]
GOOD = "\t".join(["1", *"0123456789", "10", "", "-2", *["68fd1e64"] * 25, ""])


def line_of(number: int) -> str:
    """A line with all that occurs: missing fields, negative and long numbers, both cases."""
    rng = np.random.default_rng(number)
    integers = [str(x) for x in (rng.pareto(0.6, DENSE_FEATURES) * 10).astype(int) - 2]
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
    dense = [[math.log1p(max(int(x or 0), 0)) for x in f[1 : 1 + DENSE_FEATURES]] for f in fields]
    ids = [
        [oracle_row(x, t, ROWS[t]) for t, x in enumerate(f[1 + DENSE_FEATURES :])] for f in fields
    ]
    return Batch(
        np.array(dense, np.float32).reshape(-1, DENSE_FEATURES),
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
    monkeypatch.setattr(lines, "CHUNK_BYTES", 4096)


@pytest.fixture(params=["day.tsv", "day.gz"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / str(request.param), "\n".join(LINES) + "\n")


def test_a_criteo_file_reads_as_its_fields_say(log: Path) -> None:
    with CriteoFile(log, ROWS) as source:
        batch = source.read(0, 10**6)
    assert batch.dense.dtype == batch.labels.dtype == np.float32
    assert batch.ids.dtype == np.int64
    assert all(array.flags.c_contiguous for array in (batch.dense, batch.ids, batch.labels))
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
            assert len(source._lines._kept) <= lines.CHUNKS_KEPT
        assert len(source._lines._offsets) > 3 * lines.CHUNKS_KEPT  # control


def test_a_forward_pass_never_seeks(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a gzip file each seek backwards would decompress everything before it again."""
    with CriteoFile(log, ROWS) as source:
        seeks: list[int] = []
        monkeypatch.setattr(source._lines, "_text", SpiedText(source._lines._text, seeks))
        for start in range(0, 400, 7):
            source.read(start, 7)
        source.read(395, 5)  # one step back, as after a view change
        assert seeks == []
        source.read(0, 1)  # control
        assert seeks == [0]


class SpiedText:
    def __init__(self, text: Text, seeks: list[int]) -> None:
        self.read, self.tell, self.close = text.read, text.tell, text.close
        self._text, self._seeks = text, seeks

    def seek(self, offset: int) -> None:
        self._seeks.append(offset)
        self._text.seek(offset)


def test_samples_are_counted_and_reading_past_them_gives_fewer(log: Path) -> None:
    with CriteoFile(log, ROWS) as file:
        source: Source = file  # mypy holds it to the protocol here
        first = source.read(0, 10)
        assert source.samples == len(LINES)
        assert len(source.read(395, 10)) == 5
        assert len(source.read(400, 10)) == len(source.read(10**15, 10)) == 0
        assert np.array_equal(source.read(0, 10).ids, first.ids)


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
        batch = source.read(0, 5)
    assert (batch.dense.shape, batch.ids.shape, batch.labels.shape) == ((0, 13), (0, 26), (0,))


def test_row_0_is_for_missing_ids_alone(tmp_path: Path) -> None:
    ids = [f"{x:x}" for x in range(500)]
    lines = ["\t".join(["0", *[""] * DENSE_FEATURES, x, *[""] * 25]) for x in ids]
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
        assert len(source.read(bad_line, 20)) == 20  # the others still read


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
