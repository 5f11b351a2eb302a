"""Hot rows as bitmaps, and plans on file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import ArgumentError, PlacementError, RowError
from planaria.placement import (
    HotRows,
    PlacedServer,
    PlacedTable,
    Placement,
    read_plan,
    write_plan,
)

ROWS = st.integers(1, 700)


@st.composite
def some_hot_rows(draw: st.DrawFn) -> tuple[int, list[int]]:
    rows = draw(ROWS)
    return rows, draw(st.lists(st.integers(0, rows - 1), unique=True))


@given(some_hot_rows())
def test_a_bitmap_holds_what_it_was_made_of(given: tuple[int, list[int]]) -> None:
    rows, hot = given
    found = HotRows.of(rows, np.array(hot, np.int64))
    assert found.numbers().tolist() == sorted(hot)
    assert found.count == len(hot)
    every = np.arange(rows)
    assert np.flatnonzero(found.holds(every)).tolist() == sorted(hot)
    again = HotRows(rows, found.words)
    assert np.array_equal(again.renumbered(every), found.renumbered(every))


@given(some_hot_rows())
def test_renumbering_puts_hot_rows_first_keeps_their_order_and_goes_back(
    given: tuple[int, list[int]],
) -> None:
    rows, hot = given
    found = HotRows.of(rows, np.array(hot, np.int64))
    order = [*sorted(hot), *sorted({*range(rows)} - {*hot})]
    assert found.original(np.arange(rows)).tolist() == order
    assert found.renumbered(np.array(order, np.int64)).tolist() == list(range(rows))


def test_a_large_table_takes_less_than_a_quarter_of_a_byte_per_row() -> None:
    rng = np.random.default_rng(0)
    rows = 10**6
    found = HotRows.of(rows, rng.choice(rows, rows // 5, replace=False))
    assert found.nbytes < rows / 4 < 4 * rows
    some = rng.integers(0, rows, 10_000)
    assert np.array_equal(found.original(found.renumbered(some)), some)


def test_wrong_rows_and_bitmaps_are_refused() -> None:
    found = HotRows.of(100, np.array([3]))
    for rows in ([100], [-1]):
        with pytest.raises(RowError, match="0 to 99"):
            found.holds(np.array(rows))
        with pytest.raises(RowError, match="0 to 99"):
            HotRows.of(100, np.array(rows))
    with pytest.raises(ArgumentError, match=r"uint64\[2\]"):
        HotRows(100, np.zeros(1, np.uint64))
    with pytest.raises(ArgumentError, match="past the last"):
        HotRows(100, np.full(2, 2**64 - 1, np.uint64))


# ------------------------------------------------------------------------ plans


def a_plan() -> tuple[Placement, dict[tuple[int, int], HotRows]]:
    tables = (PlacedTable("a", 100, 64, (7, 20)), PlacedTable("b", 3, 64, (0, 3)))
    server = PlacedServer(
        ram=1000, ssd=9000, level=0, share=0.5, ram_used=900, ssd_used=100, lookups_ram=1.0,
        lookups_ssd=0.5, bytes_ram=9.0, bytes_ssd=1.0, parity_ram=0.0, parity_ssd=0.0,
        microseconds=2.0,
    )  # fmt: skip
    servers = (server, msgspec.structs.replace(server, level=1, microseconds=4.0))
    plan = Placement(tables, servers, 1, 1, False, 3.5, "by hand", "job.yaml")
    hot = {
        (table, level): HotRows.of(one.rows, np.arange(count))
        for table, one in enumerate(tables)
        for level, count in enumerate(one.hot)
    }
    return plan, hot


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan, hot = a_plan()
    written = write_plan(path, plan, hot)
    found, rows = read_plan(path)
    assert found == written
    assert (found.largest, found.slow_lookups) == (4.0, 1.0)
    assert found.balance == pytest.approx(4 / 3)
    assert {key: value.numbers().tolist() for key, value in rows.items()} == {
        key: value.numbers().tolist() for key, value in hot.items()
    }
    first = path.with_suffix(".npz").read_bytes()
    write_plan(path, plan, hot)
    assert path.with_suffix(".npz").read_bytes() == first


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.write_text("{"), "expected what planaria place writes"),
        (lambda path: path.write_text(path.read_text().replace('"version": 1', '"version": 2')),
         "expected what planaria place writes"),
        (lambda path: path.write_text(path.read_text().replace("[7, 20]", "[7]").replace(
            "[\n        7,\n        20\n      ]", "[7]")), "expected 2 numbers of hot rows"),
        (lambda path: path.write_text(path.read_text().replace('"plan.npz"', '"../plan.npz"')),
         "the name of a file beside it"),
        (lambda path: path.with_suffix(".npz").write_bytes(b"PK"), "is not the file"),
        (lambda path: path.with_suffix(".npz").unlink(), "it belongs beside"),
        (lambda path: path.unlink(), "cannot read"),
    ],
    ids=["torn", "version", "levels", "path", "other rows", "no rows", "no plan"],
)  # fmt: skip
def test_what_is_not_a_whole_plan_is_refused(change: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, *a_plan())
    assert callable(change)
    change(path)
    with pytest.raises(PlacementError, match=says):
        read_plan(path)


def test_a_plan_whose_numbers_are_not_those_of_its_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan, hot = a_plan()
    write_plan(path, plan, {**hot, (0, 0): HotRows.of(100, np.arange(8))})
    with pytest.raises(PlacementError, match="8 rows are hot"):
        read_plan(path)
