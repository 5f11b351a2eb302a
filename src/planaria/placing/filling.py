"""The RAM of one server, filled with the rows that are worth most per byte.

For each table a curve of seconds over RAM; its lower convex hull is a list of segments, each with
bytes and the seconds that they save, the best ones first. Taking segments of all tables by what
they save per byte, until the RAM is full, is the optimum of the linear program; only the last one
is taken in part. What the hull promises between its corners, a curve that bends inwards does not
quite keep: `seconds_of` says what it truly is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planaria.kernels.types import Index
from planaria.placing.costs import Curve, Machine, Numbers


def lower_hull(x: Numbers, y: Numbers) -> Index:
    """Corners of the lower convex hull of points whose x ascend."""
    corners: list[int] = []
    for point in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y[b] - y[a]) * (x[point] - x[a]) < (y[point] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(point)
    return np.array(corners, np.int64)


@dataclass(frozen=True, eq=False)
class Menu:
    """Segments of all tables for one kind of machine, by what they save per byte.

    RAM and seconds are of the whole table, as if one such machine had all of it.
    """

    tables: int
    base: Numbers  # float64[tables]: seconds per sample with no row in RAM
    table: Index  # int64[segments]
    ram: Numbers
    saved: Numbers

    def members(self, tables: Sequence[int] | Index) -> Index:
        """The segments of these tables, the best ones first."""
        chosen = np.zeros(self.tables, np.bool_)
        chosen[np.asarray(tables, np.int64)] = True
        return np.flatnonzero(chosen[self.table])

    def taken(self, segments: Index, budget: float) -> Numbers:
        """Which part of each of these is taken: float64[segments], 1 up to the last one."""
        ram = self.ram[segments]
        before = np.cumsum(ram) - ram
        return np.clip((budget - before) / np.maximum(ram, 1e-300), 0.0, 1.0)

    def saving(self, segments: Index, budget: float) -> float:
        """Seconds per sample."""
        return float(self.taken(segments, budget) @ self.saved[segments])

    def fill(self, segments: Index, budget: float) -> Numbers:
        """Bytes of RAM for each table: float64[tables]."""
        bytes_taken = self.taken(segments, budget) * self.ram[segments]
        return np.bincount(self.table[segments], bytes_taken, self.tables).astype(np.float64)


def menu_of(curves: Sequence[Curve], machine: Machine) -> Menu:
    table, ram, saved, base = [], [], [], np.empty(len(curves))
    for number, curve in enumerate(curves):
        seconds = curve.traffic.seconds(machine)
        corners = lower_hull(curve.ram, seconds)
        base[number] = seconds[0]
        ram.append(np.diff(curve.ram[corners]))
        # Where the SSD is the faster tier, RAM saves nothing and is used for what has no room.
        saved.append(-np.diff(seconds[corners]))
        table.append(np.full(len(corners) - 1, number))
    all_ram, all_saved = np.concatenate(ram), np.concatenate(saved)
    order = np.argsort(-all_saved / all_ram, kind="stable")
    return Menu(len(curves), base, np.concatenate(table)[order], all_ram[order], all_saved[order])


def hot_rows(curves: Sequence[Curve], ram: Numbers) -> Index:
    """int64[tables]: how many rows of each table fit into so many bytes."""
    return np.array([curve.hot_of(float(size)) for curve, size in zip(curves, ram, strict=True)])


def seconds_of(curve: Curve, hot: int, machine: Machine) -> float:
    """Per sample, of a table with so many hot rows."""
    return float(curve.traffic_of(np.array([float(hot)])).seconds(machine)[0])
