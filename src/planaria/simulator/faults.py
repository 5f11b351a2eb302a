"""What can go wrong in a schedule, and when.

A fault that takes a member away (kill, pause, cut off, suspect) is within the budget when every
group keeps k whole members and one trainer keeps the dense network; only such faults happen unless
a schedule asks for more. Pauses and partitions that nobody notices cost nothing but time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planaria.server.machine import ServerMachine
from planaria.trainer.machine import TrainerMachine
from planaria.wire.messages import Member

if TYPE_CHECKING:
    from planaria.simulator.world import World

KINDS = (
    "kill server",
    "kill server",
    "kill server",
    "kill rebuilding",
    "kill rebuilding",
    "kill trainer",
    "kill trainer",
    "kill coordinator",
    "kill coordinator saving",  # just before or just after it saves, with some messages sent
    "kill spare",
    "kill newborn",  # the next process that is started dies before it says hello
    "pause server",  # past the heartbeat limit: it wakes up fenced
    "pause trainer",
    "pause coordinator",  # another one takes over; this one wakes up fenced
    "cut off server",  # from everybody, and suspected
    "cut off trainer",
    "suspect server",  # though nothing is wrong with it
    "suspect trainer",
    "stall",  # a pause that nobody notices
    "partition",  # two halves that do not hear each other, and nobody notices
)


@dataclass(frozen=True)
class Faults:
    """What may happen in a schedule. One seed decides what does, and when."""

    count: int = 2
    drop: float = 0.0  # the probability that a message is lost
    duplicate: float = 0.0  # and that it comes twice
    kinds: tuple[str, ...] = KINDS
    pause_s: float = 1.0  # the longest pause or cut
    within_budget: bool = True  # False: more than r servers of a group may go


def plan(world: World) -> None:
    """Half of the faults come at any time, half shortly after another: during its recovery."""
    step_s = world.network.step_s + 3 * world.faults.drop
    at = 0.0
    for number in range(world.faults.count):
        if number and world.random.random() < 0.5:
            at += world.random.expovariate(2 / step_s)
        else:
            at = world.random.uniform(0.0, step_s * (world.job.steps + 0.5))
        world.after(at, strike, world)


def strike(world: World) -> None:
    """One fault, now."""
    kind = world.random.choice(world.faults.kinds)
    if "coordinator" in kind:
        _strike_coordinator(world, kind)
    elif kind == "kill newborn":
        world.stillborn += 1
    elif kind == "partition":
        world.partition(_pause(world) / 2)
    else:
        victims = _victims(world, kind)
        if victims:
            _strike_member(world, kind, world.random.choice(victims))


def _strike_coordinator(world: World, kind: str) -> None:
    if world.coordinator not in world.processes:
        return
    if kind == "kill coordinator":
        world.kill_coordinator()
    elif kind == "pause coordinator":
        world.replace_coordinator(_pause(world))
    else:
        world.coordinator_dies_saving = True


def _strike_member(world: World, kind: str, victim: Member) -> None:
    detected_s = world.random.uniform(0.0, 0.1)
    if kind.startswith("kill"):
        world.kill(victim, detected_s)
        return
    world.note(f"{kind}: {victim}")
    if kind == "stall":
        world.pause(victim, _pause(world) / 2)
        return
    world.suspect(victim, detected_s)
    if kind.startswith("pause"):
        world.pause(victim, _pause(world))
    elif kind.startswith("cut"):
        world.cut_off(victim, _pause(world))


def _pause(world: World) -> float:
    return world.random.uniform(0.05, world.faults.pause_s)


def _victims(world: World, kind: str) -> list[Member]:
    install = world.disk.install
    members = [*install.servers, *install.trainers]
    if kind == "stall":
        return [member for member in members if usable(world, member)]
    if kind == "kill spare":
        machines = {name: process.machine for name, process in world.processes.items()}
        return [
            name
            for name, machine in machines.items()
            if isinstance(machine, ServerMachine | TrainerMachine)
            and name not in members
            and name not in world.condemned
        ]
    pool = install.trainers if "trainer" in kind else install.servers
    victims = [m for m in pool if usable(world, m) and affordable(world, m)]
    if kind == "kill rebuilding":
        return [m for m in victims if not world.processes[m].machine.whole]
    return victims


def usable(world: World, member: Member) -> bool:
    return member in world.processes and member not in world.condemned


def affordable(world: World, victim: Member) -> bool:
    """Whether the job can bear this loss, on top of what is lost already."""
    if not world.faults.within_budget:
        return True
    install = world.disk.install
    good = {
        place
        for place, member in enumerate(install.servers)
        if member != victim and usable(world, member) and world.processes[member].machine.whole
    }
    groups = world.job.layout.groups.tolist()
    if any(sum(place not in good for place in group) > world.job.r for group in groups):
        return False
    return any(
        usable(world, m) and not world.processes[m].machine.blank
        for m in install.trainers
        if m != victim
    )
