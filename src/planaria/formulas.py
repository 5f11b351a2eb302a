"""What a strategy costs, in closed form.

Times are hours, and an overhead is a share of the job's undisturbed length: 0.085 is 8.5 %. MTBF is
the mean time between failures of any server of the job. The formulas of checkpointing and partial
recovery are CPR's; they are first order, which means that each failure is charged once and nothing
goes wrong while one is repaired. `hours_with_restarts` has no such limit, for exponential failures.
"""

from __future__ import annotations

import math
from functools import lru_cache

from planaria.layout.groups import choose_groups, default_scatter, window_of

MOST_OPEN = 64  # places open at a time that are told apart


def young_interval(save: float, mtbf: float) -> float:
    """The time between saves at which full recovery costs least."""
    return math.sqrt(2 * save * mtbf)


def full_recovery_overhead(
    *, save: float, interval: float, repair: float, mtbf: float, lag: float = 0.0
) -> float:
    """Saves, and for each failure its repair (loading and rescheduling) and the work since a save.

    `lag` is how much older than the last save the newest whole one is: a save in the background
    counts only when it is written.
    """
    return save / interval + (repair + interval / 2 + lag) / mtbf


def partial_recovery_overhead(*, save: float, interval: float, repair: float, mtbf: float) -> float:
    """As full recovery, but survivors do not roll back, so no work is done twice."""
    return save / interval + repair / mtbf


def partial_interval(pls: float, mtbf: float, servers: int) -> float:
    """The time between saves that loses the share `pls` (CPR's portion of lost samples) on average.

    A failure loses half an interval's samples of one server.
    """
    return 2 * pls * servers * mtbf


def erasure_overhead(
    *,
    protection: float,
    pause: float,
    rebuild: float,
    slowdown: float,
    mtbf: float,
    save: float,
    interval: float,
    repair: float,
    loss_rate: float,
) -> float:
    """Protection of every step; a pause and a slower rebuild per failure; backups beneath.

    Where more is lost than the parity bears, at `loss_rate` per hour, the job falls back to its
    last backup, which is full recovery.
    """
    backups = save / interval + (repair + interval / 2) * loss_rate
    return protection + (pause + slowdown * rebuild) / mtbf + backups


def hours_with_restarts(work: float, repair: float, mtbf: float) -> float:
    """The expected time until `work` hours pass without a failure; each failure costs a repair.

    Exact for exponential failures, which strike during repairs as well. An attempt succeeds with
    chance exp(-work / mtbf), and the mean time of all attempts adds up to this.
    """
    exponent = (work + repair) / mtbf
    if exponent > 700:  # exp would overflow; the job never ends
        return math.inf
    return mtbf * (math.exp(exponent) - math.exp(repair / mtbf))


def restart_overhead(hours: float, repair: float, mtbf: float) -> float:
    """What `none` costs: a failure takes everything, and the job starts again."""
    return hours_with_restarts(hours, repair, mtbf) / hours - 1


# ------------------------------------------------------------------ losing more than r at once


@lru_cache(maxsize=256)
def share_of_sets(servers: int, k: int, r: int, scatter: int | None = None) -> float:
    """The chance that r + 1 servers, taken at random, stand in one group.

    Only then is more lost than the parity bears. Groups are the shifts of a few blocks, which are
    taken as random sets of the window that they lie in; the tests compare that with the true ones.
    """
    blocks = len(choose_groups(servers, k, r, scatter=scatter)) // servers
    window = window_of(servers, default_scatter(k, r) if scatter is None else scatter)
    sets = math.comb(servers, r + 1)
    # Sets that are shifts of one another are of one shape.
    shapes = sets / servers if window == servers else math.comb(window - 1, r)
    covered = math.comb(k + r, r + 1) / shapes
    of_shapes = 1.0 if covered >= 1 else -math.expm1(blocks * math.log1p(-covered))
    return min(1.0, of_shapes * shapes * servers / sets)


def loss_rate(
    *, servers: int, k: int, r: int, mtbf: float, window: float, scatter: int | None = None
) -> float:
    """Losses per hour: failures that find r stripe-mates still dead or being rebuilt.

    A failure leaves a place open for `window` hours. With exponential failures every other place
    is open with the same chance, independent of the others, when a failure comes.
    """
    if r == 0:
        return 1 / mtbf
    is_open = -math.expm1(-window / (mtbf * servers))
    share = share_of_sets(servers, k, r, scatter)
    lost, counted = 0.0, 0.0
    for others in range(min(servers - 1, MOST_OPEN) + 1):
        chance = math.comb(servers - 1, others) * is_open**others
        chance *= (1 - is_open) ** (servers - 1 - others)
        counted += chance
        lost += chance * chance_of_one(share, math.comb(others, r))
    # More open places than were counted lose for certain; below this it is rounding alone.
    beyond = 1 - counted
    return (lost + (beyond if beyond > 1e-9 else 0.0)) / mtbf


def chance_of_one(share: float, sets: int) -> float:
    """The chance that at least one of so many sets stands in a group; exact for small shares."""
    if sets == 0 or share == 1:
        return float(sets > 0)
    return -math.expm1(sets * math.log1p(-share))


def chance_within(hours: float, rate: float) -> float:
    """The chance of at least one event in so many hours."""
    return -math.expm1(-hours * rate)
