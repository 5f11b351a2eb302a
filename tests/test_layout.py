"""Layout arithmetic: each row has one home, each stripe k + r different servers."""

from dataclasses import FrozenInstanceError

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.errors import LayoutError
from planaria.layout import ArenaLayout, Layout


@st.composite
def arenas(draw: st.DrawFn) -> ArenaLayout:
    """Arenas of any size on fresh and on resized clusters, with and without fault domains."""
    r = draw(st.integers(0, 4))
    k = draw(st.integers(1, 10))
    servers = draw(st.integers(k + r, k + r + 8))
    racks = draw(st.integers(k + r, servers))
    domains = [place % racks for place in range(servers + 1)] if draw(st.booleans()) else None
    layout = Layout.fresh(servers, r, k, domains)
    if draw(st.booleans()):
        gone = draw(st.integers(0, servers - 1))
        places = [place for place in range(servers + 1) if place != gone]
        if domains is None or len({domains[place] for place in places}) >= k + r:
            layout = layout.resized(places, domains)
    return layout.arena(draw(st.integers(1, 5 * layout.n_groups * k)))


@settings(max_examples=60, deadline=None)
@given(arenas())
def test_every_row_has_exactly_one_home_and_every_home_its_row(arena: ArenaLayout) -> None:
    rows = np.arange(arena.rows)
    place, index = arena.locate(rows)
    found = np.zeros(arena.rows, dtype=np.int64)
    for server in arena.layout.places:
        here = rows[place == server]
        assert (index[place == server] < arena.data_records(server)).all()
        np.testing.assert_array_equal(arena.row_at(server, index[place == server]), here)
        all_rows = arena.row_at(server, np.arange(arena.records(server)))
        assert (all_rows[arena.data_records(server) :] == -1).all()
        np.add.at(found, all_rows[all_rows >= 0], 1)
    assert (found == 1).all()


@settings(max_examples=60, deadline=None)
@given(arenas())
def test_the_records_of_a_stripe_stand_on_different_servers_and_know_it(arena: ArenaLayout) -> None:
    layout = arena.layout
    groups, slots = (
        grid.ravel() for grid in np.meshgrid(np.arange(layout.n_groups), [0, arena.slots - 1])
    )
    places, indices = arena.members(groups, slots)
    assert places.shape == indices.shape == (groups.size, layout.k + layout.r)
    assert (np.diff(np.sort(places, axis=1), axis=1) > 0).all()
    for position in range(layout.k + layout.r):
        for server in layout.places:
            here = places[:, position] == server
            group, slot, at = arena.stripe_at(server, indices[here, position])
            np.testing.assert_array_equal(group, groups[here])
            np.testing.assert_array_equal(slot, slots[here])
            assert (at == position).all()


@settings(max_examples=60, deadline=None)
@given(arenas())
def test_a_row_and_its_stripe_agree(arena: ArenaLayout) -> None:
    rows = np.unique(np.linspace(0, arena.rows - 1, 50).astype(np.int64))
    stripe, position = np.divmod(rows, arena.layout.k)
    slot, group = np.divmod(stripe, arena.layout.n_groups)
    places, indices = arena.members(group, slot)
    place, index = arena.locate(rows)
    np.testing.assert_array_equal(place, places[np.arange(rows.size), position])
    np.testing.assert_array_equal(index, indices[np.arange(rows.size), position])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.integers(1, 8), st.integers(0, 8), st.integers(1, 10**9))
def test_servers_hold_equally_many_records(r: int, k: int, spare: int, rows: int) -> None:
    fresh = Layout.fresh(k + r + spare, r, k)
    for layout, groups_apart in ((fresh, 0), (fresh.resized(range(k + r + spare + 1)), 1)):
        arena = layout.arena(rows)
        data = [arena.data_records(place) for place in layout.places]
        parity = [arena.records(place) - arena.data_records(place) for place in layout.places]
        assert max(data) - min(data) <= groups_apart * arena.slots
        assert max(parity) - min(parity) <= groups_apart * arena.slots
        assert sum(data) >= rows


def test_a_partly_filled_slot_loads_all_servers_alike() -> None:
    layout = Layout.fresh(12, 2)
    rows = np.arange(12 * layout.k)  # one stripe in each of 12 groups
    place, _ = layout.arena(rows.size).locate(rows)
    assert np.ptp(np.bincount(place, minlength=12)) == 0


def test_regions_are_numbered_by_kind_then_group() -> None:
    layout = Layout(np.array([[0, 1, 2], [2, 0, 1], [1, 2, 0]], dtype=np.int32), k=2)
    assert (layout.r, layout.n_groups, layout.places) == (1, 3, (0, 1, 2))
    own = layout.regions(0)
    assert own.group.tolist() == [0, 1, 2]
    assert own.position.tolist() == [0, 1, 2]
    assert own.is_data.tolist() == [True, True, False]
    assert own.in_order
    assert own.data_end == 2
    assert layout.regions(1).group.tolist() == [0, 2, 1]  # data of 0 and 2, then parity of 1
    assert layout.region_of.tolist() == [[0, 0, 2], [0, 1, 2], [1, 1, 2]]
    arena = layout.arena(14)  # 7 stripes, 3 slots
    assert (arena.stripes, arena.slots) == (7, 3)
    place, index = arena.locate(np.array([0, 1, 6, 13]))
    assert place.tolist() == [0, 1, 0, 1]
    assert index.tolist() == [0, 0, 1, 2]
    assert arena.row_at(0, np.array([0, 1, 2, 5, 6])).tolist() == [0, 6, 12, -1, -1]


def test_mates_and_holders_are_all_other_servers() -> None:
    layout = Layout.fresh(12, 2)
    for place in layout.places:
        others = [other for other in range(12) if other != place]
        assert sorted(layout.mates(place)) == others
        assert sum(layout.mates(place).values()) == layout.regions(place).group.size * 9
        assert list(layout.holders(place)) == others
    assert Layout.fresh(3, 0).holders(1) == Layout.fresh(3, 0).sources(1) == ()


def test_whoever_is_sent_deltas_expects_them() -> None:
    layout = Layout.fresh(40, 1, k=3)  # too many servers for all of them to send to all others
    sent = {(place, holder) for place in layout.places for holder in layout.holders(place)}
    assert sent == {(source, place) for place in layout.places for source in layout.sources(place)}
    assert len(sent) < 40 * 39


def test_big_arenas_do_not_overflow() -> None:
    arena = Layout.fresh(4, 1).arena(2**50)
    rows = np.array([0, 2**31, 2**33 + 7, 2**50 - 1])
    place, index = arena.locate(rows)
    back = [int(arena.row_at(int(p), np.array([i]))[0]) for p, i in zip(place, index, strict=True)]
    assert back == rows.tolist()


def test_layouts_are_values() -> None:
    layout = Layout.fresh(5, 1)
    assert layout == Layout.fresh(5, 1)
    assert hash(layout) == hash(Layout.fresh(5, 1))
    assert layout != Layout.fresh(6, 1)
    assert layout.arena(10) == Layout.fresh(5, 1).arena(10)
    with pytest.raises(FrozenInstanceError):
        layout.k = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        layout.groups[0, 0] = 1


def test_a_layout_does_not_share_memory_with_its_maker() -> None:
    groups = np.array([[0, 1], [1, 0]], dtype=np.int32)
    layout = Layout(groups, k=1)
    groups[0, 0] = 7
    assert layout.groups[0, 0] == 0


@pytest.mark.parametrize(
    ("groups", "k", "sentence"),
    [
        ([[0, 1, 0]], 2, "group 0 names a place twice"),
        ([[0, -1]], 1, "outside 0"),
        ([[0, 1]], 3, "k is 3 and r is -1"),
        ([[0, 1]], 0, "k must be 1 or more"),
        ([0, 1], 1, "shape"),
        ([[0.0, 1.0]], 1, "whole numbers"),
        (np.zeros((0, 2), dtype=np.int32), 1, "shape"),
    ],
)
def test_groups_that_are_no_layout_are_refused(
    groups: npt.NDArray[np.int32], k: int, sentence: str
) -> None:
    with pytest.raises(LayoutError, match=sentence):
        Layout(groups, k)


@pytest.mark.parametrize(
    "rows",
    [
        np.array([-1]),
        np.array([100]),
        np.array([2**64 - 1], dtype=np.uint64),
        np.array([1.0]),
        np.array([True]),
        np.array([[1]]),
        np.array(1),
    ],
)
def test_rows_that_do_not_exist_are_refused(rows: npt.NDArray[np.generic]) -> None:
    arena = Layout.fresh(4, 1).arena(100)
    with pytest.raises(LayoutError, match=r"row .*(does not exist|one-dimensional)"):
        arena.locate(rows)


def test_records_groups_slots_and_places_that_do_not_exist_are_refused() -> None:
    arena = Layout.fresh(4, 1).arena(100)
    with pytest.raises(LayoutError, match=r"index .* does not exist"):
        arena.row_at(0, np.array([arena.records(0)]))
    with pytest.raises(LayoutError, match="no server stands at place 4"):
        arena.records(4)
    with pytest.raises(LayoutError, match="slot 1 does not exist"):
        arena.members(np.array([0]), np.array([arena.slots]))
    with pytest.raises(LayoutError, match="2 groups and 1 slots"):
        arena.members(np.array([0, 1]), np.array([0]))
    with pytest.raises(LayoutError, match="an arena of 0 rows"):
        Layout.fresh(4, 1).arena(0)


def test_all_whole_number_types_and_empty_batches_are_fine() -> None:
    arena = Layout.fresh(4, 1).arena(100)
    wanted = arena.locate(np.arange(100))
    for dtype in (np.int32, np.uint8, np.uint64):
        for got, want in zip(arena.locate(np.arange(100, dtype=dtype)), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    place, index = arena.locate(np.zeros(0, dtype=np.int64))
    assert place.dtype == np.int32
    assert index.dtype == np.int64
    assert place.size == index.size == 0
