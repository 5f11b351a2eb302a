"""Statistics from a sample: what is read, what is counted, and what follows for all data."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config import Config
from planaria.data import Schema, Synthetic
from planaria.errors import ConfigError, PlacementError
from planaria.kernels.types import Index
from planaria.placing.costs import Curve, Machine, Numbers, Storing
from planaria.placing.counting import RowCounts
from planaria.placing.curves import knots
from planaria.placing.filling import seconds_of
from planaria.placing.making import hottest
from planaria.placing.sampling import SurveyedTable, open_files, open_job, sampled_runs
from planaria.placing.spreading import spread
from planaria.placing.statistics import (
    FeatureStatistics,
    Statistics,
    TableStatistics,
    gather,
    read_statistics,
    summarised,
    write_statistics,
)

pytestmark = pytest.mark.torch  # the data of a job are opened by what trains on them


# ------------------------------------------------------------------------ which samples


@settings(max_examples=60)
@given(st.integers(1, 200_000), st.sampled_from([0.001, 0.01, 0.3, 1.0]), st.integers(0, 2**64 - 1))
def test_a_sample_is_runs_apart_from_each_other_of_as_many_samples_as_asked(
    samples: int, share: float, seed: int
) -> None:
    runs = list(sampled_runs(samples, share, seed))
    assert runs == list(sampled_runs(samples, share, seed))
    starts, counts = (np.array(part) for part in zip(*runs, strict=True))
    assert counts.min() >= 1
    assert starts[0] >= 0
    assert (starts[1:] >= starts[:-1] + counts[:-1]).all()
    assert starts[-1] + counts[-1] <= samples
    assert counts.sum() == max(round(samples * share), 1)


def test_other_seeds_draw_other_samples() -> None:
    assert list(sampled_runs(10**6, 0.01, 1)) != list(sampled_runs(10**6, 0.01, 2))


# ------------------------------------------------------------------------ counting


def zipf(rows: int, exponent: float) -> Numbers:
    heat = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return np.asarray(heat / heat.sum(), np.float64)


def counted(rows: Index, limit: int = 2**20) -> RowCounts:
    counts = RowCounts(limit)
    for part in np.array_split(rows, 7):
        counts.add(part)
    return counts


def test_rows_are_counted_exactly_within_the_limit() -> None:
    rng = np.random.default_rng(0)
    met = rng.choice(1000, 20_000, p=zipf(1000, 1.0))
    found = counted(met)
    true = np.bincount(met, minlength=1000)
    rows, counts = found.by_heat
    assert found.exact
    assert np.array_equal(true[rows], counts)
    assert len(rows) == np.count_nonzero(true)
    assert (np.diff(counts) <= 0).all()
    values, with_them = found.spectrum
    assert [int(np.count_nonzero(true == value)) for value in values] == with_them.tolist()


def test_more_rows_than_the_limit_leave_the_hottest_and_an_estimate_of_the_others() -> None:
    rng = np.random.default_rng(1)
    rows, limit = 300_000, 20_000
    met = rng.choice(rows, 1_000_000, p=zipf(rows, 1.0))
    found = RowCounts(limit)
    for part in np.array_split(met, 40):
        found.add(part)
    assert not found.exact
    hot, _ = found.by_heat
    assert len(hot) <= limit
    true = np.bincount(met, minlength=rows)
    assert set(range(1000)) <= set(hot.tolist())  # none of the hottest is missing
    counts, with_them = found.spectrum
    assert float(counts @ with_them) == pytest.approx(len(met), rel=0.03)
    assert with_them.sum() == pytest.approx(np.count_nonzero(true), rel=0.03)
    for value in (1, 2, 3):
        seen = with_them[counts == value].sum()
        assert seen == pytest.approx(np.count_nonzero(true == value), rel=0.06)


# ------------------------------------------------------------------------ curves


def statistics_of(
    counts: Index, *, accesses: float = 1.0, part: float = 0.01, name: str = "t"
) -> tuple[TableStatistics, Index]:
    """As if these were the accesses to each row in the sample: no source of samples in between."""
    found = RowCounts.of(counts)
    table = SurveyedTable(name, len(counts), 512)
    feature = FeatureStatistics(name, 1.0, accesses)
    return summarised(table, found, (feature,), part), found.by_heat[0]


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.3])
@pytest.mark.parametrize("per_row", [2, 20])
def test_a_curve_promises_what_the_rows_that_it_knows_really_take(
    exponent: float, per_row: int
) -> None:
    rng = np.random.default_rng(3)
    rows = 50_000
    heat = rng.permutation(zipf(rows, exponent))
    counts = rng.multinomial(rows * per_row, heat)
    found, by_heat = statistics_of(counts)
    at = np.array(found.hot_rows)
    taken = np.append(0.0, np.cumsum(heat[hottest(by_heat, rows, rows)]))[at]
    assert np.abs(np.array(found.share) - taken).max() < 0.006
    # Read off the sample itself, it would promise far more.
    naive = np.append(0.0, np.cumsum(np.sort(counts)[::-1])) / counts.sum()
    assert np.abs(naive[at] - taken).max() > 0.01
    best = np.append(0.0, np.cumsum(np.sort(heat)[::-1]))[at]
    assert np.abs(np.array(found.share_of_all) - best).max() < (0.02 if exponent else 0.05)


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.3])
def test_unseen_accesses_and_rows_are_estimated(exponent: float) -> None:
    rng = np.random.default_rng(4)
    rows, sampled = 100_000, 200_000
    heat = zipf(rows, exponent)
    full = rng.poisson(heat * sampled * 100)
    counts = rng.binomial(full, 0.01)
    found, _ = statistics_of(counts)
    assert found.unseen == pytest.approx(float(heat[counts == 0].sum()), abs=0.005)
    assert found.distinct == np.count_nonzero(counts)
    assert found.distinct_of_all == pytest.approx(np.count_nonzero(full), rel=0.05)
    assert found.exponent == pytest.approx(exponent, abs=0.12)


def test_knots_go_from_no_row_to_all() -> None:
    assert knots(1).tolist() == [0, 1]
    assert knots(5).tolist() == [0, 1, 2, 3, 4, 5]
    many = knots(10**9)
    assert (many[0], many[-1]) == (0, 10**9)
    assert 90 <= len(many) <= 101


@pytest.mark.parametrize("counts", [[0, 0, 0], [5], [1, 0], [1, 1, 1], [100, 0, 0, 1]])
def test_tiny_and_empty_tables_have_curves(counts: list[int]) -> None:
    found, by_heat = statistics_of(np.array(counts))
    assert found.share[-1] == found.share_of_all[-1] == 1.0
    assert found.distinct == len(by_heat) == sum(count > 0 for count in counts)


# ------------------------------------------------------------------------ what a sample is worth

# Accesses to a row in all data, on average, by the rows of a table. How many it takes is what
# docs/placement.md has a table of: the sample must meet rows at the edge of RAM some ten times.
PER_ROW = {20_000: 6500, 2_000: 20_000, 100: 100_000}


@pytest.mark.parametrize("exponent", [0.8, 0.95, 1.05, 1.2, 1.3])
@pytest.mark.parametrize("ram", [0.05, 0.2])
def test_a_hundredth_of_the_samples_places_within_five_percent_of_all(
    exponent: float, ram: float
) -> None:
    """Placed by the sample, costed by all data, over placed by all data and costed by it."""
    rng = np.random.default_rng([int(100 * exponent), int(100 * ram)])
    sizes = [rows for rows in PER_ROW for _ in range(3)]
    full = [rng.poisson(zipf(rows, exponent) * rows * PER_ROW[rows]) for rows in sizes]
    most = max(counts.sum() for counts in full)
    small = [rng.binomial(counts, 0.01) for counts in full]
    exact = [statistics_of(counts, accesses=counts.sum() / most, part=1.0) for counts in full]
    tried = [
        statistics_of(counts, accesses=everything.sum() / most)
        for counts, everything in zip(small, full, strict=True)
    ]
    cost = true_cost(tried, full, ram) / true_cost(exact, full, ram)
    assert 0.999 <= cost <= 1.05
    # Rows that nobody knows: the cost of any rows instead of the hottest.
    blind = [(found, rng.permutation(found.rows)) for found, _ in tried]
    assert true_cost(blind, full, ram) > 1.5 * true_cost(exact, full, ram)


def true_cost(tables: list[tuple[TableStatistics, Index]], full: list[Index], ram: float) -> float:
    """Of the largest server, by the true frequencies of the rows that the plan has in RAM."""
    storing = Storing(k=4, r=1)
    curves = [Curve(found.heat(), storing) for found, _ in tables]
    size = sum(curve.bytes for curve in curves)
    machines = [Machine(ram * size / 6, size)] * 6
    plan = spread(curves, machines)
    assert plan.largest <= 1.001 * plan.bound
    total = 0.0
    for (found, by_heat), hot, counts, curve in zip(tables, plan.hot[0], full, curves, strict=True):
        rows = hottest(by_heat, found.rows, int(hot))
        taken = np.full(len(curve.heat.hot), counts[rows].sum() / counts.sum())
        true = Curve(replace(curve.heat, share=taken), storing)
        total += seconds_of(true, int(hot), machines[0]) / 6
    return total


# ------------------------------------------------------------------------ of jobs and files


def small_job(*overrides: str) -> Config:
    sets = ["steps=40", "batch=512", "model.rows=[50,2000,300]", "model.tables=3", "model.dim=4"]
    return Config.load(None, [*sets, *overrides])


def test_statistics_of_a_job_are_those_of_the_samples_that_it_trains_on() -> None:
    job = small_job("optimizer.name=adagrad")
    found, heat = gather(open_job(job), "job", share=1.0)
    batch = Synthetic([50, 2000, 300], seed=0).read(0, 40 * 512)
    assert (found.samples, found.sampled) == (40 * 512, 40 * 512)
    for number, table in enumerate(found.tables):
        counts = np.bincount(batch.ids[:, number], minlength=table.rows)
        assert table.record_bytes == 4 * 2 * 4
        assert (table.coverage, table.pooling) == (1.0, 1.0)
        assert table.distinct == np.count_nonzero(counts)
        assert np.array_equal(counts[heat[number]], np.sort(counts)[::-1][: table.distinct])
    assert [table.name for table in found.tables] == ["table0", "table1", "table2"]


def test_a_seed_decides_the_sample_and_all_that_follows() -> None:
    job = small_job()
    first, again, other = (gather(open_job(job), "job", 0.05, seed) for seed in (1, 1, 2))
    assert first[0] == again[0]
    assert all(map(np.array_equal, first[1], again[1]))
    assert first[0].tables != other[0].tables
    assert first[0].sampled == round(0.05 * 40 * 512)


def test_memory_is_bounded_by_the_rows_that_are_counted() -> None:
    job = small_job("model.rows=[50,60000,300]")
    found, heat = gather(open_job(job), "job", 1.0, most_rows=3 * 2**12)
    assert [table.exact for table in found.tables] == [True, False, True]
    assert len(heat[1]) <= 2**12
    whole, _ = gather(open_job(job), "job", 1.0)
    assert found.tables[1].hottest(0.01) == pytest.approx(whole.tables[1].hottest(0.01), abs=0.03)
    assert found.tables[1].distinct == pytest.approx(whole.tables[1].distinct, rel=0.1)


SCHEMA = """
label: click
sparse:
  - {column: user, rows: 100, type: integer}
  - {column: seen, rows: 40, type: integer, many: true, table: items}
  - {column: item, rows: 40, type: integer, table: items}
"""


def test_coverage_and_pooling_of_files_by_their_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    n = 1000
    seen = [[] if i % 4 == 0 else [1, 2, i % 7] for i in range(n)]
    columns = {"click": [0, 1] * 500, "user": [i % 10 for i in range(n)], "seen": seen,
               "item": [3] * n}  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet", row_group_size=100)
    schema = str(tmp_path / "schema.yaml")
    with closing(open_files([str(tmp_path / "clicks.parquet")], schema)) as surveyed:
        found, heat = gather(surveyed, "clicks", 1.0)
        users = surveyed.source.read(0, n).bags("user")[0]
        item = surveyed.source.read(0, 1).bags("item")[0]
    user, items = found.tables
    assert (user.name, user.rows, user.distinct, user.record_bytes) == (
        *("user", 100),
        len(set(users.tolist())),
        None,
    )
    assert items.features == (FeatureStatistics("seen", 0.75, 3.0), FeatureStatistics("item", 1, 1))
    assert items.accesses_per_sample == pytest.approx(0.75 * 3 + 1)
    assert items.accesses == 1000 + 750 * 3
    assert heat[1][0] == item[0]
    assert user.heat(64).record_bytes == 64
    with pytest.raises(PlacementError, match="--record-bytes"):
        user.heat()


def test_criteos_files_are_recognised_and_jobs_on_them_read(tmp_path: Path) -> None:
    line = "1" + "\t3" * 13 + "".join(f"\t{n:x}" for n in range(26))
    (tmp_path / "day.tsv").write_text(f"{line}\n" * 200)
    with closing(open_files([str(tmp_path / "day.tsv")], None)) as surveyed:
        found, _ = gather(surveyed, "day", 1.0)
    assert [table.name for table in found.tables] == [f"C{n}" for n in range(1, 27)]
    assert {table.distinct for table in found.tables} == {1}
    job = Config.load(None, ["data.source=criteo", f"data.path={tmp_path / 'day.tsv'}"])
    with closing(open_job(job)) as surveyed:
        of_job, _ = gather(surveyed, "job", 0.1)
    assert of_job.sampled == 20
    assert len(of_job.tables) == 26


def test_what_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ConfigError, match="--schema"):
        open_files([str(tmp_path / "a.csv")], None)
    with pytest.raises(ConfigError, match="a script reads its samples itself"):
        open_job(Config.load(None, ["data.source=script"]))


# ------------------------------------------------------------------------ on file


def some_statistics() -> tuple[Statistics, list[Index]]:
    found, heat = statistics_of(np.array([9, 0, 3, 1]))
    return Statistics("job.yaml", 1000, 13, 0, (found,)), [heat]


def test_statistics_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    written = write_statistics(path, *some_statistics())
    found, heat = read_statistics(path)
    assert found == written
    assert heat[0].tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"version": 1', '"version": 7', "expected what planaria stats writes"),
        ('"kind": "planaria statistics"', '"kind": "planaria placement"', "planaria stats writes"),
        ('"rows": 4', '"rows": 5', "from 0 to 5 rows"),
        ('"rows": 4', '"rows": "4"', "planaria stats writes"),
        ('"seed": 0', '"seed": 0, "more": 1', "planaria stats writes"),
        ('"rows_sha256": "', '"rows_sha256": "0', "is not the file"),
    ],
)
def test_what_are_no_statistics_is_refused(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    write_statistics(path, *some_statistics())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PlacementError, match=says):
        read_statistics(path)


def test_rows_of_other_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    found, _ = some_statistics()
    write_statistics(path, found, [np.array([4])])
    with pytest.raises(PlacementError, match="others are named"):
        read_statistics(path)
    assert Schema.from_dict({"label": "x"}).tables == {}
