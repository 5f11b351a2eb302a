"""Writing a process's part of a checkpoint, in a thread of its own, while training goes on.

The content is of the instant between two messages at which it was taken: a snapshot of a server's
records, a copy of the dense network. There is one writer and one content at a time. A process that
is due to save again waits a little for the writer before: if every process skipped what it is too
slow for, no checkpoint might ever have all parts.

The writer rests between pieces, so that it leaves the cores to training; see `Brake`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from planaria.checkpoints import (
    Checkpoint,
    PartSummary,
    PartWriter,
    latest,
    make_encoding,
    restore,
)
from planaria.config import Config
from planaria.errors import DamagedCheckpoint, PlanariaError
from planaria.kernels.types import Records
from planaria.server.changed import ChangedRows
from planaria.server.priorities import Priorities
from planaria.server.snapshot import Wanted, wanted_rows
from planaria.server.store import Store
from planaria.tables import Arena

PATIENCE = 0.25  # share of cluster.deadline_s, within which everybody must answer a view change
CPU_SHARE = 0.03  # of one core: what a writer takes of it, while nobody waits
SPREAD = 0.5  # share of the time between two saves, within which the writer is to be done
DENSE_NAME = "dense"

Rows: TypeAlias = Literal["all", "changed", "priority", "interval"]
"""Of what a save has: all records, those that changed since its base, or those that matter most;
and `interval`, the latter with all records of the small tables, once per interval."""
Rest: TypeAlias = Callable[[float], None]
"""Called by a writer with the share of its work that is done, now and then."""
Say: TypeAlias = Callable[..., None]
"""Tells the supervisor of an event, with its facts; from any thread."""


class Content(Protocol):
    """What a save writes, as of the instant at which it was taken."""

    @property
    def base(self) -> int | None:
        """The step since which it has what changed; None if it has everything."""

    @property
    def rows(self) -> Rows:
        """Which records it has."""

    @property
    def blocked_s(self) -> float:
        """How long it has kept the process from its work since then."""

    def write(self, part: PartWriter, rest: Rest) -> None: ...

    def close(self) -> None:
        """It is written, or never will be."""


class Brake:
    """Lets a writer use CPU_SHARE of a core; more if it would not be done in time with that, and
    as much as it gets once somebody waits for it.

    Several servers may share a machine with a trainer that all wait for. A lower priority did not
    do (docs/log.md). What counts is the thread's CPU time, so a writer that waits for slow storage
    need not rest as well.
    """

    def __init__(self, span_s: float) -> None:
        """span_s: within which to be done."""
        self.rested_s = 0.0
        self._span_s = span_s
        self._began = time.monotonic()
        self._released = threading.Event()
        self._used_s, self._at = math.inf, 0.0  # CPU time of the thread that rests, and when

    def release(self) -> None:
        """From any thread: somebody waits."""
        self._released.set()

    def rest(self, done: float) -> None:
        """Before every piece. done: which share of all is written with it."""
        used_s, now = time.thread_time(), time.monotonic()
        owed_s = (used_s - self._used_s) / CPU_SHARE - (now - self._at)
        rest_s = min(owed_s, self._began + done * self._span_s - now)
        if rest_s > 0:
            self._released.wait(rest_s)
            self.rested_s += time.monotonic() - now
        self._used_s, self._at = time.thread_time(), time.monotonic()


class PartSaver:
    """Saves the part of one process at every step that is due, and tells the supervisor."""

    def __init__(
        self,
        config: Config,
        say: Say,
        start: int,
        arenas: Sequence[Arena] = (),
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """start: the last step that need not be saved. arenas: whose records are saved, if any.
        told: the supervisor's orders, as they come.
        """
        bits = config.checkpoint.bits
        self._encodings = [make_encoding(bits, arena.dim, arena.words) for arena in arenas]
        self.every = config.save_every_steps
        self._last_step = config.steps if config.saves_last_step else None
        self._folder = config.checkpoint.path
        self._sync = config.checkpoint.mode == "sync"
        self._say = say
        self._patience_s = config.cluster.deadline_s * PATIENCE
        self._last_s = config.cluster.deadline_s
        self._told = told
        self._seen = start
        self._first: int | None = None  # the step that this process was at when it was first asked
        self._thread: threading.Thread | None = None
        self._brake = Brake(0.0)
        self._began: float | None = None  # the last save, or the work

    def due(self, step: int) -> int | None:
        """The step to save now, if one was reached since the last call; the latest of them."""
        if step > 0 and self._first is None:
            self._first, self._began = step, time.monotonic()
        if step == self._last_step:
            wanted = step
        elif self.every:
            wanted = step - step % self.every
        else:
            wanted = self._told.get("save_at", 0)
        if not max(self._seen, 0) < wanted <= step:
            return None
        self._seen = wanted
        return wanted

    def missed(self, step: int, place: int) -> None:
        """A step was due that is over here.

        If everybody knows of it beforehand, that is so in a replacement only, and its predecessor
        may have saved it.
        """
        if self.every:
            return
        late = self._first is not None and self._first <= step
        why = "it was told too late" if late else "it took the place of another after that step"
        self._say("save failed", step=step, place=place, why=why, late=late)

    def save(self, step: int, place: int, take: Callable[[], Content]) -> None:
        """take: what is to be saved, as of now; it is called once nothing else is being written."""
        began = time.monotonic()
        if not self._wait(self._patience_s):
            why = "the part of the checkpoint before it is still being written; save less often"
            self.fail(step, place, why)
            return
        try:
            content = take()
        except (PlanariaError, MemoryError) as error:
            self.fail(step, place, f"nothing could be taken to be saved: {error}")
            return
        taken = time.monotonic()
        blocked_until = None if self._sync else taken
        # The next save is as far away as the last one was.
        last, self._began = self._began or taken, taken
        self._brake = Brake(SPREAD * (taken - last))
        self._thread = threading.Thread(
            target=self._write, args=(step, place, content, began, blocked_until), daemon=True
        )
        self._thread.start()
        if self._sync:
            self._wait(self._last_s)

    def fail(self, step: int, place: int, why: str) -> None:
        self._say("save failed", step=step, place=place, why=why, late=False)

    def close(self) -> None:
        """Waits for the last part, before the process says that it is done."""
        self._wait(self._last_s)

    def _wait(self, limit_s: float) -> bool:
        if self._thread is not None:
            self._brake.release()
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _write(
        self, step: int, place: int, content: Content, began: float, blocked_until: float | None
    ) -> None:
        """blocked_until: None if the process waits for the part."""
        assert self._folder is not None
        try:
            with (
                contextlib.closing(content),
                PartWriter(self._folder, step, place, self._encodings) as part,
            ):
                content.write(part, self._brake.rest)
                summary = part.finish()
        except Exception as error:  # drivers of storage raise anything; nobody else would see it
            self.fail(step, place, str(error))
        else:
            blocked_s = (blocked_until or time.monotonic()) - began + content.blocked_s
            self._say(
                "saved",
                step=step,
                place=place,
                part=msgspec.to_builtins(summary),
                began=began,
                base=content.base,
                rows=content.rows,
                blocked_s=blocked_s,
                rested_s=self._brake.rested_s,
            )


def summary_of(facts: dict[str, object]) -> PartSummary:
    """What `saved` said of a part."""
    return msgspec.convert(facts, PartSummary, str_keys=True)


class SavedRecords:
    """The data records of a server, all or some. Parity is made again when they are restored."""

    def __init__(
        self,
        store: Store,
        wanted: Sequence[Wanted] | None = None,
        base: int | None = None,
        rows: Rows = "all",
    ) -> None:
        """wanted: which records, arena by arena; base: what they are a difference from."""
        self.base = base
        self.rows = rows
        self._snapshot = store.take_snapshot(wanted)

    @property
    def blocked_s(self) -> float:
        return self._snapshot.blocked_s

    def write(self, part: PartWriter, rest: Rest = lambda done: None) -> None:
        for piece in self._snapshot.pieces():
            rest(piece.done)
            if piece.rows is None:
                part.add(piece.arena, piece.first, piece.records)
            else:
                part.add_rows(piece.arena, piece.rows, piece.records)

    def close(self) -> None:
        self._snapshot.close()


@dataclass(frozen=True)
class BaseOrder:
    """What the supervisor says of the next save: what it may be a difference from, if anything."""

    step: int | None = None
    keep_from: int = 0  # no earlier step will ever be one


def take_records(store: Store, step: int, order: BaseOrder | None) -> SavedRecords:
    """All records for the save of `step`, or those that changed since the base that is ordered.

    A server that has not counted since then, because it is a replacement, saves them all.
    """
    if order is None:
        return SavedRecords(store)
    if store.changed is None:
        store.changed = ChangedRows([arena.data_records for arena in store.arenas])
    changed = store.changed
    changed.forget(order.keep_from)
    since = None if order.step is None else changed.since(order.step)
    if since is None:
        saved = SavedRecords(store)
    else:
        saved = SavedRecords(store, since, order.step, "changed")
    changed.begin(step)
    return saved


def take_priorities(
    store: Store, order: BaseOrder, rule: Priorities, *, interval_ends: bool
) -> SavedRecords:
    """What the rule chooses for the next save; everything if that has nothing to add to."""
    if order.step is None:
        saved = SavedRecords(store)
        rule.saved_all()
        return saved
    chosen = [rule.choose(arena) for arena in range(len(store.arenas))]
    if interval_ends:
        others = [rule.others(arena) for arena in range(len(store.arenas))]
        chosen = [np.union1d(*pair) for pair in zip(chosen, others, strict=True)]
    wanted = [
        wanted_rows(index, arena.data_records)
        for index, arena in zip(chosen, store.arenas, strict=True)
    ]
    rows: Rows = "interval" if interval_ends else "priority"
    saved = SavedRecords(store, wanted, order.step, rows)
    for arena, index in enumerate(chosen):
        rule.saved(arena, index)
    return saved


class SavedDense:
    """The dense network. state: a copy already."""

    base = None
    rows: Rows = "all"
    blocked_s = 0.0

    def __init__(self, state: Records) -> None:
        self._state = state

    def write(self, part: PartWriter, rest: Rest) -> None:
        part.add_bytes(DENSE_NAME, self._state)

    def close(self) -> None:
        pass


def restore_records(config: Config, step: int, store: Store) -> None:
    """Fills a blank store of that step, data and parity, whatever layout was saved."""
    assert config.checkpoint.path is not None
    arenas = [arena.arena for arena in store.arenas]
    out = [arena.records for arena in store.arenas]
    restore(Checkpoint(config.checkpoint.path, step), arenas, store.layout, store.place, out)
    store.set_all_valid()


def reload_records(config: Config, store: Store) -> int:
    """Fills a blank store from the newest save that is not ahead of it; returns the save's step.

    Where there is none, or none is whole, the records are what they were at step 0.
    """
    assert config.checkpoint.path is not None
    for _ in range(2):  # what was found may be removed for a newer one before it is read
        before = store.step + 1
        while found := latest(config.checkpoint.path, before=before).checkpoint:
            try:
                restore_records(config, found.step, store)
            except DamagedCheckpoint:
                before = found.step
            else:
                return found.step
    for arena in store.arenas:
        arena.records.fill(0)  # of what was half restored
    store.initialise()
    return 0


def read_dense(config: Config, step: int) -> Records:
    """What `SavedDense` wrote."""
    assert config.checkpoint.path is not None
    found = Checkpoint(config.checkpoint.path, step).dense()
    return found[DENSE_NAME].view(np.uint32)
