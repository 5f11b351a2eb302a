"""The coordinators of a schedule: how they claim, load, save and speak; how they come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.coordinator.machine import SUPERVISOR, CoordinatorMachine
from planaria.coordinator.state import first_state
from planaria.coordinator.watch import Pulse
from planaria.simulator.process import (
    BEAT_S,
    CLAIM_S,
    DEADLINE_S,
    LIMIT_S,
    RETRY_S,
    SAVES_S,
    TICK_S,
    Process,
)
from planaria.wire.machine import Outbox
from planaria.wire.messages import NO_VIEW, Member, Suspect

MOST_TRAINERS = 4

if TYPE_CHECKING:
    from planaria.simulator.world import World


class Coordinators:
    """At most one of them is `current`: the one that members and supervisor talk to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.current: Member = "nobody"
        self.die_saving = False

    def start_first(self) -> None:
        self._create_epoch(self.world.name("coordinator"), 1)

    def _start(self) -> None:
        self._claim(self.world.name("coordinator"))

    def _claim(self, member: Member) -> None:
        epoch, takes_s = self.world.disk.free_epoch(), self.world.random.uniform(0.0, CLAIM_S)
        self.world.after(takes_s, self._create_epoch, member, epoch)

    def _create_epoch(self, member: Member, epoch: int) -> None:
        if not self.world.disk.create(epoch, member):
            self.world.note(f"{member} finds epoch {epoch} taken")
            self._claim(member)
        elif self.world.disk.states:
            takes_s = self.world.random.uniform(0.0, CLAIM_S)
            self.world.after(takes_s, self._coordinate, member, epoch)
        else:
            self._coordinate(member, epoch)

    def _coordinate(self, member: Member, epoch: int) -> None:
        world = self.world
        if world.disk.states:
            state = world.disk.state
        else:
            state = first_state(
                epoch,
                *world.first_members,
                committed=world.job.restored_at,
                keepers=world.job.keepers,
            )
        machine = world.coordinator_class(
            state,
            world.job.layout,
            epoch=epoch,
            now=world.now,
            retry_s=RETRY_S,
            deadline_s=DEADLINE_S,
            most_trainers=MOST_TRAINERS if world.job.shifts else 0,
            by_survivors=world.job.by_survivors,
        )
        watch = world.watch_class(LIMIT_S, world.hang_s)
        if state.epoch < epoch:
            watch.expect(machine.members, world.now)
        self.current = member
        world.processes[member] = Process("coordinator", machine, Pulse(BEAT_S, world.now), watch)
        for lost in sorted(world.condemned):
            world.suspect(lost, 0.01, gone=True)
        world.tick(member)

    def save(self, member: Member, machine: CoordinatorMachine, outbox: Outbox) -> Outbox:
        """Saves before anything is sent; returns what may be sent now."""
        self.world.given_up |= machine.dead | machine.retired
        state = machine.take_state()
        if state is None:
            return outbox
        dies = self.die_saving and member == self.current
        if dies and self.world.random.random() < 0.3:
            self.kill(member)
            return []
        if self._is_fenced(member, machine):
            return []
        old = self.world.disk.state if self.world.disk.states else state
        if not self.world.disk.write(state):
            self.world.note(f"{member} cannot write")
            self.kill(member)
            return []
        self.world.oracle.on_save(old, state)
        if dies:
            self.kill(member)
            return outbox[: self.world.random.randint(0, len(outbox))]
        process, takes_s = self.world.processes[member], self.world.random.choice(SAVES_S)
        if takes_s:
            process.paused_until = max(process.paused_until, self.world.now + takes_s)
            self.world.after(takes_s, self._saved, member, outbox)
        else:
            self._saved(member, outbox)
        return []

    def _saved(self, member: Member, outbox: Outbox) -> None:
        """What was saved may be said, unless somebody has taken over meanwhile."""
        process = self.world.processes.get(member)
        if process is None:
            return
        if self.world.now < process.paused_until:
            process.backlog.append((self._saved, (member, outbox)))
            return
        if self._is_fenced(member, process.machine):
            return
        for to, message in outbox:
            self.world.send(member, to, message)
        if process.watch and process.machine.install.addresses:
            process.watch.expect(process.machine.members, self.world.now)
        if process.machine.finished and member == self.current:
            self.world.ended = True
        self.world.wake(member)

    def _is_fenced(self, member: Member, machine: CoordinatorMachine) -> bool:
        """Whether the disk refuses this coordinator, which ends then."""
        if not self.world.disk.refuses(machine.state.epoch, member):
            return False
        self.world.note(f"{member} finds that another coordinator has taken over")
        self._end(member)
        return True

    def kill(self, member: Member, successors: int = 1) -> None:
        self.world.note(f"kill {member}")
        self.world.dead.add(member)
        self._end(member, successors)

    def _end(self, member: Member, successors: int = 1) -> None:
        del self.world.processes[member]
        if member == self.current:
            self.come_back(successors)

    def replace(self, seconds: float) -> None:
        """It is paused and taken for dead; when it wakes up there is another one.

        It takes somebody else for dead then, and must find out that it is fenced.
        """
        old, silent = self.current, self.world.random.choice(self.world.disk.install.servers)
        self.world.note(f"pause {old}")
        self.world.pause(old, seconds)
        self.world.after(seconds + TICK_S, self._wake_fenced, old, silent)
        self.come_back()

    def _wake_fenced(self, old: Member, silent: Member) -> None:
        process = self.world.processes.get(old)
        if process is None:
            return
        if self.world.disk.refuses(process.machine.state.epoch, old):
            self.world.deliver(SUPERVISOR, old, Suspect(view=NO_VIEW, member=silent, gone=True))
        else:  # nobody has taken over yet: what it decides still counts
            self.world.after(TICK_S, self._wake_fenced, old, silent)

    def come_back(self, count: int = 1) -> None:
        self.die_saving = False
        self.current = "nobody"
        delay = self.world.random.uniform(0.0, 0.3)
        self.world.lasts(delay + 0.02 + 4 * CLAIM_S)
        for _ in range(count):
            self.world.after(delay, self._start)
