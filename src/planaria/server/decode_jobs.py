"""What is decoded together, who is asked for it, and what has been answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planaria.kernels.types import Index, Records
from planaria.server.decoding import Mates
from planaria.wire.machine import BACK_OFF, MAX_BACK_OFF, Outbox
from planaria.wire.messages import MatePeek, MateRequest, Member, RangeRequest, View


@dataclass
class Patience:
    """When to ask again for what mates have not answered, ever more rarely."""

    asked_at: float | None = None
    wait_s: float = 0.0

    def over(self, now: float, retry_s: float) -> bool:
        if self.asked_at is None:
            self.asked_at, self.wait_s = now, retry_s
        if now - self.asked_at < self.wait_s:
            return False
        self.asked_at, self.wait_s = now, min(BACK_OFF * self.wait_s, MAX_BACK_OFF * retry_s)
        return True


@dataclass
class DecodeJob:
    arena: int
    index: Index  # the records to decode
    mates: Mates
    as_of: int
    out: Records  # accumulates coefficient times mate
    sweep: bool
    verify: bool = False  # compare with the record that is there, instead of restoring it
    asked: dict[int, tuple[Index, Index]] = field(default_factory=dict)
    """place -> (rows of this job, columns of its mates) that are still to be answered"""
    avoided: frozenset[int] = frozenset()  # places that are asked only because nobody else is left
    patience: Patience = field(default_factory=Patience)

    @property
    def count(self) -> int:
        return len(self.index)

    def expects(self, place: int) -> bool:
        return place in self.asked

    def requests(self, view: View, number: int, servers: Sequence[Member]) -> Outbox:
        return [
            (
                servers[place],
                MateRequest(
                    view=view,
                    request=number,
                    arena=self.arena,
                    as_of=self.as_of,
                    indices=self.mates.indices[rows, columns],
                ),
            )
            for place, (rows, columns) in self.asked.items()
        ]


@dataclass
class RangeJob:
    """Records in a row, all of one region: on each place their mates are in a row, too."""

    arena: int
    first: int
    count: int
    as_of: int
    mates: Mates  # of the first record, [1, k]
    peeks: bool = False  # mates say where they have it
    answers: dict[int, Records | MatePeek] = field(default_factory=dict)  # by place
    sweep: bool = True
    verify: bool = False
    avoided: frozenset[int] = frozenset()
    patience: Patience = field(default_factory=Patience)

    def requests(self, view: View, number: int, servers: Sequence[Member]) -> Outbox:
        return [
            (
                servers[place],
                RangeRequest(
                    view=view,
                    request=number,
                    arena=self.arena,
                    as_of=self.as_of,
                    first=first,
                    count=self.count,
                    peeks=self.peeks,
                ),
            )
            for place, first in self.needed().items()
            if place not in self.answers
        ]

    def expects(self, place: int) -> bool:
        return place in self.needed() and place not in self.answers

    def needed(self) -> dict[int, int]:
        """Whom to ask, and from which of their records on."""
        columns = zip(*(column[0].tolist() for column in self.mates), strict=True)
        return {place: first for place, first, coef in columns if coef}


@dataclass
class ScrubRound:
    """One pass over all parity records: each must be what its data records make of it."""

    number: int
    next_piece: list[int]  # per arena: of its parity records, so many pieces are compared
    again: list[tuple[int, Index]] = field(default_factory=list)
    held_up: bool = False  # a mate is being rebuilt itself: go on after a while
    patience: Patience = field(default_factory=Patience)
    records: int = 0
    wrong: int = 0
