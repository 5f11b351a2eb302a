"""The data records of a store as of one step, read piece by piece while steps go on.

Taking a snapshot copies nothing. From then on each step keeps what the records that it is the first
to change were before it, their *pre-images*, unless they have been read; a reader copies a piece of
the arena and lays the pre-images over the copy. So a snapshot takes a bit or two per record, and
memory for what changes before it is read.

Two threads share it: one takes the steps, through `across`, and one reads. The lock between them is
held for the length of a step, or of the copy of one piece.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from planaria import kernels
from planaria.errors import StoreError
from planaria.kernels import saves
from planaria.kernels.types import Bytes, Index, Records
from planaria.records import StoredRecords
from planaria.server.history import Change

PIECE_BYTES = 1 << 20  # what is copied at a time: a step waits no longer than that takes
WINDOW = 1 << 20  # records whose bits are turned into a list at a time

Wanted: TypeAlias = Bytes | None
"""Which data records of an arena are read: a bit for each, or None for all of them."""


def wanted_rows(index: Index, data_records: int) -> Bytes:
    """The bits of listed records."""
    bits = np.zeros(-(-data_records // 8), np.uint8)
    kernels.mark(bits, index)
    return bits


class Piece(NamedTuple):
    """Some records of one arena, ascending. They are the snapshot's until the next piece."""

    arena: int
    first: int
    rows: Index | None  # None: first, first + 1, ...
    records: Records
    done: float  # how far through all arenas that is, 0 to 1


class PreImages(NamedTuple):
    """What records were: rows ascend once the reader has them."""

    rows: Index
    values: Records


class Snapshot:
    """Close it when it is read, or given up: until then every step pays for it."""

    def __init__(self, arenas: Sequence[FrozenArena]) -> None:
        self.closed = False
        self.blocked_s = 0.0
        """How long steps have waited for the reader, or were busy with pre-images."""
        self._arenas = arenas
        self._lock = threading.Lock()
        self._problem = ""

    def across(self, take_step: Callable[[], list[Change]]) -> list[Change]:
        """Takes a step, one Change per arena, and keeps what it changes."""
        began = time.monotonic()
        with self._lock:
            self.blocked_s += time.monotonic() - began
            changes = take_step()
            if not (self.closed or self._problem):
                began = time.monotonic()
                self._keep(changes)
                self.blocked_s += time.monotonic() - began
        return changes

    def _keep(self, changes: Sequence[Change]) -> None:
        try:
            for arena, change in zip(self._arenas, changes, strict=True):
                arena.keep(change)
        except MemoryError:  # the step counts all the same; the reader is told
            self._problem = "there is no memory for what steps change while it is read"
            self._drop()

    def pieces(self) -> Iterator[Piece]:
        """All wanted records, arena by arena. To be read once, to the end, by one thread."""
        before, total = 0, sum(arena.nbytes for arena in self._arenas)
        for number, arena in enumerate(self._arenas):
            words = arena.words
            rows = max(1, PIECE_BYTES // (4 * words))
            buffer = np.empty((min(rows, arena.count), words), np.uint32)
            for first, index, stop in arena.plan(rows):
                out = buffer[: stop - first if index is None else len(index)]
                with self._lock:
                    if self.closed or self._problem:
                        raise StoreError(
                            "the snapshot cannot be read any more: "
                            f"{self._problem or 'it was closed'}; take another"
                        )
                    fresh = arena.copy(first, index, stop, out)
                arena.overlay(first, index, stop, out, fresh)
                yield Piece(number, first, index, out, (before + 4 * words * stop) / total)
            before += arena.nbytes

    def close(self) -> None:
        """From any thread, and as often as one likes."""
        with self._lock:
            self.closed = True
            self._drop()

    def _drop(self) -> None:
        for arena in self._arenas:
            arena.fresh = []


class FrozenArena:
    """One arena: which of its records are still to be read, and what those were."""

    def __init__(
        self, records: StoredRecords, count: int, region: int, wanted: Wanted = None
    ) -> None:
        """records: which the store changes. The first `count` are the data records of now; when
        servers come or go, others behind them may become data, too. region: no piece of a whole
        arena spans two regions of so many records.
        """
        self._records = records
        self.count = count
        self.words = records.words
        self._region = region
        self._wanted = wanted
        # Set for what a step need not keep: because it is kept, or because nobody wants it.
        size = -(-count // 8)
        self._settled = np.zeros(size, np.uint8) if wanted is None else ~wanted[:size]
        self._unread = 0  # all before it were read
        self.fresh: list[PreImages] = []  # of the steps since the last piece
        self._kept: list[PreImages] = []  # of those before; the reader's own

    @property
    def nbytes(self) -> int:
        return 4 * self.words * self.count

    def plan(self, rows: int) -> Iterator[tuple[int, Index | None, int]]:
        """The pieces, so many rows each: the first record, a list if it is one, and the end."""
        end = self.count
        if self._wanted is None:
            for region in range(0, end, self._region):
                last = min(region + self._region, end)
                for first in range(region, last, rows):
                    yield first, None, min(first + rows, last)
            return
        for window in range(0, end, WINDOW):
            index = saves.marked(self._wanted, window, min(window + WINDOW, end))
            for at in range(0, len(index), rows):
                piece = index[at : at + rows]
                yield int(piece[0]), piece, int(piece[-1]) + 1

    # ------------------------------------------------------------------ under the lock

    def keep(self, change: Change) -> None:
        """The pre-images of one step, which has left the records as they are."""
        count = len(change.indices)
        rows, values = np.empty(count, np.int64), np.empty((count, self.words), np.uint32)
        unread = self._unread, self.count
        kept = self._records.preserve(
            self._settled, *unread, change.indices, change.delta, rows, values
        )
        if kept:
            found = PreImages(rows[:kept], values[:kept])
            if 2 * kept < count:  # a slice would hold on to the room for the whole step
                found = PreImages(found.rows.copy(), found.values.copy())
            self.fresh.append(found)

    def copy(self, first: int, index: Index | None, stop: int, out: Records) -> list[PreImages]:
        """Copies a piece as it is now; returns the pre-images that came since the last one."""
        if index is None:
            self._records.read_into(first, out)
        else:
            self._records.gather(index, out)
        self._unread = stop
        fresh, self.fresh = self.fresh, []
        return fresh

    # ------------------------------------------------------------------ the reader alone

    def overlay(
        self, first: int, index: Index | None, stop: int, out: Records, fresh: Sequence[PreImages]
    ) -> None:
        """Makes a piece what it was. All pre-images that lie before it were used before."""
        for some in fresh:
            order = np.argsort(some.rows, kind="stable")
            self._kept.append(PreImages(some.rows[order], kernels.gather(some.values, order)))
            # Each at least twice as long as the next: there are few, whatever number of steps.
            while len(self._kept) > 1 and len(self._kept[-2].rows) < 2 * len(self._kept[-1].rows):
                self._kept.append(_merged(self._kept.pop(), self._kept.pop()))
        later: list[PreImages] = []
        for rows, values in self._kept:
            end = int(np.searchsorted(rows, stop))
            if index is None:
                saves.overlay(out, first, rows[:end], values[:end])
            else:  # only listed records are kept, so each is found
                saves.overlay(out, 0, np.searchsorted(index, rows[:end]), values[:end])
            if end < len(rows):
                later.append(PreImages(rows[end:], values[end:]))
        self._kept = later


def _merged(one: PreImages, other: PreImages) -> PreImages:
    rows = np.concatenate([one.rows, other.rows])
    order = np.argsort(rows, kind="stable")
    return PreImages(rows[order], kernels.gather(np.concatenate([one.values, other.values]), order))
