"""The two sides of a save without any process: who saves what and when, and when it counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from planaria import Store
from planaria.checkpoints import (
    DENSE,
    Checkpoint,
    PartWriter,
    Quantised,
    discard,
    latest,
    list_checkpoints,
    prune,
    restore,
)
from planaria.cluster import saving
from planaria.cluster.saves import Saves
from planaria.cluster.saving import (
    Brake,
    PartSaver,
    Rest,
    SavedDense,
    SavedRecords,
    restore_records,
)
from planaria.config import Config
from planaria.errors import DamagedCheckpoint, StepError
from planaria.server import snapshot
from planaria.tables import make_arenas


class Line:
    """What was said to the supervisor, as it arrives there."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def say(self, event: str, **facts: Any) -> None:
        self.said.append((event, msgspec.json.decode(msgspec.json.encode(facts))))


def config(folder: Path, *overrides: str) -> Config:
    shape = ("servers=3", "parity=1", "k=2", "model.tables=2", "model.rows=[50, 7]", "model.dim=4")
    save = (f"checkpoint.path={folder}", "checkpoint.every_steps=5")
    return Config.load(None, [*shape, *save, *overrides])


def stores(job: Config) -> list[Store]:
    """With numbers in weights and state, all of one step."""
    arenas = make_arenas(job.tables, job.optimizer_rule)
    made = [Store(arenas, job.layout, p, job.optimizer_rule, seed=3) for p in job.layout.places]
    for store in made:
        index = np.arange(store.arenas[0].data_records)
        gradients = np.random.default_rng(store.place).normal(size=(len(index), 4))
        store.apply(1, [[(index, gradients.astype(np.float32))]])
    return made


def save_all(job: Config, step: int, line: Line) -> list[Store]:
    made = stores(job)
    for store in made:
        saver = PartSaver(job, line.say, 0, [a.arena for a in store.arenas])
        saver.save(step, store.place, lambda store=store: SavedRecords(store))  # type: ignore[misc]
        saver.close()
    return made


def save_dense(job: Config, step: int, line: Line) -> None:
    saver = PartSaver(job, line.say, 0)
    saver.save(step, DENSE, lambda: SavedDense(np.arange(9, dtype=np.uint32)))
    saver.close()


def tell(saves: Saves, line: Line, but: Callable[[int], bool] = lambda place: False) -> None:
    for event, facts in line.said:
        if not but(facts["place"]):
            (saves.on_saved if event == "saved" else saves.on_failed)(facts)


# ---------------------------------------------------------------------------- when


def test_a_step_is_due_once_and_only_if_it_was_reached_here(tmp_path: Path) -> None:
    saver = PartSaver(config(tmp_path), Line().say, 0)
    assert [saver.due(step) for step in (0, 1, 4, 5, 5, 6, 12)] == [
        *[None, None, None, 5],
        *[None, None, 10],
    ]
    resumed = PartSaver(config(tmp_path), Line().say, 10)
    assert [resumed.due(step) for step in (10, 11, 15)] == [None, None, 15]
    never = PartSaver(config(tmp_path, "checkpoint.every_steps=0"), Line().say, 0)
    assert never.due(5) is None


class Late(SavedRecords):
    """A writer that waits at a gate."""

    gate: threading.Event

    def write(self, part: PartWriter, rest: Rest = lambda done: None) -> None:
        self.gate.wait(10)
        super().write(part, rest)


def step(store: Store) -> None:
    index = np.arange(store.arenas[0].data_records)
    store.apply(store.step + 1, [[(index, np.ones((len(index), 4), np.float32))]])


def test_a_save_is_of_its_instant_and_the_next_one_waits_for_the_writer(tmp_path: Path) -> None:
    job = config(tmp_path, "cluster.deadline_s=0.6", "cluster.retry_ms=100")
    line, store = Line(), stores(job)[0]
    before = store.arenas[0].records[: store.arenas[0].data_records].copy()
    saver = PartSaver(job, line.say, 0, [a.arena for a in store.arenas])
    late = Late(store)
    late.gate = threading.Event()
    saver.save(5, 0, lambda: late)
    step(store)  # training goes on
    saver.save(10, 0, lambda: SavedRecords(store))
    assert [(event, facts["step"]) for event, facts in line.said] == [("save failed", 10)]
    assert "still being written" in line.said[0][1]["why"]
    late.gate.set()
    saver.close()
    assert [event for event, _ in line.said] == ["save failed", "saved"]
    assert store.snapshot is None
    [part] = (tmp_path / "step-00000005").glob("*.part")
    assert before[: store.arenas[0].layout.slots].tobytes() in part.read_bytes()


def test_a_synchronous_save_is_durable_before_anything_goes_on(tmp_path: Path) -> None:
    blocked: dict[str, float] = {}
    for mode in ("sync", "async"):
        job, line = config(tmp_path / mode, f"checkpoint.mode={mode}"), Line()
        store = stores(job)[0]
        saver = PartSaver(job, line.say, 0, [a.arena for a in store.arenas])
        late = Late(store)
        late.gate = threading.Event()
        threading.Timer(0.3, late.gate.set).start()
        saver.save(5, 0, lambda late=late: late)  # type: ignore[misc]
        assert [event for event, _ in line.said] == (["saved"] if mode == "sync" else [])
        step(store)
        saver.close()
        blocked[mode] = line.said[0][1]["blocked_s"]
    assert blocked["sync"] > 0.25
    assert blocked["async"] < 0.25


def rested(brake: Brake, done: float) -> float:
    brake.rest(0.0)  # from here on it counts
    began = time.thread_time()
    while time.thread_time() - began < 0.003:
        pass
    brake.rest(done)
    return brake.rested_s


def test_a_writer_rests_unless_it_is_late_or_somebody_waits() -> None:
    assert rested(Brake(1000.0), 0.5) > 0.003 / saving.CPU_SHARE / 2
    assert rested(Brake(1000.0), 0.0) == 0  # nothing is written yet, so it is late
    assert rested(Brake(0.0), 0.5) == 0
    waited_for = Brake(1000.0)
    waited_for.release()
    assert rested(waited_for, 0.5) < 0.003


@pytest.mark.parametrize("spread", [0.0, 1e9])
def test_who_waits_for_a_resting_writer_waits_no_longer_than_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    monkeypatch.setattr(saving, "CPU_SHARE", 1e-9)
    monkeypatch.setattr(saving, "SPREAD", spread)
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 128)
    job, line = config(tmp_path), Line()
    store = stores(job)[0]
    saver = PartSaver(job, line.say, 0, [a.arena for a in store.arenas])
    assert [saver.due(step) for step in (1, 5)] == [None, 5]
    saver.save(5, 0, lambda: SavedRecords(store))
    for _ in range(100):
        if line.said:
            break
        time.sleep(0.01)
    assert len(line.said) == (spread == 0)  # the control is done by itself
    began = time.monotonic()
    saver.close()
    assert time.monotonic() - began < 5
    [(event, facts)] = line.said
    assert event == "saved"
    assert (facts["rested_s"] > 0.5) == (spread > 0)
    synchronous = config(tmp_path / "sync", "checkpoint.mode=sync")
    monkeypatch.setattr(saving, "SPREAD", 1e9)
    saver = PartSaver(synchronous, line.say, 0, [a.arena for a in store.arenas])
    saver.due(1)
    saver.save(5, 0, lambda: SavedRecords(store))  # returns, though it would rest for ever
    one, other = (
        next((folder / "step-00000005").glob("*.part")) for folder in (tmp_path, tmp_path / "sync")
    )
    assert one.read_bytes() == other.read_bytes()


def test_a_part_that_cannot_be_written_ends_its_snapshot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    job, line = config(tmp_path / "file"), Line()
    store = stores(job)[0]
    saver = PartSaver(job, line.say, 0, [a.arena for a in store.arenas])
    for number in (5, 10):
        saver.save(number, 0, lambda: SavedRecords(store))
        saver.close()
        assert store.snapshot is None
    assert [event for event, _ in line.said] == ["save failed", "save failed"]
    assert "was not saved" in line.said[1][1]["why"]


# ---------------------------------------------------------------------------- what counts


def test_a_checkpoint_counts_with_its_last_part_and_is_restored_onto_other_servers(
    tmp_path: Path,
) -> None:
    job, line, shown = config(tmp_path), Line(), list[str]()
    made = save_all(job, 5, line)
    saves = Saves(job, shown.append)
    tell(saves, line)
    assert saves.found == []
    assert latest(tmp_path).checkpoint is None
    dense = Line()
    save_dense(job, 5, dense)
    tell(saves, dense)
    assert [one["step"] for one in saves.found] == [5]
    assert latest(tmp_path, verify=True).checkpoint is not None
    other = config(tmp_path, "servers=5", "parity=2", "k=3")
    arenas = make_arenas(job.tables, job.optimizer_rule)
    digest = [sum_of(made)]
    again = []
    for place in other.layout.places:
        store = Store(arenas, other.layout, place, other.optimizer_rule, blank_at=5)
        restore_records(other, 5, store)
        assert store.invalid_records == 0
        again.append(store)
    assert [sum_of(again)] == digest


def sum_of(made: list[Store]) -> str:
    total = made[0].digest()
    for store in made[1:]:
        total += store.digest()
    return str(total)


def test_a_lost_part_is_noticed_at_the_next_checkpoint_and_at_the_end(tmp_path: Path) -> None:
    job, shown = config(tmp_path), list[str]()
    saves = Saves(job, shown.append)
    for step in (5, 10, 15):
        line = Line()
        save_all(job, step, line)
        save_dense(job, step, line)
        tell(saves, line, but=lambda place, step=step: step != 10 and place == 1)  # type: ignore[misc]
    assert [(one["step"], "failed" in one) for one in saves.found] == [(10, False), (5, True)]
    assert "server:1 ended before it was saved" in saves.found[1]["failed"]
    saves.close()
    assert saves.found[2]["step"] == 15
    assert [one.step for one in list_checkpoints(tmp_path)] == [10]  # nothing half is left
    assert saves.way_back(0) == "; go on from the checkpoint of step 10 with --resume"
    assert Saves(job, shown.append).way_back(0) == ""


def test_a_replacement_that_skips_a_step_does_not_undo_its_predecessors_part(
    tmp_path: Path,
) -> None:
    job = config(tmp_path)
    saves, line = Saves(job, lambda line: None), Line()
    save_all(job, 5, line)
    tell(saves, line)
    saves.on_failed({"step": 5, "place": 1, "why": "this server is being rebuilt", "late": False})
    dense = Line()
    save_dense(job, 5, dense)
    tell(saves, dense)
    assert [list(one) for one in saves.found] == [
        ["step", "base", "rows", "seconds", "blocked_s", "bytes"]
    ]
    saves.on_failed({"step": 10, "place": 1, "why": "this server is being rebuilt", "late": False})
    line = Line()
    save_all(job, 10, line)
    save_dense(job, 10, line)
    tell(saves, line, but=lambda place: place == 1)
    assert saves.found[1] == {"step": 10, "failed": "this server is being rebuilt"}


def test_what_is_given_up_is_removed_and_later_steps_are_not_pruned(tmp_path: Path) -> None:
    job = config(tmp_path, "checkpoint.keep_last=1")
    for step in (20, 5, 10):  # as if 20 was damaged, and the job was resumed before it
        line = Line()
        save_all(job, step, line)
        save_dense(job, step, line)
        tell(Saves(job, lambda line: None), line)
    assert [one.step for one in list_checkpoints(tmp_path)] == [10, 20]
    assert prune(tmp_path, 1) == [10]
    discard(tmp_path, 20)
    discard(tmp_path, 25)  # nothing there
    assert list_checkpoints(tmp_path) == []


# ---------------------------------------------------------------------------- fewer bits


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_fewer_bits_move_weights_a_little_and_optimizer_state_not_at_all(
    tmp_path: Path, bits: int
) -> None:
    sizes = {}
    for name, chosen in (("exact", 32), ("packed", bits)):
        one = ("strategy=none", "servers=1", "model.dim=64")
        job, line = config(tmp_path / name, f"checkpoint.bits={chosen}", *one), Line()
        arenas = make_arenas(job.tables, job.optimizer_rule)
        store = Store(arenas, job.layout, 0, job.optimizer_rule, seed=1)
        saver = PartSaver(job, line.say, 0, arenas)
        saver.save(5, 0, lambda store=store: SavedRecords(store))  # type: ignore[misc]
        saver.close()
        save_dense(job, 5, line)
        tell(Saves(job, lambda line: None), line)
        found = Checkpoint(tmp_path / name, 5)
        assert found.manifest.bits == chosen
        sizes[name] = found.manifest.bytes
        out = [np.empty_like(store.arenas[0].records)]
        restore(found, arenas, job.layout, 0, out)
    before = store.arenas[0].records.view(np.float32)
    after = out[0].view(np.float32)
    assert np.array_equal(after[:, 64:], before[:, 64:])
    step = np.ptp(before[:, :64], axis=1, keepdims=True) / (2**bits - 1)
    assert not np.array_equal(after[:, :64], before[:, :64])
    assert np.abs(after[:, :64] - before[:, :64]).mean() <= step.mean()
    assert sizes["packed"] < sizes["exact"]


def test_packed_records_of_a_wrong_size_are_damage() -> None:
    with pytest.raises(DamagedCheckpoint, match="3 records of 4 bits take"):
        Quantised(4, 8, 9).decode(np.zeros(5, np.uint8), 3)


def test_a_store_that_has_moved_on_is_not_filled(tmp_path: Path) -> None:
    job = config(tmp_path)
    store = stores(job)[0]
    with pytest.raises(StepError, match="moved from step 0 to 1"):
        store.set_all_valid()
