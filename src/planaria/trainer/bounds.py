"""How far a lossy weight may be from what it was: by table and by step.

A table's bound is a share of the range of its weights (paper: the dual-level adaptive rule). The
share is tight, base or loose by how many distinct rows are left after quantising: a table whose
rows coincide loses by it. And all bounds are twice as wide at first, and narrow in ten steps.

Ranges are looked at in steps 1, 2, 3, 5, 9, ... after the start, later every so many. In such a
step rank 0 measures the rows that it pushes, as it received them, and appends the bounds to its
dense gradient; the others append zeros. So they come out of the sum, the same bits for everybody,
with no message of their own. They hold from the second step after that one on, because rows of the
next may be on their way already. Until a table was measured it is sent exactly.

What was measured is part of the dense state: two generations of bounds behind the driver's bytes,

    float32[tables] of the next step, float32[tables] of those after it,
    uint64 first measured, uint64 to be measured, uint32 tables, uint32 CRC-32 of all before, magic

so it is there whoever dies, and in checkpoints.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planaria.kernels.types import Bytes, Floats, Index
from planaria.wire.coding import Coding

MAGIC = b"PLBOUND1"
FOOTER = struct.Struct("<QQII8s")
DECAYS = 10  # until the bounds are what was asked for
SAMPLED_ROWS = 2048  # of a table, at most
LEFT_BASE, LEFT_LOOSE = 0.5, 0.95  # shares of distinct rows left, from which on a table is so


@dataclass(frozen=True)
class BoundRule:
    """tight, base, loose: shares of a table's range."""

    tight: float = 0.01
    base: float = 0.03
    loose: float = 0.05
    decay_steps: int = 65_536
    sample_steps: int = 1024

    def factor(self, step: int) -> float:
        """Early on, weights are far from where they will be."""
        if step >= self.decay_steps:
            return 1.0
        return 2.0 * (1.0 - 0.5 * (DECAYS * step // self.decay_steps) / DECAYS)

    def bound_of(self, values: Floats) -> float:
        """For one table, from some of its rows, float32[n, dim]."""
        span = float(values.max()) - float(values.min())
        if not 0 < span < np.inf:
            return 0.0
        shares = {"tight": self.tight, "base": self.base, "loose": self.loose}
        return min(shares[self.class_of(values)] * span, 2.0**125)

    def class_of(self, values: Floats) -> str:
        """tight, base or loose: by these rows, which are not all one number."""
        span = float(values.max()) - float(values.min())
        codes = np.rint(values.astype(np.float64) / (2 * self.base * span)).astype(np.int64)
        # Rows as single values, in any order: sorted number by number they take ten times as long.
        rows = codes.view(np.dtype((np.void, codes.dtype.itemsize * codes.shape[1])))
        left = len(np.unique(rows)) / len(values)
        return "loose" if left >= LEFT_LOOSE else "base" if left >= LEFT_BASE else "tight"


USUAL_RULE = BoundRule()


@dataclass(frozen=True)
class Bounds:
    """As of one step. first: when they were first measured; due: when they will be."""

    next: Floats = field(repr=False)  # float32[tables], of the step after it
    later: Floats = field(repr=False)  # of those after that
    first: int
    due: int

    @classmethod
    def unknown(cls, tables: int, step: int) -> Bounds:
        nothing = np.zeros(tables, np.float32)
        return cls(nothing, nothing, step + 1, step + 1)

    def after(self, step: int, measured: Floats | None, rule: BoundRule) -> Bounds:
        """As of the step after. measured: in that step, if they were due."""
        if measured is None:
            return Bounds(self.later, self.later, self.first, self.due)
        wait = min(max(step - self.first, 1), rule.sample_steps)
        return Bounds(self.later, measured, self.first, step + wait)

    def measured(
        self, coding: Coding, rule: BoundRule, rows: Sequence[Index], values: Sequence[Floats]
    ) -> Floats:
        """From some rows of each arena and their weights. Tables of which there are none keep
        theirs.
        """
        found = self.later.copy()
        for number, (own, weights) in enumerate(zip(rows, values, strict=True)):
            tables = coding.of_rows(number, own)
            for local in np.unique(tables).tolist():
                table = int(coding.arenas[number].table_ids[local])
                if coding.adapts[table]:
                    some = np.flatnonzero(tables == local)[:SAMPLED_ROWS]
                    found[table] = rule.bound_of(weights[some])
        return found

    def pack(self) -> Bytes:
        body = self.next.tobytes() + self.later.tobytes()
        head = FOOTER.pack(self.first, self.due, len(self.next), 0, MAGIC)
        crc = zlib.crc32(body + head)
        footer = FOOTER.pack(self.first, self.due, len(self.next), crc, MAGIC)
        return np.frombuffer(body + footer, np.uint8)

    @classmethod
    def unpack(cls, trailer: Bytes) -> Bounds:
        first, due, tables, _, _ = FOOTER.unpack(trailer[-FOOTER.size :].tobytes())
        both = np.frombuffer(trailer[: -FOOTER.size].tobytes(), np.float32)
        return cls(both[:tables], both[tables:], first, due)


def split(state: Bytes) -> tuple[Bytes, Bytes]:
    """A dense state as the driver has it, and what is behind it of bounds: nothing, mostly."""
    nothing = state[len(state) :]
    if len(state) < FOOTER.size or state[-len(MAGIC) :].tobytes() != MAGIC:
        return state, nothing
    first, due, tables, crc, _ = FOOTER.unpack(state[-FOOTER.size :].tobytes())
    size = 8 * tables + FOOTER.size
    if size > len(state):
        return state, nothing
    trailer = state[len(state) - size :]
    plain = FOOTER.pack(first, due, tables, 0, MAGIC)
    if zlib.crc32(trailer[: -FOOTER.size].tobytes() + plain) != crc:
        return state, nothing
    return state[: len(state) - size], trailer
