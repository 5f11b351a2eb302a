"""A snapshot is what a copy taken then would be, whatever steps are taken while it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria import Layout, Optimizer, Store, Table
from planaria.errors import StoreError
from planaria.kernels import saves
from planaria.kernels.types import Bytes, Index, Records
from planaria.layout.resizing import Resize, resized, staged
from planaria.server.history import Change
from planaria.server.snapshot import FrozenArena, Snapshot, wanted_rows
from planaria.tables import make_arenas

TABLES = [Table("a", 300, 5), Table("b", 170, 3), Table("c", 95, 5)]
ADAGRAD = Optimizer("adagrad", lr=0.05)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.server.snapshot.PIECE_BYTES", 400)
    monkeypatch.setattr("planaria.server.snapshot.WINDOW", 24)


def new_store(blank_at: int | None = None) -> Store:
    arenas = make_arenas(TABLES, ADAGRAD)
    return Store(arenas, Layout.fresh(4, 1, 2), 1, seed=3, blank_at=blank_at)


def step(store: Store, random: np.random.Generator) -> None:
    """Some rows, in any order; some of them over and over, as in life."""
    contributions = []
    for arena in store.arenas:
        hot = random.permutation(arena.data_records)[: random.integers(0, 40)]
        index = np.unique(np.concatenate([hot, np.arange(min(4, arena.data_records))]))
        gradients = random.standard_normal((len(index), arena.arena.dim)).astype(np.float32)
        contributions.append([(random.permutation(index), gradients)])
    store.apply(store.step + 1, contributions)


def data_of(store: Store) -> list[Records]:
    return [arena.records.copy()[: arena.data_records] for arena in store.arenas]


def read_all(snapshot: Snapshot, expected: Sequence[Records], between: Callable[[], None]) -> int:
    """Compares each piece with the copy; returns how many records there were."""
    found = 0
    for piece in snapshot.pieces():
        stop = piece.first + len(piece.records)
        rows = np.arange(piece.first, stop) if piece.rows is None else piece.rows
        np.testing.assert_array_equal(piece.records, expected[piece.arena][rows])
        found += len(rows)
        between()
    return found


def choices(store: Store, random: np.random.Generator) -> list[Bytes | None]:
    """Of each arena all rows, some, or none."""
    found: list[Bytes | None] = []
    for arena in store.arenas:
        share = random.choice([-1.0, 0.0, 0.1, 0.7, 1.0])
        index = np.flatnonzero(random.random(arena.data_records) < share)
        found.append(None if share < 0 else wanted_rows(index, arena.data_records))
    return found


def count(store: Store, wanted: Sequence[Bytes | None]) -> int:
    sizes = [arena.data_records for arena in store.arenas]
    return sum(
        size if bits is None else saves.count_marked(bits, 0, size)
        for size, bits in zip(sizes, wanted, strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_steps_between_any_two_pieces_change_nothing_of_what_is_read(seed: int) -> None:
    random = np.random.default_rng(seed)
    store = new_store()
    for _ in range(random.integers(0, 3)):
        step(store, random)

    def some_steps() -> None:
        for _ in range(random.choice([0, 0, 1, 3])):
            step(store, random)

    for _ in range(2):  # one after the other
        expected, wanted = data_of(store), choices(store, random)
        snapshot = store.take_snapshot(wanted)
        some_steps()
        assert read_all(snapshot, expected, some_steps) == count(store, wanted)
        snapshot.close()
        assert store.snapshot is None


@pytest.mark.parametrize("seed", range(5))
def test_what_becomes_data_meanwhile_is_not_read(seed: int) -> None:
    """A mirror became data while a save was under way: the next step ended every server."""
    first, shrinks = Layout.fresh(5, 1, 2), Resize((0, 1, 2, 3), 0)
    store = Store(make_arenas(TABLES, ADAGRAD), first, 1, seed=3)
    store.rearrange(staged(first, shrinks), 1, store.step)
    for arena in store.arenas:
        arena.set_all_valid()
    random = np.random.default_rng(seed)
    expected, before = data_of(store), [arena.data_records for arena in store.arenas]
    snapshot = store.take_snapshot()
    store.rearrange(resized(first, shrinks), 1, store.step)
    assert [arena.data_records for arena in store.arenas] > before

    def some_steps() -> None:
        step(store, random)

    some_steps()
    assert read_all(snapshot, expected, some_steps) == sum(before)


def test_a_control_without_pre_images_reads_what_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(arena: FrozenArena, change: Change) -> None:
        pass

    monkeypatch.setattr(FrozenArena, "keep", forget)
    store, random = new_store(), np.random.default_rng(1)
    expected = data_of(store)
    with pytest.raises(AssertionError, match="not equal"):
        read_all(store.take_snapshot(), expected, lambda: step(store, random))


def test_a_reader_in_another_thread_sees_one_step() -> None:
    store, random = new_store(), np.random.default_rng(2)
    problems: list[BaseException] = []

    def read(snapshot: Snapshot, expected: list[Records]) -> None:
        try:
            read_all(snapshot, expected, lambda: None)
        except BaseException as problem:
            problems.append(problem)
        finally:
            snapshot.close()

    for _ in range(20):
        expected = data_of(store)
        reader = threading.Thread(target=read, args=(store.take_snapshot(), expected))
        reader.start()
        while store.snapshot:
            step(store, random)
        reader.join(10)
        assert problems == []


def test_what_was_read_or_is_not_wanted_is_not_kept() -> None:
    store, random = new_store(), np.random.default_rng(4)
    none = [np.zeros(-(-arena.data_records // 8), np.uint8) for arena in store.arenas]
    kept: list[int] = []
    for wanted in (none, [None] * len(none)):
        snapshot = store.take_snapshot(wanted)
        step(store, random)
        kept.append(sum(len(arena.fresh) for arena in snapshot._arenas))
        for _ in snapshot.pieces():
            pass
        step(store, random)
        assert all(arena.fresh == [] for arena in snapshot._arenas)
        snapshot.close()
    assert kept == [0, len(store.arenas)]


def test_a_snapshot_that_is_closed_or_has_no_memory_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, random = new_store(), np.random.default_rng(5)
    closed = store.take_snapshot()
    with pytest.raises(StoreError, match="one is being read"):
        store.take_snapshot()
    closed.close()
    with pytest.raises(StoreError, match="it was closed"):
        next(closed.pieces())

    def no_room(arena: FrozenArena, change: Change) -> None:
        raise MemoryError

    snapshot = store.take_snapshot()
    reading: Iterator[object] = snapshot.pieces()
    next(reading)
    before = store.step
    with monkeypatch.context() as patch:
        patch.setattr(FrozenArena, "keep", no_room)
        step(store, random)
    assert store.step == before + 1  # training goes on
    step(store, random)
    with pytest.raises(StoreError, match="no memory"):
        next(reading)
    with pytest.raises(StoreError, match="still to be rebuilt"):
        new_store(blank_at=7).take_snapshot()


def test_a_step_that_is_refused_leaves_the_snapshot_as_it_was() -> None:
    store, random = new_store(), np.random.default_rng(6)
    step(store, random)
    expected, snapshot = data_of(store), store.take_snapshot()
    index: Index = np.arange(5)
    good = (index, np.ones((5, store.arenas[0].arena.dim), np.float32))
    bad = (index, np.ones((5, store.arenas[1].arena.dim + 1), np.float32))
    with pytest.raises(Exception, match="gradients"):
        store.apply(store.step + 1, [[good], [bad]])
    read_all(snapshot, expected, lambda: step(store, random))
