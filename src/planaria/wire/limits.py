"""How large a message can be, by its kind: what a job's config implies, and then twice that.

Nobody in a job has reason to send more, so more is refused, and no buffer has to be ready for it.
The factor is for what this page may have counted too tightly; a stranger gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from planaria.config import Config
from planaria.tables import Arena
from planaria.wire.messages import (
    Answer,
    Delta,
    DenseCopy,
    DenseGradient,
    DenseSum,
    Early,
    Lookup,
    MatePeek,
    MateReply,
    MateRequest,
    Push,
)

GENEROSITY = 2
HEADER_BYTES = 64 << 10  # all that a header says, but for names: numbers, shapes, a sentence
NAMED_BYTES = 1 << 10  # a member in an install: its name, twice, and its address
SCRIPT_STATE_BYTES = 64 << 20
SCRIPT_IDS = 1 << 20  # that a script's batch may have, however few its first one had
BOUNDS_FOOTER_BYTES = 64
FRAME_BYTES, PIECE_BYTES = 64, 32  # of a frame of rows, and of each table in it
PEEKED_AT_ONCE = 4  # so many times as many records of a sweep, where they are not sent
SMALLEST_ARRAYS = 1 << 20  # so that no job's limits are tight by accident


@dataclass(frozen=True)
class Limits:
    """Bytes that a header may have, and the arrays of one message together, by kind.

    `other` is for kinds that are not listed. The defaults suffice for what a client of any job is
    told, such as the outcome of a scrub.
    """

    header: int = 1 << 20
    arrays: Mapping[type[Any], int] = field(default_factory=dict)
    other: int = 256 << 20
    frames: int = 256  # of one message, all together

    @cached_property
    def largest(self) -> int:
        """Of one frame, or of all arrays of one message."""
        return max(self.header, self.other, *self.arrays.values())

    def of(self, kind: type[Any]) -> int:
        """Bytes that the arrays of one message of this kind may have together."""
        return self.arrays.get(kind, self.other)

    @classmethod
    def of_job(cls, config: Config, dense_parameters: int) -> Limits:
        """What the processes of a job may say to each other."""
        arenas = config.arenas
        exact: dict[type[Any], int] = dict.fromkeys(
            (Lookup, Answer, Early, Push, Delta, MateRequest, MateReply, MatePeek), 0
        )
        for arena in arenas:
            for kind, size in _of_arena(config, arena).items():
                exact[kind] += size
        # Dense Adam has the most state: three words for each parameter, and one more.
        exact[DenseGradient] = exact[DenseSum] = 4 * dense_parameters
        exact[DenseCopy] = 4 * (3 * dense_parameters + 1)
        exact[Lookup] += 4 * len(config.tables)  # bounds; here and in what trainers sum
        exact[DenseGradient] += 4 * len(config.tables)
        exact[DenseSum] += 4 * len(config.tables)
        exact[DenseCopy] += 8 * len(config.tables) + BOUNDS_FOOTER_BYTES
        if config.script.parameters is not None:  # whatever a script keeps beside them
            exact[DenseCopy] += 4 * dense_parameters + SCRIPT_STATE_BYTES
        arrays = {kind: max(GENEROSITY * n, SMALLEST_ARRAYS) for kind, n in exact.items()}
        members = config.servers + config.spares + config.most_trainers
        return cls(
            header=HEADER_BYTES + members * NAMED_BYTES + 96 * len(arenas),
            arrays=arrays,
            other=max(arrays.values()),  # what nobody listed takes no larger buffer than the rest
            frames=64 + GENEROSITY * 2 * len(arenas),
        )


OF_HOSTS = Limits(header=32 << 20)  # whole configurations, and what scripts print


def _of_arena(config: Config, arena: Arena) -> dict[type[Any], int]:
    """Exact upper bounds, in bytes, of one arena's share of a message."""
    tables, layout = len(arena.table_ids), config.layout.arena(arena.rows)
    # A server has one record of a stripe at most, however few servers there are by now.
    data_records = records = layout.layout.n_groups * layout.slots
    # A trainer names each row once. The last lookup is that of its share of the held-out samples.
    fewest = 1 if config.is_elastic else config.trainers
    samples = -(-max(config.batch, config.data.test_samples) // fewest)
    named = min(samples * tables, data_records)
    if config.script.parameters is not None:  # bags of any size
        ids = config.script.ids * config.trainers // fewest
        named = min(max(8 * ids, SCRIPT_IDS), data_records)
    # All trainers' rows of one step, as one owner has them; on one holder each has one parity
    # record.
    touched = min(max(config.batch * tables, config.most_trainers * named), data_records)
    # A place has one mate of each record at most, and is asked for what a lookup wants or for a
    # piece of the sweep.
    decoded = min(max(named, config.rebuild.chunk), records)
    # A mate that is read where it lies tells what changed in each step of its history.
    peeked = min(PEEKED_AT_ONCE * config.rebuild.chunk, records)
    changed = config.history.steps * max(config.layout.k, 1) * min(touched, peeked)
    weights, record, number, bits = 4 * arena.dim, 4 * arena.words, 8, -(-named // 8)
    bits += FRAME_BYTES + PIECE_BYTES * tables
    return {
        Lookup: named * number,
        Answer: named * weights + bits,
        Early: named * weights + bits,
        Push: named * (number + weights),
        Delta: touched * (number + record),
        MateRequest: decoded * number,
        MateReply: decoded * record,
        MatePeek: changed * (number + record),
    }
