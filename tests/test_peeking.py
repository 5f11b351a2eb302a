"""Who rebuilds reads its mates' memory where it lies: right, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from broken_rules import HARD, assert_found

from planaria import kernels
from planaria.errors import ArgumentError
from planaria.kernels.field import PRODUCT
from planaria.kernels.peeking import Source, count_change, peek
from planaria.kernels.types import Bytes
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server.peeking import DATA, OTHERS, Changes, LocalPeeks
from planaria.server.rehearsing import Rehearsal
from planaria.server.store import Store
from planaria.simulator import World
from planaria.simulator.campaigns import run_seed
from planaria.simulator.peeking import SimulatedPeeks
from planaria.tables import Table, make_arenas
from planaria.wire.messages import MatePeek, Message

HELD = """
import ctypes, sys
own = ctypes.create_string_buffer(bytes(range(256)) * 4000)
counter = (ctypes.c_uint64 * 2)(77, 4)
print(ctypes.addressof(own), ctypes.addressof(counter), flush=True)
sys.stdin.read(1)
counter[1] += 1
print("changed", flush=True)
sys.stdin.read(1)
"""


class Other:
    """Another process, with 1,024,000 bytes and a count of what happened to them."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", HELD]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=0)
        assert self.process.stdout
        self.at, self.counter = map(int, self.process.stdout.readline().split())
        self.bytes = np.frombuffer(bytes(range(256)) * 4000, np.uint8)

    def source(self, first: int, coef: int, key: int = 77, counted: int = 4) -> Source:
        return Source(self.process.pid, self.at + first, self.counter, key, counted, coef)

    def change(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("x")
        assert self.process.stdout.readline() == "changed\n"

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("size", [1, 31, 4096, 300_001, 900_000])
def test_every_level_sums_what_another_process_has(size: int) -> None:
    with Other() as other:
        firsts, coefs = (0, 3, 70_001, 64), (1, 0, 29, 255)
        out = np.full(size, 99, np.uint8)
        assert peek([other.source(*one) for one in zip(firsts, coefs, strict=True)], out) == 0
        wanted = np.zeros(size, np.uint8)
        for first, coef in zip(firsts, coefs, strict=True):
            wanted ^= PRODUCT[coef][other.bytes[first : first + size]]
        assert np.array_equal(out, wanted)


@pytest.mark.usefixtures("level")
def test_what_changed_or_is_gone_or_somebody_elses_is_told() -> None:
    out = np.empty(5000, np.uint8)
    with Other() as other:
        fine = other.source(0, 1)
        assert peek([fine, fine], out) == 0
        assert peek([fine, other.source(0, 1, key=78)], out) == -2
        assert peek([fine._replace(at=64), fine], out) == -1  # nothing lies there
        assert peek([fine, fine._replace(counter=64)], out) == -2
        other.change()
        assert peek([other.source(0, 1, counted=5), fine], out) == 2
    assert peek([fine, fine], out) == -1  # nobody is there


@pytest.mark.usefixtures("level")
def test_bad_arguments_of_peeking_are_refused() -> None:
    out, source = np.empty(8, np.uint8), Source(os.getpid(), 64, 64, 1, 1, 1)
    with pytest.raises(ArgumentError, match="at least one"):
        peek([], out)
    for wrong in (
        {"process": 0},
        {"process": 2**31},
        {"at": -1},
        {"counted": 2**64},
        {"coef": 256},
    ):
        with pytest.raises(ArgumentError, match="no memory of a process"):
            peek([source._replace(**wrong)], out)
    with pytest.raises(ArgumentError, match="out"):
        peek([source], out.astype(np.int64))
    with pytest.raises(ArgumentError, match="counter"):
        count_change(np.zeros(3, np.uint64))


@pytest.mark.usefixtures("level")
def test_a_count_is_odd_while_something_changes_however_deep() -> None:
    changes = Changes(key=5)
    counts = changes.counters[:, 1]
    with changes.to(DATA):
        assert counts.tolist() == [1, 0]
        with changes.to(DATA, OTHERS):
            assert counts.tolist() == [1, 1]
        assert counts.tolist() == [1, 2]
    with pytest.raises(ZeroDivisionError), changes.to(OTHERS):
        raise ZeroDivisionError
    assert counts.tolist() == [2, 4]
    assert changes.counters[:, 0].tolist() == [5, 5]


# ---------------------------------------------------------------------------- a store

LAYOUT = Layout.fresh(5, 2, 3)
ARENAS = make_arenas([Table("a", 600, 3)], Optimizer("adagrad"))


def trained() -> list[Store]:
    """All servers, after two steps."""
    stores = [Store(ARENAS, LAYOUT, place) for place in LAYOUT.places]
    draw = np.random.default_rng(3)
    for step in (1, 2):
        for place, store in enumerate(stores):
            index = np.flatnonzero(draw.random(store.arenas[0].data_records) < 0.4)
            gradients = draw.standard_normal((len(index), 3)).astype(np.float32)
            changes = store.apply(step, [[(index, gradients)]])
            for holder, deltas in store.parity_deltas(changes).items():
                stores[holder].apply_parity(place, step, deltas)
    return stores


@pytest.mark.parametrize("as_of", [0, 1, 2])
def test_what_lies_there_without_the_changes_is_what_would_be_sent(as_of: int) -> None:
    some = 0
    for store in trained():
        arena = store.arenas[0]
        slots = arena.layout.slots
        for first in range(0, len(arena.records), slots):
            there = arena.records.read(first, first + slots).copy()
            for index, delta in store.changes_after(0, first, first + slots, as_of):
                assert len(np.unique(index)) == len(index)
                kernels.mul_add(there, index, None, delta)
                some += len(index)
            assert np.array_equal(there, store.export(0, first, first + slots, as_of))
    assert (some > 0) == (as_of < 2)


def test_whatever_writes_records_counts_it() -> None:
    """All that a store does to its records, with those records compared before and after."""
    stores = trained()
    store, arena = stores[1], stores[1].arenas[0]
    source = next(iter(store.sources))
    data, other = np.arange(3), np.arange(arena.data_records, arena.data_records + 3)
    gradients = np.ones((3, 3), np.float32)

    def counted(do: Any) -> tuple[list[int], list[bool]]:
        before, records = store.changes.counters[:, 1].copy(), arena.records.copy()
        do()
        assert not (store.changes.counters[:, 1] % 2).any()
        changed = (records != arena.records.copy()).any(axis=1)
        moved = store.changes.counters[:, 1] > before
        kinds = [changed[: arena.data_records].any(), changed[arena.data_records :].any()]
        return moved.tolist(), kinds

    assert counted(lambda: store.apply(3, [[(data, gradients)]])) == ([True, False], [True, False])
    owner = stores[source]
    changes = owner.apply(
        3,
        [
            [
                (
                    np.arange(owner.arenas[0].data_records),
                    np.ones((owner.arenas[0].data_records, 3), np.float32),
                )
            ]
        ],
    )
    deltas = owner.parity_deltas(changes)[1]
    applied = counted(lambda: store.apply_parity(source, 3, deltas))
    assert applied == ([False, True], [False, True])
    assert counted(lambda: store.retract(source, 2)) == ([False, True], [False, True])
    arena.bitmap[:] = 0
    arena.invalid = len(arena.records)
    values = np.ones((6, arena.arena.words), np.uint32)
    both = np.concatenate([data, other])
    assert counted(lambda: store.restore(0, both, values, 2))[0] == [True, True]
    fills = counted(lambda: store.restore_range(0, 3, 5, 2, lambda out: out.fill(7)))
    assert fills == ([True, False], [True, False])


def test_a_range_that_was_not_read_leaves_what_was_there() -> None:
    store = trained()[0]
    arena = store.arenas[0]
    arena.bitmap[:] = 0b11
    arena.invalid = len(kernels.missing(arena.bitmap, np.arange(len(arena.records))))
    before, invalid = arena.records.copy()[:16], arena.invalid

    def fails(out: Any) -> None:
        out.fill(9)
        raise ArgumentError("in vain")

    with pytest.raises(ArgumentError):
        store.restore_range(0, 0, 16, 2, fails)
    assert arena.invalid == invalid
    there = np.array([0, 1, 8, 9])
    assert np.array_equal(arena.records.gather(there), before[there])


# ---------------------------------------------------------------------------- the protocol

PEEKING: dict[str, Any] = {**HARD, "peeks": True, "rebuild_chunk": 1}


class Counted(SimulatedPeeks):
    reads: ClassVar[list[int]] = []

    def read(self, sources: Sequence[Source], out: Bytes) -> int:
        found = super().read(sources, out)
        self.reads.append(found)
        return found


class CountedWorld(World):
    peeks_class = Counted


def test_schedules_peek_and_find_what_has_changed_or_gone() -> None:
    Counted.reads.clear()
    for seed in range(12):
        assert run_seed(seed, CountedWorld, **PEEKING).failed is None
    assert Counted.reads.count(0) > 100
    assert any(found > 0 for found in Counted.reads)
    assert any(found < 0 for found in Counted.reads)


class Trusting(SimulatedPeeks):
    """Takes what has changed since its mate said where it lies."""

    def read(self, sources: Sequence[Source], out: Bytes) -> int:
        return min(super().read(sources, out), 0)


class BelievesTheCount(World):
    peeks_class = Trusting


class TakesNothingOut(World):
    """Reads records as of now, whatever the step that was asked for."""

    def send(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, MatePeek):
            message = msgspec.structs.replace(message, ends=[], indices=message.indices[:0])
            message.deltas = message.deltas[:0]
        super().send(sender, to, message)


@pytest.mark.parametrize("world", [BelievesTheCount, TakesNothingOut])
def test_control_what_is_not_as_of_one_step_is_found(world: type[World]) -> None:
    assert_found(world, 0, PEEKING)


def test_where_memory_cannot_be_read_records_are_sent() -> None:
    class Closed(SimulatedPeeks):
        def read(self, sources: Sequence[Source], out: Bytes) -> int:
            return -1

    class ClosedWorld(World):
        peeks_class = Closed

    for seed in range(6):
        assert run_seed(seed, ClosedWorld, **PEEKING).failed is None


def test_where_records_change_all_the_time_they_are_sent() -> None:
    """Steps that are shorter than a look kept a replacement looking for ever."""

    class Restless(SimulatedPeeks):
        def read(self, sources: Sequence[Source], out: Bytes) -> int:
            return 1

    class RestlessWorld(World):
        peeks_class = Restless

    for seed in range(6):
        assert run_seed(seed, RestlessWorld, **PEEKING).failed is None


def test_a_rehearsal_peeks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a spare's first range is not the first one of its life."""
    found: list[int] = []
    read = LocalPeeks.read

    def noted(self: LocalPeeks, sources: Sequence[Source], out: Bytes) -> int:
        found.append(read(self, sources, out))
        return found[-1]

    monkeypatch.setattr(LocalPeeks, "read", noted)
    assert Rehearsal().spare.whole
    assert found
    assert not any(found)
