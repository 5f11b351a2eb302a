"""Checkpoints of what changed, without any process: told late, replaced or not, nothing is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_jobs import wait_until

from planaria import Layout, Store
from planaria.checkpoints import (
    DENSE,
    POLICIES,
    Checkpoint,
    discard,
    latest,
    list_checkpoints,
    restore,
)
from planaria.cluster import archive
from planaria.cluster.parts import Content, PartSaver, SavedDense, take_records
from planaria.config import Config
from planaria.control.saving import SaveMachine
from planaria.records import RamRecords
from planaria.server.changed import MAX_STEPS, ChangedRows
from planaria.server.history import Change
from planaria.tables import make_arenas
from planaria.wire.control import Base, PartFailed, PartSaved, Told

ROWS = 2000
LIMIT_S = 60.0  # for what takes milliseconds


@pytest.fixture
def folder() -> Iterator[str]:
    """In memory: nothing here is about disks, and disks take their time."""
    import fsspec

    yield "memory://differences/job"
    fsspec.filesystem("memory").rm("/differences", recursive=True)


class Fleet:
    """All servers of a job, their savers, and the supervisor's side."""

    def __init__(self, folder: str | Path, seed: int, *overrides: str) -> None:
        shape = ("servers=3", "parity=1", "k=2", "model.tables=1", f"model.rows={ROWS}")
        save = (f"checkpoint.path={folder}", "checkpoint.every_steps=5", "model.dim=4")
        self.job = Config.load(None, [*shape, *save, *overrides])
        self.random = np.random.default_rng(seed)
        self.arenas = make_arenas(self.job.tables, self.job.optimizer_rule)
        self.stores = [self.new_store(place) for place in self.job.layout.places]
        self.saves = SaveMachine(self.job, 0, 0.0)
        self.ordered = [Base() for _ in self.stores]  # as each has heard of it

    def new_store(self, place: int, blank_at: int | None = None) -> Store:
        return Store(self.arenas, self.job.layout, place, seed=1, blank_at=blank_at)

    @property
    def step(self) -> int:
        return self.stores[0].step

    def train(self, steps: int = 5) -> None:
        for _ in range(steps):
            for store in self.stores:
                rows = self.random.zipf(1.3, 20) % store.arenas[0].data_records
                index = np.unique(rows).astype(np.int64)
                gradients = self.random.standard_normal((len(index), 4)).astype(np.float32)
                store.apply(store.step + 1, [[(index, gradients)]])

    def replace(self, place: int) -> None:
        """Another process has the same records, and has counted nothing."""
        old = self.stores[place]
        new = self.new_store(place, blank_at=old.step)
        for arena, before in zip(new.arenas, old.arenas, strict=True):
            arena.records.put(0, before.records.copy())
        new.set_all_valid()
        self.stores[place], self.ordered[place] = new, Base()

    def save(self, late: tuple[int, ...] = (), but: int | None = None) -> None:
        """late: who has not got the last order yet. but: whose part is lost."""
        order = self.saves.base
        told: list[Told] = []
        for store in self.stores:
            if store.place not in late:
                self.ordered[store.place] = order
            plain = self.job.checkpoint.policy == "full"
            content = take_records(store, self.step, None if plain else self.ordered[store.place])
            self.write(told, store.place, content)
        self.write(told, DENSE, SavedDense(np.arange(9, dtype=np.uint32)))
        for what in told:
            assert isinstance(what, PartSaved)
            if what.place == but:
                lost = PartFailed(step=what.step, place=what.place, why="a test", late=False)
                self.saves.on_part_failed(lost, 0.0)
            else:
                self.saves.on_part(what, 0.0)
        self.do_work()
        for place in late:
            self.ordered[place] = order

    def write(self, told: list[Told], place: int, content: Content) -> None:
        saver = PartSaver(self.job, told.append, 0, arenas=() if place == DENSE else self.arenas)
        saver.save(self.step, place, lambda: content)
        assert wait_until(lambda: not saver.writing, LIMIT_S)

    def do_work(self) -> None:
        """Until none is left."""
        while work := self.saves.take_work():
            for one in work:
                if (outcome := archive.do(one, self.job, "", None)) is not None:
                    archive.tell(outcome, self.saves, self.saves.notes.append, 0.0)

    def check(self) -> Checkpoint:
        """The newest checkpoint is what a full one of the same instant is, in any layout."""
        bits = f"checkpoint.bits={self.job.checkpoint.bits}"
        plain = Fleet(f"{self.job.checkpoint.path}-plain", 0, bits)
        plain.stores = self.stores
        plain.save()
        found = latest(self.job.checkpoint.path or "", verify=True).checkpoint
        full = latest(f"{self.job.checkpoint.path}-plain").checkpoint
        assert found is not None
        assert full is not None
        assert found.step == full.step == self.step
        # Files of its own for a server that comes back, all of them for one that holds all rows.
        for layout, place in ((self.job.layout, 1), (Layout.fresh(1, 0), 0)):
            shape = (layout.arena(ROWS).records(place), self.arenas[0].words)
            out = RamRecords(np.zeros(shape, np.uint32))
            expected = RamRecords(np.ones(shape, np.uint32))
            restore(found, self.arenas, layout, place, [out])
            restore(full, self.arenas, layout, place, [expected])
            np.testing.assert_array_equal(out.array, expected.array)
        discard(f"{self.job.checkpoint.path}-plain", self.step)
        return found


def bases(fleet: Fleet) -> dict[int, list[int]]:
    return {one["step"]: one["base"] for one in fleet.saves.published if "failed" not in one}


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("full", {5: [], 10: [], 15: []}),
        ("one-shot", {5: [], 10: [5], 15: [5]}),
        ("consecutive", {5: [], 10: [5], 15: [5, 10]}),
        ("intermittent", {5: [], 10: [5], 15: [5]}),
    ],
)
def test_differences_are_smaller_and_restore_to_what_a_full_checkpoint_does(
    folder: str, policy: str, expected: dict[int, list[int]], bits: int
) -> None:
    fleet = Fleet(
        folder, 1, f"checkpoint.policy={policy}", f"checkpoint.bits={bits}"
    )  # fmt: skip
    for _ in expected:
        fleet.train()
        fleet.save()
        fleet.check()
    assert bases(fleet) == expected
    first, *others = [one["bytes"] for one in fleet.saves.published]
    assert all((size < 0.6 * first) == (policy != "full") for size in others)


def test_a_server_that_was_told_late_or_replaced_saves_more_than_it_must(folder: str) -> None:
    fleet = Fleet(folder, 2, "checkpoint.policy=consecutive")
    sizes: dict[int, list[int]] = {}

    def save(**how: Any) -> None:
        fleet.train()
        fleet.save(**how)
        manifest = fleet.check().manifest
        sizes[fleet.step] = [manifest.part_of(place).records for place in range(3)]

    save()
    save()
    save(late=(0,))  # 0 has what changed since 5, the others since 10
    fleet.replace(1)
    save()
    save(late=(0, 1, 2))  # all have what changed since 15
    save()
    assert bases(fleet) == {
        5: [],
        10: [5],
        15: [5, 10],
        20: [5, 10, 15],
        25: [5, 10, 15],
        30: [5, 10, 15, 25],
    }
    everything = sizes[5][1]
    assert sizes[20][1] == everything
    assert max(*sizes[10], *sizes[15], sizes[20][0], sizes[20][2], *sizes[30]) < everything


def test_a_checkpoint_that_lacks_a_part_is_no_base(folder: str) -> None:
    fleet = Fleet(folder, 3, "checkpoint.policy=consecutive")
    for but in (None, 1, None, 2, None):
        fleet.train()
        fleet.save(but=but)
    fleet.check()
    assert bases(fleet) == {5: [], 15: [5], 25: [5, 15]}


def test_a_base_that_is_gone_makes_the_next_one_full(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "job", 4, "checkpoint.policy=one-shot")
    for _ in range(2):
        fleet.train()
        fleet.save()
    shutil.rmtree(tmp_path / "job" / "step-00000005")
    for _ in range(3):
        fleet.train()
        fleet.save()
    fleet.check()
    assert bases(fleet) == {5: [], 10: [5], 20: [], 25: [20]}
    assert "step 15 needs step 5, which is not whole" in fleet.saves.published[2]["failed"]


def test_what_a_kept_checkpoint_needs_is_kept(folder: str) -> None:
    fleet = Fleet(
        folder, 5, "checkpoint.policy=consecutive", "checkpoint.keep_last=1"
    )  # fmt: skip
    kept = []
    for number in range(7):
        if number == 3:
            for place in range(3):
                fleet.replace(place)  # so the next one is full
        fleet.train()
        fleet.save()
        fleet.check()
        kept.append([one.step for one in list_checkpoints(folder)])
    assert kept == [[5], [5, 10], [5, 10, 15], [20], [20, 25], [20, 25, 30], [20, 25, 30, 35]]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_newest_checkpoint_is_right(folder: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    fleet = Fleet(
        folder,
        seed,
        f"checkpoint.policy={POLICIES[1 + seed % 3]}",
        f"checkpoint.keep_last={random.integers(1, 3)}",
    )
    for _ in range(8):
        fleet.train(int(random.integers(1, 6)))
        if random.random() < 0.3:
            fleet.replace(int(random.integers(3)))
        late = tuple(np.flatnonzero(random.random(3) < 0.3).tolist())
        but = int(random.integers(3)) if random.random() < 0.2 else None
        fleet.save(late=late, but=but)
        if but is None:
            fleet.check()
    assert any(bases(fleet).values())


def test_changes_are_counted_since_each_step_of_interest() -> None:
    random = np.random.default_rng(0)
    changed = ChangedRows([100, 30])
    seen: dict[int, list[set[int]]] = {}
    assert changed.since(0) is None
    for step in range(30):
        touched = [random.permutation(100)[:7], random.permutation(30)[:2]]
        changed.note([Change(rows, None, np.zeros((len(rows), 1), np.uint32)) for rows in touched])
        for sets in seen.values():
            for rows, some in zip(touched, sets, strict=True):
                some.update(rows.tolist())
        if step % 3 == 0:
            changed.begin(step)
            seen[step] = [set(), set()]
        for since in changed.steps:
            bits = changed.since(since)
            assert bits is not None
            found = [np.flatnonzero(np.unpackbits(one, bitorder="little")) for one in bits]
            assert [set(rows.tolist()) for rows in found] == seen[since]
    assert changed.steps == [*seen][-MAX_STEPS:]
    changed.forget(before=24)
    assert changed.steps == [24, 27]
    changed.forget(before=100)
    assert changed.since(27) is None
