"""What a server's memory is used for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planaria.server.arena import ArenaStore
from planaria.server.history import History


class Memory(NamedTuple):
    """Bytes in use, by purpose."""

    data: int
    parity: int
    history: int
    validity: int

    @property
    def total(self) -> int:
        return sum(self)


def memory_of(stores: Sequence[ArenaStore], histories: Iterable[History]) -> Memory:
    data, parity = (
        sum(len(s.regions(kind)) * s.layout.slots * s.arena.words * 4 for s in stores)
        for kind in ("data", "parity")
    )
    return Memory(
        data,
        parity,
        sum(history.bytes_used for history in histories),
        sum(s.bitmap.nbytes for s in stores),
    )
