"""Parquet and CSV read as their schema says, the same however they are asked for."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.data import PRESETS, CriteoFile, Order, Samples, Schema
from planaria.data import blocks as blocks_module
from planaria.data import csv as csv_module
from planaria.data import order as order_module
from planaria.data.csv import CsvFiles
from planaria.data.parquet import ParquetFiles

SCHEMA = Schema.from_dict(
    {
        "label": "click",
        "dense": [{"column": "price", "log": True, "fill": 0.5}, {"column": "age"}],
        "sparse": [
            {"column": "user", "rows": 1000, "type": "integer"},
            {"column": "city", "rows": 50},
            {"column": "genres", "rows": 20, "many": True, "weights": "scores"},
        ],
    }
)
N = 230
rng = np.random.default_rng(5)
LENGTHS = rng.integers(0, 4, N)
ROWS: list[dict[str, Any]] = [
    {
        "click": int(rng.integers(0, 2)),
        "price": None if n % 7 == 0 else float(rng.integers(-3, 1000)),
        "age": float(n),
        "user": None if n % 11 == 0 else int(rng.integers(-5, 2**40)),
        "city": None if n % 13 == 0 else f"city {rng.integers(0, 30)} of the realm"[: n % 20 + 4],
        "genres": [f"g{g}" for g in rng.integers(0, 9, LENGTHS[n])],
        "scores": [float(s) / 4 for s in rng.integers(1, 9, LENGTHS[n])],
        "unused": "x",
    }
    for n in range(N)
]


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int = 20) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    def text(value: Any) -> str:
        if isinstance(value, list):
            return "|".join(map(text, value))
        return "" if value is None else str(value)

    lines = [",".join(rows[0]), *(",".join(text(value) for value in row.values()) for row in rows)]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def equal(one: Samples, other: Samples) -> bool:
    assert (one.weights is None) == (other.weights is None)
    pairs = [
        (getattr(one, name), getattr(other, name))
        for name in ("labels", "dense", "values", "lengths", "weights")
        if getattr(one, name) is not None
    ]
    return one.keys == other.keys and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that a small file has many."""
    monkeypatch.setattr(csv_module, "BLOCK_LINES", 16)
    monkeypatch.setattr(blocks_module, "SAMPLES_KEPT", 80)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


Source = ParquetFiles | CsvFiles


@pytest.fixture(params=["parquet", "csv", "csv.gz"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    """The rows in three files of a folder, which has others as well."""
    folder = tmp_path / "day"
    folder.mkdir()
    (folder / "_SUCCESS").write_text("")
    (folder / "notes.md").write_text("nothing")
    write = write_parquet if request.param == "parquet" else write_csv
    for number, (start, stop) in enumerate([(0, 100), (100, 101), (101, N)]):
        write(folder / f"part-{number}.{request.param}", ROWS[start:stop])
    kind: Callable[..., Source] = ParquetFiles if request.param == "parquet" else CsvFiles
    with kind(folder, SCHEMA) as source:
        yield source


def test_rows_read_as_the_schema_says(source: Source) -> None:
    found = source.read(0, 10**6)
    assert len(found) == source.samples == N
    assert found.keys == ("user", "city", "genres")
    assert found.labels.tolist() == [row["click"] for row in ROWS]
    prices = [0.5 if row["price"] is None else np.log1p(max(row["price"], 0)) for row in ROWS]
    np.testing.assert_allclose(found.dense[:, 0], np.array(prices, np.float32), rtol=2e-7)
    assert found.dense[:, 1].tolist() == [row["age"] for row in ROWS]
    for name in ("user", "city"):
        rows, lengths = found.bags(name)
        assert (lengths == 1).all()
        missing = np.array([row[name] is None for row in ROWS])
        assert ((rows == 0) == missing).all()
        by_value: dict[Any, set[int]] = {}
        for row, number in zip(ROWS, rows.tolist(), strict=True):
            by_value.setdefault(row[name], set()).add(number)
        assert all(len(numbers) == 1 for numbers in by_value.values())
    assert len(np.unique(found.bags("user")[0])) > 170  # of 209 values in 1000 rows
    rows, lengths = found.bags("genres")
    assert lengths.tolist() == LENGTHS.tolist()
    assert found.weights is not None
    scores = [score for row in ROWS for score in row["scores"]]
    assert found.weights[-len(rows) :].tolist() == scores
    assert (found.weights[: -len(rows)] == 1).all()


def test_csv_and_parquet_give_the_same_bits(tmp_path: Path) -> None:
    with (
        ParquetFiles(write_parquet(tmp_path / "a.parquet", ROWS), SCHEMA) as one,
        CsvFiles(write_csv(tmp_path / "a.csv", ROWS), SCHEMA) as other,
    ):
        assert equal(one.read(0, N), other.read(0, N))
        assert not equal(one.read(0, N - 1), other.read(1, N - 1))  # control


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, N + 9), st.integers(0, 120)), max_size=6))
def test_any_samples_in_any_order_are_those_of_one_pass(
    source: Source, reads: list[tuple[int, int]]
) -> None:
    everything = source.read(0, N)
    for start, count in reads:
        assert equal(source.read(start, count), everything.slice(start, start + count))
    assert equal(source.take(range(7, 60)), everything.slice(7, 60))
    index = np.array([start % N for start, _ in reads], np.int64)
    assert equal(source.take(index), everything.take(index))


def test_only_the_last_blocks_are_kept(source: Source) -> None:
    for start in (0, N - 1, 50, 150, 101, 0):
        source.read(start, 1)
    assert 3 <= len(source._kept) <= 6
    source.read(0, N)
    assert sum(map(len, source._kept.values())) <= 80 + 20


def test_a_shuffled_epoch_decodes_each_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "WINDOW", 40)
    path = write_parquet(tmp_path / "a.parquet", ROWS, group=23)

    def decoded(numbers: Callable[[ParquetFiles], list[Any]]) -> list[int]:
        with ParquetFiles(path, SCHEMA) as source:
            read, blocks = source._tables.read, []

            def counted(block: int, columns: Sequence[str]) -> Any:
                blocks.append(block)
                return read(block, columns)

            monkeypatch.setattr(source._tables, "read", counted)
            labels = [source.take(some).dense[:, 1] for some in numbers(source)]
            assert sorted(np.concatenate(labels).tolist()) == list(range(N))
            return blocks

    def in_windows(source: ParquetFiles) -> list[Any]:
        order = Order(N, 10, shuffle=True, drop_last=False, blocks=source.blocks)
        return [order.indices(step, 0) for step in range(1, order.steps + 1)]

    def anyhow(source: ParquetFiles) -> list[Any]:
        return np.split(np.random.default_rng(1).permutation(N), N // 10)

    assert sorted(decoded(in_windows)) == list(range(10))
    assert len(decoded(anyhow)) > 50  # control


def test_commands_that_read_no_tables_do_without_pyarrow() -> None:
    code = "import sys, planaria.cli; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = f"import planaria.data.parquet; {code}"  # control
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


def test_files_are_read_in_sorted_order_or_as_listed(tmp_path: Path) -> None:
    paths = [write_parquet(tmp_path / f"{n}.parquet", [ROWS[n]]) for n in (2, 0, 1)]

    def ages(path: Any) -> list[float]:
        found: list[float] = ParquetFiles(path, SCHEMA).read(0, 9).dense[:, 1].tolist()
        return found

    assert ages(tmp_path) == [0, 1, 2]
    assert ages(str(tmp_path / "[02].parquet")) == [0, 2]
    assert ages(paths) == [2, 0, 1]


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


GOLDEN = 0x9E3779B97F4A7C15


def row_of(value: str | int, table: int) -> int:
    """A row of a million, one id at a time."""
    key = value if isinstance(value, int) else 0
    if isinstance(value, str):
        text = value.encode()
        key = mix((len(text) + GOLDEN) % 2**64)
        for at in range(0, len(text), 8):
            word = int.from_bytes(text[at : at + 8], "little")
            key = mix(((key ^ word) + GOLDEN) % 2**64)
    return mix((key + mix((table + 1) * GOLDEN % 2**64)) % 2**64) % (10**6 - 1) + 1


def test_an_id_is_hashed_to_the_same_row_on_every_machine(tmp_path: Path) -> None:
    """Frozen: a model that was trained once reads these rows for ever."""
    values = ["a", "city", "eight by", "nine byte", "Zürich", "x" * 100]
    rows: list[dict[str, Any]] = [
        {"y": 1, "t": value, "n": n * n - 3} for n, value in enumerate(values)
    ]
    schema = Schema.from_dict(
        {
            "label": "y",
            "sparse": [
                {"column": "t", "rows": 10**6},
                {"column": "n", "rows": 10**6, "type": "integer"},
            ],
        }
    )
    with ParquetFiles(write_parquet(tmp_path / "a.parquet", rows), schema) as source:
        found = source.read(0, 9).values.tolist()
    assert found == [row_of(row["t"], 0) for row in rows] + [row_of(row["n"], 1) for row in rows]
    assert found[::5] == [193703, 125958, 607640]


@pytest.mark.parametrize(
    "stored",
    [
        {"city": pa.large_string(), "genres": pa.large_list(pa.string())},
        {"city": pa.dictionary(pa.int8(), pa.string()), "click": pa.bool_()},
        {"city": pa.string_view(), "genres": pa.list_(pa.string_view())},
        {"user": pa.float64(), "age": pa.decimal128(9, 2)},
        {"user": pa.string(), "age": pa.string(), "click": pa.string()},
    ],
)
def test_how_a_column_is_stored_does_not_matter(tmp_path: Path, stored: dict[str, Any]) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    for name, kind in stored.items():
        place = table.column_names.index(name)
        try:
            column = table[name].cast(kind)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            column = pa.array(table[name].to_pylist(), kind)
        table = table.set_column(place, name, column)
    pq.write_table(table, tmp_path / "b.parquet")
    with (
        ParquetFiles(tmp_path / "a.parquet", SCHEMA) as one,
        ParquetFiles(tmp_path / "b.parquet", SCHEMA) as other,
    ):
        assert equal(one.read(0, N), other.read(0, N))


def test_columns_of_one_table_share_its_rows(tmp_path: Path) -> None:
    rows = [{"y": 1, "seen": "b", "bought": "b"}]
    apart = [{"column": "seen", "rows": 10**6}, {"column": "bought", "rows": 10**6}]
    path = write_parquet(tmp_path / "a.parquet", rows)

    def read(sparse: list[dict[str, Any]]) -> list[int]:
        schema = Schema.from_dict({"label": "y", "sparse": sparse})
        found: list[int] = ParquetFiles(path, schema).read(0, 1).values.tolist()
        return found

    together = read([{**one, "table": "items"} for one in apart])
    assert together[0] == together[1]
    assert len(set(read(apart))) == 2  # control


# ------------------------------------------------------------------------ vocabularies


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_vocabulary_gives_frequent_values_rows_of_their_own(tmp_path: Path, kind: str) -> None:
    words = ["b", "a", "c", "b", None, "d", "a", "b", 'say "x"\\', "é"]
    rows = [{"y": n % 2, "w": word, "n": n % 3} for n, word in enumerate(words)]
    (tmp_path / "schema.yaml").write_text(
        "label: y\nsparse:\n- {column: w, rows: 5, vocabulary: w.txt}\n"
        "- {column: n, rows: 9, type: integer, vocabulary: n.txt}\n"
    )
    schema = Schema.load(tmp_path / "schema.yaml")
    if kind == "parquet":
        source: Source = ParquetFiles(write_parquet(tmp_path / "a.parquet", rows, 3), schema)
    else:
        rows[8]["w"] = '"say ""x""\\"'
        source = CsvFiles(write_csv(tmp_path / "a.csv", rows), schema)
    with source:
        made = source.make_vocabularies()
        assert made == {str(tmp_path / "w.txt"): 4, str(tmp_path / "n.txt"): 3}
        found = source.read(0, 99)
        assert source.make_vocabularies() == {}
    # b three times, a twice, then the first of the others; those that no row is left for: row 0.
    assert (tmp_path / "w.txt").read_text() == '"b"\n"a"\n"c"\n"d"\n'
    assert found.bags("w")[0].tolist() == [1, 2, 3, 1, 0, 4, 2, 1, 0, 0]
    assert (tmp_path / "n.txt").read_text() == "0\n1\n2\n"
    assert found.bags("n")[0].tolist() == [n % 3 + 1 for n in range(10)]


# ------------------------------------------------------------------------ well-known files


CRITEO_LINES = [
    "\t".join(
        [
            str(n % 2),
            *("" if (n + i) % 5 == 0 else str((n * 37 + i) % 400 - 3) for i in range(13)),
            *(
                "" if (n + i) % 9 == 0 else f"{(n * 7919 + i * 104729) % 2**32:08x}"
                for i in range(26)
            ),
        ]
    )
    for n in range(100)
]


@pytest.mark.parametrize("kind", ["tsv", "parquet"])
def test_criteo_as_text_or_parquet_is_what_its_own_reader_gives(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "day.tsv"
    path.write_text("".join(f"{line}\n" for line in CRITEO_LINES))
    with CriteoFile(path, [1_000_000] * 26) as file:
        wanted = file.read(0, 100)
    schema = PRESETS["criteo"]
    if kind == "tsv":
        source: Source = CsvFiles(path, schema)
    else:
        rows = []
        for line in CRITEO_LINES:
            fields = dict(zip(schema.columns, line.split("\t"), strict=True))
            numbers = {
                name: int(fields[name]) if fields[name] else None for name in schema.columns[:14]
            }
            rows.append({**fields, **numbers})
        source = ParquetFiles(write_parquet(tmp_path / "day.parquet", rows, 30), schema)
    with source:
        found = source.read(0, 999)
    assert np.array_equal(found.values.reshape(26, 100).T, wanted.ids)
    assert np.array_equal(found.dense, wanted.dense)
    assert np.array_equal(found.labels, wanted.labels)


AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
    "1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,"
    "a99f214a,ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79\n"
    "10000169349117863715,1,14102200,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,"
    "a99f214a,96809ac8,711ee120,1,0,15704,320,50,1722,0,35,100084,79\n"
)


@pytest.mark.parametrize(
    ("preset", "name", "text", "labels", "equal_keys"),
    [
        ("movielens-100k", "u.data", "196\t242\t3\t881250949\n186\t242\t4\t891717742\n", [0, 1], 1),
        (
            "movielens-dat",
            "ratings.dat",
            "1::1193::5::978300760\n1::661::3::978302109\n",
            [1, 0],
            1,
        ),
        (
            "movielens",
            "ratings.csv",
            "userId,movieId,rating,timestamp\n1,296,5.0,1147880044\n2,296,3.5,1147868817\n",
            [1, 0],
            1,
        ),
        ("avazu", "train.csv", AVAZU, [0, 1], 17),
    ],
)
def test_presets_read_the_files_that_they_are_for(
    tmp_path: Path, preset: str, name: str, text: str, labels: list[int], equal_keys: int
) -> None:
    (tmp_path / name).write_text(text)
    with CsvFiles(tmp_path / name, PRESETS[preset]) as source:
        found = source.read(0, 9)
    assert found.labels.tolist() == labels
    assert found.values.min() > 0  # nothing is missing
    rows = found.values.reshape(len(found.keys), 2)
    assert int((rows[:, 0] == rows[:, 1]).sum()) == equal_keys


def test_presets_come_back_from_their_files(tmp_path: Path) -> None:
    for name, schema in PRESETS.items():
        schema.save(tmp_path / name)
        assert Schema.load(tmp_path / name) == schema
