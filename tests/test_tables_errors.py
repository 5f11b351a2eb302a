"""Data that is not as it should be gets a sentence: file, row, and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planaria.data import Schema
from planaria.data.csv import CsvFiles
from planaria.data.parquet import ParquetFiles
from planaria.errors import ArgumentError, ConfigError, DataError

SCHEMA = Schema.from_dict(
    {
        "label": "y",
        "dense": [{"column": "x"}],
        "sparse": [
            {"column": "id", "rows": 9, "type": "integer"},
            {"column": "tags", "rows": 9, "many": True, "weights": "w"},
        ],
    }
)
RIGHT: dict[str, Any] = {
    "y": [0, 1, 1],
    "x": [0.5, None, 2.5],
    "id": [1, None, 3],
    "tags": [["a"], [], ["b", "c"]],
    "w": [[1.0], [], [0.5, 0.5]],
}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(DataError) as refused:
        read()
    return str(refused.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"y": [0, None, 1]}, "a.parquet, row 2: the label 'y' is missing; expected a number"),
        ({"y": [0, 1, float("inf")]}, "a.parquet, row 3: the label 'y' is inf"),
        ({"x": ["1", "fast", "2"]}, "a.parquet, row 2: 'x' is 'fast'; expected a number"),
        ({"x": [0, 0, 1e300]}, "row 3: 'x' is '1e+300'; expected a number that fits float32"),
        ({"id": [1.5, 2, 3]}, "row 1: 'id' is '1.5'; expected a whole number"),
        ({"id": [True, False, True]}, "'id' has the type bool; expected whole numbers"),
        ({"id": ["1", "2x", "3"]}, "row 2: 'id' is '2x'; expected a whole number"),
        ({"id": [[1], [2], [3]]}, "'id' has lists; expected one id, or `many: true`"),
        ({"tags": [1, 2, 3]}, "'tags' has the type int64; expected lists"),
        ({"w": [[1.0], [], [0.5]]}, "row 3: 'w' has 1 weights; expected 2, one for each id"),
        ({"w": [[1.0], [], [0.5, None]]}, "row 3: a weight in 'w' is no number"),
        ({"tags": [[1], [], [2, 3]]}, "'tags' has the type int64; expected text; set `type: int"),
    ],
)
def test_wrong_values_in_parquet_are_refused(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(RIGHT), path)
    assert len(ParquetFiles(path, SCHEMA).read(0, 9)) == 3  # control
    pq.write_table(pa.table({**RIGHT, **changed}), path)
    assert says in refusal(lambda: ParquetFiles(path, SCHEMA).read(0, 9))


def test_rows_are_counted_in_their_file(tmp_path: Path) -> None:
    pq.write_table(pa.table(RIGHT), tmp_path / "a.parquet")
    wrong = pa.table({**RIGHT, "y": [0, 1, None]})
    pq.write_table(wrong, tmp_path / "b.parquet", row_group_size=2)
    source = ParquetFiles(tmp_path, SCHEMA)
    assert len(source.read(0, 5)) == 5
    assert "b.parquet, row 3: the label" in refusal(lambda: source.read(5, 1))


def test_a_missing_column_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(RIGHT).drop_columns(["x"]), path)
    said = refusal(lambda: ParquetFiles(path, SCHEMA))
    assert said.endswith("a.parquet has no column 'x'; there are 'y', 'id', 'tags', 'w'")
    (tmp_path / "a.csv").write_text("y,id,tags\n1,2,3\n")
    said = refusal(lambda: CsvFiles(tmp_path / "a.csv", SCHEMA))
    assert said.endswith("a.csv has no column 'x'; there are 'y', 'id', 'tags'")


def test_damaged_parquet_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({**RIGHT, "x": [0.1, 0.2, 0.3]}), path)
    content = path.read_bytes()
    for end in (4, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        said = refusal(lambda: ParquetFiles(path, SCHEMA))
        assert "a.parquet" in said
        assert "cut off: restore it" in said
    path.write_bytes(content[:4] + bytes(40) + content[44:])
    source = ParquetFiles(path, SCHEMA)  # its footer is whole
    assert "a.parquet" in refusal(lambda: source.read(0, 3))
    path.write_bytes(b"")
    assert "a.parquet is empty" in refusal(lambda: ParquetFiles(path, SCHEMA))


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table(RIGHT).slice(0, 0), tmp_path / "a.parquet")
    assert "no sample" in refusal(lambda: ParquetFiles(tmp_path, SCHEMA))
    (tmp_path / "a.csv").write_text("y,x,id,tags,w\n")
    assert "no sample" in refusal(lambda: CsvFiles(tmp_path, SCHEMA))
    assert "no files were given" in refusal(lambda: CsvFiles([], SCHEMA))
    assert "there are no such files" in refusal(lambda: CsvFiles(tmp_path / "b*.csv", SCHEMA))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"1,1,fast", "line 3: 'id' is 'fast'; expected a whole number"),
        (b"1,fast,1", "line 3: 'x' is 'fast'; expected a number"),
        (b"1,\xff,1", "line 3: 'x' is '\\\\xff'; expected a number"),
        (b",1,1", "line 3: the label 'y' is missing"),
        (b"1,1", "line 3: 2 fields; expected 3 between ','"),
        (b"1,1,1,1", "line 3: 4 fields; expected 3 between ','"),
        (b"", "line 3: the label 'y' is missing"),
        (b'1,"2\n3",1', "a.csv, line "),
        (b'1,"2,1', "a.csv, line "),
    ],
)
def test_wrong_lines_of_csv_are_refused(tmp_path: Path, line: bytes, says: str) -> None:
    schema = Schema(label="y", sparse=SCHEMA.sparse[:1], dense=SCHEMA.dense)
    path = tmp_path / "a.csv"
    path.write_bytes(b"y,x,id\n1,2.5,3\n1,2,1\n0,,\n")
    with CsvFiles(path, schema) as source:
        assert source.read(0, 9).labels.tolist() == [1, 1, 0]  # control
    path.write_bytes(b"y,x,id\n1,2.5,3\n" + line + b"\n0,,\n")
    with CsvFiles(path, schema) as source:
        said = refusal(lambda: source.read(0, 9))
    assert says.replace("\\\\", "\\") in said.replace("\\\\", "\\")


def test_a_file_that_starts_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfy,x,id\r\n1,"2",3\r\n')
    schema = Schema(label="y", sparse=SCHEMA.sparse[:1], dense=SCHEMA.dense)
    with CsvFiles(tmp_path / "a.csv", schema) as source:
        assert source.read(0, 9).dense.tolist() == [[2.0]]


def test_samples_that_there_are_not_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table(RIGHT), tmp_path / "a.parquet")
    source = ParquetFiles(tmp_path, SCHEMA)
    with pytest.raises(ArgumentError, match="no sample 3: they are 0 to 2"):
        source.take(np.array([0, 3]))
    with pytest.raises(ArgumentError, match="cannot read"):
        source.read(-1, 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no vocabulary"),
        ('"a"\n"b"\n"c"\n', "has 3 values; expected 2 or fewer"),
        ('"a"\n7\n', "line 2: '7'; expected text in quotes"),
        ('"a"\nb\n', "line 2: 'b'; expected text in quotes"),
        ('"a"\n"a"\n', "has a value twice"),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path: Path, content: str | None, says: str) -> None:
    pq.write_table(pa.table({"y": [1], "w": ["a"]}), tmp_path / "a.parquet")
    file = tmp_path / "w.txt"
    if content is not None:
        file.write_text(content)
    sparse = [{"column": "w", "rows": 3, "vocabulary": str(file)}]
    schema = Schema.from_dict({"label": "y", "sparse": sparse})
    assert says in refusal(lambda: ParquetFiles(tmp_path, schema).read(0, 1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("label: [1]", "label: Expected `str`, got `array`"),
        ("sparse: []", "missing required field `label`"),
        ("label: y\nspares: []", "unknown field `spares`"),
        ("label: y\nsparse: [{column: a}]", "sparse[0]: Object missing required field `rows`"),
        ("label: y\nsparse: [{column: a, rows: 0}]", "sparse[0].rows: Expected `int` >= 1"),
        ("label: y\nsparse: [{column: a, rows: 5, type: float}]", "sparse[0].type: Invalid"),
        ("label: y\nsparse: [{column: a, rows: 5, weights: w}]", "sparse[0]: weights go with"),
        (
            "label: y\nsparse: [{column: a, rows: 5}, {column: a, rows: 5}]",
            "'a' stands there twice",
        ),
        (
            "label: y\nsparse: [{column: a, rows: 5, table: t}, {column: b, rows: 6, table: t}]",
            "'a' and 'b' share the table 't'; expected the same rows",
        ),
        ("label: y\ncolumns: [x]", "columns: expected 'y' among them"),
        ("label: y\nsparse: [{column: a, rows: 5, modulo: 5}]", "`modulo` goes with `type: int"),
        ("label: [", "expected YAML"),
        ("label: y\ndense: [{column: x, fill: .nan}]", "dense[0]: fill: expected a number"),
        ("- 1", "Expected `object`"),
    ],
)
def test_wrong_schemas_are_refused_with_the_path_of_the_key(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "schema.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Schema.load(path)
    assert says in str(refused.value)
    assert "schema.yaml" in str(refused.value)
    with pytest.raises(ConfigError, match="check the path"):
        Schema.load(tmp_path / "no-such.yaml")
