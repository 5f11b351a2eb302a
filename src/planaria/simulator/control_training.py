"""The steps of a schedule of the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.simulator.puppets import Puppet

if TYPE_CHECKING:
    from planaria.simulator.control import ControlWorld


def train(world: ControlWorld) -> None:
    """A step, if everybody of the view in force is there for it."""
    members = _ready_members(world)
    if members and world.trained < world.steps:
        world.trained = min(puppet.step for puppet in members) + 1
        for puppet in members:
            puppet.on_step(world.trained, world.now)
            world.flush(puppet.member, puppet)


def _ready_members(world: ControlWorld) -> list[Puppet]:
    if not world.disk.states:
        return []
    install = world.disk.install
    found = []
    for member in (*install.servers, *install.trainers):
        process = world.processes.get(member)
        if process is None or process.puppet is None or world.now < process.paused_until:
            return []
        puppet = process.puppet
        if puppet.view != install.view or puppet.frozen or puppet.blank or puppet.stopped:
            return []
        found.append(puppet)
    return found if len({puppet.step for puppet in found}) == 1 else _caught_up(found)


def _caught_up(members: list[Puppet]) -> list[Puppet]:
    """A replacement starts at the committed step, and the others redo nothing."""
    behind = min(puppet.step for puppet in members)
    for puppet in members:
        puppet.step = behind
    return members
