"""The two sides of a save without any process: who saves what and when, and when it counts."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cluster_jobs import wait_until

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
from planaria.cluster import archive, parts
from planaria.cluster.parts import (
    Brake,
    PartSaver,
    Rest,
    SavedDense,
    SavedRecords,
    restore_records,
)
from planaria.config import Config
from planaria.control.saving import SaveMachine
from planaria.errors import DamagedCheckpoint, StepError
from planaria.records import RamRecords
from planaria.server import snapshot
from planaria.tables import make_arenas
from planaria.wire.codec import decode, encode
from planaria.wire.control import Orders, PartFailed, PartSaved, Tell, Told

LIMIT_S = 60.0  # for what takes milliseconds
STEPS = 400


class Line:
    """What was told to the supervisor, as it arrives there."""

    def __init__(self) -> None:
        self.told: list[PartSaved | PartFailed] = []

    def tell(self, what: Told) -> None:
        frames = encode(b"token", "server-0", "", Tell(number=1, what=what))
        heard = decode(b"token", frames).message
        assert isinstance(heard, Tell)
        assert isinstance(heard.what, PartSaved | PartFailed)
        self.told.append(heard.what)

    @property
    def steps(self) -> list[tuple[type[Told], int]]:
        return [(type(one), one.step) for one in self.told]


def config(folder: Path, *overrides: str) -> Config:
    shape = ("servers=3", "parity=1", "k=2", "model.tables=2", "model.rows=[50, 7]", "model.dim=4")
    save = (f"checkpoint.path={folder}", "checkpoint.every_steps=5", f"steps={STEPS}")
    return Config.load(None, [*shape, *save, *overrides])


def stores(job: Config) -> list[Store]:
    """With numbers in weights and state, all of one step."""
    arenas = make_arenas(job.tables, job.optimizer_rule)
    made = [Store(arenas, job.layout, p, seed=3) for p in job.layout.places]
    for store in made:
        index = np.arange(store.arenas[0].data_records)
        gradients = np.random.default_rng(store.place).normal(size=(len(index), 4))
        store.apply(1, [[(index, gradients.astype(np.float32))]])
    return made


def saver_of(job: Config, line: Line, store: Store) -> PartSaver:
    return PartSaver(job, line.tell, 0, arenas=[a.arena for a in store.arenas])


def finish(saver: PartSaver) -> None:
    assert wait_until(lambda: not saver.writing, LIMIT_S)


def save_all(job: Config, step: int, line: Line) -> list[Store]:
    made = stores(job)
    for store in made:
        saver = saver_of(job, line, store)
        saver.save(step, store.place, lambda store=store: SavedRecords(store))  # type: ignore[misc]
        finish(saver)
    return made


def save_dense(job: Config, step: int, line: Line) -> None:
    saver = PartSaver(job, line.tell, 0)
    saver.save(step, DENSE, lambda: SavedDense(np.arange(9, dtype=np.uint32)))
    finish(saver)


def saved_by_all(job: Config, step: int) -> Line:
    line = Line()
    save_all(job, step, line)
    save_dense(job, step, line)
    return line


def hear(saves: SaveMachine, line: Line, but: Callable[[int], bool] = lambda place: False) -> None:
    """All that was told, and the work that follows from it."""
    for one in line.told:
        if not but(one.place):
            pass_on(saves, one)
    do_work(saves)


def pass_on(saves: SaveMachine, told: PartSaved | PartFailed, now: float = 0.0) -> None:
    if isinstance(told, PartSaved):
        saves.on_part(told, now)
    else:
        saves.on_part_failed(told, now)


def do_work(saves: SaveMachine, now: float = 0.0) -> None:
    """Until none is left."""
    while work := saves.take_work():
        for one in work:
            if (outcome := archive.do(one, saves.config, "", None)) is not None:
                archive.tell(outcome, saves, saves.notes.append, now)


def rebuilding(step: int, place: int) -> PartFailed:
    return PartFailed(step=step, place=place, why="this server is being rebuilt", late=False)


# ---------------------------------------------------------------------------- when


def test_a_step_is_due_once_and_only_if_it_was_reached_here(tmp_path: Path) -> None:
    saver = PartSaver(config(tmp_path), Line().tell, 0)
    assert [saver.due(step) for step in (0, 1, 4, 5, 5, 6, 12)] == [
        *[None, None, None, 5],
        *[None, None, 10],
    ]
    resumed = PartSaver(config(tmp_path), Line().tell, 10)
    assert [resumed.due(step) for step in (10, 11, 15)] == [None, None, 15]
    never = PartSaver(config(tmp_path, "checkpoint.every_steps=0"), Line().tell, 0)
    assert never.due(5) is None


def test_the_last_step_is_due_whatever_the_interval_and_can_be_asked_for_again(
    tmp_path: Path,
) -> None:
    job = config(tmp_path, "steps=12")
    saver = PartSaver(job, Line().tell, 10)
    assert [saver.due(11), saver.due(12), saver.due(12)] == [None, 12, None]
    saver.not_yet(12)  # this server is not whole yet, say
    assert [saver.due(12), saver.due(12)] == [12, None]
    assert not saver.last_done
    replacement = PartSaver(job, Line().tell, 0)
    assert replacement.due(12, Orders(saved=12)) is None
    assert replacement.last_done
    if_due = PartSaver(config(tmp_path, "steps=12", "checkpoint.last_step=if_due"), Line().tell, 10)
    assert if_due.due(12) is None
    assert if_due.last_done


class Late(SavedRecords):
    """A writer that waits at a gate."""

    gate: threading.Event

    def write(self, part: PartWriter, rest: Rest = lambda done: None) -> None:
        self.gate.wait(LIMIT_S)
        super().write(part, rest)


def step(store: Store) -> None:
    index = np.arange(store.arenas[0].data_records)
    store.apply(store.step + 1, [[(index, np.ones((len(index), 4), np.float32))]])


def test_a_save_is_of_its_instant_and_the_next_one_waits_for_the_writer(tmp_path: Path) -> None:
    job = config(tmp_path, "cluster.deadline_s=0.6", "cluster.retry_ms=100")
    line, store = Line(), stores(job)[0]
    before = store.arenas[0].records.copy()[: store.arenas[0].data_records]
    saver = saver_of(job, line, store)
    late = Late(store)
    late.gate = threading.Event()
    saver.save(5, 0, lambda: late)
    step(store)  # training goes on
    saver.save(10, 0, lambda: SavedRecords(store))
    [failed] = line.told
    assert isinstance(failed, PartFailed)
    assert failed.step == 10
    assert "still being written" in failed.why
    late.gate.set()
    finish(saver)
    assert line.steps == [(PartFailed, 10), (PartSaved, 5)]
    assert store.snapshot is None
    [part] = (tmp_path / "step-00000005").glob("*.part")
    assert before[: store.arenas[0].layout.slots].tobytes() in part.read_bytes()


def test_a_synchronous_save_is_durable_before_anything_goes_on(tmp_path: Path) -> None:
    blocked: dict[str, float] = {}
    for mode in ("sync", "async"):
        job, line = config(tmp_path / mode, f"checkpoint.mode={mode}"), Line()
        store = stores(job)[0]
        saver = saver_of(job, line, store)
        late = Late(store)
        late.gate = threading.Event()
        threading.Timer(0.3, late.gate.set).start()
        saver.save(5, 0, lambda late=late: late)  # type: ignore[misc]
        assert line.steps == ([(PartSaved, 5)] if mode == "sync" else [])
        step(store)
        finish(saver)
        [saved] = line.told
        assert isinstance(saved, PartSaved)
        blocked[mode] = saved.blocked_s
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
    assert rested(Brake(1000.0), 0.5) > 0.003 / parts.CPU_SHARE / 2
    assert rested(Brake(1000.0), 0.0) == 0  # nothing is written yet, so it is late
    assert rested(Brake(0.0), 0.5) == 0
    waited_for = Brake(1000.0)
    waited_for.release()
    assert rested(waited_for, 0.5) < 0.003


@pytest.mark.parametrize("spread", [0.0, 1e9])
def test_who_waits_for_a_resting_writer_waits_no_longer_than_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    monkeypatch.setattr(parts, "CPU_SHARE", 1e-9)
    monkeypatch.setattr(parts, "SPREAD", spread)
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 128)
    job, line = config(tmp_path), Line()
    store = stores(job)[0]
    saver = saver_of(job, line, store)
    assert [saver.due(step) for step in (1, 5)] == [None, 5]
    saver.save(5, 0, lambda: SavedRecords(store))
    if spread:
        time.sleep(1.0)
    else:
        finish(saver)  # the control is done by itself
    assert len(line.told) == (spread == 0)

    def save_last() -> bool:
        """As a process does that has nothing else to do: it asks again."""
        if saver.due(STEPS) is not None:
            saver.save(STEPS, 0, lambda: SavedRecords(store))
        return saver.last_done

    assert wait_until(save_last, LIMIT_S)
    assert line.steps == [(PartSaved, 5), (PartSaved, STEPS)]
    first = line.told[0]
    assert isinstance(first, PartSaved)
    assert (first.rested_s > 0.5) == (spread > 0)
    synchronous = config(tmp_path / "sync", "checkpoint.mode=sync")
    monkeypatch.setattr(parts, "SPREAD", 1e9)
    saver = saver_of(synchronous, line, store)
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
    saver = saver_of(job, line, store)
    for number in (5, 10):
        saver.save(number, 0, lambda: SavedRecords(store))
        finish(saver)
        assert store.snapshot is None
    assert line.steps == [(PartFailed, 5), (PartFailed, 10)]
    assert isinstance(line.told[1], PartFailed)
    assert "was not saved" in line.told[1].why


@pytest.mark.parametrize("stall_s", [LIMIT_S, 0.05])
def test_a_last_part_is_given_up_only_when_nothing_of_it_was_written_for_long(
    tmp_path: Path, stall_s: float
) -> None:
    job = config(tmp_path, f"checkpoint.stall_s={stall_s}")
    line, store = Line(), stores(job)[0]
    saver, late = saver_of(job, line, store), Late(store)
    late.gate = threading.Event()
    saver.save(STEPS, 0, lambda: late)

    def is_given_up() -> bool:
        saver.give_up_stalled(0)
        return saver.last_done

    assert not is_given_up()  # it has just begun, and the machine's clock has not
    if stall_s == LIMIT_S:
        assert not is_given_up()
    else:
        assert wait_until(is_given_up, LIMIT_S)
        [failed] = line.told
        assert isinstance(failed, PartFailed)
        assert failed.step == STEPS
        assert "nothing was written for" in failed.why
    late.gate.set()
    finish(saver)
    assert line.steps[-1] == (PartSaved, STEPS)


# ---------------------------------------------------------------------------- what counts


def test_a_checkpoint_counts_with_its_last_part_and_is_restored_onto_other_servers(
    tmp_path: Path,
) -> None:
    job, line = config(tmp_path), Line()
    made = save_all(job, 5, line)
    saves = SaveMachine(job, 0, 0.0)
    hear(saves, line)
    assert saves.published == []
    assert saves.waits_for() == {5: [DENSE]}
    assert latest(tmp_path).checkpoint is None
    dense = Line()
    save_dense(job, 5, dense)
    hear(saves, dense)
    assert [one["step"] for one in saves.published] == [5]
    assert saves.newest() == 5
    found = latest(tmp_path, verify=True).checkpoint
    assert found is not None
    other = config(tmp_path, "servers=5", "parity=2", "k=3")
    arenas = make_arenas(job.tables, job.optimizer_rule)
    digest = [sum_of(made)]
    again = []
    for place in other.layout.places:
        store = Store(arenas, other.layout, place, blank_at=5)
        restore_records(other, found.job, 5, store)
        assert store.invalid_records == 0
        again.append(store)
    assert [sum_of(again)] == digest


def sum_of(made: list[Store]) -> str:
    total = made[0].digest()
    for store in made[1:]:
        total += store.digest()
    return str(total)


def test_an_archive_publishes_in_its_own_time_and_tells_when_it_is_asked(tmp_path: Path) -> None:
    saves = SaveMachine(config(tmp_path), 0, 0.0)
    for told in saved_by_all(saves.config, 5).told:
        pass_on(saves, told)
    disk = archive.Archive(saves.config, "", None)
    for work in saves.take_work():
        disk.submit(work)
    assert wait_until(lambda: latest(tmp_path).checkpoint is not None, LIMIT_S)
    assert saves.published == []  # the machine is the supervisor's alone
    [readable], _, _ = select.select([disk.descriptor], [], [], LIMIT_S)
    disk.report_to(saves, saves.notes.append)
    assert (readable, saves.newest()) == (disk.descriptor, 5)
    disk.close()


def test_a_lost_part_is_noticed_at_the_next_checkpoint_and_at_the_end(tmp_path: Path) -> None:
    job = config(tmp_path, "checkpoint.last_step=if_due")
    saves = SaveMachine(job, 0, 0.0)
    for step in (5, 10, 15):
        line = saved_by_all(job, step)
        hear(saves, line, but=lambda place, step=step: step != 10 and place == 1)  # type: ignore[misc]
    assert [(one["step"], "failed" in one) for one in saves.published] == [(10, False), (5, True)]
    assert "server:1 ended before it was saved" in saves.published[1]["failed"]
    saves.close(0.0)
    do_work(saves)
    assert saves.published[2]["step"] == 15
    assert [one.step for one in list_checkpoints(tmp_path)] == [10]  # nothing half is left
    assert (saves.newest(), SaveMachine(job, 0, 0.0).newest()) == (10, 0)


def test_a_replacement_that_skips_a_step_does_not_undo_its_predecessors_part(
    tmp_path: Path,
) -> None:
    job = config(tmp_path)
    saves, line = SaveMachine(job, 0, 0.0), Line()
    save_all(job, 5, line)
    hear(saves, line)
    saves.on_part_failed(rebuilding(5, 1), 0.0)
    dense = Line()
    save_dense(job, 5, dense)
    hear(saves, dense)
    assert [list(one) for one in saves.published] == [
        ["step", "base", "rows", "seconds", "blocked_s", "bytes"]
    ]
    saves.on_part_failed(rebuilding(10, 1), 0.0)
    hear(saves, saved_by_all(job, 10), but=lambda place: place == 1)
    assert saves.published[1] == {"step": 10, "failed": "this server is being rebuilt"}


def test_a_part_that_a_replacement_saves_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    job = config(tmp_path)
    saves, line, again = SaveMachine(job, 0, 0.0), Line(), Line()
    save_all(job, STEPS, line)
    hear(saves, line)  # then server:1 is killed, and its replacement saves the last step again
    save_all(job, STEPS, again)
    [part] = [one for one in again.told if one.place == 1]
    pass_on(saves, part)
    dense = Line()
    save_dense(job, STEPS, dense)
    hear(saves, dense)
    assert isinstance(part, PartSaved)
    found = latest(tmp_path, verify=True).checkpoint
    assert found is not None
    assert found.manifest.part_of(1) == part.part
    [one] = saves.published
    assert one["bytes"] == sum(summary.bytes for summary in found.manifest.parts)
    failed = SaveMachine(job, 0, 0.0)
    failed.on_part_failed(rebuilding(STEPS, 1), 0.0)  # this time the first one says that it cannot
    pass_on(failed, part)
    assert failed.waits_for() == {STEPS: [DENSE, 0, 2]}


def test_what_is_given_up_is_removed_and_later_steps_are_not_pruned(tmp_path: Path) -> None:
    job = config(tmp_path, "checkpoint.keep_last=1")
    for step in (20, 5, 10):  # as if 20 was damaged, and the job was resumed before it
        hear(SaveMachine(job, 0, 0.0), saved_by_all(job, step))
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
        store = Store(arenas, job.layout, 0, seed=1)
        saver = saver_of(job, line, store)
        saver.save(5, 0, lambda store=store: SavedRecords(store))  # type: ignore[misc]
        finish(saver)
        save_dense(job, 5, line)
        hear(SaveMachine(job, 0, 0.0), line)
        found = Checkpoint(tmp_path / name, 5)
        assert found.manifest.bits == chosen
        sizes[name] = found.manifest.bytes
        out = RamRecords(np.empty_like(store.arenas[0].records.copy()))
        restore(found, arenas, job.layout, 0, [out])
    before = store.arenas[0].records.copy().view(np.float32)
    after = out.array.view(np.float32)
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
