"""Writing a process's part of a checkpoint, in a thread of its own, while training goes on.

The content is of the instant between two messages at which it was taken: a snapshot of a server's
records, a copy of the dense network. There is one writer and one content at a time. A process that
is due to save again waits a little for the writer before: if every process skipped what it is too
slow for, no checkpoint might ever have all parts. The last step is waited for as long as its writer
makes progress: it is what the job was for.

The writer rests between pieces, so that it leaves the cores to training; see `Brake`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from planaria.checkpoints import (
    Checkpoint,
    PartWriter,
    latest,
    make_encoding,
    restore,
)
from planaria.cluster.files import Beginning
from planaria.config import Config
from planaria.errors import CheckpointError, DamagedCheckpoint, PlanariaError
from planaria.kernels.types import Bytes
from planaria.server.changed import ChangedRows
from planaria.server.priorities import Priorities
from planaria.server.snapshot import Wanted, wanted_rows
from planaria.server.store import Store
from planaria.tables import Arena
from planaria.trainer.bounds import split
from planaria.wire.control import Base, Orders, PartFailed, PartSaved, SavedRows, Told

PATIENCE = 0.25  # share of cluster.deadline_s, within which everybody must answer a view change
CPU_SHARE = 0.03  # of one core: what a writer takes of it, while nobody waits
SPREAD = 0.5  # share of the time between two saves, within which the writer is to be done
DENSE_NAME = "dense"
BOUNDS_NAME = "bounds"  # of lossy lookups, where there are any
NO_ORDERS = Orders()

Rest: TypeAlias = Callable[[float], None]
"""Called by a writer with the share of its work that is done, now and then."""
Tell: TypeAlias = Callable[[Told], None]
"""Tells the supervisor, from any thread."""


class Content(Protocol):
    """What a save writes, as of the instant at which it was taken."""

    @property
    def base(self) -> int | None:
        """The step since which it has what changed; None if it has everything."""

    @property
    def rows(self) -> SavedRows:
        """Which records it has."""

    @property
    def lacks(self) -> int:
        """Row updates up to now that neither it nor a save before it has."""

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
        self.done = 0.0  # the share that is written
        self._span_s = span_s
        self._began = time.monotonic()
        self._released = threading.Event()
        self._used_s, self._at = math.inf, 0.0  # CPU time of the thread that rests, and when

    def release(self) -> None:
        """From any thread: somebody waits."""
        self._released.set()

    def rest(self, done: float) -> None:
        """Before every piece. done: which share of all is written with it."""
        self.done = done
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
        self, config: Config, tell: Tell, start: int, job: str = "", arenas: Sequence[Arena] = ()
    ) -> None:
        """start: the last step that need not be saved. job: its identity, which parts carry.
        arenas: whose records are saved, if any.
        """
        bits = config.checkpoint.bits
        self._encodings = [make_encoding(bits, arena.dim, arena.words) for arena in arenas]
        self.every = config.save_every_steps
        self._last_step = config.steps if config.saves_last_step else None
        self._folder = config.checkpoint.path
        self._sync = config.checkpoint.mode == "sync"
        self._tell = tell
        self._job = job
        self._patience_s = config.cluster.deadline_s * PATIENCE
        self._sync_s = config.cluster.deadline_s / 2
        self._stall_s = config.checkpoint.stall_s
        self._seen = start
        self._first: int | None = None  # the step that this process was at when it was first asked
        self._thread: threading.Thread | None = None
        self._brake = Brake(0.0)
        self._began: float | None = None  # the last save, or the work
        self._moved: tuple[float, float] = (0.0, 0.0)  # share of the part that is written, since
        self.last_done = self._last_step is None or start >= self._last_step
        """Whether nothing of the last step is still to be saved here."""

    def end_at(self, step: int) -> None:
        """The job ends here, before the step that its configuration names."""
        if self._last_step is not None and step < self._last_step:
            self._last_step = step
            self.last_done |= self._seen >= step

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def done_share(self) -> float:
        """Of the part that is being written."""
        return self._brake.done

    def due(self, step: int, orders: Orders = NO_ORDERS) -> int | None:
        """The step to save now, if one was reached since the last call; the latest of them.

        orders: the supervisor may want a step to be saved, and knows what is saved already.
        """
        if step > 0 and self._first is None:
            self._first, self._began = step, time.monotonic()
        self._seen = max(self._seen, orders.saved)
        self.last_done |= orders.saved == self._last_step
        wanted = orders.save_at if orders.save_at <= step else 0
        if self.every:
            wanted = max(wanted, step - step % self.every)
        if step == self._last_step:
            wanted = step
        if not self._seen < wanted:
            return None
        self._seen = wanted
        return wanted

    def begin_again_at(self, step: int) -> None:
        """The layout has changed, and steps after this one come again: so do their parts."""
        self._seen = min(self._seen, step)
        if self._last_step is not None and step < self._last_step:
            self.last_done = False

    def not_yet(self, step: int) -> None:
        """What `due` gave cannot be saved at this moment, and must be asked for again."""
        self._seen = step - 1

    def missed(self, step: int, place: int) -> None:
        """A step was due that is over here.

        If everybody knows of it beforehand, that is so in a replacement only, and its predecessor
        may have saved it.
        """
        if self.every and step % self.every == 0:
            return
        late = self._first is not None and self._first <= step
        why = "it was told too late" if late else "it took the place of another after that step"
        self._tell(PartFailed(step=step, place=place, why=why, late=late))

    def save(self, step: int, place: int, take: Callable[[], Content], resizes: int = 0) -> None:
        """take: what is to be saved, as of now; it is called once nothing else is being written.
        resizes: so often has the layout changed.

        If something is and this is the last step, it must be asked for again.
        """
        began = time.monotonic()
        if not self._wait(0.0 if step == self._last_step else self._patience_s):
            if step == self._last_step:
                self.not_yet(step)
                return
            why = "the part of the checkpoint before it is still being written; save less often"
            self.fail(step, place, why)
            return
        try:
            content = take()
        except (PlanariaError, MemoryError) as error:
            self.fail(step, place, f"nothing could be taken to be saved: {error}")
            return
        taken = time.monotonic()
        # The next save is as far away as the last one was.
        last, self._began = self._began or taken, taken
        self._brake = Brake(SPREAD * (taken - last))
        if step == self._last_step:
            self._brake.release()  # nothing else is left to do
        self._moved = (0.0, taken)
        self._thread = threading.Thread(
            target=self._write, args=(step, place, resizes, content, began, taken), daemon=True
        )
        self._thread.start()
        if self._sync:
            self._wait(self._sync_s)

    def fail(self, step: int, place: int, why: str) -> None:
        self._tell(PartFailed(step=step, place=place, why=why, late=False))
        self.last_done |= step == self._last_step

    def give_up_stalled(self, place: int) -> None:
        """The last part, if nothing of it was written for too long: every wait has an end."""
        now, done = time.monotonic(), self._brake.done
        if done != self._moved[0] or not self.writing:
            self._moved = (done, now)
        elif now - self._moved[1] > self._stall_s and self._last_step is not None:
            why = f"nothing was written for {self._stall_s:.0f} s (checkpoint.stall_s)"
            self.fail(self._last_step, place, why)

    def _wait(self, limit_s: float) -> bool:
        if self._thread is not None:
            self._brake.release()
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _write(
        self, step: int, place: int, resizes: int, content: Content, began: float, taken: float
    ) -> None:
        assert self._folder is not None
        try:
            with (
                contextlib.closing(content),
                PartWriter(self._folder, step, place, self._encodings, job=self._job) as part,
            ):
                content.write(part, self._brake.rest)
                summary = part.finish()
        except Exception as error:  # drivers of storage raise anything; nobody else would see it
            self.fail(step, place, str(error))
            return
        now = time.monotonic()
        saved = PartSaved(
            step=step,
            place=place,
            part=summary,
            base=content.base,
            rows=content.rows,
            lacks=content.lacks,
            seconds=now - began,
            blocked_s=(now if self._sync else taken) - began + content.blocked_s,
            rested_s=self._brake.rested_s,
            resizes=resizes,
        )
        self._tell(saved)
        self.last_done |= step == self._last_step


class SavedRecords:
    """The data records of a server, all or some. Parity is made again when they are restored."""

    def __init__(
        self,
        store: Store,
        wanted: Sequence[Wanted] | None = None,
        base: int | None = None,
        rows: SavedRows = "all",
    ) -> None:
        """wanted: which records, arena by arena; base: what they are a difference from."""
        self.base = base
        self.rows = rows
        self.lacks = 0
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


def take_records(store: Store, step: int, order: Base | None) -> SavedRecords:
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
    store: Store, order: Base, rule: Priorities, *, interval_ends: bool
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
    rows: SavedRows = "interval" if interval_ends else "priority"
    saved = SavedRecords(store, wanted, order.step, rows)
    for arena, index in enumerate(chosen):
        rule.saved(arena, index)
    return saved


class SavedDense:
    """The dense network. state: a copy already."""

    base = None
    rows: SavedRows = "all"
    lacks = 0
    blocked_s = 0.0

    def __init__(self, state: Bytes) -> None:
        self._state = state

    def write(self, part: PartWriter, rest: Rest) -> None:
        own, bounds = split(self._state)
        part.add_bytes(DENSE_NAME, own)
        if len(bounds):
            part.add_bytes(BOUNDS_NAME, bounds)

    def close(self) -> None:
        pass


def open_own(config: Config, job: str, step: int) -> Checkpoint:
    """A checkpoint of this job's; another's in its folder would be trained on in silence."""
    assert config.checkpoint.path is not None
    found = Checkpoint(config.checkpoint.path, step)
    if found.job != job:
        raise CheckpointError(
            f"step {step} in {config.checkpoint.path} was saved by job {found.job}, and this is "
            f"{job}; give each job a checkpoint.path of its own"
        )
    return found


def restore_records(
    config: Config,
    job: str,
    step: int,
    store: Store,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fills a blank store of that step, data and parity, whatever layout was saved."""
    arenas = [arena.arena for arena in store.arenas]
    out = [arena.records for arena in store.arenas]
    found = open_own(config, job, step)
    restore(found, arenas, store.layout, store.place, out, on_progress)
    store.set_all_valid()


def reload_records(
    config: Config,
    beginning: Beginning,
    store: Store,
    on_progress: Callable[[], None] = lambda: None,
) -> int:
    """Fills a blank store from the newest save that is not ahead of it; returns the save's step.

    beginning: of the job whose save it must be. Where there is none, or none is whole, the records
    are what they were at step 0: what was made then, and not what was imported.
    """
    job = beginning.job
    assert config.checkpoint.path is not None
    for _ in range(2):  # what was found may be removed for a newer one before it is read
        before = store.step + 1
        while found := latest(config.checkpoint.path, before=before, job=job).checkpoint:
            try:
                restore_records(config, job, found.step, store, on_progress)
            except DamagedCheckpoint:
                before = found.step
            else:
                return found.step
    if beginning.imported:
        raise DamagedCheckpoint(
            f"the model that was imported into {config.checkpoint.path} is not whole any more, and "
            "nothing was saved since; import it again"
        )
    for arena in store.arenas:
        arena.records.clear(0, len(arena.records))  # of what was half restored
    store.initialise(on_progress)
    return 0


def read_dense(config: Config, job: str, step: int) -> Bytes | None:
    """What `SavedDense` wrote; None of a model that was imported without a dense part."""
    found = open_own(config, job, step).dense()
    parts = [found[name].view(np.uint8) for name in (DENSE_NAME, BOUNDS_NAME) if name in found]
    return np.concatenate(parts) if parts else None
