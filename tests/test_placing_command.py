"""`planaria stats` and `planaria place`, from their options to their files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from planaria.cli import app
from planaria.data import Synthetic
from planaria.placement import read_plan
from planaria.placing.statistics import read_statistics

pytestmark = pytest.mark.torch

JOB = """
steps: 50
batch: 256
model: {tables: 3, rows: [40, 4000, 9000], dim: 16}
optimizer: {name: adagrad}
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def sentence(done: Result) -> str:
    return " ".join(done.output.split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def statistics(folder: Path) -> Path:
    assert run("stats", "job.yaml", "--sample", "20").exit_code == 0
    return folder / "stats.json"


def test_statistics_of_a_job_are_shown_written_and_drawn(folder: Path) -> None:
    done = run("stats", "job.yaml", "--sample", "10", "--png", "stats.png")
    assert done.exit_code == 0, done.output
    assert "1,280 of 12,800 samples, 10 %" in done.output
    assert "table2 9,000" in sentence(done)
    assert max(map(len, done.output.splitlines())) <= 80
    assert (folder / "stats.png").read_bytes().startswith(b"\x89PNG")
    found, heat = read_statistics(folder / "stats.json")
    assert found.sampled == 1280
    assert [table.record_bytes for table in found.tables] == [128] * 3
    assert [len(rows) for rows in heat] == [table.distinct for table in found.tables]


def test_a_plan_is_shown_written_and_drawn(folder: Path, statistics: Path) -> None:
    done = run("place", str(statistics), "--ram", "100kB", "--ssd", "1MB", "--png", "plan.png")
    assert done.exit_code == 0, done.output
    assert "times the bound of the linear program" in sentence(done)
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    plan, hot = read_plan(folder / "plan.json")
    assert (plan.k, plan.r, len(plan.servers)) == (4, 1, 6)
    for server in plan.servers:
        assert server.ram_used <= server.ram
        assert server.ssd_used <= server.ssd
        assert server.parity_ram > 0
    stored = sum(table.rows * 128 for table in plan.tables) * 5 / 4
    used = sum(server.ram_used + server.ssd_used for server in plan.servers)
    assert used == pytest.approx(stored, rel=1e-3)
    # Some of the hottest rows that were counted are hot, and all of them before any cold one.
    _, heat = read_statistics(statistics)
    for table, rows in enumerate(heat):
        count = min(hot[table, 0].count, len(rows))
        assert hot[table, 0].holds(rows[:count]).all()
        assert not hot[table, 0].holds(rows[count:]).any()


def test_json_is_what_was_written_and_nothing_else(statistics: Path) -> None:
    done = run("place", str(statistics), "--ram", "100kB", "--ssd", "1MB", "--json")
    assert json.loads(done.stdout) == json.loads(Path("plan.json").read_text())
    done = run("stats", "job.yaml", "--json", "--out", "other.json")
    assert json.loads(done.stdout) == json.loads(Path("other.json").read_text())


def test_servers_that_differ_have_levels_and_free_shares(statistics: Path) -> None:
    options = ["--ssd", "1MB", "--ram", "50kB*3,200kB*3", "--renumber"]
    done = run("place", str(statistics), *options, "--out", "even.json")
    assert done.exit_code == 0, done.output
    assert run("place", str(statistics), *options, "--shares", "free").exit_code == 0
    even, hot = read_plan(Path("even.json"))
    free, _ = read_plan(Path("plan.json"))
    assert [server.level for server in even.servers] == [0, 0, 0, 1, 1, 1]
    assert hot[2, 0].count < hot[2, 1].count
    assert hot[2, 1].holds(hot[2, 0].numbers()).all()
    assert free.largest < even.largest
    assert sum(server.share for server in free.servers) == pytest.approx(1)


def test_whole_tables_go_to_one_server_each(statistics: Path) -> None:
    done = run("place", str(statistics), "--ram", "400kB", "--servers", "2", "--whole-tables")
    assert done.exit_code == 0, done.output
    plan, _ = read_plan(Path("plan.json"))
    assert {table.server for table in plan.tables} == {0, 1}
    assert plan.r == 0
    assert plan.largest <= 1.01 * plan.bound_microseconds
    assert "largest server of greedy sharding by size x lookups" in sentence(done)


def test_what_a_plan_predicts_is_what_fresh_samples_do(statistics: Path) -> None:
    assert run("place", str(statistics), "--ram", "100kB").exit_code == 0
    plan, hot = read_plan(Path("plan.json"))
    ids = Synthetic([40, 4000, 9000]).read(50 * 256, 50_000).ids
    slow = sum(np.count_nonzero(~hot[table, 0].holds(ids[:, table])) for table in range(3))
    assert plan.slow_lookups == pytest.approx(slow / len(ids), rel=0.06)
    assert plan.slow_lookups > 0.1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ram", "1kB", "--ssd", "1kB"], "MB are missing"),
        (["--ram", "lots"], "--ram: expected sizes"),
        (["--ram", "1MB", "--servers", "2", "--parity", "2"], "--servers: expected 3 or more"),
        (["--ram", "1MB", "--k", "6"], "--k: expected at most 5, got 6"),
        (["--ram", "1MB", "--solver", "magic"], "--solver: expected auto, highs, heuristic"),
        (["--ram", "1MB", "--shares", "mine"], "--shares: expected even or free"),
        (["--ram", "1MB", "--ssd-rate", "0"], "expected more than 0 bytes per second"),
        (["--ram", "1MB", "--out", "no/plan.json"], "a folder that can be written to"),
    ],
)
def test_wrong_options_of_a_plan_get_a_sentence_and_exit_code_2(
    options: list[str], says: str, statistics: Path
) -> None:
    done = run("place", str(statistics), *options)
    assert done.exit_code == 2
    assert says in sentence(done)
    assert not Path("plan.json").exists()


def test_statistics_of_no_tables_get_a_sentence(statistics: Path) -> None:
    statistics.write_text(json.dumps({**json.loads(statistics.read_text()), "tables": []}))
    done = run("place", str(statistics), "--ram", "1MB")
    assert done.exit_code == 2
    assert "there are no tables in it" in sentence(done)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stats", "job.yaml", "--sample", "0"], "--sample: expected a number above 0"),
        (["stats", "no.yaml"], "no.yaml"),
        (["stats", "job.yaml", "--schema", "criteo"], "--schema: the job names its own"),
        (["stats", "no.parquet"], "there are no such files"),
        (["place", "no.json", "--ram", "1GB"], "planaria stats writes such files"),
        (["place", "job.yaml", "--ram", "1GB"], "expected what planaria stats writes"),
    ],
)
def test_what_is_not_there_gets_a_sentence_and_exit_code_2(
    words: list[str], says: str, folder: Path
) -> None:
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert says in sentence(done)


def test_highs_finds_what_the_segments_found(statistics: Path) -> None:
    options = ["place", str(statistics), "--ram", "100kB", "--renumber"]
    assert run(*options, "--solver", "highs").exit_code == 0
    exact, _ = read_plan(Path("plan.json"))
    assert run(*options, "--solver", "heuristic").exit_code == 0
    ours, _ = read_plan(Path("plan.json"))
    assert ours.largest <= 1.001 * exact.largest
    assert exact.largest <= 1.03 * ours.largest
