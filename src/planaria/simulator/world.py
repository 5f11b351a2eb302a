"""The world of one schedule: processes, a network, a disk, a supervisor, and faults.

Time is simulated, in seconds. Every message is delivered after a random delay, so messages overtake
one another; some are lost and some come twice. Processes are killed, paused past the heartbeat
limit (they wake up fenced) and cut off; the coordinator is killed too. One seed decides it all.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planaria.codes import Code
from planaria.coordinator.machine import (
    SUPERVISOR,
    CoordinatorMachine,
    CoordinatorState,
    first_state,
)
from planaria.errors import PlanariaError
from planaria.server.digest import Digest
from planaria.server.machine import ServerMachine
from planaria.simulator.toy import ToyDense, ToyJob, reference
from planaria.trainer.machine import TrainerMachine
from planaria.wire.machine import COORDINATOR, Machine, Outbox
from planaria.wire.messages import NO_VIEW, Hello, Member, Message, Spawn, Suspect

TICK_S = 0.05
RETRY_S = 0.2
SPAWN_S = 0.02
END_S = 60.0  # a schedule that has not ended by then hangs


class Failure(PlanariaError):
    """A schedule broke a promise; the message says which."""


@dataclass(frozen=True)
class Faults:
    """What may happen in a schedule."""

    count: int = 2
    drop: float = 0.0
    duplicate: float = 0.0
    kinds: tuple[str, ...] = (
        "kill server",
        "kill server",
        "kill rebuilding",
        "kill trainer",
        "kill coordinator",
        "pause server",
        "pause trainer",
        "cut off server",
    )
    within_budget: bool = True  # False: more than r servers of a group may go


@dataclass
class Process:
    machine: Any
    paused_until: float = 0.0
    cut_off_until: float = 0.0
    backlog: list[Callable[[], None]] = field(default_factory=list)


class World:
    """One job under one schedule. `run` raises Failure when a promise is broken."""

    server_class: type[ServerMachine] = ServerMachine
    trainer_class: type[TrainerMachine] = TrainerMachine
    coordinator_class: type[CoordinatorMachine] = CoordinatorMachine

    def __init__(self, job: ToyJob, seed: int, faults: Faults, spares: int = 1) -> None:
        self.job = job
        self.seed = seed
        self.faults = faults
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = 0
        self.delivered = 0
        self.trace: list[str] = []
        self.processes: dict[Member, Process] = {}
        self.dead: set[Member] = set()
        self.condemned: set[Member] = set()  # suspected, though perhaps alive
        self.names = 0
        self.slow = {0.002: 0.6, 0.02: 0.3, 0.1: 0.1}
        servers = [self._name("server") for _ in range(job.servers)]
        trainers = [self._name("trainer") for _ in range(job.ranks)]
        self.disk: CoordinatorState = first_state(servers, trainers)
        for place, member in enumerate(servers):
            self._start(
                member, self.server_class(member, job.server_job(RETRY_S), fresh_place=place)
            )
        for rank, member in enumerate(trainers):
            self._start(member, self._trainer(member, rank))
        for _ in range(spares):
            self._spawn("server")
        self.coordinator = ""
        self._start_coordinator(restarted=False)
        for _ in range(faults.count):
            self._at(self.random.uniform(0.0, 0.12 * job.steps), self._fault)

    # ------------------------------------------------------------------ processes

    def _name(self, role: str) -> Member:
        self.names += 1
        return f"{role}-{self.names}"

    def _trainer(self, member: Member, rank: int | None) -> TrainerMachine:
        return self.trainer_class(
            member, self.job.trainer_job(RETRY_S), ToyDense(), fresh_rank=rank
        )

    def _start(self, member: Member, machine: Any) -> None:
        self.processes[member] = Process(machine)
        self._hello(member)
        self._tick(member)

    def _spawn(self, role: str) -> None:
        member = self._name(role)
        if role == "server":
            self._start(member, self.server_class(member, self.job.server_job(RETRY_S)))
        else:
            self._start(member, self._trainer(member, None))

    def _hello(self, member: Member) -> None:
        """A process says hello until a view names it."""
        if member not in self.processes:
            return
        machine = self.processes[member].machine
        role = "server" if isinstance(machine, ServerMachine) else "trainer"
        named = machine.install is not None
        if not named:
            hello = Hello(view=NO_VIEW, member=member, role=role)
            self._send(member, COORDINATOR, hello)
            self._at(0.1, lambda: self._hello(member))

    def _start_coordinator(self, *, restarted: bool) -> None:
        member = self._name("coordinator")
        machine = self.coordinator_class(
            self.disk, self.job.layout, restarted=restarted, now=self.now, retry_s=RETRY_S, deadline_s=5.0
        )
        self.coordinator = member
        self.processes[member] = Process(machine)
        self._after(member, machine.take_outbox())
        for lost in sorted(self.dead | self.condemned):
            self._suspect(lost, 0.01)
        self._tick(member)

    def _suspect(self, member: Member, delay: float) -> None:
        def tell() -> None:
            self.condemned.add(member)
            message = Suspect(view=NO_VIEW, member=member)
            self._deliver(SUPERVISOR, self.coordinator, message)

        self._at(delay, tell)

    def _tick(self, member: Member) -> None:
        process = self.processes.get(member)
        if process is None:
            return
        if self.now >= process.paused_until:
            self._after(member, process.machine.tick(self.now))
        self._at(TICK_S, lambda: self._tick(member))

    # ------------------------------------------------------------------ the network

    def _at(self, delay: float, event: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, event))

    def _delay(self) -> float:
        mean = self.random.choices(list(self.slow), list(self.slow.values()))[0]
        return self.random.expovariate(1 / mean)

    def _send(self, sender: Member, to: Member, message: Message) -> None:
        copies = 2 if self.random.random() < self.faults.duplicate else 1
        if self.random.random() < self.faults.drop and to != SUPERVISOR:
            copies = 0
        for _ in range(copies):
            self._at(self._delay(), lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: Member, to: Member, message: Message) -> None:
        # Of what a killed process had sent, some was still in its buffers.
        if sender in self.dead and self.random.random() < 0.5:
            return
        to = self.coordinator if to == COORDINATOR else to
        for end in (sender, to):
            process = self.processes.get(end)
            if process and self.now < process.cut_off_until:
                return
        self._deliver(sender, to, message)

    def _deliver(self, sender: Member, to: Member, message: Message) -> None:
        if to == SUPERVISOR:
            if isinstance(message, Spawn):
                for _ in range(message.count):
                    role = message.role
                    self._at(SPAWN_S, lambda role=role: self._spawn(role))  # type: ignore[misc]
            return
        process = self.processes.get(to)
        if process is None:
            return
        if self.now < process.paused_until:
            process.backlog.append(lambda: self._deliver(sender, to, message))
            return
        self.delivered += 1
        self.on_delivery(sender, to, message)
        if to not in self.processes:
            return
        if isinstance(process.machine, CoordinatorMachine):
            out = process.machine.receive(sender, message, self.now)
        else:
            out = process.machine.receive(sender, message)
        self._after(to, out)

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        """For tests that kill at a chosen message."""

    def _after(self, member: Member, outbox: Outbox) -> None:
        """What a driver does after each call: save, compute, send."""
        machine = self.processes[member].machine
        if isinstance(machine, CoordinatorMachine):
            state = machine.take_state()
            if state is not None:
                if state.epoch < self.disk.epoch:
                    return  # another coordinator has taken over: this one is fenced
                self.disk = state
        if isinstance(machine, TrainerMachine):
            outbox = outbox + self._drive(machine)
        for to, message in outbox:
            self._send(member, to, message)

    def _drive(self, trainer: TrainerMachine) -> Outbox:
        job = self.job
        arena = job.layout.arena(job.rows)
        out: Outbox = []
        while True:
            if (step := trainer.wants_ids()) is not None:
                rows = job.rows_of(step, trainer.rank)
                places, index = arena.locate(rows)
                ids = {p: [index[places == p]] for p in range(job.servers)}
                trainer.give_ids(step, ids)
            elif not trainer.shadow and (found := trainer.ready()) is not None:
                self._compute(trainer, found)
            else:
                return out + trainer.take_outbox()

    def _compute(self, trainer: TrainerMachine, found: dict[int, list[Any]]) -> None:
        job, step, rank = self.job, trainer.step, trainer.rank
        rows = job.rows_of(step, rank)
        places, _ = job.layout.arena(job.rows).locate(rows)
        values = np.empty((len(rows), job.dim), np.float32)
        for place in range(job.servers):
            values[places == place] = found[place][0]
        assert isinstance(trainer.dense, ToyDense)
        sparse, dense = job.gradients(step, rank, rows, values, trainer.dense.versions[step - 1])
        pushes = {p: [sparse[places == p]] for p in range(job.servers)}
        trainer.give_gradients(step, pushes, dense)

    # ------------------------------------------------------------------ faults

    def kill(self, member: Member, detected_s: float = 0.005) -> None:
        self.trace.append(f"{self.now:.3f} kill {member}")
        self.dead.add(member)
        del self.processes[member]
        if member == self.coordinator:
            self._at(self.random.uniform(0.0, 0.3), lambda: self._start_coordinator(restarted=True))
        else:
            self._suspect(member, detected_s)

    def _fault(self) -> None:
        kind = self.random.choice(self.faults.kinds)
        members = self.disk.install
        if "coordinator" in kind:
            if self.coordinator in self.processes:
                self.kill(self.coordinator)
            return
        pool = members.trainers if "trainer" in kind else members.servers
        victims = [m for m in pool if self._usable(m) and self._affordable(m)]
        if "rebuilding" in kind:
            victims = [m for m in victims if not self.processes[m].machine.whole]
        if not victims:
            return
        victim = self.random.choice(victims)
        if kind.startswith("kill"):
            self.kill(victim, self.random.uniform(0.0, 0.05))
            return
        self.trace.append(f"{self.now:.3f} {kind}: {victim}")
        until = self.now + self.random.uniform(0.05, 1.0)
        self._suspect(victim, self.random.uniform(0.0, 0.1))
        self.condemned.add(victim)
        if kind.startswith("pause"):
            self.processes[victim].paused_until = until
            self._at(until - self.now, lambda: self._wake(victim))
        else:
            self.processes[victim].cut_off_until = until

    def _wake(self, member: Member) -> None:
        if member in self.processes:
            self.trace.append(f"{self.now:.3f} {member} wakes")
            backlog, self.processes[member].backlog = self.processes[member].backlog, []
            for event in backlog:
                event()

    def _usable(self, member: Member) -> bool:
        return member in self.processes and member not in self.condemned

    def _affordable(self, victim: Member) -> bool:
        """Whether the job can bear this loss, on top of what is lost already."""
        if not self.faults.within_budget:
            return True
        install = self.disk.install
        good = {
            place
            for place, member in enumerate(install.servers)
            if member != victim and self._usable(member) and self.processes[member].machine.whole
        }
        groups = self.job.layout.groups.tolist()
        if any(sum(place not in good for place in group) > self.job.r for group in groups):
            return False
        return any(
            self._usable(m) and not self.processes[m].machine.blank
            for m in install.trainers
            if m != victim
        )

    # ------------------------------------------------------------------ the run

    def run(self) -> World:
        try:
            while not self._over():
                if not self.events or self.now > END_S:
                    raise Failure(f"it hangs at {self.now:.1f} s: {self.state()}")
                self.now, _, event = heapq.heappop(self.events)
                event()
            if self.failure is None:
                self._check()
        except Exception as error:
            raise Failure(f"seed {self.seed}: {error}; {'; '.join(self.trace)}") from error
        return self

    @property
    def failure(self) -> str | None:
        coordinator = self.processes.get(self.coordinator)
        failure: str | None = coordinator.machine.failure if coordinator else None
        return failure

    def _over(self) -> bool:
        """Done, and everything whole again; or stopped with the loss named."""
        if self.coordinator not in self.processes:
            return False
        if self.failure:
            return True
        return self.processes[self.coordinator].machine.finished and all(
            member in self.processes and self.processes[member].machine.whole
            for member in self.disk.install.servers
        )

    def state(self) -> str:
        return ", ".join(
            f"{name}@{getattr(p.machine, 'step', '')}{'' if not isinstance(p.machine, Machine) else p.machine.view}"
            for name, p in self.processes.items()
        )

    def servers(self) -> list[ServerMachine]:
        return [self.processes[member].machine for member in self.disk.install.servers]

    def _check(self) -> None:
        """The promises of DESIGN.md, after the last step."""
        job = self.job
        digest, dense = reference(job)
        stores = [server.store for server in self.servers()]
        found = sum((store.digest() for store in stores if store), Digest())
        if found != digest:
            raise Failure(f"the records differ from the undisturbed run: {found}, not {digest}")
        for member in self.disk.install.trainers:
            trainer = self.processes[member].machine
            if trainer.dense.step != job.steps or trainer.dense.state.tobytes() != dense:
                raise Failure(f"the dense state of {member} differs from the undisturbed run")
        self._check_stripes()
        if errors := [error for server in self.servers() for error in server.errors]:
            raise Failure(f"a server refused a message: {errors[0]}")

    def _check_stripes(self) -> None:
        """Every stripe satisfies its parity equations, once all deltas have arrived."""
        job = self.job
        servers = self.servers()
        if any(server.store is None or server.store.held_step < job.steps for server in servers):
            raise Failure("a delta of the last step is still missing")
        code, arena = Code(job.k, job.r), job.layout.arena(job.rows)
        for group in range(job.layout.n_groups):
            for slot in range(arena.slots):
                places, index = arena.members(np.array([group]), np.array([slot]))
                shards = [
                    servers[place].store.arenas[0].records[i].view(np.uint8)  # type: ignore[union-attr]
                    for place, i in zip(places[0].tolist(), index[0].tolist(), strict=True)
                ]
                if not code.verify(shards[: job.k], shards[job.k :]):
                    raise Failure(f"stripe {slot} of group {group} is inconsistent")
