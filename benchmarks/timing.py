"""Side-by-side timing on a machine that may be busy: interleaved rounds, medians, CPU time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


def _nothing(turn: int) -> None:
    pass


class Side(NamedTuple):
    """One of the things compared. Both calls get the number of the turn.

    Turns are counted over all sides, so that whoever picks the turn's indices from a ring never
    meets rows that the side before has just pulled into the cache.
    """

    run: Callable[[int], object]
    prepare: Callable[[int], object] = _nothing  # before each run, not timed


def interleaved(
    sides: Mapping[str, Side],
    rounds: int = 41,
    warm_up_rounds: int = 3,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds of each side, from rounds in which every side runs once, in turn.

    What slows the machine down for a while slows all sides down, so ratios hold where times do
    not. The clock is this process's CPU time: the time on the wall where one thread runs
    undisturbed, and blind to the time slices that other processes take. Work on several threads
    needs time.perf_counter instead. The order turns around every round, so that nobody always
    runs behind the same neighbour.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    turn = 0
    for round_number in range(warm_up_rounds + rounds):
        order = list(sides.items())
        for name, side in order if round_number % 2 else reversed(order):
            side.prepare(turn)
            start = clock()
            side.run(turn)
            elapsed = clock() - start
            turn += 1
            if round_number >= warm_up_rounds:
                seconds[name].append(elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}
