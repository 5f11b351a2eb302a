"""What can go wrong in a schedule, and when.

A fault that takes a member away (kill, pause, cut off, suspect) is within the budget when every
group keeps k whole members and one member keeps the dense state; only such faults happen unless
a schedule asks for more. Pauses and partitions that nobody notices cost nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planaria.layout.resizing import layout_after
from planaria.server.machine import ServerMachine
from planaria.simulator.process import DEADLINE_S, LIMIT_S
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
    "freeze spare",  # for good: it takes a place, perhaps, and must not keep it
    "kill newborn",  # the next process that is started dies before it says hello
    "pause server",  # past the heartbeat limit: it wakes up fenced
    "pause trainer",
    "pause coordinator",  # another one takes over; this one wakes up fenced
    "pause several",  # past the limit, as many as come: who is needed is waited for
    "pause all",  # and the coordinator: nobody must be taken for dead
    "stall",  # a pause that nobody notices
    "stall coordinator",  # past the limit, and nobody takes over
    "hang server",  # its heart goes on beating; perhaps past the deadline
    "hang trainer",
    "cut off server",  # from everybody
    "cut off trainer",
    "mute member",  # it hears, and nobody hears it
    "deafen member",  # the other way round
    "suspect server",  # though nothing is wrong with it
    "suspect trainer",
    "partition",  # two halves that do not hear each other, and nobody notices
    "long partition",  # past the deadline; what the code can bear is on the other side
    "burst",  # nearly everything is lost for a while
    "disk error",  # the coordinator cannot save, and dies of it
    "two coordinators",  # are started at the same moment
)


WHILE_RESIZING = (*KINDS, *["kill mirroring"] * 6)  # of schedules in which servers come and go


@dataclass(frozen=True)
class Faults:
    """What may happen in a schedule. One seed decides what does, and when."""

    count: int = 2
    drop: float = 0.0  # the probability that a message is lost
    duplicate: float = 0.0  # and that it comes twice
    kinds: tuple[str, ...] = KINDS
    pause_s: float = 1.0  # the longest pause or cut; past the limit, where that is the point
    within_budget: bool = True  # False: more than r servers of a group may go
    scales: tuple[int, ...] = ()  # the number of servers changes to these, one after the other


def plan(world: World) -> None:
    """Half of the faults come at any time, half shortly after another: during its recovery."""
    step_s = world.links.network.step_s + 3 * world.faults.drop
    job_s = step_s * (world.job.steps - world.job.restored_at + 0.5)
    at = 0.0
    for number in range(world.faults.count):
        if number and world.random.random() < 0.5:
            at += world.random.expovariate(2 / step_s)
        else:
            at = world.random.uniform(0.0, job_s)
        world.after(at, strike, world)
    if world.faults.count and world.random.random() < 0.3:
        world.after(world.random.uniform(0.0, job_s), world.scrub)
    if world.job.shifts:
        world.scale_trainers()
    if world.faults.scales:
        world.after(world.random.uniform(0.0, job_s / 2), world.scale, world.faults.scales)


def strike(world: World) -> None:
    """One fault, now."""
    kind = world.random.choice(world.faults.kinds)
    if "coordinator" in kind or kind == "disk error":
        _strike_coordinator(world, kind)
    elif kind == "kill newborn":
        world.stillborn += 1
    elif kind in ("pause several", "pause all"):
        _pause_many(world, kind)
    elif kind in ("partition", "long partition", "burst"):
        _strike_network(world, kind)
    else:
        victims = _victims(world, kind)
        if victims:
            _strike_member(world, kind, world.random.choice(victims))


def _strike_coordinator(world: World, kind: str) -> None:
    if world.coordinator not in world.processes:
        return
    if kind == "kill coordinator":
        world.coordinators.kill(world.coordinator)
    elif kind == "pause coordinator":
        world.coordinators.replace(_pause(world))
    elif kind == "stall coordinator":
        world.note(f"{kind} {world.coordinator}")
        world.pause(world.coordinator, _past_limit(world))
    elif kind == "two coordinators":
        world.note(kind)
        world.coordinators.kill(world.coordinator, successors=2)
    elif kind == "disk error":
        world.disk.errors += 1
    else:
        world.coordinators.die_saving = True


def _strike_network(world: World, kind: str) -> None:
    members = sorted(world.processes)
    if kind == "burst":
        seconds = _pause(world)
        world.note(f"burst for {seconds:.2f} s")
        world.burst(seconds)
        return
    if kind == "partition":
        seconds = _pause(world) / 2
        island = frozenset(m for m in members if world.random.random() < 0.5)
    else:
        seconds = DEADLINE_S + world.random.uniform(0.0, 3.0)
        island = _bearable(world, world.random.sample(members, len(members)))
    world.note(f"{kind}: {', '.join(sorted(island))} for {seconds:.2f} s")
    world.cut(island, seconds)


def _pause_many(world: World, kind: str) -> None:
    """They all come back before the deadline."""
    members = list(world.processes)
    if kind == "pause several":
        members = [m for m in members if usable(world, m) and world.random.random() < 0.5]
        if _some_stay_away(world):
            bearable = _bearable(world, members)
            members = [m for m in members if m in bearable]
    seconds = _past_limit(world)
    world.note(f"{kind}: {', '.join(members)} for {seconds:.2f} s")
    for member in members:
        world.pause(member, seconds + world.random.uniform(0.0, 0.1))


def _strike_member(world: World, kind: str, victim: Member) -> None:
    detected_s = world.random.uniform(0.0, 0.1)
    if kind.startswith("kill"):
        world.kill(victim, detected_s)
        return
    world.note(f"{kind}: {victim}")
    if kind == "stall":
        world.pause(victim, _pause(world) / 2)
    elif kind == "freeze spare":
        world.freeze(victim)
    elif kind.startswith("pause"):
        world.pause(victim, _past_limit(world))
    elif kind.startswith("hang"):
        world.pause(victim, world.random.uniform(0.5, DEADLINE_S + 2), beats=True)
    elif kind.startswith("suspect"):
        world.suspect(victim, detected_s, gone=world.random.random() < 0.5)
    else:
        ways = {"mute member": {"into": False}, "deafen member": {"out": False}}
        world.cut(frozenset([victim]), _past_limit(world), **ways.get(kind, {}))


def _bearable(world: World, members: Iterable[Member]) -> frozenset[Member]:
    """As many of these as the job can lose together."""
    lost: frozenset[Member] = frozenset()
    for member in members:
        if usable(world, member) and affordable(world, lost | {member}):
            lost |= {member}
    return lost


def _some_stay_away(world: World) -> bool:
    """Whether members will be given up although they are waited for.

    If others fall silent a moment before these do, those are given up, and then these are needed.
    """
    members = [*world.disk.install.servers, *world.disk.install.trainers]
    there = [world.processes[member] for member in members if member in world.processes]
    given_up_at = world.now + LIMIT_S + DEADLINE_S
    return any(process.at_risk_until > given_up_at for process in there)


def _past_limit(world: World) -> float:
    """Long enough to be noticed; not so long that who is needed would be given up."""
    longest_s = min(LIMIT_S + world.faults.pause_s, DEADLINE_S)
    return world.random.uniform(LIMIT_S, longest_s)


def _pause(world: World) -> float:
    return world.random.uniform(0.05, world.faults.pause_s)


def _victims(world: World, kind: str) -> list[Member]:
    install = world.disk.install
    members = [*install.servers, *install.trainers]
    if kind == "stall":
        return [member for member in members if usable(world, member)]
    if kind in ("mute member", "deafen member"):
        return [m for m in members if usable(world, m) and affordable(world, {m})]
    if kind in ("kill spare", "freeze spare"):
        machines = {name: process.machine for name, process in world.processes.items()}
        return [
            name
            for name, machine in machines.items()
            if isinstance(machine, ServerMachine | TrainerMachine)
            and name not in members
            and name not in world.condemned
        ]
    pool = install.trainers if "trainer" in kind else install.servers
    victims = [m for m in pool if usable(world, m) and affordable(world, {m})]
    if kind == "kill rebuilding":
        return [m for m in victims if not world.processes[m].machine.whole]
    if kind == "kill mirroring":
        return [m for m in victims if not world.processes[m].machine.mirrored]
    return victims


def usable(world: World, member: Member) -> bool:
    """Whether it is there, and nobody has reason to think otherwise."""
    process = world.processes.get(member)
    if process is None or member in world.condemned or world.now < process.at_risk_until:
        return False
    coordinator = world.processes.get(world.coordinator)
    given_up = coordinator.machine.dead if coordinator else ()
    return process.role != "coordinator" and member not in given_up


def affordable(world: World, victims: Set[Member]) -> bool:
    """Whether the job can bear these losses, on top of what is lost already."""
    if not world.faults.within_budget:
        return True
    install = world.disk.install
    good = {
        place
        for place, member in enumerate(install.servers)
        if member not in victims and usable(world, member) and world.processes[member].machine.whole
    }
    groups = world.layout.groups.tolist()
    if install.moving is not None:  # the view that ends a resize may be on its way already
        after = install.moving.places(len(install.servers))
        to_come = layout_after(world.job.layout, [*install.resizes, install.moving]).groups
        groups += [[after[place] for place in group] for group in to_come.tolist()]
    if any(sum(place not in good for place in group) > world.job.r for group in groups):
        return False
    return any(
        usable(world, m) and world.processes[m].machine.dense
        for m in [*install.trainers, *install.keeping()]
        if m not in victims
    )
