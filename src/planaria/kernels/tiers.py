"""The kernels of tiers, checked: which records lie in memory, and the file that holds the others.
What planaria.kernels promises of its functions holds for these.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.kernels import twin_tiers
from planaria.kernels.checks import array, require
from planaria.kernels.types import Bytes, Index, Records

COLD = -1  # as the slot of a record, or the owner of a slot: none
CLAIMED = -2  # as the slot of a record: it is about to get one


def _backend() -> Any:
    return twin_tiers if kernels.level() == "numpy" else kernels.native


class Slots(NamedTuple):
    """Which record lies in which slot of memory."""

    slot_of: NDArray[np.int32]  # by record
    owner: NDArray[np.int32]  # by slot, as what follows
    pin: NDArray[np.uint32]  # the last call that needed it
    ticket: NDArray[np.uint64]  # of the read that fills it
    uses: Bytes  # of late

    @classmethod
    def empty(cls, records: int, slots: int) -> Slots:
        return cls(
            np.full(records, COLD, np.int32),
            np.full(slots, COLD, np.int32),
            np.zeros(slots, np.uint32),
            np.zeros(slots, np.uint64),
            np.zeros(slots, np.uint8),
        )

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


class Located(NamedTuple):
    slots: Index  # of each record, or -1
    missing: Index  # the records without one, each once
    ticket: int  # the latest of those that have one


def locate(table: Slots, index: Index, call: int) -> Located:
    """Where records lie. Those without a slot are claimed, and the caller must give them one."""
    _check(table)
    array("index", index, np.int64, 1)
    slots, missing = np.empty(len(index), np.int64), np.empty(len(index), np.int64)
    count, ticket = _backend().locate_slots(*table, index, call, slots, missing)
    return Located(slots, missing[:count], ticket)


def claim(table: Slots, call: int, done: int, hand: int, wanted: int) -> tuple[Index, int]:
    """Up to so many slots that may be used for other records, and where the clock's hand is then.

    Those are passed over which this call needs, or which a read after `done` still fills.
    """
    _check(table)
    slots = np.empty(wanted, np.int64)
    count, hand = _backend().claim_slots(*table, call, done, hand, slots)
    return slots[:count], hand


def _check(table: Slots) -> None:
    array("slot_of", table.slot_of, np.int32, 1, writable=True)
    array("owner", table.owner, np.int32, 1, writable=True)
    array("pin", table.pin, np.uint32, 1, writable=True)
    array("ticket", table.ticket, np.uint64, 1, writable=True)
    array("uses", table.uses, np.uint8, 1, writable=True)
    require(len(table.owner) > 0, "there must be a slot")


class Cold(Protocol):
    """Records in a file, each in blocks of its own, with checksums in memory, uint32[records].

    One thread at a time may call it. After a failure nothing that it gives counts.
    """

    def write(
        self, records: Index, slots: Index, values: Records, sums: NDArray[np.uint32]
    ) -> None:
        """Takes copies of values[slots[i]], to be written as distinct records[i] in time, and
        notes their checksums.
        """

    def read(self, records: Index, slots: Index, values: Records, sums: NDArray[np.uint32]) -> int:
        """Begins to read records[i] into values[slots[i]]; returns the ticket to wait with."""

    def write_range(self, first: int, values: Records, sums: NDArray[np.uint32]) -> None: ...

    def read_range(self, first: int, values: Records, sums: NDArray[np.uint32]) -> None: ...

    def wait(self, ticket: int) -> None: ...

    def settle(self) -> None:
        """Until all is written."""

    def done(self) -> int:
        """All reads up to this ticket have ended."""

    def failure(self) -> tuple[bool, int, int] | None:
        """Whether it was written, the error's number, and the record; the number is 0 where other
        bytes came back than were written, and -1 where fewer did.
        """


def open_cold(descriptor: int, words: int, stride: int, threads: int, room: int) -> Cold:
    """stride: bytes from one record to the next; room: of what may wait to be written.

    The descriptor belongs to it from now on, and is closed when nobody holds it any more.
    """
    cold: Cold = _backend().ColdFile(descriptor, words * 4, stride, threads, room)
    return cold
