"""What a server refuses of trainers' messages, before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planaria.errors import StepError
from planaria.server.arena import rules_of
from planaria.server.job import ServerJob
from planaria.server.store import Store
from planaria.wire.messages import Push


def check_message(
    job: ServerJob, trainers: int, store: Store, step: int, rank: int, per_arena: Sequence[object]
) -> None:
    """trainers: so many are in this view."""
    if not 0 <= rank < trainers:
        raise StepError(f"there is no rank {rank}; ranks are 0 to {trainers - 1}")
    # A replacement starts at c. A trainer may be at c + 2, because another one's dense state was
    # late; and it asks one step ahead.
    if not 1 <= step <= store.step + 3:
        raise StepError(f"step {step} is too far from step {store.step}")
    check_arenas(job, per_arena)


def check_arenas(job: ServerJob, per_arena: Sequence[object]) -> None:
    if len(per_arena) != len(job.arenas):
        raise StepError(f"{len(per_arena)} arenas; this job has {len(job.arenas)}")


def check_lrs(store: Store, push: Push, others: Mapping[int, Push]) -> None:
    """All ranks compute the same ones; a job in which they differ must not go on.

    others: pushes of the same step, by rank.
    """
    rules_of(store.arenas, push.lrs)
    for rank, other in others.items():
        if other.lrs != push.lrs:
            raise StepError(
                f"rank {push.rank} has the learning rates {push.lrs} in step {push.step}, but "
                f"rank {rank} has {other.lrs}; make every rank's the same function of the step"
            )
