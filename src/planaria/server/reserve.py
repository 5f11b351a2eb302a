"""Memory for records that a server does not have yet.

The first touch of a page costs more than all that is done with it afterwards, and the rows of a
step lie on most of an arena's pages. So a spare touches its memory while it has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from planaria import kernels
from planaria.kernels.types import Records
from planaria.layout import Layout
from planaria.server.arena import room_for
from planaria.tables import Arena

PIECE_BYTES = 4 << 20
PAGE_WORDS = 1024


class Reserve:
    """Enough for any place of a job, once."""

    def __init__(self, arenas: Sequence[Arena], layout: Layout) -> None:
        self._records: list[Records | None] = []
        self._wanted: list[int] = []  # words of each that are touched
        for arena in arenas:
            within = layout.arena(arena.rows)
            most = max(within.records(place) for place in layout.places)
            self._records.append(kernels.allocate(room_for(within, most), arena.words))
            self._wanted.append(most * arena.words)
        self._arena, self._touched = 0, 0  # which is being touched, and how many words of it are

    def touch(self) -> bool:
        """Touches another piece; False if there is none left."""
        while self._arena < len(self._records):
            records, first = self._records[self._arena], self._touched
            if records is not None and first < self._wanted[self._arena]:
                self._touched = min(first + PIECE_BYTES // 4, self._wanted[self._arena])
                records.reshape(-1)[first : self._touched : PAGE_WORDS] = 0
                return True
            self._arena, self._touched = self._arena + 1, 0
        return False

    def take(self, arena: int, rows: int) -> Records | None:
        """Zeros, as many or more; None if they were taken before, or are too few."""
        records, self._records[arena] = self._records[arena], None
        return None if records is None or len(records) < rows else records
