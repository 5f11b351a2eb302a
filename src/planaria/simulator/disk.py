"""The job's folder as the coordinators see it: claims, states, errors. See cluster/files.py.

Claiming, loading and saving are several calls, so that others may come between them.
"""

from __future__ import annotations

from planaria.wire.control import CoordinatorState
from planaria.wire.messages import Install, Member


class Disk:
    def __init__(self) -> None:
        self.claims: dict[int, Member] = {}  # epoch -> owner
        self.states: dict[int, CoordinatorState] = {}  # epoch -> the last one saved in it
        self.errors = 0  # so many of the writes to come fail

    @property
    def state(self) -> CoordinatorState:
        """The newest state. There is one from the start of a world on."""
        return self.states[max(self.states)]

    @property
    def install(self) -> Install:
        return self.state.install

    def free_epoch(self) -> int:
        """The lowest above all that are claimed."""
        return max(self.claims, default=0) + 1

    def create(self, epoch: int, owner: Member) -> bool:
        """Exclusively: False if it was claimed meanwhile."""
        return self.claims.setdefault(epoch, owner) == owner

    def refuses(self, epoch: int, owner: Member) -> bool:
        return max(self.claims) > epoch or self.claims[epoch] != owner

    def write(self, state: CoordinatorState) -> bool:
        """False if that fails."""
        if self.errors:
            self.errors -= 1
            return False
        self.states[state.epoch] = state
        return True
