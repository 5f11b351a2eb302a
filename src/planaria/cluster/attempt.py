"""One set of processes, from their start to their end: the supervisor's loop.

What to do is decided by machines without I/O (control.supervising, control.saving); this file
carries messages, signals and files between them and the world, and tells observers what happens.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from planaria.cluster.archive import Archive
from planaria.cluster.events import Exited, JobEvent, Note, Observer, StopAsked
from planaria.cluster.files import Beginning, JobFiles
from planaria.cluster.hosts import Hosts, HostsLauncher
from planaria.cluster.launcher import Launcher, LocalLauncher
from planaria.cluster.node import limits_of
from planaria.cluster.scripts import Scripts
from planaria.cluster.transport import open_transport
from planaria.config import Config, describe_shared
from planaria.control.acting import Kill, Send, Start, Verdict
from planaria.control.children import FIRST_BATCH, Child, Failure
from planaria.control.losses import Losses
from planaria.control.remembering import Remembering
from planaria.control.saving import SaveMachine, named
from planaria.control.supervising import SupervisorMachine
from planaria.coordinator.machine import SUPERVISOR
from planaria.errors import ClusterError, ExactnessError
from planaria.exactness import Fingerprint, check
from planaria.files import write_atomically
from planaria.layout.resizing import layout_after
from planaria.wire.codec import Envelope
from planaria.wire.control import (
    AskStatus,
    ClaimEpoch,
    DataEnded,
    LastStep,
    Listening,
    Obeyed,
    PartFailed,
    PartSaved,
    Ready,
    Refused,
    Reloaded,
    Running,
    SaveState,
    SaveWanted,
    Status,
    StepDone,
    Tell,
    Told,
    Viewed,
    WaitedFor,
    Working,
)
from planaria.wire.messages import Heartbeat, Member
from planaria.wire.telling import Listener

POLL_MS = 50


class Attempt:
    """The processes of a job. Use it as a context manager; leaving it leaves nothing behind."""

    def __init__(
        self,
        config: Config,
        beginning: Beginning,
        saves: SaveMachine,
        archive: Archive | None,
        losses: Losses,
        observers: Sequence[Observer],
        fingerprint: Fingerprint | None = None,
        scripts: Scripts | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """fingerprint: what trainers must agree with, where that is known already. hosts: where the
        processes run, if not here.
        """
        self._scripts = scripts
        self._hosts = hosts
        self._placed = [f"server-{place}" for place in range(config.servers)]  # in the last view
        self._moving = ""  # what becomes of the number of servers
        self._shared = ""  # which hosts have several members of a group, as was said
        self._labels: dict[Member, str] = {}  # fault domains, where all is on this machine
        self.config = config
        self.beginning = beginning
        self.saves = saves
        self.losses = losses
        self.fingerprint = fingerprint
        self.failed = False  # whether the logs are worth keeping
        self._archive = archive
        self._observers = observers
        self._listeners: dict[Member, Listener] = {}
        self._addresses: dict[Member, str] = {}
        self._leaving: str | None = None  # why the job is left once the current step is saved
        self._leave_by = 0.0
        self._failures = 0
        self._struck: set[Member] = set()  # on purpose: nobody need read their logs

    def __enter__(self) -> Attempt:
        self.files = JobFiles.fresh()
        try:
            beginning = msgspec.structs.replace(self.beginning, pause_after=self._pauses_after())
            keys = self.files.create(self.config, beginning)
            bind = self.files.bind_address(self.config, SUPERVISOR)
            self.transport = open_transport(SUPERVISOR, keys, bind, limits_of(self.config))
            address = self.transport.address.encode()
            write_atomically(self.files.folder / "supervisor.address", address)
            self.launcher = self._launcher().__enter__()
        except OSError as error:
            self.files.remove()
            raise ClusterError(
                f"the job could not be started in {self.files.folder}: {error}"
            ) from None
        except BaseException:
            self.files.remove()
            raise
        self.transport.watch(self.launcher.fileno())
        if self._archive:
            self.transport.watch(self._archive.descriptor)
        now = time.monotonic()
        self.machine = SupervisorMachine(self.config, self.beginning.step, now)
        self._remembering = Remembering(self.files)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.launcher.close()
        self.transport.close()
        verdict = self.machine.verdict
        lost = verdict is None or verdict.sentence is not None
        self.files.remove(keep_logs=self.failed or (lost and kind is None))

    def _launcher(self) -> Launcher:
        if self._hosts is not None:
            return HostsLauncher(self.config, self.files, self._hosts, self.note)
        return LocalLauncher(self.config, self.files, self._scripts)

    # ------------------------------------------------------------------ for observers

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def step(self) -> int:
        return self.machine.step

    def member_of(self, role: str, number: int) -> Member | None:
        """Who has a place, a rank or a number among the spares now; None if nobody."""
        if role == "coordinator":
            return self.machine.coordinator or None
        by_role = {
            "server": self.machine.servers,
            "trainer": self.machine.trainers,
            "spare": self.machine.spares,
        }
        members = by_role[role]
        return members[number] if number < len(members) else None

    def signal(self, member: Member, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal to a process, if it is there; returns when."""
        self._struck.add(member)
        self.launcher.signal(member, number)
        return time.monotonic()

    def emit(self, member: Member, what: Any) -> None:
        event = JobEvent(time.monotonic(), member, what)
        for observer in self._observers:
            observer.on_event(event, self)

    def note(self, line: str) -> None:
        self.emit("", Note(line))

    # ------------------------------------------------------------------ the loop

    def run(self) -> Verdict:
        """Until the processes have ended well, or cannot go on."""
        try:
            while self.machine.verdict is None:
                self._turn()
        except OSError as error:  # of this process: others' are theirs
            return Verdict(f"the supervisor could not go on: {error}")
        return self.machine.verdict

    def leave(self, why: str) -> None:
        """Somebody wants the job to end: the current step is saved first, if that can be."""
        if self._archive is None or self.machine.verdict or not self.machine.servers:
            self.machine.verdict = self.machine.verdict or Verdict(why)
            return
        self._leave_when_saved(why)
        self.note(f"{why}: the current step is saved first; once more to leave at once")

    def _turn(self) -> None:
        self.transport.poll(POLL_MS)
        now = time.monotonic()
        for envelope in self.transport.receive():
            self._on_message(envelope, now)
        self._tend_scripts(now)
        for member, ended in self.launcher.ended():
            role = self.machine.children[member].role if member in self.machine.children else ""
            self._forget(member)
            self.machine.on_exit(member, ended, now)
            self.emit(member, Exited(role, ended.code))
        if self._archive:
            self._archive.report_to(self.saves, self.note)
        self.machine.on_waiting(self.launcher.waiting(), now)
        self.machine.tick(now)
        self.saves.tick(now)
        self._leave_if_saved(now)
        self._order()
        self._act()
        for observer in self._observers:
            observer.on_tick(now, self)

    def _tend_scripts(self, now: float) -> None:
        """A script's process cannot tell before its first batch that it works."""
        ranks = {member: rank for rank, member in enumerate(self.machine.trainers)}
        for member, looks in self.launcher.tend(ranks, now):
            self._on_told(member, Working(what=FIRST_BATCH, done=looks, of=looks + 1), now)

    def _act(self) -> None:
        # Orders first: somebody may wait for them, and to start a process takes a while.
        for action in sorted(self.machine.take(), key=lambda one: not isinstance(one, Send)):
            match action:
                case Start():
                    self.launcher.start(action.role, action.member, action.number)
                case Kill():
                    self.launcher.signal(action.member, signal.SIGKILL)
                case Send():
                    self._send(action.to, action.orders)
        if self._archive:
            for work in self.saves.take_work():
                self._archive.submit(work)
        failures, self.machine.failures = self.machine.failures, []
        for failure in failures:
            self._on_failure(failure)
        for notes in (self.machine.notes, self.saves.notes):
            lines = notes[:]
            notes.clear()
            for line in lines:
                self.note(line)

    def _order(self) -> None:
        saves = self.saves
        self.machine.order(
            save_at=saves.save_at,
            save_all=saves.save_all,
            saved=saves.newest(),
            base=saves.base,
            partial=not self.losses.over_budget,
            pause_after=self._pauses_after(),
            domains=self._domains(),
        )

    def _domains(self) -> dict[Member, str]:
        """Of servers and spares, where groups keep them apart."""
        if not self.config.keeps_domains_apart:
            return {}
        children = self.machine.children.items()
        domains = {m: self._domain(m, one) for m, one in children if one.role == "server"}
        return {member: domain for member, domain in domains.items() if domain is not None}

    def _domain(self, member: Member, child: Child) -> str | None:
        """Where all is on this machine, as the configuration names it: whoever replaces a server
        stands where that one did, and who comes to be one more, in a domain of its own.
        """
        if self._hosts is not None:
            return self.launcher.domain(member)
        return self._labels.get(member, member)

    def _label(self, viewed: Viewed) -> None:
        before, self._placed = self._placed, viewed.servers
        known = self._labels or dict(zip(before, self.config.cluster.domains or (), strict=False))
        for place, member in enumerate(viewed.servers):
            if member not in known and place < len(before):
                known[member] = known.get(before[place], member)
        self._labels = known

    def _note_shared_domains(self, viewed: Viewed) -> None:
        """Who replaces a server may have to stand where others of its groups do."""
        known = self._domains()
        if viewed.moving is not None or not known.keys() >= {*viewed.servers}:
            return
        layout = layout_after(self.config.layout, viewed.resizes)
        shared = describe_shared(layout, [known[member] for member in viewed.servers])
        if shared != self._shared:
            self._shared = shared
            self.note(shared or "no two members of a group share a host any more")

    def _pauses_after(self) -> int:
        """The first step that an observer wants to be asked after; not one that is over."""
        wanted = [observer.pauses_after() for observer in self._observers]
        return min([step for step in wanted if step > self.beginning.step], default=0)

    def _send(self, member: Member, message: Any) -> None:
        if address := self._addresses.get(member):
            self.transport.send(address, self.transport.encode(message))

    def _forget(self, member: Member) -> None:
        """It has ended; what it told may still be on its way."""
        self._addresses.pop(member, None)
        self.transport.forget({*self._addresses.values()})

    # ------------------------------------------------------------------ what is told

    def _on_message(self, envelope: Envelope, now: float) -> None:
        member, message = envelope.sender, envelope.message
        if member in self.machine.children:
            self._addresses[member] = envelope.address
        match message:
            case Tell():
                listener = self._listeners.setdefault(member, Listener())
                for what in listener.receive(message):
                    self._on_told(member, what, now)
                self._send(member, listener.heard())
            case Obeyed():
                self.machine.receive(member, message, now)
            case Heartbeat():
                self.machine.heard(member, now)
            case ClaimEpoch() | SaveState():
                current = member == self.machine.coordinator
                answer = self._remembering.answer(message, current=current)
                self.transport.send(envelope.address, self.transport.encode(answer))
            case AskStatus():
                if message.stop:
                    self.emit("", StopAsked())
                self._drain(message.drain)
                self.transport.send(envelope.address, self.transport.encode(self._status()))

    def _on_told(self, member: Member, what: Told, now: float) -> None:
        before = {*self.machine.servers, *self.machine.trainers}
        self.machine.receive(member, what, now)
        match what:
            case Listening() if member == self.machine.coordinator:
                self._publish_coordinator(what.address)
            case Ready() if what.fingerprint is not None:
                self._compare(member, what.fingerprint)
            case StepDone():
                self.losses.on_step(what)
                self._leave_by = now + self.config.checkpoint.stall_s  # steps may be slow
                if what.rank == 0:
                    self.saves.on_step(what.step, now)
            case Viewed():
                self.saves.on_lost(len(before - {*what.servers, *what.trainers}), now)
                self.saves.on_view(what.resizes)
                self._moving = _describe(what)
                self._label(what)
                self._note_shared_domains(what)
            case WaitedFor():
                self._on_waited_for(what)
            case PartSaved():
                self.saves.on_part(what, now)
                self._leave_by = now + self.config.checkpoint.stall_s
            case PartFailed():
                self.saves.on_part_failed(what, now)
            case Reloaded():
                self._on_reloaded(what)
            case DataEnded():
                self._on_data_ended(what)
            case Refused() if what.ends:
                self.machine.verdict = self.machine.verdict or Verdict(what.what)
            case LastStep():
                self.saves.end_at(what.step, now)
                self.config = self.machine.config = self.saves.config
            case SaveWanted():
                self.saves.save_soon()
        self.emit(member, what)

    def _status(self) -> Status:
        machine = self.machine
        processes = [
            Running(
                who=machine.who(member),
                member=member,
                host=self.launcher.where(member),
                state=child.state,
                domain=(self.launcher.domain(member) if self._hosts else self._labels.get(member))
                or "",
            )
            for member, child in machine.children.items()
        ]
        return Status(
            step=machine.step,
            steps=self.config.steps,
            saved=self.saves.newest(),
            failures=self._failures,
            processes=processes,
            lost=machine.lost,
            moving=self._moving,
        )

    def _drain(self, hosts: Sequence[str]) -> None:
        """Nobody is put there any more, and no spare there may take a place."""
        if self._hosts is not None:
            for host in hosts:
                self._hosts.drain(host)
        for spare in self.machine.spares:
            if self.launcher.where(spare) in hosts:
                self.machine.kill(spare, "its host is drained")

    def _publish_coordinator(self, address: str) -> None:
        """For whoever looks from outside; the job goes on without it."""
        try:
            write_atomically(self.files.folder / "coordinator.address", address.encode())
        except OSError as error:
            self.note(f"nobody outside will find the coordinator: {error}")

    def _on_failure(self, failure: Failure) -> None:
        self._failures += 1
        self.failed |= failure.member not in self._struck
        self.emit(failure.member, failure)

    def _on_waited_for(self, told: WaitedFor) -> None:
        who = ", ".join(map(self.machine.who, told.members))
        self.note(
            f"{who} cannot be heard, and the job cannot do without: it waits, "
            f"{told.deadline_s:.0f} s at most (cluster.deadline_s)"
        )

    def _on_reloaded(self, reloaded: Reloaded) -> None:
        saves, losses = self.saves, self.losses
        counted = saves.last_of_all_rows(reloaded.place, reloaded.saved)
        since = max(counted, min(self.beginning.step, reloaded.saved))
        self.note(losses.on_reloaded(reloaded, since, saves.lacks(reloaded.place, reloaded.saved)))
        saves.extra.update(losses.to_save())
        if losses.passes_budget():
            self.note("the lost samples have passed the budget: at the next failure all roll back")

    def _on_data_ended(self, ended: DataEnded) -> None:
        # Not the step before that one: a trainer that reads ahead may be the first to find the end.
        last = ended.samples // self.config.batch
        why = (
            f"step {last + 1} wants more samples than data.path has: its {ended.samples} suffice "
            f"for {last} steps; lower steps or batch"
        )
        if self._leaving:
            return
        if self._archive is None or last <= self.beginning.step:
            self.machine.verdict = self.machine.verdict or Verdict(why)
            return
        self._leave_when_saved(why, last)

    def _compare(self, member: Member, found: Fingerprint) -> None:
        """Whether a trainer computes the bits that the others compute."""
        if self.fingerprint is None:
            self.fingerprint = found
        try:
            for line in check(self.fingerprint, found, self.config.reproducible):
                self.note(f"{member}: {line}")
        except ExactnessError as error:
            self.machine.verdict = self.machine.verdict or Verdict(f"{member}: {error}")
        self.saves.extra["fingerprint"] = msgspec.to_builtins(self.fingerprint)

    # ------------------------------------------------------------------ saving, and leaving

    def _leave_when_saved(self, why: str, step: int | None = None) -> None:
        self._leaving = why
        self._leave_by = time.monotonic() + self.config.checkpoint.stall_s
        self.saves.save_now(step)

    def _leave_if_saved(self, now: float) -> None:
        if self._leaving is None or self.machine.verdict:
            return
        saved = self.saves.saved_now
        if saved is None and now < self._leave_by:
            return
        # Which one is told with the way back: a later one may become whole before all have left.
        said = "what was trained so far was saved first"
        if not saved:
            lacking = self.saves.waits_for().get(self.saves.save_at, [])
            part = f", for want of the part of {', '.join(map(named, lacking))}" if lacking else ""
            said = f"the current step could not be saved{part}"
        self.machine.verdict = Verdict(f"{self._leaving}; {said}")


def _describe(viewed: Viewed) -> str:
    """What becomes of the servers, if anything."""
    moving = viewed.moving
    if moving is None:
        return ""
    if moving.lost:
        return f"{moving.servers} servers take over what the lost ones held"
    return f"records move: from {len(viewed.servers) - moving.come} to {moving.servers} servers"
