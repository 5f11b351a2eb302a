"""Records in two tiers are the records in one: the same bits, whatever lies where, and never others
than were written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from planaria import kernels
from planaria.checkpoints import Facts, PartWriter, publish, restore
from planaria.errors import RowError, TierError
from planaria.kernels.tiers import COLD, Slots, claim, locate
from planaria.kernels.types import Index, Records
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.records import RamRecords, StoredRecords, TieredRecords
from planaria.records.budget import Tier
from planaria.server.digest import Digest
from planaria.server.store import Store
from planaria.tables import Table, make_arenas

OPTIMIZER = Optimizer("adagrad", 0.1)
RULE = OPTIMIZER.rule()
DIM, WORDS, COUNT = 4, 8, 600


@pytest.fixture(params=[level for level in kernels.levels() if level in ("avx2", "numpy")])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.level()
    kernels.select_level(request.param)
    yield request.param
    kernels.select_level(before)


def both(folder: Path, slots: int, count: int = COUNT, words: int = WORDS) -> list[StoredRecords]:
    return [
        RamRecords(kernels.allocate(count, words), count),
        TieredRecords(str(folder), words, count, slots),
    ]


class Schedule:
    """The same operations, drawn from a seed, on records in either place."""

    def __init__(self, records: StoredRecords, seed: int) -> None:
        self.records = records
        self.draw = np.random.default_rng(seed)
        self.seen: list[bytes] = []

    def run(self, operations: int) -> None:
        names = ["gather", "scatter", "apply", "add", "delta", "read", "put", "writing", "prefetch"]
        for name in self.draw.choice(names, operations):
            getattr(self, name)()
        self.see(self.records.copy())

    def see(self, found: Records) -> None:
        self.seen.append(found.tobytes())

    def index(self, distinct: bool = True) -> Index:
        """Few records are in most of them."""
        index = self.draw.zipf(1.3, self.draw.integers(0, 90)) % COUNT
        return np.unique(index) if distinct else index

    def values(self, count: int, words: int = WORDS) -> Records:
        return self.draw.integers(0, 2**32, (count, words), np.uint32)

    def rows(self) -> tuple[int, int]:
        first, stop = sorted(self.draw.integers(0, COUNT + 1, 2).tolist())
        return first, stop

    def gather(self) -> None:
        index = self.index(distinct=False)
        self.see(self.records.gather(index))
        self.see(self.records.gather(index, np.empty((len(index), DIM), np.uint32)))

    def scatter(self) -> None:
        index = self.index()
        self.records.scatter(index, self.values(len(index)) // np.uint32(4))

    def apply(self) -> None:
        ranks = []
        for _ in range(3):
            index = self.draw.permutation(self.index())
            ranks.append((index, self.draw.normal(size=(len(index), DIM)).astype(np.float32)))
        applied = self.records.apply(RULE, COUNT, DIM, ranks)
        order = np.argsort(applied.indices)
        self.see(np.ascontiguousarray(applied.delta[order]))
        rows, out = np.empty(len(order), np.int64), np.empty((len(order), WORDS), np.uint32)
        settled = np.zeros(-(-COUNT // 8), np.uint8)
        sorted_index = applied.indices[order]
        kept = self.records.preserve(
            settled, 5, COUNT - 5, sorted_index, applied.delta[order].copy(), rows, out
        )
        self.see(out[:kept])
        self.seen += [rows[:kept].tobytes(), settled.tobytes()]

    def add(self) -> None:
        index = self.index()
        coef = (
            self.draw.integers(1, 256, len(index), np.uint8) if self.draw.random() < 0.5 else None
        )
        self.records.add(index, coef, self.values(len(index)) // np.uint32(4))

    def delta(self) -> None:
        index = self.index()
        by_region = self.draw.integers(1, 4, 6, np.uint8)
        valid = None
        if self.draw.random() < 0.5:
            valid = self.draw.integers(0, 256, -(-COUNT // 8), np.uint8)
        coef = self.records.add_delta(index, 100, by_region, self.values(len(index)), valid)
        self.seen.append(b"" if coef is None else coef.tobytes())

    def read(self) -> None:
        first, stop = self.rows()
        self.see(self.records.read(first, stop))

    def put(self) -> None:
        first, stop = self.rows()
        if self.draw.random() < 0.2:
            self.records.clear(first, stop)
        else:
            self.records.put(first, self.values(stop - first) // np.uint32(4))

    def writing(self) -> None:
        first, stop = self.rows()
        values = self.values(stop - first) // np.uint32(4)
        with self.records.writing(first, stop) as out:
            out[:] = values

    def prefetch(self) -> None:
        self.records.prefetch(self.index())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # any bits are taken for numbers
@pytest.mark.parametrize("slots", [1, 7, 30, 120, 600])
@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_tells_records_in_two_tiers_from_records_in_memory(
    tmp_path: Path, level: str, slots: int, seed: int
) -> None:
    found = []
    for records in both(tmp_path, slots):
        schedule = Schedule(records, seed)
        schedule.run(40 if level == "numpy" else 120)
        found.append(schedule.seen)
    assert found[0] == found[1]
    assert list(tmp_path.iterdir()) == []  # the file has no name


@pytest.mark.parametrize("words", [1, 8, 127, 128, 129, 1024, 1500])
def test_records_of_any_size_come_back(tmp_path: Path, level: str, words: int) -> None:
    ram, tiered = both(tmp_path, 10, count=300, words=words)
    draw = np.random.default_rng(words)
    for records in (ram, tiered):
        draw = np.random.default_rng(words)
        records.put(17, draw.integers(0, 2**32, (200, words), np.uint32))
        for _ in range(20):
            index = np.unique(draw.integers(0, 300, 25))
            records.scatter(index, draw.integers(0, 2**32, (len(index), words), np.uint32))
    assert np.array_equal(ram.copy(), tiered.copy())


def test_more_room_keeps_what_there_is(tmp_path: Path, level: str) -> None:
    for records in both(tmp_path, 20):
        records.scatter(
            np.arange(COUNT), np.arange(COUNT * WORDS, dtype=np.uint32).reshape(COUNT, -1)
        )
        assert records.hold(COUNT - 10, COUNT)
        with pytest.raises(RowError):
            records.gather(np.array([COUNT - 5]))
        assert not records.hold(2 * COUNT, 2 * COUNT)
        found = records.copy()
        assert np.array_equal(found[: COUNT - 10].ravel(), np.arange((COUNT - 10) * WORDS))
        assert not found[COUNT:].any()


def test_hot_records_stay_in_memory(tmp_path: Path, level: str) -> None:
    records = TieredRecords(str(tmp_path), WORDS, COUNT, 60)
    draw = np.random.default_rng(0)
    for _ in range(60):
        records.gather(np.unique(draw.zipf(1.3, 40) % COUNT))
    before = records.accesses.missed
    for _ in range(20):
        records.gather(np.arange(1, 20))
        records.gather(np.unique(draw.integers(100, COUNT, 10)))  # once each, or nearly
    hot_misses = before
    for _ in range(5):
        records.gather(np.arange(1, 20))
    assert records.accesses.missed - before <= 20 * 10
    before = records.accesses.missed
    records.gather(np.arange(1, 20))
    assert records.accesses.missed == before
    assert hot_misses > 0  # control: it was not all in memory from the start


def test_what_was_fetched_ahead_is_there(tmp_path: Path, level: str) -> None:
    records = TieredRecords(str(tmp_path), WORDS, COUNT, 100)
    records.prefetch(np.arange(30, 70))
    missed = records.accesses.missed
    records.gather(np.arange(30, 70))
    assert missed == 40
    assert records.accesses.missed == missed


def test_a_store_on_disk_is_saved_and_restored_like_one_in_memory(tmp_path: Path) -> None:
    """A part is read into memory by threads that are not done when its range has been asked for:
    what they read went into memory that was already forgotten, and no checksum could know.
    """
    arenas, layout = make_arenas([Table("a", 40_000, DIM)], OPTIMIZER), Layout.fresh(2, 0)
    tier = Tier(str(tmp_path), (500,))
    stores = [Store(arenas, layout, place, seed=1, tier=tier) for place in layout.places]
    parts = []
    for store in stores:
        gradients = np.ones((40, DIM), np.float32)
        store.apply(1, [[(np.arange(0, 4000, 100), gradients)]])
        with PartWriter(str(tmp_path / "saves"), 1, store.place) as part:
            for piece in store.take_snapshot().pieces():
                part.add(piece.arena, piece.first, piece.records)
            parts.append(part.finish())
    facts = Facts([Table("a", 40_000, DIM)], OPTIMIZER, layout)
    found = publish(str(tmp_path / "saves"), 1, parts, facts)
    for wanted in (layout, Layout.fresh(3, 1)):
        total = Digest()
        for place in wanted.places:
            store = Store(arenas, wanted, place, blank_at=1, tier=tier)
            restore(found, arenas, wanted, place, [store.arenas[0].records])
            store.set_all_valid()
            total += store.digest()
        assert total == stores[0].digest() + stores[1].digest()


# ---------------------------------------------------------------------------- slots and their twin


def test_slots_are_found_and_freed_as_the_twin_does() -> None:
    found = []
    for name in {kernels.levels()[0], "numpy"}:
        kernels.select_level(name)
        draw, table, hand = np.random.default_rng(3), Slots.empty(200, 30), 0
        seen: list[bytes] = []
        for call in range(1, 80):
            at = locate(table, draw.zipf(1.2, 25) % 200, call)
            slots, hand = claim(table, call, call // 2, hand, len(at.missing))
            owners = table.owner[slots]
            table.slot_of[owners[owners >= 0]] = COLD
            there = len(slots)
            table.slot_of[at.missing[there:]] = COLD
            table.slot_of[at.missing[:there]] = slots
            table.owner[slots] = at.missing[:there]
            table.ticket[slots] = draw.integers(0, call)
            seen += [part.tobytes() for part in (*table, *at[:2])]
            seen.append(bytes([hand, at.ticket]))
        found.append(seen)
    kernels.select_level(kernels.levels()[0])
    assert found[0] == found[-1]
    assert len(found) == 2


# ---------------------------------------------------------------------------- disks that fail


def descriptor_of(folder: Path) -> int:
    (found,) = [
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if str(folder) in os.path.realpath(link) or str(folder) in _target(link)
    ]
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def flip_everything(folder: Path) -> None:
    path = f"/proc/self/fd/{descriptor_of(folder)}"
    descriptor = os.open(path, os.O_RDWR)
    size = os.fstat(descriptor).st_size
    content = np.frombuffer(os.pread(descriptor, size, 0), np.uint8)
    os.pwrite(descriptor, (content ^ 1).tobytes(), 0)
    os.fsync(descriptor)
    os.close(descriptor)


READS: dict[str, Callable[[StoredRecords], object]] = {
    "gather": lambda records: records.gather(np.arange(5)),
    "add": lambda records: records.add(np.array([3]), None, np.ones((1, WORDS), np.uint32)),
    "read": lambda records: records.read(0, 5),
    "copy": lambda records: records.copy(),
}


@pytest.mark.parametrize("read", READS)
def test_other_bytes_than_were_written_are_never_given(
    tmp_path: Path, level: str, read: str
) -> None:
    records = TieredRecords(str(tmp_path), WORDS, COUNT, 20)
    records.put(0, np.ones((COUNT, WORDS), np.uint32))
    READS["gather"](records)  # control
    records.gather(np.arange(100, 120))
    records.gather(np.arange(100, 120))
    records.gather(np.arange(200, 220))
    flip_everything(tmp_path)
    with pytest.raises(TierError, match="other bytes came back than were written"):
        READS[read](records)
    with pytest.raises(TierError):  # from then on
        records.gather(np.arange(200, 201))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"gone cannot be opened: No such file.*tier\.path"):
        TieredRecords(str(tmp_path / "gone"), WORDS, COUNT, 20)


def test_a_disk_without_room_says_so_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"cannot be given .* bytes: .*make room"):
        TieredRecords(str(tmp_path), 1024, 2**31 - 1, 20)


def test_threads_may_share_it(tmp_path: Path) -> None:
    """One takes steps, and another reads ranges, as savers do: each sees whole records."""
    records = TieredRecords(str(tmp_path), WORDS, COUNT, 25)
    problems: list[object] = []
    over = threading.Event()

    def reads() -> None:
        try:
            while not over.is_set():
                found = records.read(0, COUNT)
                if (found != found[:, :1]).any():
                    problems.append(found)
        except Exception as error:  # nobody else would see it
            problems.append(error)

    thread = threading.Thread(target=reads)
    thread.start()
    draw = np.random.default_rng(0)
    expected = np.zeros(COUNT, np.uint32)
    for step in range(300):
        index = np.unique(draw.integers(0, COUNT, 40))
        delta = np.repeat(draw.integers(0, 2**32, (len(index), 1), np.uint32), WORDS, axis=1)
        records.prefetch(np.unique(draw.integers(0, COUNT, 10)))
        records.add(index, None, delta)
        expected[index] ^= delta[:, 0]
        assert step < 0 or np.array_equal(records.gather(index)[:, 0], expected[index])
    over.set()
    thread.join()
    assert problems == []
    assert np.array_equal(records.copy()[:, 3], expected)
