"""Rows of all arenas by server, and what the servers answer back in the order of the rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config import Config
from planaria.layout.resizing import Resize, resized
from planaria.torch.routed import JobRouter

ROWS = {"a": 40, "b": 7, "c": 23}


def job_of(servers: int, parity: int) -> Config:
    dims = {"a": 4, "b": 2, "c": 4}
    tables = [{"name": name, "rows": rows, "dim": dims[name]} for name, rows in ROWS.items()]
    return Config.from_dict({"servers": servers, "parity": parity, "tables": tables})


JOBS = {shape: job_of(*shape) for shape in [(2, 1), (3, 1), (5, 2), (6, 1)]}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(JOBS)), st.data())
def test_each_row_goes_to_one_server_and_its_value_comes_back_to_its_place(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    config = JOBS[shape]
    rows = [
        np.array(
            data.draw(st.lists(st.integers(0, arena.rows - 1), unique=True, max_size=20)), np.int64
        )
        for arena in config.arenas
    ]
    routed = JobRouter(config).route(rows, config.layout)
    assert sorted(routed.rows) == list(range(config.servers))
    assert routed.counts == [
        sum(len(own) for own in routed.rows[place]) for place in range(config.servers)
    ]
    assert sum(routed.counts) == sum(map(len, rows))
    for arena in range(len(rows)):
        records = [(p, int(r)) for p, own in routed.rows.items() for r in own[arena]]
        assert len(set(records)) == len(records), "two rows in one record"
    draw = np.random.default_rng(0)
    values = [
        draw.normal(size=(len(own), arena.dim)).astype(np.float32)
        for own, arena in zip(rows, config.arenas, strict=True)
    ]
    back = routed.gather(routed.split(values))
    for one, other in zip(values, back, strict=True):
        assert np.array_equal(one, other)


def test_a_row_has_one_record_whatever_is_asked_for_with_it() -> None:
    config = JOBS[5, 2]
    router = JobRouter(config)
    everything = router.route([np.arange(arena.rows) for arena in config.arenas], config.layout)
    place_of: list[dict[int, tuple[int, int]]] = [{} for _ in config.arenas]
    for arena, part in enumerate(everything.parts):
        for place, run in enumerate(everything.runs[arena]):
            for row, record in zip(part.order[run], part.indices[run], strict=True):
                place_of[arena][int(row)] = (place, int(record))
    for arena, content in enumerate(config.arenas):
        for row in range(content.rows):
            rows = [np.empty(0, np.int64) for _ in config.arenas]
            rows[arena] = np.array([row])
            alone = router.route(rows, config.layout).rows
            [(place, record)] = [(p, int(r)) for p, own in alone.items() for r in own[arena]]
            assert (place, record) == place_of[arena][row]


def test_nothing_is_asked_for_and_nothing_comes() -> None:
    config = JOBS[3, 1]
    routed = JobRouter(config).route([np.empty(0, np.int64) for _ in config.arenas], config.layout)
    assert routed.counts == [0, 0, 0]
    values = [np.empty((0, arena.dim), np.float32) for arena in config.arenas]
    assert [own.shape for own in routed.gather(routed.split(values))] == [
        own.shape for own in values
    ]


def test_a_route_is_found_again_by_the_very_arrays_that_it_was_made_of() -> None:
    config = JOBS[3, 1]
    router, layout = JobRouter(config), config.layout
    rows, others = [np.array([3, 1, 2]), np.array([0, 4])], [np.array([7]), np.array([5])]
    routed, other = router.route(rows, layout), router.route(others, layout)
    assert router.route(rows, layout) is routed, "gradients of a step, after the rows of the next"
    assert router.route([rows[0], rows[1].copy()], layout) is not routed
    again = router.route([one.copy() for one in others], layout)
    assert other.counts == again.counts


def test_gradients_go_by_the_layout_that_their_rows_were_asked_for_by() -> None:
    """Servers may have come or gone between the two; rows that are asked for next go by the new."""
    config = JOBS[3, 1]
    router, before = JobRouter(config), config.layout
    after = resized(before, Resize((0, 1, 2), 2))
    rows = [np.arange(arena.rows) for arena in config.arenas]
    asked = router.route(rows, before)
    assert router.route(rows, after) is asked
    assert asked.layout is before
    later = router.route([own.copy() for own in rows], after)
    assert later.layout is after
    assert len(later.rows) == 5
    assert sum(later.counts) == sum(asked.counts)
