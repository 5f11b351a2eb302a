"""The coordinator of a schedule of the control plane: what its process does around the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planaria.control.children import EXIT_FAILED, Ended
from planaria.coordinator.machine import SUPERVISOR, CoordinatorMachine, first_state
from planaria.coordinator.watch import Pulse, Silence, Watch
from planaria.simulator.puppets import Puppet
from planaria.wire.control import Finished, Obeyed, Orders, Silent, Viewed, WantMore
from planaria.wire.machine import Outbox
from planaria.wire.messages import NO_VIEW, Member, Spawn, Suspect
from planaria.wire.telling import Teller

if TYPE_CHECKING:
    from planaria.simulator.control import ControlWorld

BEAT_S = 0.2


@dataclass
class Process:
    role: str
    puppet: Puppet | None = None
    machine: CoordinatorMachine | None = None
    watch: Watch | None = None
    pulse: Pulse = field(default_factory=lambda: Pulse(BEAT_S, 0.0))
    teller: Teller = field(default_factory=Teller)  # of a coordinator
    orders: Orders = field(default_factory=Orders)
    paused_until: float = 0.0
    beats: bool = False  # also while it is paused
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    silent: dict[Member, Silence] = field(default_factory=dict)
    again: int = 0
    announced: Any = None
    struck: bool = False  # a fault has hit it
    told_end: bool = False


def become_coordinator(world: ControlWorld, member: Member, process: Process) -> None:
    epoch = world.disk.free_epoch()
    world.disk.create(epoch, member)
    config = world.config
    fresh = first_state(
        epoch,
        [f"server-{place}" for place in range(config.servers)],
        [f"trainer-{rank}" for rank in range(config.trainers)],
        committed=world.start,
    )
    state = world.disk.state if world.disk.states else fresh
    process.machine = CoordinatorMachine(
        state,
        config.layout,
        epoch=epoch,
        now=world.now,
        retry_s=0.5,
        deadline_s=config.cluster.deadline_s,
    )
    limit_s = config.cluster.heartbeat_limit_ms / 1000
    process.watch = Watch(limit_s, config.cluster.hang_limit_s)
    if state.epoch < epoch:
        process.watch.expect(process.machine.members, world.now)
    after_call(world, member, process, process.machine.take_outbox())


def tick_coordinator(world: ControlWorld, member: Member, process: Process) -> None:
    assert process.machine
    assert process.watch
    machine = process.machine
    for silence in process.watch.tick(world.now):
        if silence.member in machine.expected:
            process.silent[silence.member] = silence
            suspect = Suspect(view=NO_VIEW, member=silence.member, gone=False)
            after_call(world, member, process, machine.receive(SUPERVISOR, suspect, world.now))
        else:
            process.watch.forget(silence.member)
    after_call(world, member, process, machine.tick(world.now))
    for tell in process.teller.due(world.now):
        world.to_supervisor(member, tell)


def obey(world: ControlWorld, member: Member, process: Process, orders: Orders) -> None:
    assert process.machine
    if orders.number > process.orders.number:
        process.orders = orders
        for gone in orders.gone:
            if gone not in process.machine.dead:
                suspect = Suspect(view=NO_VIEW, member=gone, gone=True)
                outbox = process.machine.receive(SUPERVISOR, suspect, world.now)
                after_call(world, member, process, outbox)
        if orders.again > process.again:
            process.again = orders.again
            after_call(world, member, process, process.machine.start_afresh(world.now))
    world.to_supervisor(member, Obeyed(number=process.orders.number))


def after_call(world: ControlWorld, member: Member, process: Process, outbox: Outbox) -> None:
    machine, watch = process.machine, process.watch
    if machine is None or watch is None or member not in world.processes:
        return
    state = machine.take_state()
    if state is not None:
        if world.disk.refuses(state.epoch, member):
            world.end(member, Ended(EXIT_FAILED, "another epoch"))
            return
        world.disk.write(state)
    for given_up in sorted(process.silent.keys() & machine.dead):
        silence = process.silent.pop(given_up)
        told = Silent(member=given_up, seconds=silence.seconds, hung=silence.hung)
        world.tell(member, told)
    for to, message in outbox:
        if to == SUPERVISOR and isinstance(message, Spawn):
            world.tell(member, WantMore(role=message.role, count=message.count))
    world.post(member, [(to, message) for to, message in outbox if to != SUPERVISOR])
    install = machine.install
    if install.addresses and install.view != process.announced:
        process.announced = install.view
        world.tell(member, Viewed.of(install))
        watch.expect(machine.members, world.now)
    if machine.finished and not process.told_end:
        process.told_end = True
        world.tell(member, Finished(failure=machine.failure))
