"""What every server of a job must agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planaria.layout import Layout
from planaria.records.budget import Tier
from planaria.server.peeking import Peeks
from planaria.server.reserve import Reserve
from planaria.tables import Arena
from planaria.wire.coding import EXACTLY, Coding


def nothing(*_: object) -> None:
    """Where a driver does not care. No lambda: simulated worlds are copied, and those cannot be."""


@dataclass(frozen=True)
class ServerJob:
    arenas: Sequence[Arena]
    layout: Layout
    seed: int
    keep_steps: int = 2
    retry_s: float = 1.0
    rebuild_chunk: int = 16384  # records that the background sweep asks for at a time
    scrub_every: int = 0  # steps between two verifications of all parity records; 0: never
    rebuild_bytes_per_s: int = 0  # limit of the background sweep; 0: none
    rebuild_jobs: int = 2  # how many such requests may be under way
    rebuild_priority: str = "redundancy"  # see planaria.server.pace
    on_progress: Callable[[], None] = nothing  # called now and then while records are filled
    reserve: Reserve | None = None  # memory of a spare
    tier: Tier | None = None  # where cold records lie, if not in memory
    peeks: Peeks | None = None  # whether it reads what it rebuilds in its mates' memory
    early_answers: bool = False  # rows that a step will hardly change leave before it
    coding: Coding = EXACTLY  # of rows, on their way to trainers
    partial: bool = False  # a replacement's records come from a save, not from its stripe-mates
