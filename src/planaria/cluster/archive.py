"""The disk's side of saving, in a thread of its own: nobody watches for deaths from in here."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from planaria.checkpoints import (
    Facts,
    Lease,
    discard,
    discard_parts,
    latest,
    list_checkpoints,
    prune,
    publish,
)
from planaria.config import Config
from planaria.control.saving import Discard, Prune, Publish, SaveMachine, Work
from planaria.errors import CheckpointError, LeaseLost, PlanariaError
from planaria.layout.resizing import layout_after

RENEW_S = 5.0
CLOSE_S = 10.0
LOOK_S = 5.0  # for a way back: whoever leaves does not wait for a disk that does not answer


@dataclass(frozen=True)
class Published:
    step: int


@dataclass(frozen=True)
class NotPublished:
    step: int
    why: str


@dataclass(frozen=True)
class Noted:
    """What only people need to know."""

    line: str


Outcome: TypeAlias = Published | NotPublished | Noted


class Archive:
    """Does what a SaveMachine asks for, in order. `descriptor` is readable when some is done."""

    def __init__(self, config: Config, job: str, lease: Lease | None) -> None:
        self.config = config
        self._job = job
        self._lease = lease
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        self._work.put(work)

    def report_to(self, saves: SaveMachine, note: Callable[[str], None]) -> None:
        """Tells what was done since the last call."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return
        while not self._done.empty():
            tell(self._done.get_nowait(), saves, note, time.monotonic())

    def close(self) -> None:
        """Ends the thread when all is done, or leaves it where the disk does not answer."""
        self._work.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self.descriptor)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=RENEW_S)
            except queue.Empty:
                self._renew()
                continue
            if work is None:
                return
            self._renew()
            outcome = do(work, self.config, self._job, self._lease)
            self._pass_on_notes()
            if outcome is not None:
                self._tell(outcome)

    def _renew(self) -> None:
        if self._lease:
            try:
                self._lease.renew(time.monotonic())
            except (PlanariaError, OSError):
                pass  # whoever relies on it checks it
            self._pass_on_notes()

    def _pass_on_notes(self) -> None:
        while self._lease and self._lease.notes:
            self._tell(Noted(self._lease.notes.pop(0)))

    def _tell(self, outcome: Outcome) -> None:
        self._done.put(outcome)
        os.eventfd_write(self.descriptor, 1)


def do(work: Work, config: Config, job: str, lease: Lease | None) -> Outcome | None:
    """One piece of work; nothing is said of what was removed."""
    folder = config.checkpoint.path
    assert folder is not None
    try:
        match work:
            case Publish():
                _publish(folder, work, config, job, lease)
                return Published(work.step)
            case Discard():
                _discard(folder, work, job, lease)
            case Prune():
                keep = config.checkpoint.keep_last
                prune(folder, keep, up_to=work.up_to, job=job, lease=lease)
    except Exception as error:  # drivers of storage raise anything
        if isinstance(work, Publish):
            return NotPublished(work.step, str(error))
        return Noted(f"what is not needed any more could not be removed: {error}")
    return None


def _discard(folder: str, work: Discard, job: str, lease: Lease | None) -> None:
    try:
        discard(folder, work.step, job=job, lease=lease, published=False)
    except LeaseLost:  # which is said where a checkpoint could not be published
        discard_parts(folder, work.step, work.files)


def _publish(folder: str, work: Publish, config: Config, job: str, lease: Lease | None) -> None:
    facts = Facts(
        config.tables,
        config.optimizer_rule,
        layout_after(config.layout, work.resizes),
        samples=work.step * config.batch,
        base=work.base,
        config=config.to_dict(),
        extra={"rows": work.rows, **work.extra},
        job=job,
    )
    publish(folder, work.step, list(work.parts), facts, lease=lease)


def tell(outcome: Outcome, saves: SaveMachine, note: Callable[[str], None], now: float) -> None:
    match outcome:
        case Published(step):
            saves.on_published(step, now)
        case NotPublished(step, why):
            saves.on_publish_failed(step, why, now)
        case Noted(line):
            note(line)


def newest_of(config: Config, job: str) -> tuple[int, int, dict[str, Any]] | None:
    """Of this job's whole checkpoints with all rows of one step: step, bytes and what it remembers.

    Every byte is read.
    """
    folder = config.checkpoint.path
    assert folder is not None
    found = latest(folder, job=job, verify=True)
    while found.checkpoint and is_mixed(found.checkpoint.manifest.extra):
        found = latest(folder, job=job, before=found.checkpoint.step, verify=True)
    if found.checkpoint is None:
        return None
    manifest = found.checkpoint.manifest
    return manifest.step, manifest.bytes, manifest.extra


def way_back(config: Config, job: str, known: int) -> str:
    """The end of a sentence that says what was lost, by what the folder has now.

    known: the step of the newest checkpoint that this job knows of, 0 if none.
    """
    folder = config.checkpoint.path
    if folder is None or not known:
        return ""
    found: list[str] = []
    looking = threading.Thread(target=lambda: found.append(_look_back(folder, job)), daemon=True)
    looking.start()
    looking.join(LOOK_S)
    if found:
        return found[0]
    return f"; {folder} does not answer: whether its checkpoint of step {known} is there, is unsure"


def _look_back(folder: str, job: str) -> str:
    try:
        whole = [one.checkpoint for one in list_checkpoints(folder) if one.checkpoint]
    except CheckpointError as error:
        return f"; there is nothing to go on from: {error}"
    own = [checkpoint.step for checkpoint in whole if checkpoint.job == job]
    if not own:
        return f"; there is nothing to go on from: {folder} has no whole checkpoint of this job"
    first = ""
    if whole[-1].step > own[-1]:  # --resume would take it
        first = f"move what another job has saved, up to step {whole[-1].step}, out of {folder}; "
    return f"; {first}go on from the checkpoint of step {own[-1]} with --resume"


def is_mixed(extra: dict[str, Any]) -> bool:
    """Whether priority saves made it: rows that matter less are older than its step."""
    return extra.get("rows") in ("priority", "interval")
