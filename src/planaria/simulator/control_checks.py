"""What must hold when a schedule of the control plane has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.simulator.checks import Failure as Broken
from planaria.wire.messages import NO_VIEW, Install, Message, Prepare, View

if TYPE_CHECKING:
    from planaria.simulator.control import ControlWorld


def check_saved(world: ControlWorld, message: Message) -> None:
    """Nobody is told of a view that is forgotten if the coordinator ends now."""
    if not isinstance(message, Prepare | Install):
        return
    view = message.view
    saved = world.disk.states.get(view.epoch)
    used = NO_VIEW if saved is None else View(saved.epoch, saved.n)
    in_force = NO_VIEW if saved is None else saved.install.view
    if view > (in_force if isinstance(message, Install) else used):
        raise Broken(f"view {tuple(view)} is told before it is saved")


def check_end(world: ControlWorld) -> None:
    last = [one for one in world.saves.published if one["step"] == world.steps]
    if world.sentence is None:
        if world.trained != world.steps:
            raise Broken(f"it says that it is done, at step {world.trained}")
        if len(world.holds) < world.config.servers + world.config.trainers:
            raise Broken(f"it is done, and only {sorted(world.holds)} have told what they hold")
        if not last:
            raise Broken("it is done, and not a word is said of the last save")
        if ("failed" in last[-1]) == (world.steps in world.on_disk):
            raise Broken(f"of the last save it says {last[-1]}, which is not true")
    elif world.lost:
        if not any(word in world.sentence for word in ("lost", "nobody is left")):
            raise Broken(f"it says that this is lost: {world.sentence}")
    elif not _is_allowed(world, world.sentence):
        raise Broken(f"the job ended for nothing: {world.sentence}")


def _is_allowed(world: ControlWorld, sentence: str) -> bool:
    """Whether the faults of this schedule can make a job end with this sentence."""
    if "in a row" in sentence:
        return bool(world.cursed) or any("dies at birth" in line for line in world.story)
    if "times at step" in sentence:
        hit = [line for line in world.story if " error " in line or " hang " in line]
        return bool(world.cursed) or len(hit) > 1
    return False
