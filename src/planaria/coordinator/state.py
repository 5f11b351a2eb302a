"""What a coordinator begins with, and a view change under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from planaria.wire.control import CoordinatorState
from planaria.wire.messages import Install, Member, Promise, View


def first_state(
    epoch: int,
    servers: list[Member],
    trainers: list[Member],
    committed: int = 0,
    keepers: int = 0,
) -> CoordinatorState:
    """committed: the step that everybody starts at, restored from a checkpoint."""
    install = Install(
        view=View(epoch, 1),
        committed=committed,
        servers=servers,
        trainers=trainers,
        rebuilding=[],
        keepers=keepers,
    )
    return CoordinatorState(epoch, 1, install)


@dataclass
class Gathering:
    """A view change under way: who must answer, and what they hold."""

    view: View
    waiting: set[Member]
    since: float
    promises: dict[Member, Promise] = field(default_factory=dict)
