"""The world of one schedule: processes, a network, a disk and a supervisor.

Time is simulated, in seconds, and starts far from zero. Every message is delivered after a random
delay, so messages overtake one another; some are lost and some come twice. What else goes wrong is
in faults.py, what must hold all the same in checks.py. One seed decides everything.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planaria.coordinator.machine import (
    SUPERVISOR,
    CoordinatorMachine,
    CoordinatorState,
    first_state,
)
from planaria.kernels.types import Floats
from planaria.server.machine import ServerMachine
from planaria.simulator.checks import Failure, Oracle
from planaria.simulator.faults import Faults, plan
from planaria.simulator.toy import ToyDense, ToyJob
from planaria.trainer.machine import TrainerMachine
from planaria.wire.machine import COORDINATOR, Machine, Outbox
from planaria.wire.messages import NO_VIEW, Hello, Install, Member, Message, Spawn, Suspect

START_S = 1000.0
TICK_S = 0.1
RETRY_S = 0.2
DEADLINE_S = 5.0
SPAWN_S = 0.02
PULSE_S = 0.1  # how often the oracle looks


@dataclass(frozen=True)
class Network:
    """How long messages take, and about how long a step then takes when none is lost."""

    delays: tuple[tuple[float, float], ...]
    """(cumulative probability, mean of an exponential distribution in s)"""
    step_s: float

    def mean_s(self, kind: float) -> float:
        """Of the messages that `kind`, from 0 to below 1, stands for."""
        for below, mean_s in self.delays[:-1]:
            if kind < below:
                return mean_s
        return self.delays[-1][1]


NETWORKS = {
    "even": Network(((1.0, 0.002),), 0.04),
    "uneven": Network(((0.6, 0.002), (0.9, 0.02), (1.0, 0.1)), 0.25),
    "ragged": Network(((0.8, 0.001), (0.97, 0.03), (1.0, 0.5)), 0.22),
}


@dataclass
class Process:
    role: str  # server, trainer or coordinator
    machine: Any
    paused_until: float = 0.0
    cut_off_until: float = 0.0
    computing: int = 0  # of trainers: the step that the driver is computing
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)


class World:
    """One job under one schedule. `run` raises Failure when a promise is broken."""

    server_class: type[ServerMachine] = ServerMachine
    trainer_class: type[TrainerMachine] = TrainerMachine
    coordinator_class: type[CoordinatorMachine] = CoordinatorMachine

    def __init__(
        self, job: ToyJob, seed: int, faults: Faults, *, spares: int = 1, network: str = "uneven"
    ) -> None:
        self.job = job
        self.seed = seed
        self.faults = faults
        self.network = NETWORKS[network]
        self.random = random.Random(seed)
        self.now = self.calm_at = START_S
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        self.delivered = 0
        self.story: list[str] = []  # the faults, for whoever reads a failure
        self.processes: dict[Member, Process] = {}
        self.dead: set[Member] = set()
        self.condemned: set[Member] = set()  # suspected, though perhaps alive
        self.island: frozenset[Member] = frozenset()
        self.island_until = 0.0
        self.last_cut_until = 0.0  # nobody is cut off after this
        self.stillborn = 0  # so many of the processes to come die at once
        self.coordinator_dies_saving = False
        self.ended = False
        self.names = 0
        self.oracle = Oracle(self)
        servers = [self._name("server") for _ in range(job.servers)]
        trainers = [self._name("trainer") for _ in range(job.ranks)]
        self.disk: CoordinatorState = first_state(servers, trainers)
        for place, member in enumerate(servers):
            machine = self.server_class(member, job.server_job(RETRY_S), fresh_place=place)
            self._start(member, "server", machine)
        for rank, member in enumerate(trainers):
            self._start(member, "trainer", self._trainer(member, rank))
        for _ in range(spares):
            self._spawn("server")
        self.coordinator = ""
        self._start_coordinator(restarted=False)
        plan(self)
        self.after(PULSE_S, self._pulse)

    # ------------------------------------------------------------------ processes

    def _name(self, role: str) -> Member:
        self.names += 1
        return f"{role}-{self.names}"

    def _trainer(self, member: Member, rank: int | None) -> TrainerMachine:
        job = self.job.trainer_job(RETRY_S)
        return self.trainer_class(member, job, ToyDense(), fresh_rank=rank)

    def _start(self, member: Member, role: str, machine: Any) -> None:
        self.processes[member] = Process(role, machine)
        self._hello(member)
        self.after(self.random.uniform(0.0, TICK_S), self._tick, member)

    def _spawn(self, role: str) -> None:
        member = self._name(role)
        if self.stillborn:
            self.stillborn -= 1
            self.note(f"{member} dies at birth")
            self.dead.add(member)
            self.suspect(member, 0.01)
        elif role == "server":
            self._start(member, role, self.server_class(member, self.job.server_job(RETRY_S)))
        else:
            self._start(member, role, self._trainer(member, None))

    def _hello(self, member: Member) -> None:
        """A process says hello until a view names it."""
        process = self.processes.get(member)
        if process is None or process.machine.install is not None:
            return
        if self.now >= process.paused_until:
            hello = Hello(view=NO_VIEW, member=member, role=process.role, address=f"at {member}")
            self._send(member, COORDINATOR, hello)
        self.after(RETRY_S, self._hello, member)

    def _start_coordinator(self, *, restarted: bool) -> None:
        member = self._name("coordinator")
        machine = self.coordinator_class(
            self.disk,
            self.job.layout,
            restarted=restarted,
            now=self.now,
            retry_s=RETRY_S,
            deadline_s=DEADLINE_S,
        )
        self.coordinator = member
        self.processes[member] = Process("coordinator", machine)
        for lost in sorted(self.dead | self.condemned):
            self.suspect(lost, 0.01)
        self._tick(member)

    def _tick(self, member: Member) -> None:
        process = self.processes.get(member)
        if process is None:
            return
        if self.now >= process.paused_until:
            self._finish_call(member, process.machine.tick(self.now))
        self.after(TICK_S, self._tick, member)

    # ------------------------------------------------------------------ the network

    def after(self, delay: float, event: Callable[..., None], *arguments: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, event, arguments))

    def now_first(self, event: Callable[..., None], *arguments: Any) -> None:
        """Before everything else that is due now."""
        heapq.heappush(self.events, (self.now, 0, event, arguments))

    def _send(self, sender: Member, to: Member, message: Message) -> None:
        draw = self.random.random
        faults = self.faults
        if faults.drop and to != SUPERVISOR and draw() < faults.drop:
            return
        for _ in range(2 if faults.duplicate and draw() < faults.duplicate else 1):
            mean_s = self.network.mean_s(draw())
            self.after(-math.log(1.0 - draw()) * mean_s, self._arrive, sender, to, message)

    def _arrive(self, sender: Member, to: Member, message: Message) -> None:
        # Of what a killed process had sent, some was still in its buffers.
        if sender in self.dead and self.random.random() < 0.5:
            return
        to = self.coordinator if to == COORDINATOR else to
        if self.now < self.last_cut_until and (self._is_cut_off(sender) or self._is_cut_off(to)):
            return
        if self.now < self.island_until and (sender in self.island) != (to in self.island):
            return
        self._deliver(sender, to, message)

    def _is_cut_off(self, member: Member) -> bool:
        process = self.processes.get(member)
        return process is not None and self.now < process.cut_off_until

    def _deliver(self, sender: Member, to: Member, message: Message) -> None:
        if to == SUPERVISOR:
            if isinstance(message, Spawn):
                for _ in range(message.count):
                    self.after(SPAWN_S, self._spawn, message.role)
            return
        process = self.processes.get(to)
        if process is None:
            return
        if self.now < process.paused_until:
            process.backlog.append((self._deliver, (sender, to, message)))
            return
        self.delivered += 1
        self.on_delivery(sender, to, message)
        self.hand_over(sender, to, message)

    def hand_over(self, sender: Member, to: Member, message: Message) -> None:
        process = self.processes.get(to)
        if process is None:
            return  # killed by `on_delivery`
        if isinstance(message, Install):
            self.oracle.on_install(to, message)
        if process.role == "coordinator":
            out = process.machine.receive(sender, message, self.now)
        else:
            out = process.machine.receive(sender, message)
        self._finish_call(to, out)

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        """For those who watch, or kill at a chosen message."""

    # ------------------------------------------------------------------ drivers

    def _finish_call(self, member: Member, outbox: Outbox) -> None:
        """What a driver does after each call of a machine: save or compute, then send."""
        process = self.processes[member]
        if process.role == "server":
            outbox += process.machine.protect()
        elif process.role == "trainer":
            outbox += self._drive(member, process)
        else:
            outbox = self._save(member, process.machine, outbox)
        if process.role != "coordinator" and process.machine.done and not process.machine.left:
            outbox += process.machine.leave()
        for to, message in outbox:
            self._send(member, to, message)

    def _save(self, member: Member, machine: CoordinatorMachine, outbox: Outbox) -> Outbox:
        """Saves before anything is sent; returns what may be sent."""
        state = machine.take_state()
        if state is not None:
            if state.epoch < self.disk.epoch:
                self.note(f"{member} finds that another coordinator has taken over")
                del self.processes[member]
                return []
            dies = self.coordinator_dies_saving and member == self.coordinator
            if dies and self.random.random() < 0.3:
                self.kill_coordinator()
                return []
            self.oracle.on_save(self.disk, state)
            self.disk = state
            if dies:
                self.kill_coordinator()
                return outbox[: self.random.randint(0, len(outbox))]
        if machine.finished and member == self.coordinator:
            self.ended = True
        return outbox

    def _drive(self, member: Member, process: Process) -> Outbox:
        """Gives ids when asked for, and starts to compute when all rows are there."""
        trainer: TrainerMachine = process.machine
        while (step := trainer.wants_ids()) is not None:
            trainer.give_ids(step, self.oracle.reference.batches[step, trainer.rank].ids)
        if not trainer.shadow and process.computing != trainer.step:
            rows = trainer.ready()
            if rows is not None:
                process.computing = trainer.step
                takes_s = self.random.choice((0.0, 0.0, 0.005, 0.05))
                self.after(takes_s, self._computed, member, trainer.step, rows)
        return trainer.take_outbox()

    def _computed(self, member: Member, step: int, rows: dict[int, list[Floats]]) -> None:
        """The gradients are ready, whatever has happened to the view meanwhile."""
        process = self.processes.get(member)
        if process is None:
            return
        if self.now < process.paused_until:
            process.backlog.append((self._computed, (member, step, rows)))
            return
        process.computing = 0
        batch = self.oracle.on_compute(process.machine, step, rows)
        process.machine.give_gradients(step, batch.pushes, batch.dense_gradient)
        self._finish_call(member, process.machine.take_outbox())

    # ------------------------------------------------------------------ what faults do

    def note(self, what: str) -> None:
        self.story.append(f"{self.now - START_S:.3f} {what}")

    def lasts(self, seconds: float) -> None:
        """A fault goes on for so long from now."""
        self.calm_at = max(self.calm_at, self.now + seconds)

    def kill(self, member: Member, detected_s: float = 0.005) -> None:
        self.note(f"kill {member}")
        self.dead.add(member)
        del self.processes[member]
        self.suspect(member, detected_s)

    def suspect(self, member: Member, delay: float) -> None:
        """The coordinator is told; the same happens when the supervisor sees an exit."""

        def tell() -> None:
            self._deliver(SUPERVISOR, self.coordinator, Suspect(view=NO_VIEW, member=member))

        self.condemned.add(member)
        self.lasts(delay)
        self.after(delay, tell)

    def pause(self, member: Member, seconds: float) -> None:
        self.lasts(seconds)
        self.processes[member].paused_until = self.now + seconds
        self.after(seconds, self._wake, member)

    def _wake(self, member: Member) -> None:
        process = self.processes.get(member)
        if process and self.now >= process.paused_until:
            self.note(f"{member} wakes")
            backlog, process.backlog = process.backlog, []
            for event, arguments in backlog:
                event(*arguments)

    def cut_off(self, member: Member, seconds: float) -> None:
        self.lasts(seconds)
        self.processes[member].cut_off_until = self.now + seconds
        self.last_cut_until = max(self.last_cut_until, self.now + seconds)

    def partition(self, seconds: float) -> None:
        self.lasts(seconds)
        self.island = frozenset(m for m in self.processes if self.random.random() < 0.5)
        self.island_until = self.now + seconds
        self.note(f"partition: {', '.join(sorted(self.island))} for {seconds:.2f} s")

    def kill_coordinator(self) -> None:
        self.note(f"kill {self.coordinator}")
        self.dead.add(self.coordinator)
        del self.processes[self.coordinator]
        self._coordinator_comes_back()

    def replace_coordinator(self, seconds: float) -> None:
        """It is paused and taken for dead; when it wakes up there is another one.

        It slept, so it takes somebody else for dead then, and must find out that it is fenced.
        """
        old, silent = self.coordinator, self.random.choice(self.disk.install.servers)
        self.note(f"pause {old}")
        self.pause(old, seconds)
        self.after(seconds + TICK_S, self._wake_fenced, old, silent)
        self._coordinator_comes_back()

    def _wake_fenced(self, old: Member, silent: Member) -> None:
        process = self.processes.get(old)
        if process and process.machine.state.epoch < self.disk.epoch:
            self._deliver(SUPERVISOR, old, Suspect(view=NO_VIEW, member=silent))

    def _coordinator_comes_back(self) -> None:
        self.coordinator_dies_saving = False
        self.coordinator = "nobody"
        delay = self.random.uniform(0.0, 0.3)
        self.lasts(delay + 0.02)

        def start() -> None:
            self._start_coordinator(restarted=True)

        self.after(delay, start)

    # ------------------------------------------------------------------ the run

    def run(self) -> World:
        try:
            while not self.ended:
                self.now, _, event, arguments = heapq.heappop(self.events)
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
