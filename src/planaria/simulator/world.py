"""The world of one schedule: processes, a network, a disk and a supervisor.

Time is simulated, in seconds, and starts far from zero. Every message is delivered after a random
delay, so messages overtake one another; some are lost and some come twice. What else goes wrong is
in faults.py, what must hold all the same in checks.py. One seed decides everything.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from planaria.coordinator.machine import SUPERVISOR, CoordinatorMachine
from planaria.coordinator.watch import Pulse, Watch
from planaria.dense import DenseCopies
from planaria.layout import Layout
from planaria.layout.resizing import layout_after
from planaria.server.job import ServerJob
from planaria.server.machine import ServerMachine
from planaria.simulator.checks import Failure, Oracle
from planaria.simulator.coordinators import Coordinators
from planaria.simulator.disk import Disk
from planaria.simulator.driving import Driver
from planaria.simulator.faults import Faults, plan
from planaria.simulator.network import NETWORKS, Cut, Links
from planaria.simulator.peeking import SimulatedPeeks
from planaria.simulator.process import (
    BEAT_S,
    PULSE_S,
    RETRY_S,
    SETTLED_S,
    SPAWN_S,
    START_S,
    TICK_S,
    Process,
)
from planaria.simulator.toy import ToyJob
from planaria.trainer.machine import TrainerMachine
from planaria.wire.machine import COORDINATOR, Machine, Outbox
from planaria.wire.messages import (
    NO_VIEW,
    Heartbeat,
    Hello,
    Install,
    Member,
    Message,
    Scale,
    Scaled,
    ScaleTrainers,
    Scrub,
    Scrubbed,
    Shift,
    Spawn,
    Stop,
    Suspect,
)


class World:
    """One job under one schedule. `run` raises Failure when a promise is broken."""

    server_class: type[ServerMachine] = ServerMachine
    trainer_class: type[TrainerMachine] = TrainerMachine
    coordinator_class: type[CoordinatorMachine] = CoordinatorMachine
    disk_class: type[Disk] = Disk
    watch_class: type[Watch] = Watch
    peeks_class: type[SimulatedPeeks] = SimulatedPeeks

    def __init__(
        self, job: ToyJob, seed: int, faults: Faults, *, spares: int = 1, network: str = "uneven"
    ) -> None:
        self.job = job
        self.seed = seed
        self.faults = faults
        self.links = Links(NETWORKS[network], faults.drop, faults.duplicate)
        self.random = random.Random(seed)
        self.now = self.calm_at = START_S
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        self.delivered = 0
        self.scrubs = 0  # finished ones
        self.scaled = self.resized = 0  # to how many servers, and how often
        self.unwanted: list[Member] = []  # servers that are to go
        self.story: list[str] = []  # the faults, for whoever reads a failure
        self.processes: dict[Member, Process] = {}
        self.dead: set[Member] = set()
        self.condemned: set[Member] = set()  # dead, or said to be
        self.given_up: set[Member] = set()  # by any coordinator, ever
        self.coming = Counter[str]()  # by role: those that were asked for, and start
        self.stillborn = 0  # so many of the processes to come die at once
        self.ended = False
        self.names = 0
        self.hang_s = self.random.choice((3.0, 10.0))
        self.oracle = Oracle(self)
        self.disk = self.disk_class()
        self.coordinators = Coordinators(self)
        servers = [self.name("server") for _ in range(job.servers)]
        trainers = [self.name("trainer") for _ in range(job.trainers)]
        self.first_members = (servers, trainers)
        for place, member in enumerate(servers):
            self._start(member, "server", self._first_server(member, place))
        for rank, member in enumerate(trainers):
            self._start(member, "trainer", self._trainer(member, rank))
        for _ in range(spares):
            self._spawn("server")
        self.coordinators.start_first()
        plan(self)
        self.after(PULSE_S, self._pulse)

    @property
    def layout(self) -> Layout:
        """That of the newest view."""
        install = self.disk.install
        return layout_after(self.job.layout, install.resizes, install.moving)

    @property
    def coordinator(self) -> Member:
        return self.coordinators.current

    # ------------------------------------------------------------------ processes

    def name(self, role: str) -> Member:
        self.names += 1
        return f"{role}-{self.names}"

    def _trainer(self, member: Member, rank: int | None) -> TrainerMachine:
        job = self.job.trainer_job(RETRY_S)
        dense = DenseCopies() if rank is None else self.job.first_dense()
        return self.trainer_class(member, job, dense, fresh_rank=rank)

    def _server_job(self, member: Member) -> ServerJob:
        job = self.job.server_job(RETRY_S)
        if not self.job.peeks:
            return job
        number = int(member.removeprefix("server-"))
        return replace(job, peeks=self.peeks_class(self, number))

    def _first_server(self, member: Member, place: int) -> ServerMachine:
        job, at = self._server_job(member), self.job.restored_at
        # Also at step 0: to copy records is much quicker than to make them for every schedule.
        machine = self.server_class(member, job, fresh_place=place, restored_at=at)
        assert machine.store
        self.job.restore(machine.store)
        return machine

    def _start(self, member: Member, role: str, machine: Any) -> None:
        process = self.processes[member] = Process(role, machine, Pulse(BEAT_S, self.now))
        if role == "trainer":
            process.driver = Driver(self, member, machine)
        self._hello(member)
        self.after(self.random.uniform(0.0, TICK_S), self.tick, member)
        self.after(self.random.uniform(0.0, BEAT_S), self._beat, member)

    def _come(self, role: str) -> None:
        self.coming[role] -= 1
        self._spawn(role)

    def _spawn(self, role: str) -> None:
        member = self.name(role)
        if self.stillborn:
            self.stillborn -= 1
            self.note(f"{member} dies at birth")
            self.dead.add(member)
            self.suspect(member, 0.01, gone=True)
        elif role == "server":
            self._start(member, role, self.server_class(member, self._server_job(member)))
        else:
            self._start(member, role, self._trainer(member, None))

    def _hello(self, member: Member) -> None:
        """A process says hello until a view names it."""
        process = self.processes.get(member)
        if process is None or process.machine.install is not None:
            return
        if self.now >= process.paused_until:
            hello = Hello(view=NO_VIEW, member=member, role=process.role, address=f"at {member}")
            self.send(member, COORDINATOR, hello)
        self.after(RETRY_S, self._hello, member)

    def tick(self, member: Member) -> None:
        process = self.processes.get(member)
        if process is None:
            return
        if self.now >= process.paused_until:
            process.pulse.turn(self.now)
            if process.watch:
                self._look_for_silence(member, process.watch, process.machine)
            if member in self.processes and self.now >= process.paused_until:
                self.finish_call(member, process.machine.tick(self.now))
        self.after(TICK_S, self.tick, member)

    def _look_for_silence(self, member: Member, watch: Watch, machine: CoordinatorMachine) -> None:
        for silence in watch.tick(self.now):
            if silence.member in machine.expected:
                suspect = Suspect(view=NO_VIEW, member=silence.member, gone=False)
                self.hand_over(SUPERVISOR, member, suspect)
            else:
                watch.forget(silence.member)

    def _beat(self, member: Member) -> None:
        process = self.processes.get(member)
        if process is None:
            return
        if self.now >= process.paused_until or process.beats:
            beat = Heartbeat(view=NO_VIEW, age_ms=process.pulse.beat(self.now))
            self.send(member, COORDINATOR, beat)
        self.after(BEAT_S, self._beat, member)

    # ------------------------------------------------------------------ the network

    def after(self, delay: float, event: Callable[..., None], *arguments: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, event, arguments))

    def now_first(self, event: Callable[..., None], *arguments: Any) -> None:
        """Before everything else that is due now."""
        heapq.heappush(self.events, (self.now, 0, event, arguments))

    def send(self, sender: Member, to: Member, message: Message) -> None:
        for delay_s in self.links.delays(self.random, self.now) if to != SUPERVISOR else (0.001,):
            self.after(delay_s, self._arrive, sender, to, message)

    def _arrive(self, sender: Member, to: Member, message: Message) -> None:
        # Of what a killed process had sent, some was still in its buffers.
        if sender in self.dead and self.random.random() < 0.5:
            return
        to = self.coordinator if to == COORDINATOR else to
        if to == SUPERVISOR:
            self._on_supervisor(message)
        elif self.links.passes(sender, to, self.now):
            self.deliver(sender, to, message)

    def _on_supervisor(self, message: Message) -> None:
        if isinstance(message, Spawn):
            for _ in range(message.count - self.coming[message.role]):
                self.coming[message.role] += 1
                self.after(SPAWN_S, self._come, message.role)
        elif isinstance(message, Scaled):
            if message.state == "refused":
                raise Failure(f"no {message.servers} servers: {message.why}")
            if message.state == "done" and not message.trainers:
                self.scaled, self.resized = message.servers, self.resized + 1
        elif isinstance(message, Scrubbed):
            self.scrubs += 1
            if message.wrong:
                raise Failure(f"a scrub found {message.wrong} wrong records")

    def deliver(self, sender: Member, to: Member, message: Message) -> None:
        if not self.is_up(to, self.deliver, sender, to, message):
            return
        if not isinstance(message, Heartbeat):
            self.delivered += 1
            self.on_delivery(sender, to, message)
        self.hand_over(sender, to, message)

    def hand_over(self, sender: Member, to: Member, message: Message) -> None:
        process = self.processes.get(to)
        if process is None:
            return  # killed by `on_delivery`
        if isinstance(message, Install):
            self.oracle.on_install(to, message)
        elif isinstance(message, Stop):
            self.oracle.on_stop(to, message)
        if process.watch:
            age_s = message.age_ms / 1000 if isinstance(message, Heartbeat) else 0.0
            if sender != SUPERVISOR:
                process.watch.heard(sender, self.now, age_s)
            out = process.machine.receive(sender, message, self.now)
        else:
            out = process.machine.receive(sender, message)
        self.finish_call(to, out)

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        """For those who watch, or kill at a chosen message."""

    # ------------------------------------------------------------------ drivers

    def finish_call(self, member: Member, outbox: Outbox) -> None:
        """What a driver does after each call of a machine: save or compute, then send."""
        process = self.processes[member]
        machine = process.machine
        if process.role == "coordinator":
            outbox = self.coordinators.save(member, machine, outbox)
        else:
            if process.driver is None:
                outbox += machine.protect() + machine.sweep()
            else:
                process.driver.advance()
                outbox += machine.take_outbox()
            if machine.done and not machine.left:
                outbox += machine.leave()
        for to, message in outbox:
            self.send(member, to, message)

    def is_up(self, member: Member, event: Callable[..., None], *arguments: Any) -> bool:
        """Whether a process runs now. If it only stands still, the event waits until it wakes."""
        process = self.processes.get(member)
        if process is not None and self.now < process.paused_until:
            process.backlog.append((event, arguments))
            return False
        return process is not None

    # ------------------------------------------------------------------ what faults do

    def note(self, what: str) -> None:
        self.story.append(f"{self.now - START_S:.3f} {what}")

    def lasts(self, seconds: float) -> None:
        """A fault goes on for so long from now."""
        self.calm_at = max(self.calm_at, self.now + seconds)

    def at_risk(self, member: Member, seconds: float) -> None:
        """For so long, and until it has been heard of again, this member may be given up."""
        self.lasts(seconds)
        if process := self.processes.get(member):
            process.at_risk_until = max(process.at_risk_until, self.now + seconds + SETTLED_S)

    def kill(self, member: Member, detected_s: float = 0.005) -> None:
        self.note(f"kill {member}")
        self.dead.add(member)
        del self.processes[member]
        self.suspect(member, detected_s, gone=True)

    def suspect(self, member: Member, delay: float, *, gone: bool) -> None:
        """The coordinator is told; the same happens when the supervisor sees an exit."""
        if gone:
            self.condemned.add(member)
        self.at_risk(member, delay)
        self.after(delay, self._tell_coordinator, Suspect(view=NO_VIEW, member=member, gone=gone))

    def _tell_coordinator(self, message: Message) -> None:
        self.deliver(SUPERVISOR, self.coordinator, message)

    def scrub(self) -> None:
        self._tell_coordinator(Scrub(view=NO_VIEW, round=0))

    def scale(self, wanted: Sequence[int]) -> None:
        """To so many servers, one number after the other; now and then without one that is there.
        Whoever wants it asks until it is done.
        """
        servers = self.disk.install.servers
        self.unwanted = [self.random.choice(servers)] if self.random.random() < 0.5 else []
        self.note(f"scale to {wanted[0]} servers, without {self.unwanted}")
        self._ask_to_scale(list(wanted))

    def _ask_to_scale(self, wanted: list[int]) -> None:
        if self.scaled == wanted[0]:
            self.scaled = 0
            if wanted[1:]:
                self.scale(wanted[1:])
            return
        scale = Scale(view=NO_VIEW, servers=wanted[0], without=self.unwanted)
        self._tell_coordinator(scale)
        self.after(RETRY_S, self._ask_to_scale, wanted)

    def next_shift(self) -> Shift | None:
        """That which everybody will know of, and nobody does."""
        install, shifts = self.disk.install, self.job.shifts
        if install.shift is not None or len(install.shifts) == len(shifts):
            return None
        return shifts[len(install.shifts)]

    def scale_trainers(self) -> None:
        """As the job's shifts say, one after the other; whoever wants them asks until it is done,
        and again if it was given up.
        """
        if self.disk.states and (shift := self.next_shift()) is not None:
            wanted = ScaleTrainers(view=NO_VIEW, trainers=shift.trainers, after=shift.after)
            self._tell_coordinator(wanted)
        self.after(RETRY_S, self.scale_trainers)

    def pause(self, member: Member, seconds: float, *, beats: bool = False) -> None:
        """It stands still; with `beats` its heart does not: it hangs, or is very busy."""
        self.at_risk(member, seconds)
        process = self.processes[member]
        process.paused_until = max(process.paused_until, self.now + seconds)
        process.beats = beats
        self.after(seconds, self.wake, member)

    def freeze(self, member: Member) -> None:
        """It stands still for good. That is no fault that lasts: nobody may wait for it."""
        process = self.processes[member]
        process.paused_until = process.at_risk_until = math.inf
        process.beats = False
        self.lasts(0.0)

    def wake(self, member: Member) -> None:
        process = self.processes.get(member)
        if process and self.now >= process.paused_until:
            backlog, process.backlog = process.backlog, []
            for event, arguments in backlog:
                self.after(0.0, event, *arguments)

    def cut(self, inside: frozenset[Member], seconds: float, **ways: bool) -> None:
        self.lasts(seconds)
        self.links.cuts.append(Cut(self.now + seconds, inside, **ways))
        if self.coordinator in inside:
            inside = frozenset(self.processes) - inside
        for member in inside:
            self.at_risk(member, seconds)

    def burst(self, seconds: float) -> None:
        self.links.burst_until = self.now + seconds
        for member in self.processes:
            self.at_risk(member, seconds)

    # ------------------------------------------------------------------ the run

    def run(self) -> Self:
        try:
            events, next_of = self.events, heapq.heappop
            while not self.ended:
                self.now, _, event, arguments = next_of(events)
                event(*arguments)
            if self.failure is None:
                self.oracle.at_end()
            elif self.faults.within_budget:
                raise Failure(f"the job gave up: {self.failure}")
        except Exception as error:
            what = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
            raise Failure(f"seed {self.seed}: {what}; {'; '.join(self.story)}") from error
        return self

    @property
    def failure(self) -> str | None:
        """What the coordinator says is lost, if it has given up."""
        coordinator = self.processes.get(self.coordinator)
        failure: str | None = coordinator.machine.failure if coordinator else None
        return failure

    def _pulse(self) -> None:
        self.oracle.on_pulse()
        self.after(PULSE_S, self._pulse)

    def state(self) -> str:
        """Every member, its step and its view, for whoever looks into a failure."""
        return ", ".join(
            f"{name}@{getattr(process.machine, 'step', '')} {tuple(process.machine.view)}"
            for name, process in self.processes.items()
            if isinstance(process.machine, Machine)
        )
