"""The coordinator as a process: it listens, saves, and watches hearts."""

from __future__ import annotations

import contextlib
import os
import secrets
import time

from planaria.cluster.distant import Distant
from planaria.cluster.files import JobFiles
from planaria.cluster.node import POLL_MS, Node, log
from planaria.cluster.nursery import ERRORS
from planaria.cluster.tracing import ANY, Tracer
from planaria.control.remembering import Claims
from planaria.coordinator.machine import SUPERVISOR, CoordinatorMachine
from planaria.coordinator.state import first_state
from planaria.coordinator.watch import Silence, Watch
from planaria.dense import keepers
from planaria.errors import ClusterError
from planaria.wire.codec import Envelope
from planaria.wire.control import Control, Finished, Silent, Viewed, WaitedFor, WantMore
from planaria.wire.machine import Outbox
from planaria.wire.messages import (
    NO_VIEW,
    Heartbeat,
    Install,
    Member,
    Message,
    Spawn,
    Suspect,
)

ORPHANS_S = 0.2  # how long processes without a supervisor may take to end
UNSPOKEN = (
    "the command that ran this job has ended without a word: it was killed, or ran out of memory "
    "or open files; all its processes have ended"
)
NOTHING_SAVED = "; nothing was saved: start it again, with checkpoint.path to have a way back"


def rehearse() -> None:
    """For a nursery. To have imported is most of it."""


TIERS_STAY = (
    "with tier.ram the number of servers is fixed, for nobody knows whether their disks have room; "
    "save, and --resume with another"
)


class CoordinatorNode(Node):
    def __init__(self, files: JobFiles, member: Member) -> None:
        self._is_beside = not files.is_copy  # the supervisor
        super().__init__(files, member, "coordinator")
        config = self.config
        self.owner = f"{member} {secrets.token_hex(8)}"  # no other process ever has this name
        self._beat_at = 0.0
        self._distant: Distant | None = None
        if not self._is_beside:
            self._distant = Distant(self.transport, self.line, self._beat)
        self._claims: Claims = self._distant or files
        epoch = self._claims.claim(self.owner)
        saved = self._claims.load()
        state = saved or first_state(
            epoch,
            [f"server-{place}" for place in range(config.servers)],
            [f"trainer-{rank}" for rank in range(config.trainers)],
            committed=files.start(),
            keepers=keepers(config.r, config.trainers),
        )
        self.machine = CoordinatorMachine(
            state,
            config.layout,
            epoch=epoch,
            now=time.monotonic(),
            retry_s=config.cluster.retry_ms / 1000,
            deadline_s=config.cluster.deadline_s,
            partial=config.survival.partial,
            most_trainers=config.most_trainers if config.is_elastic else 0,
            by_survivors=config.rebuild.by == "survivors",
        )
        if config.keeps_domains_apart:
            self.machine.moving.domains = {}
        if config.tier.ram is not None:
            self.machine.moving.fixed = TIERS_STAY
        self.watch = Watch(config.cluster.heartbeat_limit_ms / 1000, config.cluster.hang_limit_s)
        if saved:  # everybody was there once: who does not show up is silent
            self.watch.expect(self.machine.members, time.monotonic())
        self.book.update(state.install.addresses)
        self._announced: Install | None = None
        self._silent: dict[Member, Silence] = {}  # found to be, and not given up so far
        self._waited_for: set[Member] = set()  # as was told
        self._again = 0
        self._supervisor = os.getppid()
        tracer = Tracer(files, member, lambda: ANY)
        tracer.watch(self, "_suspect", "detect")
        tracer.watch(self.machine, "receive", lambda sender, message, now: type(message).__name__)
        tracer.watch(self.transport, "send_all", "send")

    def _on_orphan(self) -> None:
        """Cleans up in the supervisor's place; the others end at the same moment."""
        if not self._is_beside:  # the folder here is the host's
            return
        time.sleep(ORPHANS_S)
        if os.getppid() != self._supervisor and not self.machine.finished:
            self._speak_for_the_supervisor()
        self.files.remove(keep_logs=True)

    def _speak_for_the_supervisor(self) -> None:
        """It was killed, or a library has aborted it: whoever started it should know the way on."""
        from planaria.cluster.archive import way_back  # coordinators start faster without

        back = way_back(self.config, self.files.job(), self.orders.saved)
        for descriptor in map(int, os.environ.get(ERRORS, "").split()):
            with contextlib.suppress(OSError):
                os.write(descriptor, f"error: {UNSPOKEN}{back or NOTHING_SAVED}\n".encode())

    def on_orders(self) -> None:
        """Who has ended, and whether somebody wants everybody to start afresh."""
        self.machine.partial &= self.orders.partial
        if self.machine.moving.domains is not None:
            self.machine.moving.domains = self.orders.domains
        for member in self.orders.gone:
            if member not in self.machine.dead:
                self._suspect(member, gone=True)
        if self.orders.again > self._again:
            self._again = self.orders.again
            self._after(self.machine.start_afresh(time.monotonic()))

    def run(self) -> str:
        self._after(self.machine.take_outbox())
        while not self.machine.finished:
            self.transport.poll(POLL_MS)
            now = time.monotonic()
            self.line.turn()
            self._beat(now)
            for envelope in self._received():
                self.book[envelope.sender] = envelope.address
                if isinstance(envelope.message, Control):
                    self.on_control(envelope.message)
                    continue
                age_ms = getattr(envelope.message, "age_ms", 0)
                self.watch.heard(envelope.sender, now, age_ms / 1000)
                self._receive(envelope.sender, envelope.message)
            silences = self.watch.tick(now)
            self._end_if_cut_off(silences)
            for silence in silences:
                if silence.member in self.machine.expected:
                    self._silent[silence.member] = silence
                    self._suspect(silence.member, gone=False)
                else:
                    self.watch.forget(silence.member)
            self._after(self.machine.tick(now))
            self._tell_waited_for()
        log(f"the job is over: {self.machine.failure or 'done'}")
        self.line.tell(Finished(failure=self.machine.failure))
        self.last_words()
        self.transport.close()  # once everybody has been told to stop
        return self.machine.failure or ""

    def _end_if_cut_off(self, silences: list[Silence]) -> None:
        """Who hears nobody at all, on a machine of its own, takes the fault for its own: the next
        coordinator is elsewhere. If it hears nobody either, they are gone.
        """
        living = {*self.machine.members} - self.machine.dead
        if self._distant and living <= {one.member for one in silences if not one.hung}:
            raise ClusterError("no member is heard here: this machine may be cut off from them")

    def _received(self) -> list[Envelope]:
        """What came while something was saved elsewhere, and what comes now."""
        waited: list[Envelope] = []
        if self._distant is not None:
            waited, self._distant.waiting = self._distant.waiting, []
        return [*waited, *self.transport.receive()]

    def _beat(self, now: float) -> None:
        """From the main loop itself: the supervisor replaces a coordinator that hangs."""
        if now - self._beat_at >= self.config.cluster.heartbeat_ms / 1000:
            self._beat_at = now
            self.line.say(Heartbeat(view=NO_VIEW))

    def _suspect(self, member: Member, *, gone: bool) -> None:
        self._receive(SUPERVISOR, Suspect(view=NO_VIEW, member=member, gone=gone))

    def _receive(self, sender: Member, message: Message) -> None:
        self._after(self.machine.receive(sender, message, time.monotonic()))

    def _after(self, outbox: Outbox) -> None:
        """Saves before it sends: what was never saved was never said."""
        state = self.machine.take_state()
        if state is not None:
            self._claims.save(state, self.owner)
        for member in sorted(self._silent.keys() & self.machine.dead):
            silence = self._silent.pop(member)
            log(f"{member} is given up: {silence}")
            if not silence.hung:
                self.watch.gave_up(silence, time.monotonic())
            self.line.tell(Silent(member=member, seconds=silence.seconds, hung=silence.hung))
        for to, message in outbox:
            if to == SUPERVISOR and isinstance(message, Spawn):
                want = WantMore(role=message.role, count=message.count, grows=message.grows)
                self.line.tell(want)
        self.post([(to, message) for to, message in outbox if to != SUPERVISOR])
        self._announce(self.machine.install)

    def _tell_waited_for(self) -> None:
        """After a tick, who is silent is somebody that the job cannot do without."""
        waited_for = {*self.machine.silent}
        if waited_for - self._waited_for:
            deadline_s = self.machine.deadline_s
            self.line.tell(WaitedFor(members=sorted(waited_for), deadline_s=deadline_s))
        self._waited_for = waited_for

    def _announce(self, install: Install) -> None:
        if install is self._announced or not install.addresses:
            return
        if self._announced is None or install.view != self._announced.view:
            self.line.tell(Viewed.of(install))
        self._announced = install
        self.watch.expect(self.machine.members, time.monotonic())
