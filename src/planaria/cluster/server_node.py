"""An embedding server as a process. It never imports torch; it starts in a fraction of a second."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planaria import kernels
from planaria.cluster.files import JobFiles
from planaria.cluster.node import IDLE_MS, MemberNode
from planaria.cluster.parts import (
    PartSaver,
    SavedRecords,
    reload_records,
    restore_records,
    take_priorities,
    take_records,
)
from planaria.cluster.tiering import tier_of
from planaria.cluster.tracing import ANY, Tracer, trace_member
from planaria.coordinator.machine import RETIRED
from planaria.server.housing import tier_facts
from planaria.server.job import ServerJob
from planaria.server.machine import ServerMachine
from planaria.server.peeking import LocalPeeks, Peeks
from planaria.server.priorities import RULES, Mfu, Priorities
from planaria.server.rehearsing import Rehearsal
from planaria.server.reserve import Reserve
from planaria.server.store import Store
from planaria.wire.coding import Coding
from planaria.wire.control import (
    Base,
    Ready,
    Rebuilding,
    Rebuilt,
    Refused,
    Reloaded,
    ScrubFound,
    ServerHolds,
)
from planaria.wire.messages import (
    NO_VIEW,
    MateRequest,
    Member,
    Message,
    Push,
    RangeRequest,
    Stop,
)

REPORT_S = 0.2
PAUSE_SHARE = 0.1
MAX_PAUSE_S = 0.02
MATES_S = 1.0  # after which nobody who rebuilds is waited for


def resident_bytes() -> int:
    """Memory of this process that is really in use, by the kernel's count; 0 if it cannot be asked.

    A figure for the report: no reason to end, where no descriptor is left to read it.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class UpdateCount:
    """How many row updates this process has made, and how many of them no save has."""

    total: int = 0
    saved_total: int = 0  # those made when it last saved
    lacked: int = 0  # and those of them that were in no save then

    def note(self, pushes: Sequence[Push]) -> None:
        self.total += sum(len(index) for push in pushes for index in push.indices)

    def saved(self, lacks: int) -> None:
        self.saved_total, self.lacked = self.total, lacks

    @property
    def unsaved(self) -> int:
        return self.lacked + self.total - self.saved_total


def rehearse() -> None:
    """For a nursery: what is forked off it has done all of its work once."""
    Rehearsal()


class ServerNode(MemberNode):
    def __init__(self, files: JobFiles, member: Member, place: int | None) -> None:
        super().__init__(files, member, "server")
        config = self.config
        kernels.set_threads(config.threads.server)
        self._progress = 0
        self._reserve: Reserve | None = None
        tier = tier_of(config)
        if place is None and tier is None and (config.r or config.survival.partial):
            self._reserve = Reserve(config.arenas, config.layout)
        job = ServerJob(
            config.arenas,
            config.layout,
            config.seed,
            keep_steps=config.history.steps,
            retry_s=config.cluster.retry_ms / 1000,
            rebuild_chunk=config.rebuild.chunk,
            rebuild_jobs=config.rebuild.jobs,
            rebuild_priority=config.rebuild.priority,
            rebuild_bytes_per_s=config.rebuild.bytes_per_s,
            scrub_every=config.scrub.every_steps,
            reserve=self._reserve,
            tier=tier,
            peeks=None if tier else self._peeks(),
            early_answers=config.cluster.early_answers == "on",
            coding=Coding.of_job(config),
            partial=config.survival.partial,
            on_progress=self._on_progress,
        )
        beginning = files.beginning()
        start, restores = beginning.step, beginning.restores
        at = start if restores else None
        self.server = ServerMachine(member, job, fresh_place=place, restored_at=at)
        self.machine = self.server
        self.server.room = lambda to, size: self.transport.room(self.address_of(to), size)
        if restores and self.server.store is not None:
            restore_records(config, beginning.job, start, self.server.store, self._on_progress)
        self.saver = PartSaver(config, self.line.tell, start, files.job(), job.arenas)
        self.updates = UpdateCount()
        self.priorities: Priorities | None = None
        self._priority_saves = 0  # in this interval
        if job.partial:
            self.server.on_applied = self._on_applied
            self._begin_priorities()
        self._was_whole = place is not None
        self._told = 0.0
        self._rebuilds_since = 0.0  # its first view, if that had it rebuild
        self._resizes = 0  # how often the layout has changed
        self._told_in = NO_VIEW  # the view in which it told what it holds
        self._applied, self._applied_at = 0, 0.0  # the last step seen, and when
        self._send_at = self._look_at = 0.0  # when its deltas are sent, and those of others read
        # Where steps wait for the network, votes are what they wait for in the end.
        self._pause_share = 0.0 if job.early_answers else PAUSE_SHARE
        self._mates_at = -math.inf  # when others last wanted records of it
        self._trace(files)
        self.line.tell(Ready())

    def _peeks(self) -> Peeks | None:
        """Whose sockets are files is on one machine with all others. Where messages are encrypted,
        records are nobody else's business either.
        """
        if self.keys.secret is not None or not self.transport.address.startswith("ipc://"):
            return None
        return LocalPeeks(os.getpid(), int.from_bytes(os.urandom(8), "little"))

    def _trace(self, files: JobFiles) -> None:
        server = self.server
        tracer = Tracer(files, self.member, lambda: server.step if server.store else ANY)

        def watch_store() -> None:
            tracer.watch(server.store, "apply", "apply")
            tracer.watch(server.store, "parity_deltas", "delta out")
            tracer.watch(server.store, "apply_parity", "delta in")
            tracer.watch(server.rebuilder, "take_requests", "ask mates")
            tracer.watch(server.rebuilder, "take_sweep", "sweep")
            tracer.watch(server.rebuilder, "on_reply", "decode")
            tracer.watch(server.rebuilder, "on_peek", "decode")

        if server.store is not None:
            watch_store()
        tracer.watch(server, "_take_place", "take place", watch_store)
        tracer.watch(server, "_answer", "answer")
        trace_member(tracer, self.transport, server)

    def _on_progress(self, doing: str = "filling its records") -> None:
        """Another piece of many records is there: initialised, restored, reloaded or hashed."""
        self._progress += 1
        self.line.working(doing, self._progress, self._progress + 1)

    def _handle(self, sender: Member, address: str, message: Message) -> None:
        if isinstance(message, Stop) and message.reason == RETIRED and self.saver.writing:
            return  # it is told again
        super()._handle(sender, address, message)
        if isinstance(message, MateRequest | RangeRequest):
            self._mates_at = time.monotonic()
        self._save_if_due()

    def _save_if_due(self) -> None:
        """Right when a step was applied and its answers are out. One message applies one step at
        most: the pushes of the next wait for this server's vote.
        """
        server, store = self.server, self.server.store
        if server.last is not None:
            self.saver.end_at(server.last)
        step = self.saver.due(server.step, self.orders)
        if store is None or step is None:
            return
        if not store.memory().data:
            self.saver.last_done = True  # it only mirrors what others save
        elif step != store.step:
            self.saver.missed(step, server.place)
        elif server.whole:
            resizes = len(server.install.resizes) if server.install else 0
            self.saver.save(step, server.place, lambda: self._take(store, step), resizes)
        elif step in (self.config.steps, server.last):
            self.saver.not_yet(step)  # nothing comes after it: it is saved when all is rebuilt
        else:
            self.saver.fail(step, server.place, "this server is being rebuilt")

    def _take(self, store: Store, step: int) -> SavedRecords:
        """What this save has of the records, as they are now."""
        order = self.orders.base
        rule = self.priorities if self.orders.partial else None
        whole = self.orders.save_all and step == self.orders.save_at
        last = step in (self.config.steps, self.server.last)
        if whole or (self.config.saves_last_step and last):
            rule = None  # a model to go on from: all rows of one step
            order = Base(keep_from=order.keep_from) if whole else order
        if rule is None:
            full = self.config.checkpoint.policy == "full"
            saved = take_records(store, step, None if full else order)
        else:
            self._priority_saves += 1
            interval_ends = self._priority_saves >= round(1 / self.config.cpr.rho)
            saved = take_priorities(store, order, rule, interval_ends=interval_ends)
        unsaved = self.updates.unsaved
        if saved.rows != "priority":
            self._priority_saves = unsaved = 0
        saved.lacks = rule.unsaved if isinstance(rule, Mfu) else unsaved
        self.updates.saved(saved.lacks)
        return saved

    def _begin_priorities(self) -> None:
        """From what is saved, or known without a save: for a server that has just been filled."""
        make = RULES.get(self.config.cpr.variant)
        if make is not None and self.server.store is not None:
            cpr = self.config.cpr
            self.priorities = make(self.server.store, cpr.rho, cpr.large_share)

    def _on_applied(self, pushes: Sequence[Push]) -> None:
        self.updates.note(pushes)
        if self.priorities is not None:
            for push in pushes:
                for arena, index in enumerate(push.indices):
                    self.priorities.note(arena, index)

    def work(self) -> int:
        self._save_if_due()  # time, too, can let a step go
        self._report()
        if self.server.done and not self.server.left:
            self._leave_when_saved()
        self.post(self.server.sweep())
        if self._reserve is not None:
            return self._warm(self._reserve)
        wait_ms, rebuilder = self._protect(), self.server.rebuilder
        if rebuilder is None or self.server.mirrored or not rebuilder.rests_s:
            return wait_ms
        return min(wait_ms, math.ceil(rebuilder.rests_s * 1000))

    def _warm(self, reserve: Reserve) -> int:
        """A spare gets ready, for half of the time at most: others have work to do."""
        began = time.monotonic()
        if self.server.store is not None or not reserve.touch():
            self._reserve = None
        return math.ceil((time.monotonic() - began) * 1000)

    def _protect(self) -> int:
        """Sends deltas a little after the answers, which all trainers wait for, and looks at those
        of others a little later, at all of them at once.

        Votes are wanted only when the trainers have computed, so the servers that share a core are
        better off if all of them answer first, and if none is woken by every single delta. The
        pauses are a share of the time between steps.
        """
        server, now = self.server, time.monotonic()
        if self._applied != server.step:
            pause_s = min(self._pause_share * (now - self._applied_at), MAX_PAUSE_S)
            self._applied, self._applied_at = server.step, now
            self._send_at, self._look_at = now + pause_s, now + 2 * pause_s
        if server.unsent and not server.frozen() and now >= self._send_at:
            self.post(server.protect())
        wait_s = (self._send_at if server.unsent else self._look_at) - now
        calm = server.mirrored and not server.frozen() and now - self._mates_at > MATES_S
        self.transport.defer(on=calm and wait_s > 0)
        return math.ceil(wait_s * 1000) if wait_s > 0 else IDLE_MS

    def _report(self) -> None:
        server = self.server
        for error in server.errors:
            self.line.tell(Refused(what=error))
        server.errors.clear()
        if server.unsendable:
            self.line.tell(Refused(what=server.unsendable, ends=True))
            server.unsendable = ""
        for scrub in server.scrubbed:
            found = ScrubFound(
                place=server.place, round=scrub.number, records=scrub.records, wrong=scrub.wrong
            )
            self.line.tell(found)
        server.scrubbed.clear()
        if server.rebuilder is None:
            return
        now, place = time.monotonic(), server.place
        rows, size = server.rebuilder.rows_rebuilt, server.rebuilder.bytes_rebuilt
        if server.whole and not self._was_whole:
            self.line.tell(Rebuilt(place=place, rows=rows, bytes=size))
        elif not server.whole and now - self._told > REPORT_S:
            self._told = now
            left = server.store.invalid_records if server.store else 0
            left_s = (now - self._rebuilds_since) * left / rows if rows else None
            self.line.tell(Rebuilding(place=place, rows=rows, left=left, left_s=left_s))
        elif server.whole and not server.mirrored and server.store is not None:
            self.line.working("taking over records", rows, rows + server.store.invalid_records)
        self._was_whole = server.whole

    def on_view(self) -> None:
        if self.server.wants_save:
            self._fill_from_save()
        install = self.server.install
        if install and (install.rebuilding or install.moving):
            self._mates_at = time.monotonic()
        if install and len(install.resizes) != self._resizes:
            self._resizes = len(install.resizes)
            self.saver.begin_again_at(self.server.step)
        self._rebuilds_since = self._rebuilds_since or time.monotonic()
        self._was_whole = self.server.whole

    def _fill_from_save(self) -> None:
        """Partial recovery: this server goes on from its last save, the others from where they are.

        Nobody can go on without it, so it may take its time.
        """
        store = self.server.store
        assert store is not None
        began = time.monotonic()
        saved = reload_records(self.config, self.files.beginning(), store, self._on_progress)
        reloaded = Reloaded(
            place=self.server.place,
            step=store.step,
            saved=saved,
            rows=sum(arena.data_records for arena in store.arenas),
            bytes=store.memory().data,
            seconds=time.monotonic() - began,
        )
        self.line.tell(reloaded)
        self._begin_priorities()
        self.post(self.server.filled())

    def _leave_when_saved(self) -> None:
        """Nobody needs it any more when the trained model is saved and what it holds was heard."""
        if not self.saver.last_done:
            self.line.working("saving the last step", round(1000 * self.saver.done_share), 1001)
            self.saver.give_up_stalled(self.server.place)
        elif self._told_in != self.server.view:
            self._told_in = self.server.view
            self._tell_what_it_holds()
        elif not self.line.unheard:
            self.post(self.server.leave())

    def _tell_what_it_holds(self) -> None:
        store = self.server.store
        assert store is not None
        memory, digest = (
            store.memory(),
            store.digest(partial(self._on_progress, "hashing its records")),
        )
        holds = ServerHolds(
            place=self.server.place,
            digest=(str(digest.first), str(digest.second)),
            data=memory.data,
            parity=memory.parity,
            resident=resident_bytes(),
            refused=self.transport.refused,
            sent=self.sent,
            tiers=tier_facts(arena.records for arena in store.arenas),
        )
        self.line.tell(holds)
