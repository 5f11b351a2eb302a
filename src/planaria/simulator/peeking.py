"""The memory of simulated processes, as others read it: between any two events, and of whoever is
still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from planaria import kernels
from planaria.kernels.peeking import Source
from planaria.kernels.types import Bytes
from planaria.server.peeking import Peeks
from planaria.server.store import Store

if TYPE_CHECKING:
    from planaria.simulator.world import World

ARENA = 1 << 32  # records that an arena may have


class SimulatedPeeks(Peeks):
    """An address is the number of a record, a process that of its name."""

    def __init__(self, world: World, process: int) -> None:
        super().__init__(process, key=process)
        self.world = world

    def address(self, store: Store, arena: int, first: int) -> int:
        return arena * ARENA + first

    def counter(self, kind: int) -> int:
        return kind

    def read(self, sources: Sequence[Source], out: Bytes) -> int:
        out[:] = 0
        for number, source in enumerate(sources, 1):
            store = self._store_of(source.process)
            if store is None:
                return -number
            arena, first = divmod(source.at, ARENA)
            records = store.arenas[arena].records
            values = records.read(first, first + len(out) // (4 * records.words))
            kernels.mul_add_bytes(out, source.coef, values.reshape(-1).view(np.uint8))
            if store.changes.counters[source.counter, 1] != source.counted:
                return number
        return 0

    def _store_of(self, process: int) -> Store | None:
        found = self.world.processes.get(f"server-{process}")
        store: Store | None = found.machine.store if found else None
        return store
