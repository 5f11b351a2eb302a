"""Writing a process's part of a checkpoint, in a thread of its own, while training goes on.

The content is a copy, taken between two messages; from then on the writer owns it. There is one
writer and one copy at a time. A process that is due to save again waits a little for the writer
before: if every process skipped what it is too slow for, no checkpoint might ever have all parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

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
from planaria.server.store import Store
from planaria.tables import Arena

PATIENCE = 0.25  # share of cluster.deadline_s, within which everybody must answer a view change
DENSE_NAME = "dense"

Fill: TypeAlias = Callable[[PartWriter], None]
"""Writes a copy into a part."""
Say: TypeAlias = Callable[..., None]
"""Tells the supervisor of an event, with its facts; from any thread."""


class PartSaver:
    """Saves the part of one process at every step that is due, and tells the supervisor."""

    def __init__(self, config: Config, say: Say, start: int, arenas: Sequence[Arena] = ()) -> None:
        """start: the last step that need not be saved. arenas: whose records are saved, if any."""
        bits = config.checkpoint.bits
        self._encodings = [make_encoding(bits, arena.dim, arena.words) for arena in arenas]
        self.every = config.checkpoint.every_steps
        self._folder = config.checkpoint.path
        self._say = say
        self._patience_s = config.cluster.deadline_s * PATIENCE
        self._last_s = config.cluster.deadline_s
        self._seen = start
        self._thread: threading.Thread | None = None

    def due(self, step: int) -> int | None:
        """The step to save now, if one was reached since the last call; the latest of them."""
        if not self.every or step <= self._seen:
            return None
        last, self._seen = self._seen, step
        found = step - step % self.every
        return found if found > max(last, 0) else None

    def save(self, step: int, place: int, copy: Callable[[], Fill]) -> None:
        """copy: makes a copy of what is to be saved, and gives what writes that copy."""
        if not self._wait(self._patience_s):
            why = "the part of the checkpoint before it is still being written; save less often"
            self.fail(step, place, why)
            return
        began = time.monotonic()
        try:
            fill = copy()
        except (PlanariaError, MemoryError) as error:
            self.fail(step, place, f"no copy could be taken: {error}")
            return
        self._thread = threading.Thread(
            target=self._write, args=(step, place, fill, began), daemon=True
        )
        self._thread.start()

    def fail(self, step: int, place: int, why: str) -> None:
        self._say("save failed", step=step, place=place, why=why)

    def close(self) -> None:
        """Waits for the last part, before the process says that it is done."""
        self._wait(self._last_s)

    def _wait(self, limit_s: float) -> bool:
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _write(self, step: int, place: int, fill: Fill, began: float) -> None:
        assert self._folder is not None
        try:
            with PartWriter(self._folder, step, place, self._encodings) as part:
                fill(part)
                summary = part.finish()
        except Exception as error:  # drivers of storage raise anything; nobody else would see it
            self.fail(step, place, str(error))
        else:
            facts = msgspec.to_builtins(summary)
            self._say("saved", step=step, place=place, part=facts, began=began)


def summary_of(facts: dict[str, object]) -> PartSummary:
    """What `saved` said of a part."""
    return msgspec.convert(facts, PartSummary, str_keys=True)


def copy_records(store: Store) -> Fill:
    """The data records of a server. Parity is made again when they are restored."""
    copies = [arena.records[: arena.data_records].copy() for arena in store.arenas]
    slots = [arena.layout.slots for arena in store.arenas]

    def fill(part: PartWriter) -> None:
        for number, (records, size) in enumerate(zip(copies, slots, strict=True)):
            for first in range(0, len(records), size):  # region by region
                part.add(number, first, records[first : first + size])

    return fill


def copy_dense(state: Records) -> Fill:
    """state: a copy already."""
    return lambda part: part.add_bytes(DENSE_NAME, state)


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
    """What `copy_dense` wrote."""
    assert config.checkpoint.path is not None
    found = Checkpoint(config.checkpoint.path, step).dense()
    return found[DENSE_NAME].view(np.uint32)
