"""The coordinator of a schedule of the control plane: what its process does around the machine.

It is beside the supervisor, and has its disk; or on another machine, and asks the supervisor. Then
it does nothing before it is answered, as the process does (cluster/distant.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planaria.control.children import EXIT_FAILED, Ended
from planaria.control.remembering import Answered, Asked, Question
from planaria.coordinator.machine import SUPERVISOR, CoordinatorMachine
from planaria.coordinator.state import first_state
from planaria.coordinator.watch import Pulse, Silence, Watch
from planaria.dense import keepers
from planaria.errors import ClusterError
from planaria.simulator.checks import Failure as Broken
from planaria.simulator.disk import Disk
from planaria.simulator.puppets import Puppet
from planaria.wire.control import (
    ClaimEpoch,
    CoordinatorState,
    EpochClaimed,
    Finished,
    Obeyed,
    Orders,
    SaveState,
    Silent,
    Viewed,
    WantMore,
)
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
    question: Question | None = None  # what it waits for, on another machine
    held: Outbox = field(default_factory=list)  # what it says then
    saves: int = 0
    cut_until: float = 0.0  # nothing passes between it and the supervisor


class OnDisk:
    """The job's folder, as the supervisor of a schedule has it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def claim(self, owner: str) -> int:
        epoch = self._disk.free_epoch()
        self._disk.create(epoch, owner)
        return epoch

    def load(self) -> CoordinatorState | None:
        return self._disk.state if self._disk.states else None

    def save(self, state: CoordinatorState, owner: str) -> None:
        if self._disk.refuses(state.epoch, owner):
            raise ClusterError("another epoch")
        self._disk.write(state)


def become_coordinator(world: ControlWorld, member: Member, process: Process) -> None:
    if world.distant:
        ask(world, member, process, ClaimEpoch(owner=member))
        return
    here = OnDisk(world.disk)
    coordinate(world, member, process, here.claim(member), here.load())


def ask(world: ControlWorld, member: Member, process: Process, asked: Asked) -> None:
    process.question = world.question_class(asked, world.now)
    ask_again(world, member, process)


def ask_again(world: ControlWorld, member: Member, process: Process) -> None:
    question = process.question
    assert question
    try:
        if question.due(world.now):
            world.to_supervisor(member, question.asked)
    except ClusterError as error:
        world.end(member, Ended(EXIT_FAILED, str(error)))
        return
    if question.answer is not None:
        on_answer(world, member, process, question.answer)


def on_answer(world: ControlWorld, member: Member, process: Process, answer: Answered) -> None:
    if process.question is None:
        return  # it is the second one
    process.question.receive(answer)
    if process.question.answer is None:
        return
    process.question = None
    if answer.refused:
        if member == world.supervisor.coordinator:
            raise Broken(f"{member}, which nobody has replaced, is refused: {answer.refused}")
        world.end(member, Ended(EXIT_FAILED, answer.refused))
    elif isinstance(answer, EpochClaimed):
        coordinate(world, member, process, answer.epoch, answer.state)
    else:
        held, process.held = process.held, []
        speak(world, member, process, held)


def coordinate(
    world: ControlWorld,
    member: Member,
    process: Process,
    epoch: int,
    saved: CoordinatorState | None,
) -> None:
    """saved: the newest state, after the claim."""
    config = world.config
    fresh = first_state(
        epoch,
        [f"server-{place}" for place in range(config.servers)],
        [f"trainer-{rank}" for rank in range(config.trainers)],
        committed=world.start,
        keepers=keepers(config.r, config.trainers),
    )
    state = saved or fresh
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
            if process.question:
                return  # the others are found again
        else:
            process.watch.forget(silence.member)
    after_call(world, member, process, machine.tick(world.now))
    for tell in process.teller.due(world.now):
        world.to_supervisor(member, tell)


def obey(world: ControlWorld, member: Member, process: Process, orders: Orders) -> None:
    assert process.machine
    if orders.number > process.orders.number:
        for gone in orders.gone:
            if gone not in process.machine.dead:
                suspect = Suspect(view=NO_VIEW, member=gone, gone=True)
                outbox = process.machine.receive(SUPERVISOR, suspect, world.now)
                after_call(world, member, process, outbox)
            if process.question:
                return  # the rest when the orders come again
        process.orders = orders
        if orders.again > process.again:
            process.again = orders.again
            after_call(world, member, process, process.machine.start_afresh(world.now))
    world.to_supervisor(member, Obeyed(number=process.orders.number))


def after_call(world: ControlWorld, member: Member, process: Process, outbox: Outbox) -> None:
    machine = process.machine
    if machine is None or member not in world.processes:
        return
    state = machine.take_state()
    if state is not None:
        if world.distant:
            process.saves += 1
            process.held = outbox
            ask(world, member, process, SaveState(owner=member, number=process.saves, state=state))
            return
        if world.disk.refuses(state.epoch, member):
            world.end(member, Ended(EXIT_FAILED, "another epoch"))
            return
        world.disk.write(state)
    speak(world, member, process, outbox)


def speak(world: ControlWorld, member: Member, process: Process, outbox: Outbox) -> None:
    """What was saved may be said."""
    machine, watch = process.machine, process.watch
    assert machine
    assert watch
    for given_up in sorted(process.silent.keys() & machine.dead):
        silence = process.silent.pop(given_up)
        told = Silent(member=given_up, seconds=silence.seconds, hung=silence.hung)
        world.tell(member, told)
    for to, message in outbox:
        if to == SUPERVISOR and isinstance(message, Spawn):
            world.tell(
                member, WantMore(role=message.role, count=message.count, grows=message.grows)
            )
    world.post(member, [(to, message) for to, message in outbox if to != SUPERVISOR])
    install = machine.install
    if install.addresses and install.view != process.announced:
        process.announced = install.view
        world.tell(member, Viewed.of(install))
        watch.expect(machine.members, world.now)
    if machine.finished and not process.told_end:
        process.told_end = True
        world.tell(member, Finished(failure=machine.failure))
