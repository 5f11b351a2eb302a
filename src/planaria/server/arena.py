"""The records of one arena on one server, and which of them are valid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.errors import InvalidRecord, StoreError
from planaria.kernels.types import Bytes, Index, OptimizerRule
from planaria.layout import ArenaLayout
from planaria.layout.arithmetic import NOTHING, Regions
from planaria.records import StoredRecords
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
        records: StoredRecords,
    ) -> None:
        """records: zeros, and as many as the place has."""
        self.arena = arena
        self.records = records
        self.bitmap: Bytes = np.full(-(-records.room // 8), 0xFF if valid else 0, np.uint8)
        self._arrange(layout, place)
        self.invalid = self.invalid_mirrors = 0
        if not valid:
            in_use = self.own.group != NOTHING
            for region in np.flatnonzero(~in_use).tolist():
                kernels.mark(self.bitmap, self._of(region))
            self.invalid = int(in_use.sum()) * layout.slots
            self.invalid_mirrors = int(self.own.is_mirror.sum()) * layout.slots

    def _arrange(self, layout: ArenaLayout, place: int) -> None:
        self.layout = layout
        self.place = place
        self.own: Regions = layout.layout.regions(place)
        self.data_records = layout.data_records(place)
        """All data is below this; so is nothing else, where the layout is in order."""
        self.in_order = self.own.in_order
        self.mirrors = bool(self.own.is_mirror.any())

    def rearrange(self, layout: ArenaLayout, place: int) -> bool:
        """The same records under another layout: what is new to this server is not valid; what it
        has no more is forgotten. Returns whether all that was data stays as it was, and where.
        """
        before, data_records = self.own, self.data_records
        count = layout.records(place)
        stays = self.records.hold(count, room_for(layout, count))
        if not stays:
            bitmap = np.full(-(-self.records.room // 8), 0xFF, np.uint8)
            bitmap[: len(self.bitmap)] = self.bitmap
            self.bitmap = bitmap
        self._arrange(layout, place)
        for region, (group, position) in enumerate(
            zip(self.own.group.tolist(), self.own.position.tolist(), strict=True)
        ):
            if region < len(before.group) and group == before.group[region]:
                if group == NOTHING or position == before.position[region]:
                    continue
            index = self._of(region)
            if group == NOTHING:
                kernels.mark(self.bitmap, index)
            else:
                _clear(self.bitmap, index)
                stays &= index[0] >= data_records
        self._count_invalid()
        return bool(stays)

    def _of(self, region: int) -> Index:
        """The numbers of its records."""
        slots = self.layout.slots
        return np.arange(region * slots, (region + 1) * slots)

    def _count_invalid(self) -> None:
        """Of what this server holds, and of what it only mirrors."""
        self.invalid = self.invalid_mirrors = 0
        for region in np.flatnonzero(self.own.group != NOTHING).tolist():
            count = len(kernels.missing(self.bitmap, self._of(region)))
            self.invalid += count
            self.invalid_mirrors += count if self.own.is_mirror[region] else 0

    def is_data(self, index: Index) -> NDArray[np.bool_]:
        """Which of these records are data; the others are parity or mirrors."""
        if self.in_order:
            return index < self.data_records
        found: NDArray[np.bool_] = self.own.is_data[index // self.layout.slots]
        return found

    def has_data_at(self, number: int) -> bool:
        return number < len(self.records) and bool(self.own.is_data[number // self.layout.slots])

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
        if self.mirrors:
            self.invalid_mirrors -= int(self.own.is_mirror[index // self.layout.slots].sum())

    def set_all_valid(self) -> None:
        self.bitmap.fill(0xFF)
        self.invalid = self.invalid_mirrors = 0

    def regions(self, kind: str) -> list[int]:
        """Those that hold data; or those that hold parity, or mirror something."""
        if kind == "data":
            chosen = self.own.is_data
        else:
            chosen = ~self.own.is_data & (self.own.group != NOTHING)
        found: list[int] = np.flatnonzero(chosen).tolist()
        return found

    def chunks(self, region: int, size: int) -> list[slice]:
        """The records of one region, `size` at a time."""
        first, slots = region * self.layout.slots, self.layout.slots
        return [slice(first + at, first + min(at + size, slots)) for at in range(0, slots, size)]


def rules_of(stores: Sequence[ArenaStore], lrs: Sequence[float] | None) -> list[OptimizerRule]:
    """The numbers of one step, arena by arena; raises if these are no learning rates."""
    optimizers = [store.arena.optimizer for store in stores]
    if lrs is None:
        return [optimizer.rule() for optimizer in optimizers]
    if len(lrs) != len(optimizers):
        raise StoreError(
            f"{len(lrs)} learning rates came with a step; this job has {len(optimizers)} "
            "arenas, and each takes one"
        )
    return [optimizer.rule(lr) for optimizer, lr in zip(optimizers, lrs, strict=True)]


def room_for(layout: ArenaLayout, count: int) -> int:
    """Records that there is address space for: as many as a server has that stands in all groups.
    Memory is taken only by what is touched.
    """
    return max(count, layout.layout.n_groups * layout.slots)


def _clear(bitmap: Bytes, index: Index) -> None:
    np.bitwise_and.at(bitmap, index // 8, ~(np.uint8(1) << (index % 8).astype(np.uint8)))
