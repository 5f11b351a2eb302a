"""Where the records of a new store come to live: in memory, or in two tiers."""

from __future__ import annotations

from collections.abc import Iterable

from planaria import kernels
from planaria.layout import ArenaLayout
from planaria.records import RamRecords, StoredRecords, TieredRecords
from planaria.records.budget import Tier
from planaria.server.arena import room_for
from planaria.server.reserve import Reserve
from planaria.tables import Arena


def house(
    number: int,
    arena: Arena,
    layout: ArenaLayout,
    place: int,
    reserve: Reserve | None = None,
    tier: Tier | None = None,
) -> StoredRecords:
    """Zeros for the records of arena `number` at a place. Where there is memory for them already,
    that is taken; where cold ones lie in a file, the file is made.
    """
    count = layout.records(place)
    if tier is not None and tier.slots[number] < count:
        return TieredRecords(tier.folder, arena.words, count, max(tier.slots[number], 1))
    taken = reserve.take(number, count) if reserve else None
    if taken is None:
        taken = kernels.allocate(room_for(layout, count), arena.words)
    return RamRecords(taken, count)


def tier_facts(records: Iterable[StoredRecords]) -> dict[str, float]:
    """What lies on a disk, how often records were needed one by one and were not in memory, and
    for how long somebody waited for those; nothing where all are in memory.
    """
    tiered = [some for some in records if isinstance(some, TieredRecords)]
    if not tiered:
        return {}
    return {
        "disk_bytes": sum(some.cold_bytes for some in tiered),
        "accesses": sum(some.accesses.touched for some in tiered),
        "missed": sum(some.accesses.missed for some in tiered),
        "waited_s": sum(some.accesses.waited_s for some in tiered),
    }
