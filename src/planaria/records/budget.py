"""How many records of each arena a server holds in memory, when that has a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planaria.records.coldfile import BUFFER_BYTES, CHECKSUM_BYTES

RECORD_BYTES = 4 + CHECKSUM_BYTES  # of every record, in memory or not: its slot, its checksum
SLOT_BYTES = 4 + 4 + 8 + 1 + 1  # of every slot: its record, when it was used, whether it changed


@dataclass(frozen=True)
class Tier:
    """Where a server's cold records lie, and how many others there are in memory, by arena."""

    folder: str
    slots: tuple[int, ...]


class ArenaNeeds(NamedTuple):
    """Of one arena on the server that has most of it."""

    records: int
    words: int
    step_rows: int  # records that a step changes

    @property
    def fixed_bytes(self) -> int:
        return self.records * RECORD_BYTES + BUFFER_BYTES

    @property
    def slot_bytes(self) -> int:
        return 4 * self.words + SLOT_BYTES


class ServerNeeds(NamedTuple):
    """Bytes of memory."""

    all: int  # with every record in it
    least: int  # with those of a step
    history: int


def server_needs(arenas: Sequence[ArenaNeeds], history: int) -> ServerNeeds:
    records = sum(4 * arena.words * arena.records for arena in arenas)
    least = sum(arena.fixed_bytes + arena.step_rows * arena.slot_bytes for arena in arenas)
    return ServerNeeds(records + history, least + history, history)


def slots_within(ram: int, arenas: Sequence[ArenaNeeds], history: int) -> tuple[int, ...]:
    """As many as fit into so many bytes, which are enough for a step: first the rows of a step of
    each arena, and the rest by what its other records take.
    """
    rest = ram - server_needs(arenas, history).least
    others = [(arena.records - arena.step_rows) * arena.slot_bytes for arena in arenas]
    share = min(1.0, rest / max(sum(others), 1))
    return tuple(
        min(arena.records, arena.step_rows + int(share * other) // arena.slot_bytes)
        for arena, other in zip(arenas, others, strict=True)
    )
