"""What can go wrong in a schedule of the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.control.children import EXIT_FAILED, Ended
from planaria.wire.messages import Member

if TYPE_CHECKING:
    from planaria.simulator.control import ControlWorld
    from planaria.simulator.control_coordinator import Process

KILLED = Ended(-9, "killed by SIGKILL")
KINDS = (
    "kill",
    "kill",
    "kill coordinator",
    "error",  # an exception, once
    "stubborn error",  # whoever has that place ends with an exception, again and again
    "freeze",  # SIGSTOP for less or more than the limit
    "hang",  # the main loop stands still, the heart beats
    "freeze coordinator",
    "cut coordinator",  # off the supervisor alone, where it is on another machine
    "sleep",  # the supervisor alone
    "sleep all",  # a paused container
    "stillborn",  # the next processes end before they are of any use
    "slow disk",
    "failing disk",
)


def strike(world: ControlWorld) -> None:
    """One fault, now."""
    kind, draw = world.random.choice(world.kinds), world.random
    coordinator = world.supervisor.coordinator
    members = sorted(name for name, one in world.processes.items() if one.puppet)
    if kind in ("kill", "error", "freeze", "hang") and members:
        _strike_member(world, kind, draw.choice(members))
    elif kind == "stubborn error":
        role = draw.choice(("server", "trainer"))
        world.cursed.add((role, 0))
        world.note(f"{role}:0 is cursed")
    elif kind == "kill coordinator" and coordinator in world.processes:
        world.note(f"kill {coordinator}")
        world.end(coordinator, KILLED)
    elif kind == "freeze coordinator" and coordinator in world.processes:
        world.pause(coordinator, draw.uniform(0.5, 90.0), beats=False)
    elif kind == "cut coordinator" and world.distant and coordinator in world.processes:
        _cut(world, coordinator, draw.uniform(0.5, 12.0))
    elif kind in ("sleep", "sleep all"):
        _sleep(world, kind, draw.uniform(0.5, 90.0))
    elif kind == "stillborn":
        world.stillborn += draw.choice((1, 2, 8))
    elif kind == "slow disk":
        world.disk_slow_until = world.now + draw.uniform(1.0, 20.0)
    elif kind == "failing disk":
        world.disk_fails_until = world.now + draw.uniform(1.0, 20.0)


def _strike_member(world: ControlWorld, kind: str, member: Member) -> None:
    world.note(f"{kind} {member}")
    if kind == "kill":
        world.end(member, KILLED)
    elif kind == "error":
        world.end(member, Ended(EXIT_FAILED, "MemoryError"))
    else:
        world.pause(member, world.random.uniform(0.5, 90.0), beats=kind == "hang")


def _cut(world: ControlWorld, coordinator: Member, seconds: float) -> None:
    world.note(f"{coordinator} is cut off for {seconds:.1f} s")
    process = world.processes[coordinator]
    process.cut_until, process.struck = world.now + seconds, True


def end_when_heard(world: ControlWorld, member: Member, process: Process) -> None:
    """The supervisor kills it: at once, or when its machine, which is cut off, hears of it."""
    if world.now >= process.cut_until:
        world.end(member, KILLED)
        return
    delay = process.cut_until - world.now + world.random.uniform(0.0, 1.0)
    world.after(delay, _end_if_it_runs, world, member, process)


def _end_if_it_runs(world: ControlWorld, member: Member, process: Process) -> None:
    if world.processes.get(member) is process:
        world.end(member, KILLED)


def _sleep(world: ControlWorld, kind: str, seconds: float) -> None:
    world.note(f"{kind} for {seconds:.1f} s")
    world.slept_until = max(world.slept_until, world.now + seconds)
    if kind == "sleep all":
        for member in list(world.processes):
            world.pause(member, seconds, beats=False, told=False)
