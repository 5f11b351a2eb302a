"""Full or differential: what the next checkpoint should be, from the sizes of those before it.

The policies are Check-N-Run's. A *baseline* is a full checkpoint, S_i the size of the i-th
difference after it as a share of the baseline's.

    full           every checkpoint has all records
    one-shot       differences from the baseline: they grow, a restore reads two checkpoints
    consecutive    differences from the checkpoint before: small, a restore reads them all
    intermittent   as one-shot, with a new baseline as soon as 1 + S_1 + ... + S_i <= (i + 1) * S_i:
                   what the differences of this round took, with a new baseline, is then no more
                   than going on at the present size would take

One-shot and consecutive as published never write a new baseline. Here they do, too, where it is
plainly the better thing: one-shot when a difference has become as large as a full checkpoint, and
consecutive when all differences together have, so that a restore reads at most about twice the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from planaria.errors import ArgumentError

Policy: TypeAlias = Literal["full", "one-shot", "consecutive", "intermittent"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


class Saved(NamedTuple):
    """A checkpoint that was published: its step, its size, and what it needs."""

    step: int
    bytes: int
    base: tuple[int, ...] = ()


class SavePlan(NamedTuple):
    """The next checkpoint: full, or all rows changed since step `since`, on top of `base`."""

    base: tuple[int, ...] = ()

    @property
    def full(self) -> bool:
        return not self.base

    @property
    def since(self) -> int | None:
        return self.base[-1] if self.base else None


def plan_next(policy: Policy, history: Sequence[Saved], longest: float = 1.0) -> SavePlan:
    """What to save next. history: what was published, oldest first, as far as changed rows are
    known since; whoever has lost count of them passes nothing and gets a full checkpoint.
    longest: how many times the baseline consecutive differences may come to.
    """
    if policy not in POLICIES:
        raise ArgumentError(f"unknown policy {policy!r}; use {', '.join(POLICIES)}")
    baselines = [at for at, saved in enumerate(history) if not saved.base]
    if policy == "full" or not baselines:
        return SavePlan()
    baseline, *differences = history[baselines[-1] :]
    shares = [saved.bytes / baseline.bytes for saved in differences]
    if shares and _wants_baseline(policy, shares, longest):
        return SavePlan()
    if policy == "consecutive":
        return SavePlan((baseline.step, *(saved.step for saved in differences)))
    return SavePlan((baseline.step,))


def _wants_baseline(policy: Policy, shares: Sequence[float], longest: float) -> bool:
    match policy:
        case "one-shot":
            return shares[-1] >= 1
        case "consecutive":
            return sum(shares) >= longest
    return 1 + sum(shares) <= (len(shares) + 1) * shares[-1]
