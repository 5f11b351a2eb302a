"""Servers that come or go while a job trains: what training keeps of its speed meanwhile.

One of six servers is drained, so a sixth of all records moves, and then one comes again. The
figure is the speed from the view that begins a move to the view that ends it, over that of the
steps before; and that of the last steps, when records lie elsewhere than in the beginning.

    python -m benchmarks.moving
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from typing import NamedTuple

import numpy as np

from benchmarks.cluster import NETWORKS, Row, Sizes, job, show
from planaria.cluster import asking
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.run import JobRun
from planaria.errors import PlanariaError
from planaria.wire.control import StepDone, Viewed

BAR = 0.85
BEFORE = 40  # steps that are compared with


class Move(NamedTuple):
    servers: int
    began: float
    ended: float


class Scales(Watcher):
    """Asks for another number of servers after some steps, and notes when records move."""

    def __init__(self, wanted: dict[int, int]) -> None:
        """wanted: by step, the number of servers from then on."""
        self.wanted = wanted
        self.steps: list[float] = []  # when each was done
        self.moves: list[Move] = []
        self.problems: list[str] = []
        self._began = 0.0
        self._resizes = 0

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        what = event.what
        if isinstance(what, StepDone) and what.rank == 0:
            self.steps.append(event.at)
            if what.step in self.wanted:
                arguments = (processes, self.wanted[what.step])
                threading.Thread(target=self._scale, args=arguments, daemon=True).start()
        elif isinstance(what, Viewed):
            if what.moving is not None:
                self._began = event.at
            elif len(what.resizes) > self._resizes:
                self.moves.append(Move(len(what.servers), self._began, event.at))
            self._resizes = len(what.resizes)

    def _scale(self, processes: Attempt, servers: int) -> None:
        try:
            found = asking.scale(processes.folder, servers)
            if found.state != "done":
                self.problems.append(found.why)
        except PlanariaError as error:
            self.problems.append(str(error))

    def kept(self, move: Move) -> float:
        """The share of its speed that training had during a move."""
        times = np.array(self.steps)
        before = np.diff(times[times < move.began][-BEFORE:]).mean()
        inside = times[(times >= move.began) & (times <= move.ended)]
        # The steps that a view change holds up are those of the move as well.
        during = (inside[-1] - inside[0]) / (len(inside) - 1)
        return float(before / during)

    def afterwards(self) -> float:
        """Of its speed before the first move, the share that it has in the end."""
        times = np.array(self.steps)
        before = np.diff(times[times < self.moves[0].began][-BEFORE:]).mean()
        return float(before / np.diff(times[-BEFORE:]).mean())


def moving(sizes: Sizes) -> list[Row]:
    kept: dict[str, list[float]] = {}
    details: dict[str, list[str]] = {}
    for _ in range(sizes.rounds):
        steps = sizes.steps
        watch = Scales({steps: 5, 3 * steps: 6})
        JobRun(job(sizes, "parity=1", "k=4", f"steps={6 * steps}"), observers=[watch]).run()
        if watch.problems or len(watch.moves) < 2:
            raise SystemExit(f"records did not move as they should: {watch.problems}")
        for move in watch.moves:
            name = f"samples/s while six become five, or five six: {move.servers} afterwards"
            kept.setdefault(name, []).append(watch.kept(move))
            took = f"{move.ended - move.began:.1f} s"
            details.setdefault(name, []).append(f"{kept[name][-1]:.2f} for {took}")
        name = "samples/s of six after both moves"
        kept.setdefault(name, []).append(watch.afterwards())
        details.setdefault(name, []).append(f"{kept[name][-1]:.2f}")
    return [
        Row(name, statistics.median(found), BAR, False, "; ".join(details[name]))
        for name, found in kept.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each of the 26 tables")
    parser.add_argument("--steps", type=int, default=120, help="steps before a move")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--network", choices=NETWORKS, default="512-256", help="its layers")
    options = parser.parse_args()
    show(moving(Sizes(options.rows, 16, options.steps, options.rounds, network=options.network)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
