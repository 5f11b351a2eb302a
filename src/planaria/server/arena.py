"""The records of one arena on one server, and which of them are valid."""

from __future__ import annotations

import numpy as np

from planaria import kernels
from planaria.errors import InvalidRecord
from planaria.kernels.types import Bytes, Index, Records
from planaria.layout import ArenaLayout
from planaria.tables import Arena

CHUNK_RECORDS = 1 << 15  # how many records bulk work takes at a time


class ArenaStore:
    """One arena's records on one server."""

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        place: int,
        valid: bool,
        records: Records | None = None,
    ) -> None:
        """records: zeros, if there is memory for them already."""
        self.arena = arena
        self.layout = layout
        self.place = place
        self.data_records = layout.data_records(place)
        if records is None:
            records = kernels.allocate(layout.records(place), arena.words)
        self.records = records
        self.invalid = 0 if valid else len(self.records)
        fill = 0xFF if valid else 0
        self.bitmap: Bytes = np.full(-(-len(self.records) // 8), fill, np.uint8)

    def missing(self, index: Index) -> Index:
        """Those of `index` that are not valid, in order."""
        return kernels.missing(self.bitmap, index) if self.invalid else index[:0]

    def require_valid(self, index: Index) -> None:
        if len(missing := self.missing(index)):
            raise InvalidRecord(
                f"{len(missing)} records are still to be rebuilt, the first is {missing[0]}; "
                "decode them first",
                missing.tolist(),
            )

    def set_valid(self, index: Index) -> None:
        """Marks records that were not valid before."""
        kernels.mark(self.bitmap, index)
        self.invalid -= len(index)

    def set_all_valid(self) -> None:
        self.bitmap.fill(0xFF)
        self.invalid = 0

    def regions(self, kind: str) -> range:
        own = self.layout.layout.regions(self.place)
        if kind == "data":
            return range(own.data_regions)
        return range(own.data_regions, len(own.group))

    def chunks(self, region: int, size: int) -> list[slice]:
        """The records of one region, `size` at a time."""
        first, slots = region * self.layout.slots, self.layout.slots
        return [slice(first + at, first + min(at + size, slots)) for at in range(0, slots, size)]
