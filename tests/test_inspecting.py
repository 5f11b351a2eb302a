"""What `planaria data` says of files is true, and the schema that it writes reads them."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from planaria import inspecting
from planaria.cli import app
from planaria.config import Config
from planaria.data import PRESETS, Schema
from planaria.data.opening import open_source, open_tables
from planaria.data.suggesting import suggest, suggested_rows
from planaria.data.survey import ColumnSurvey, survey
from planaria.errors import DataError

rng = np.random.default_rng(3)
N = 3000
HOT = np.where(rng.random(N) < 0.5, 0, rng.integers(1, 100, N))  # half of all uses are of value 0
TABLE: dict[str, Any] = {
    "row_id": np.arange(N) + 10**9,
    "clicked": rng.integers(0, 2, N),
    "user": HOT,
    "city": [None if n % 4 == 0 else f"city {n % 40}" for n in range(N)],
    "price": rng.random(N),
    "view_count": rng.integers(0, 500, N),
    "tags": [[f"t{i}" for i in range(n % 3)] for n in range(N)],
    "tag_weights": [[0.5, 1.5][: n % 3] for n in range(N)],
    "constant": ["x"] * N,
}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspecting.console, "_width", 200)
    return tmp_path


@pytest.fixture(params=["parquet", "csv"])
def file(request: pytest.FixtureRequest, folder: Path) -> Path:
    path = folder / f"day.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.table(TABLE), path, row_group_size=700)
        return path

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "|".join(map(str, value))
        return "" if value is None else str(value)

    rows = zip(*TABLE.values(), strict=True)
    lines = [";".join(TABLE), *(";".join(map(text, row)) for row in rows)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def columns_of(path: Path, limit: int = 2**20) -> dict[str, ColumnSurvey]:
    with closing(open_tables([str(path)]).tables) as tables:
        return {column.name: column for column in survey(tables, limit=limit)}


def test_a_survey_counts_what_is_there(file: Path) -> None:
    found = columns_of(file)
    assert list(found) == list(TABLE)
    user, city, tags = found["user"], found["city"], found["tags"]
    assert user.counts.distinct == len(np.unique(HOT))
    assert user.counts.exact
    hottest = np.sort(np.bincount(HOT))[::-1]
    assert user.counts.hot_share(0.01) == hottest[0] / N
    assert user.counts.hot_share(0.1) == hottest[:10].sum() / N
    assert (city.nulls, city.counts.distinct) == (N // 4, 30)
    assert (tags.many, tags.items, tags.counts.distinct) == (True, N, 2)
    assert tags.mean_length == 1.0
    assert found["row_id"].counts.distinct == N
    kinds = {name: column.type for name, column in found.items()}
    if file.suffix == ".csv":
        assert kinds["user"] == "integer"
        assert kinds["price"] == "number"
        assert kinds["city"] == "text"
    else:
        assert (kinds["user"], kinds["price"], kinds["city"]) == ("int64", "double", "text")


def test_many_values_are_estimated_and_it_says_so(file: Path) -> None:
    found = columns_of(file, limit=500)["row_id"].counts
    assert not found.exact
    assert len(found.hashes) <= 500
    assert abs(found.distinct / N - 1) < 0.3
    assert columns_of(file, limit=500)["user"].counts.exact  # control


def test_the_command_shows_columns_and_writes_a_schema_that_reads_the_file(file: Path) -> None:
    code, said = run("inspect", file, "--write", "schema.yaml", "--job", "job.yaml")
    assert code == 0, said
    job = Config.load(Path("job.yaml"))
    assert (job.data.path, job.data.schema, job.batch) == (str(file), "schema.yaml", 16)
    assert "3,000 rows" in said
    assert re.search(r"city .* 25\.0% .* 30 ", said)
    assert re.search(r"user .* 0 .* (99|100) ", said)
    assert re.search(r"tags .* 1\.00", said)
    schema = Schema.load("schema.yaml")
    assert schema.label == "clicked"
    assert [one.column for one in schema.dense] == ["price", "view_count"]
    assert [one.log for one in schema.dense] == [False, True]
    assert schema.keys == ("user", "city", "tags")
    assert schema.sparse[2].many
    assert schema.sparse[2].weights == "tag_weights"
    comment = Path("schema.yaml").read_text()
    assert "row_id, because nearly every row has a value of its own" in comment
    assert "constant, because it has one value" in comment
    with open_source(str(file), schema) as source:
        samples = source.read(0, N)
    assert samples.labels.tolist() == TABLE["clicked"].tolist()
    assert samples.bags("tags")[1].tolist() == [n % 3 for n in range(N)]


@pytest.mark.parametrize(
    ("name", "text", "preset"),
    [
        ("u.data", "196\t242\t3\t881250949\n", "movielens-100k"),
        ("ratings.dat", "1::1193::5::978300760\n", "movielens-dat"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,296,5.0,1147880044\n", "movielens"),
        ("train.txt", "\t".join(["1", *"1" * 13, *["68fd1e64"] * 26]) + "\n", "criteo"),
        (
            "train.csv",
            ",".join(["id", *PRESETS["avazu"].needs]) + "\n" + ",".join("0" * 24) + "\n",
            "avazu",
        ),
    ],
)
def test_well_known_files_are_recognised(name: str, text: str, preset: str, folder: Path) -> None:
    (folder / name).write_text(text)
    code, said = run("inspect", name, "--write", "schema.yaml")
    assert code == 0, said
    assert Schema.load("schema.yaml") == PRESETS[preset]
    with open_source(name, PRESETS[preset]) as source:
        assert source.samples == 1


def test_columns_that_no_schema_can_have_are_shown_all_the_same(folder: Path) -> None:
    strange = {"click": [0, 1], "s": [{"x": 1}, None], "when": pa.array([1, 2], pa.timestamp("s"))}
    pq.write_table(pa.table({**strange, "none": pa.nulls(2)}), "a.parquet")
    code, said = run("inspect", "a.parquet", "--write", "schema.yaml")
    assert code == 0, said
    assert re.search(r"s .*struct.* 50\.0%", said)
    assert Schema.load("schema.yaml") == Schema(label="click")


def test_files_that_only_look_a_little_like_it_are_not_taken_for_well_known(folder: Path) -> None:
    (folder / "a.csv").write_text("userId,movieId,rating\n1,2,3\n")
    opened = open_tables("a.csv")
    opened.tables.close()
    assert opened.preset is None


def test_a_vocabulary_is_made_once(file: Path) -> None:
    run("inspect", file, "--write", "schema.yaml")
    schema = Path("schema.yaml")
    schema.write_text(
        schema.read_text().replace("{column: city,", "{column: city, vocabulary: cities.txt,")
    )
    code, said = run("vocabulary", schema, file)
    assert code == 0, said
    assert "30 values" in said
    assert len(Path("cities.txt").read_text().splitlines()) == 30
    assert "nothing to do" in run("vocabulary", schema, file)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "no-such.csv"], "there are no such files"),
        (["inspect", "a.csv", "--preset", "magic"], "--preset: expected criteo"),
        (["inspect", "a.csv", "--write", "s.yaml"], "name it with --label"),
        (["inspect", "a.csv", "--write", "s.yaml", "--label", "c"], "no column 'c'; there are 'a'"),
        (["inspect", "a.csv", "--write", "no/s.yaml", "--label", "a"], "cannot write no/s.yaml"),
        (["inspect", "a.csv", "b.parquet"], "some files are Parquet and some are not"),
        (["vocabulary", "no-such.yaml", "a.csv"], "check the path"),
    ],
)
def test_bad_use_gets_a_sentence(arguments: list[str], says: str, folder: Path) -> None:
    (folder / "a.csv").write_text("a,b\n1,2\n")
    pq.write_table(pa.table({"a": [1]}), folder / "b.parquet")
    code, said = run(*arguments)
    assert code == 2
    assert says in " ".join(said.split())


def test_rows_are_suggested_in_round_numbers() -> None:
    wanted = {0: 10, 2: 10, 30: 60, 1682: 3400, 10**9: 10_000_000}
    assert {distinct: suggested_rows(distinct) for distinct in wanted} == wanted


def test_a_table_without_a_label_is_told_to_name_one() -> None:
    with pytest.raises(DataError, match="--label"):
        suggest([ColumnSurvey("a", "text")])
