"""Checkpoints: what was saved on any number of servers comes back on any other, bit for bit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoint_jobs import TABLES, Model, half_or_raw, layouts, restored, small_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria import Layout, Optimizer, Store, Table
from planaria.checkpoints import (
    Checkpoint,
    Facts,
    PartWriter,
    fill_parity,
    latest,
    list_checkpoints,
    prune,
    publish,
    restore,
)
from planaria.errors import ArgumentError, CheckpointError, RowError
from planaria.kernels.types import Index, Records
from planaria.records import RamRecords

pytestmark = pytest.mark.usefixtures("small_chunks")
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(4, 1, 2)


@pytest.fixture
def memory() -> Iterator[str]:
    import fsspec

    yield "memory://checkpoints/of a test"
    fsspec.filesystem("memory").rm("/checkpoints", recursive=True)


# ---------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("parity", [True, False])
@pytest.mark.parametrize("wanted", [LAYOUT, Layout.fresh(5, 1, 3)])
def test_restoring_tells_its_progress_at_each_chunk(
    tmp_path: Path, wanted: Layout, parity: bool
) -> None:
    """So that a process that restores for minutes can show that it is alive."""
    model = Model(300, [Table("a", 300, 2)], Optimizer("adam"))
    checkpoint = model.save(str(tmp_path), 5, LAYOUT, parity=parity)
    shape = (wanted.arena(300).records(0), model.arenas[0].words)
    quiet, told = (RamRecords(np.empty(shape, np.uint32)) for _ in range(2))
    calls: list[int] = []
    restore(checkpoint, model.arenas, wanted, 0, [quiet])
    restore(checkpoint, model.arenas, wanted, 0, [told], on_progress=lambda: calls.append(1))
    assert np.array_equal(told.array, quiet.array)
    assert len(calls) >= 5


@settings(max_examples=20, deadline=None)
@given(layouts(), layouts(), st.integers(1, 90), st.booleans())
def test_any_layout_is_restored_onto_any_other_with_parity(
    saved: Layout, wanted: Layout, rows: int, parity: bool
) -> None:
    tables = [Table("a", rows, 2), Table("b", 7, 4), Table("c", 3, 2)]
    model = Model(rows, tables, Optimizer("adam"))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = model.save(folder, 5, saved, parity=parity)
        model.check_restored(checkpoint, wanted)
        model.check_restored(checkpoint, saved)


@settings(max_examples=8, deadline=None)
@given(st.lists(layouts(), min_size=2, max_size=4), layouts(), st.integers(0, 2**32), st.booleans())
def test_a_chain_of_differences_is_restored_onto_any_layout(
    saved: list[Layout], wanted: Layout, seed: int, consecutive: bool
) -> None:
    model = Model(seed)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = model.save(folder, 0, saved[0])
        since = [np.empty(0, np.int64) for _ in model.arenas]
        base: Sequence[int] = [0]
        for step, layout in enumerate(saved[1:], start=1):
            changed = model.train(0.3)
            since = changed if consecutive else _both(since, changed)
            checkpoint = model.save(folder, step, layout, base=base, changed=since)
            base = [*base, step] if consecutive else base
        model.check_restored(checkpoint, wanted)
        model.check_restored(Checkpoint(folder, checkpoint.step), saved[-1])


def _both(one: Sequence[Index], other: Sequence[Index]) -> list[Index]:
    return [np.union1d(a, b) for a, b in zip(one, other, strict=True)]


def test_a_chain_in_one_layout_is_read_from_the_own_files_alone(tmp_path: Path) -> None:
    layout = Layout.fresh(3, 0)
    model = Model()
    model.save(tmp_path, 1, layout)
    checkpoint = model.save(tmp_path, 2, layout, base=[1], changed=model.train())
    for manifest in checkpoint.chain:
        for part in manifest.record_parts:
            if part.place != 0:
                file = tmp_path / f"step-{manifest.step:08d}" / part.file
                file.write_bytes(bytes(part.bytes))
    for found, expected in zip(
        restored(checkpoint, model.arenas, layout, 0), model.server(layout, 0), strict=True
    ):
        assert np.array_equal(found, expected)
    with pytest.raises(CheckpointError):  # control: place 1 does need the others' files
        restored(checkpoint, model.arenas, layout, 1)


def _trained(layout: Layout, steps: int) -> list[Store]:
    """Real stores after some steps; what they learn depends on the step alone."""
    optimizer = Optimizer("adagrad", lr=0.05)
    arenas = Model(0, TABLES, optimizer).arenas
    stores = [Store(arenas, layout, place, seed=3) for place in layout.places]
    by_place = dict(zip(layout.places, stores, strict=True))
    for step in range(1, steps + 1):
        for place, store in by_place.items():
            gradients = []
            for arena in arenas:
                random = np.random.default_rng((step, arena.dim))
                rows = random.permutation(arena.rows)[:20]
                values = random.standard_normal((20, arena.dim)).astype(np.float32)
                places, index = layout.arena(arena.rows).locate(rows)
                mine = np.flatnonzero(places == place)
                gradients.append([(index[mine], np.ascontiguousarray(values[mine]))])
            changes = store.apply(step, gradients)
            for holder, deltas in store.parity_deltas(changes).items():
                by_place[holder].apply_parity(place, step, deltas)
    return stores


@pytest.mark.parametrize("wanted", [(4, 1, 2), (7, 2, 4), (1, 0, 1), (9, 4, 4), (3, 2, 1)])
def test_what_is_restored_is_what_training_in_that_layout_gives(
    tmp_path: Path, wanted: tuple[int, int, int]
) -> None:
    stores = _trained(LAYOUT, 4)
    parts = []
    for store in stores:
        with PartWriter(tmp_path, 4, store.place) as part:
            for number, arena in enumerate(store.arenas):
                index = np.arange(arena.data_records)
                part.add(number, 0, store.read(number, index, 4))
            parts.append(part.finish())
    facts = Facts(TABLES, stores[0].arenas[0].arena.optimizer, LAYOUT)
    checkpoint = publish(tmp_path, 4, parts, facts)
    for store in _trained(Layout.fresh(*wanted), 4):
        arenas = [arena.arena for arena in store.arenas]
        out = restored(checkpoint, arenas, store.layout, store.place)
        for found, arena in zip(out, store.arenas, strict=True):
            np.testing.assert_array_equal(found, arena.records.copy())


def test_each_data_record_is_read_once_and_parity_can_be_filled_alone(tmp_path: Path) -> None:
    model = Model()
    model.save(tmp_path, 1, LAYOUT)
    checkpoint = model.save(tmp_path, 2, LAYOUT, base=[1], changed=model.train())
    wanted = Layout.fresh(5, 2, 3)
    for place in wanted.places:
        expected = model.server(wanted, place)
        out = [np.zeros_like(records) for records in expected]
        times = [np.zeros(len(records), int) for records in expected]
        for piece in checkpoint.read(wanted, place):
            out[piece.arena][piece.index] = piece.records
            times[piece.arena][piece.index] += 1
        fill_parity(checkpoint, model.arenas, wanted, place, list(map(RamRecords, out)))
        for number, arena in enumerate(model.arenas):
            layout = wanted.arena(arena.rows)
            rows = layout.row_at(place, np.arange(len(out[number])))
            assert np.array_equal(times[number], rows >= 0)
            assert np.array_equal(out[number], expected[number])


def test_quantised_records_come_back_as_their_encoding_says(tmp_path: Path) -> None:
    model = Model()
    model.save(tmp_path, 3, LAYOUT, parity=True, bits=16)
    for rows in model.rows:
        rows[:] = rows & 0xFFFF0000 | 0x10000
    found = latest(tmp_path, encodings=half_or_raw).checkpoint
    assert found is not None
    assert found.manifest.bits == 16
    for layout in (LAYOUT, Layout.fresh(3, 1)):
        model.check_restored(found, layout)  # parity of what is decoded, not what was saved
    with pytest.raises(CheckpointError, match="16 bits"):
        model.check_restored(Checkpoint(tmp_path, 3), LAYOUT)


def test_the_dense_state_and_the_facts_come_back(tmp_path: Path) -> None:
    model = Model(12)
    model.save(tmp_path, 7, LAYOUT)
    found = latest(str(tmp_path)).checkpoint
    assert found is not None
    dense = found.dense()
    assert sorted(dense) == ["nothing", "weights"]
    assert dense["weights"].view(np.float32).tolist() == [7.0] * 100
    assert len(dense["nothing"]) == 0
    manifest = found.manifest
    assert (found.step, manifest.samples, manifest.config) == (7, 12, {"a": [1]})
    assert tuple(manifest.tables) == TABLES
    assert manifest.optimizer == model.optimizer
    assert found.layout == LAYOUT


def test_checkpoints_lie_on_any_file_system_of_fsspec(memory: str) -> None:
    model = Model()
    for step in (1, 2, 3):
        model.save(memory, step, LAYOUT)
    found = latest(memory, verify=True)
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.passed_over) == (3, [])
    model.check_restored(found.checkpoint, Layout.fresh(3, 1))
    assert prune(memory, 1) == [1, 2]
    assert [listed.step for listed in list_checkpoints(memory)] == [3]
    assert latest("memory://checkpoints/nothing here") == (None, [])
    with pytest.raises(CheckpointError, match="nosuch://"):
        latest("nosuch://checkpoints")


def test_file_urls_are_local_folders(tmp_path: Path) -> None:
    Model().save(f"file://{tmp_path}/a", 1, LAYOUT)
    assert [listed.step for listed in list_checkpoints(tmp_path / "a")] == [1]


def test_servers_write_their_parts_at_the_same_time(tmp_path: Path) -> None:
    model = Model()
    parts = []

    def write(place: int) -> None:
        parts.append(model.save_part(tmp_path, 1, LAYOUT, place))

    threads = [threading.Thread(target=write, args=(place,)) for place in LAYOUT.places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.check_restored(publish(tmp_path, 1, parts, model.facts(LAYOUT)), Layout.fresh(2, 1))


def test_a_step_can_be_saved_anew_and_leaves_no_files_behind(tmp_path: Path) -> None:
    model = Model(1)
    model.save(tmp_path, 1, LAYOUT)
    model.save_part(tmp_path, 1, LAYOUT, 0)  # by a server that died before the step was published
    model.train()
    model.check_restored(model.save(tmp_path, 1, LAYOUT), LAYOUT)
    assert len(list((tmp_path / "step-00000001").iterdir())) == len(LAYOUT.places) + 2


# ---------------------------------------------------------------------------- what is refused


def _restore_with(model: Model, checkpoint: Checkpoint, out: list[Records] | None = None) -> None:
    if out is None:
        restored(checkpoint, model.arenas, LAYOUT, 0)
    else:
        fill_parity(checkpoint, model.arenas, LAYOUT, 0, list(map(RamRecords, out)))


def test_another_job_s_tables_are_refused(tmp_path: Path) -> None:
    checkpoint = Model().save(tmp_path, 1, LAYOUT)
    for other in (Model(0, TABLES[::-1]), Model(0, TABLES[:2]), Model(0, TABLES, Optimizer("sgd"))):
        with pytest.raises(CheckpointError, match=r"user 61 x 3 \(rowwise_adagrad\), item 40"):
            _restore_with(other, checkpoint)
    with pytest.raises(ArgumentError, match="out"):
        _restore_with(Model(), checkpoint, [np.zeros((1, 4), np.uint32)] * 2)
    with pytest.raises(ArgumentError, match="2 arenas"):
        _restore_with(Model(), checkpoint, [])


def test_a_part_takes_every_record_once(tmp_path: Path) -> None:
    records = np.zeros((10, 4), np.uint32)
    with PartWriter(tmp_path, 1, 0) as part:
        part.add(0, 0, records)
        part.add(0, 20, records)
        part.add(0, 10, records)
        with pytest.raises(ArgumentError, match="29 were added before"):
            part.add(0, 29, records)
        with pytest.raises(ArgumentError, match="has ranges"):
            part.add_rows(0, np.arange(10), records)
        part.add_rows(1, np.arange(10) * 7, records)
        with pytest.raises(ArgumentError, match="listed before"):
            part.add_rows(1, np.arange(63, 73), records)
        with pytest.raises(RowError):
            part.add_rows(1, np.zeros(10, np.int64), records)
        with pytest.raises(ArgumentError, match="has listed"):
            part.add(1, 0, records)
        part.add_bytes("a", b"1")
        with pytest.raises(ArgumentError, match="'a' was added before"):
            part.add_bytes("a", b"2")
        summary = part.finish()
    assert summary.ranges == {0: [(0, 30)]}
    assert summary.records == 40
    with pytest.raises(CheckpointError, match="finished"):
        part.add(2, 0, records)


@pytest.mark.parametrize(
    ("words", "says"), [(np.uint8, "uint32"), (np.float32, "uint32"), (np.int64, "uint32")]
)
def test_records_are_words(tmp_path: Path, words: type[np.generic], says: str) -> None:
    with PartWriter(tmp_path, 1, 0) as part, pytest.raises(ArgumentError, match=says):
        part.add(0, 0, np.zeros((3, 4), words))


def test_planaria_starts_without_fsspec() -> None:
    code = "import sys, planaria.checkpoints as c; c.latest('.'); sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
