"""The store: every kept version reads back exactly, nothing is half applied, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria import Initial, Layout, Optimizer, Store, Table
from planaria.codes import Code
from planaria.errors import (
    ArgumentError,
    CodeError,
    HistoryGone,
    InvalidRecord,
    RowError,
    StepError,
    StoreError,
)
from planaria.kernels.types import Floats, Index, Records
from planaria.optimizers import NAMES
from planaria.server import Change, Digest, ParityDelta, decode, find_mates
from planaria.tables import Arena, make_arenas

TABLES = [
    Table("a", 300, 5),
    Table("b", 170, 3, Initial.normal(0.0, 1.0)),
    Table("c", 95, 5, Initial.uniform(2.0, 3.0)),
]


class Cluster:
    """All stores of a layout, and the random steps that they take."""

    def __init__(
        self,
        layout: Layout,
        optimizer: Optimizer | None = None,
        *,
        keep_steps: int = 3,
        seed: int = 7,
    ) -> None:
        self.layout = layout
        self.optimizer = optimizer or Optimizer("adagrad", lr=0.05)
        self.arenas: list[Arena] = make_arenas(TABLES, self.optimizer)
        self.keep_steps = keep_steps
        self.seed = seed
        self.stores = {place: self.store(place) for place in layout.places}

    def store(self, place: int, blank_at: int | None = None) -> Store:
        return Store(
            self.arenas,
            self.layout,
            place,
            seed=self.seed,
            keep_steps=self.keep_steps,
            blank_at=blank_at,
        )

    def gradients(self, step: int, ranks: int = 3) -> list[list[tuple[Index, Floats]]]:
        """Per arena and rank: arena rows and gradients; a function of the step alone."""
        random = np.random.default_rng((self.seed, step))
        return [
            [
                (
                    random.permutation(arena.rows)[: random.integers(0, 60)],
                    random.standard_normal((60, arena.dim)).astype(np.float32),
                )
                for _ in range(ranks)
            ]
            for arena in self.arenas
        ]

    def contributions(self, place: int, step: int) -> list[list[tuple[Index, Floats]]]:
        """The part of the step's gradients that is for one server."""
        result = []
        for arena, ranks in zip(self.arenas, self.gradients(step), strict=True):
            layout = self.layout.arena(arena.rows)
            parts = []
            for rows, grads in ranks:
                places, index = layout.locate(rows)
                mine = np.flatnonzero(places == place)
                parts.append((index[mine], np.ascontiguousarray(grads[mine])))
            result.append(parts)
        return result

    def step(self, step: int) -> None:
        for place, store in self.stores.items():
            changes = store.apply(step, self.contributions(place, step))
            for holder, deltas in store.parity_deltas(changes).items():
                self.stores[holder].apply_parity(place, step, deltas)

    def run(self, last: int, first: int = 1) -> Cluster:
        for step in range(first, last + 1):
            self.step(step)
        return self

    @property
    def digest(self) -> Digest:
        return sum((store.digest() for store in self.stores.values()), Digest())

    def broken_stripes(self) -> int:
        """How many stripes do not satisfy their parity equations."""
        code = Code(self.layout.k, self.layout.r)
        broken = 0
        for a, arena in enumerate(self.arenas):
            layout = self.layout.arena(arena.rows)
            for group in range(self.layout.n_groups):
                for slot in range(layout.slots):
                    places, index = layout.members(np.array([group]), np.array([slot]))
                    shards = [
                        self.stores[int(p)]
                        .arenas[a]
                        .records.gather(np.array([i]))[0]
                        .view(np.uint8)
                        for p, i in zip(places[0], index[0], strict=True)
                    ]
                    broken += not code.verify(shards[: code.k], shards[code.k :])
        return broken


def snapshot(store: Store) -> list[bytes]:
    return [arena.records.copy().tobytes() for arena in store.arenas]


def flip_a_bit(store: Store) -> None:
    records = store.arenas[0].records
    delta = np.zeros((1, records.words), np.uint32)
    delta[0, 0] = 1
    records.add(np.array([0]), None, delta)


LAYOUT = Layout.fresh(6, 2, 3)


def test_every_stripe_satisfies_its_parity_equations_from_the_start_and_after_steps() -> None:
    cluster = Cluster(LAYOUT)
    assert cluster.broken_stripes() == 0
    cluster.run(5)
    assert cluster.broken_stripes() == 0
    flip_a_bit(cluster.stores[0])  # control: it shows
    assert cluster.broken_stripes() == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_does_not_depend_on_the_sharding(name: str) -> None:
    optimizer = Optimizer(name, lr=0.05, weight_decay=0.01)
    layouts = [
        Layout.fresh(1, 0),
        Layout.fresh(2, 1),
        Layout.fresh(6, 2, 3),
        Layout.fresh(5, 0, 4),
        Layout.fresh(9, 4, 4),
    ]
    digests = {str(Cluster(layout, optimizer).run(3).digest) for layout in layouts}
    assert len(digests) == 1
    other = Cluster(LAYOUT, Optimizer(name, lr=0.050001, weight_decay=0.01)).run(3)
    assert str(other.digest) not in digests
    assert str(Cluster(LAYOUT, optimizer, seed=8).run(3).digest) not in digests


def test_initial_weights_are_those_that_the_tables_ask_for() -> None:
    cluster = Cluster(Layout.fresh(1, 0))
    wide, narrow = (cluster.layout.arena(arena.rows) for arena in cluster.arenas)
    weights = cluster.stores[0].lookup(0, wide.locate(np.arange(395))[1])
    assert np.abs(weights[:300]).max() <= 300**-0.5
    assert weights[300:].min() >= 2
    assert weights[300:].max() < 3
    normal = cluster.stores[0].lookup(1, narrow.locate(np.arange(170))[1])
    assert 0.8 < normal.std() < 1.2


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_every_one_of_the_last_versions_reads_back_exactly(
    seed: int, keep_steps: int, steps: int
) -> None:
    cluster = Cluster(LAYOUT, keep_steps=keep_steps, seed=seed)
    versions: dict[int, dict[int, list[Records]]] = {}
    for step in range(steps + 1):
        if step:
            cluster.step(step)
        versions[step] = {
            place: [arena.records.copy() for arena in store.arenas]
            for place, store in cluster.stores.items()
        }
    for place, store in cluster.stores.items():
        oldest = max(steps - keep_steps, 0)
        for step in range(oldest, steps + 1):
            for a, records in enumerate(versions[step][place]):
                n_data = store.arenas[a].data_records
                assert np.array_equal(store.export(a, 0, n_data, step), records[:n_data])
                parity = store.export(a, n_data, len(records), step)
                assert np.array_equal(parity, records[n_data:])
                data = np.arange(n_data)
                weights = records[: len(data), : store.arenas[a].arena.dim].view(np.float32)
                assert np.array_equal(store.lookup(a, data, step), weights)
        assert snapshot(store) == [r.tobytes() for r in versions[steps][place]]


def test_reading_further_back_than_the_history_is_a_typed_error_that_says_how_far() -> None:
    store = Cluster(LAYOUT, keep_steps=2).run(5).stores[0]
    first_parity = store.arenas[0].data_records
    for index in (np.array([0]), np.array([first_parity]), np.array([0, first_parity])):
        with pytest.raises(HistoryGone, match="oldest that can be read is 3") as caught:
            store.read(0, index, 2)
        assert caught.value.oldest == 3
        with pytest.raises(StepError, match="still to come"):
            store.read(0, index, 6)


def test_an_as_of_read_may_name_a_record_twice() -> None:
    cluster = Cluster(LAYOUT).run(2)
    before = cluster.stores[1].arenas[0].records.copy()
    cluster.step(3)
    index = np.array([5, 5, 0, 5])
    assert np.array_equal(cluster.stores[1].read(0, index, 2), before[index])


def test_steps_out_of_order_are_refused_and_change_nothing() -> None:
    cluster = Cluster(LAYOUT).run(2)
    store = cluster.stores[0]
    before = snapshot(store)
    for step in (1, 2, 4):
        with pytest.raises(StepError):
            store.apply(step, cluster.contributions(0, step))
        source = next(iter(store.sources))
        with pytest.raises(StepError):
            store.apply_parity(source, step, [])
    assert snapshot(store) == before


def _none() -> Index:
    return np.zeros(0, np.int64)


def _bad_contributions(store: Store) -> list[list[list[tuple[Index, Floats]]]]:
    """Good for arena 0, wrong for arena 1: what was done to arena 0 must be undone."""

    def grads(n: int, dim: int) -> Floats:
        return np.ones((n, dim), np.float32)

    good = (np.arange(20), grads(20, 5))
    limit = store.arenas[1].data_records
    return [
        [[good], [(np.array([limit]), grads(1, 3))]],  # parity is not for gradients
        [[good], [(np.array([-1]), grads(1, 3))]],
        [[good], [(np.array([1, 1]), grads(2, 3))]],
        [[good], [(np.array([1, 2]), grads(1, 3))]],
        [[good], [(np.array([1]), grads(1, 4))]],
        [[good], [(np.array([1]), grads(1, 3).astype(np.float64))]],
        [[good]],
    ]


def test_a_step_that_is_refused_for_one_arena_leaves_all_as_they_were() -> None:
    store = Cluster(LAYOUT).stores[0]
    before = snapshot(store)
    for contributions in _bad_contributions(store):
        with pytest.raises((ArgumentError, StoreError)):
            store.apply(1, contributions)
        assert snapshot(store) == before
        assert store.step == 0
    store.apply(1, [[(np.arange(20), np.ones((20, 5), np.float32))], []])
    assert snapshot(store) != before


def test_a_delta_that_is_refused_for_one_arena_leaves_all_as_they_were() -> None:
    cluster = Cluster(LAYOUT)
    owner = cluster.stores[0]
    deltas = owner.parity_deltas(owner.apply(1, cluster.contributions(0, 1)))
    holder, good = next((h, d) for h, d in deltas.items() if len(d[0].indices))
    store = cluster.stores[holder]
    before = snapshot(store)
    words = store.arenas[1].arena.words
    unprotected = np.array([0])  # a data record of the holder
    one = np.ones((1, words), np.uint32)
    for bad in (
        ParityDelta(unprotected, one),
        ParityDelta(np.array([len(store.arenas[1].records)]), one),
        ParityDelta(np.array([-1]), one),
        ParityDelta(_none(), one),
        ParityDelta(_none(), np.ones((0, words + 1), np.uint32)),
        ParityDelta(np.zeros(0, np.int32), one[:0]),
    ):
        with pytest.raises((StoreError, ArgumentError)):
            store.apply_parity(0, 1, [good[0], bad])
        assert snapshot(store) == before
    with pytest.raises(StoreError, match="arenas"):
        store.apply_parity(0, 1, good[:1])
    with pytest.raises(StoreError, match="no parity here"):
        store.apply_parity(holder, 1, good)
    store.apply_parity(0, 1, good)
    assert snapshot(store) != before


def test_retracting_a_source_takes_exactly_its_deltas_back() -> None:
    cluster = Cluster(LAYOUT, keep_steps=4).run(2)
    other = Cluster(LAYOUT, keep_steps=4).run(2)
    lost = 3
    for step in (3, 4):
        cluster.step(step)
        for place, store in other.stores.items():
            changes = store.apply(step, other.contributions(place, step))
            for holder, deltas in store.parity_deltas(changes).items():
                if place != lost:  # as if the lost server's deltas had never arrived
                    other.stores[holder].apply_parity(place, step, deltas)
    for place, store in cluster.stores.items():
        if lost in store.sources:
            assert store.held_step == 4
            store.retract(lost, 2)
            assert store.held_step == 2
        assert snapshot(store) == snapshot(other.stores[place])
    with pytest.raises(HistoryGone):
        cluster.stores[0].retract(lost, -1)


def test_memory_is_accounted_for() -> None:
    cluster = Cluster(LAYOUT, keep_steps=2).run(1)
    memories = [store.memory() for store in cluster.stores.values()]
    records = sum(
        arena.records.nbytes for store in cluster.stores.values() for arena in store.arenas
    )
    assert sum(m.data + m.parity for m in memories) == records
    assert sum(m.parity for m in memories) * LAYOUT.k == sum(m.data for m in memories) * LAYOUT.r
    assert all(m.history > 0 and m.validity > 0 for m in memories)
    assert memories[0].total == sum(memories[0])
    after_two = [store.memory().history for store in cluster.run(3, first=2).stores.values()]
    after_five = [store.memory().history for store in cluster.run(6, first=4).stores.values()]
    assert sum(after_five) < 2 * sum(after_two)  # the history is bounded


# ---------------------------------------------------------------------------- rebuilding


def rebuild(cluster: Cluster, store: Store, absent: set[int], as_of: int, order: Index) -> None:
    """Decodes the records of arena after arena, in random order, on demand."""
    for a, arena in enumerate(store.arenas):
        for index in np.array_split(np.arange(len(arena.records))[order % len(arena.records)], 7):
            distinct = np.unique(index)
            mates = find_mates(arena.layout, store.place, distinct, absent)
            shards = []
            for places, indices in zip(mates.places.T, mates.indices.T, strict=True):
                shard = np.empty((len(distinct), arena.arena.words), np.uint32)
                for place in np.unique(places):
                    here = places == place
                    shard[here] = cluster.stores[int(place)].read(a, indices[here], as_of)
                shards.append(shard)
            store.restore(a, distinct, decode(mates, shards), as_of)


@pytest.mark.parametrize("lost", [{0}, {5}, {1, 4}])
def test_lost_servers_are_rebuilt_bit_for_bit_also_as_of_an_earlier_step(lost: set[int]) -> None:
    cluster = Cluster(LAYOUT, keep_steps=3)
    expected = {}
    for step in range(1, 5):
        cluster.step(step)
        expected[step] = {place: snapshot(store) for place, store in cluster.stores.items()}
    for place in lost:
        del cluster.stores[place]
    for as_of in (2, 4):
        for place in lost:
            store = cluster.store(place, blank_at=as_of)
            rebuild(cluster, store, lost, as_of, np.random.default_rng(as_of).permutation(4000))
            assert store.invalid_records == 0
            assert snapshot(store) == expected[as_of][place]


def test_rebuilt_parity_is_brought_forward_with_the_deltas_that_came_meanwhile() -> None:
    cluster = Cluster(LAYOUT, keep_steps=3).run(2)
    lost = 2
    blank = cluster.store(lost, blank_at=2)
    del cluster.stores[lost]
    for step in (3, 4):  # the replacement gets deltas before any of its records is valid
        for place, store in cluster.stores.items():
            changes = store.apply(step, cluster.contributions(place, step))
            for holder, deltas in store.parity_deltas(changes).items():
                target = blank if holder == lost else cluster.stores[holder]
                target.apply_parity(place, step, deltas)
    undisturbed = Cluster(LAYOUT, keep_steps=3).run(4)
    rebuild(cluster, blank, {lost}, 2, np.arange(4000))
    for arena, expected in zip(blank.arenas, undisturbed.stores[lost].arenas, strict=True):
        parity = slice(arena.data_records, None)
        assert np.array_equal(arena.records.copy()[parity], expected.records.copy()[parity])


def test_restoring_leaves_valid_records_alone() -> None:
    cluster = Cluster(LAYOUT)
    blank = cluster.store(0, blank_at=0)
    words = blank.arenas[0].arena.words
    index = np.array([3, 8])
    assert blank.restore(0, index, np.full((2, words), 9, np.uint32), 0) == 2
    again = np.array([8, 4, 3])
    assert blank.restore(0, again, np.full((3, words), 1, np.uint32), 0) == 1
    assert blank.arenas[0].records.copy()[[3, 4, 8], 0].tolist() == [9, 1, 9]
    assert blank.arenas[0].invalid == len(blank.arenas[0].records) - 3


def _uses_of_an_invalid_record(store: Store) -> list[Callable[[], object]]:
    index = np.array([3, 4])
    grads = np.ones((2, 5), np.float32)
    return [
        lambda: store.lookup(0, index),
        lambda: store.read(0, index, 0),
        lambda: store.apply(1, [[(index, grads)], []]),
        lambda: store.digest(),
    ]


def test_a_record_is_not_used_before_it_is_rebuilt() -> None:
    cluster = Cluster(LAYOUT)
    blank = cluster.store(0, blank_at=0)
    blank.restore(0, np.array([3]), np.zeros((1, blank.arenas[0].arena.words), np.uint32), 0)
    for use in _uses_of_an_invalid_record(blank):
        with pytest.raises(InvalidRecord) as caught:
            use()
        assert 3 not in caught.value.indices
    assert blank.missing(0, np.array([4, 3, 5])).tolist() == [4, 5]
    assert blank.step == 0


def test_more_losses_than_parity_are_named() -> None:
    cluster = Cluster(LAYOUT)
    with pytest.raises(CodeError, match="more than 2 were lost"):
        find_mates(cluster.stores[0].arenas[0].layout, 0, np.arange(100), {1, 2})


def test_a_parity_record_is_not_looked_up() -> None:
    store = Cluster(LAYOUT).stores[0]
    with pytest.raises(RowError, match="which are the data records"):
        store.lookup(0, np.array([store.arenas[0].data_records]))
    with pytest.raises(RowError):
        store.lookup(0, np.array([-1]))


def test_a_change_is_its_own_undo() -> None:
    cluster = Cluster(LAYOUT)
    store = cluster.stores[0]
    before = snapshot(store)
    changes = store.apply(1, cluster.contributions(0, 1))
    assert all(isinstance(change, Change) for change in changes)
    assert snapshot(store) != before
    for arena, change in zip(store.arenas, changes, strict=True):
        arena.records.add(change.indices, None, change.delta)
    assert snapshot(store) == before
