"""The digest of logical contents: equal rows give equal digests, on any number of servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planaria import kernels
from planaria.kernels.types import NO_ROW
from planaria.server.arena import CHUNK_RECORDS, ArenaStore


@dataclass(frozen=True)
class Digest:
    """128 bits that can be added up over arenas and servers, in any order."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.first + other.first) % 2**64, (self.second + other.second) % 2**64)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"


def digest_of(
    stores: Sequence[ArenaStore], on_progress: Callable[[], None] = lambda: None
) -> Digest:
    """Of the data records of one server."""
    total = Digest()
    for store in stores:
        for start in range(0, store.data_records, CHUNK_RECORDS):
            stop = min(start + CHUNK_RECORDS, store.data_records)
            index = np.arange(start, stop)
            rows = store.layout.row_at(store.place, index)
            store.require_valid(index[rows >= 0])
            table, row = store.arena.table_row(rows.clip(min=0))
            keys = (table.astype(np.uint64) << np.uint64(40)) | row.astype(np.uint64)
            keys[rows < 0] = NO_ROW
            total += Digest(*kernels.digest(store.records.read(start, stop), keys))
            on_progress()
    return total
