"""What a table costs the servers, by how many of its rows are hot.

A sample accesses `accesses` rows of a table. Each access reads the record and, when the step is
applied, writes it; with r parity records, r more are read and written. A record of b bytes takes b
in RAM; on an SSD it takes whole pages. So of a sample, with `share` of the accesses on hot rows,

    in RAM   accesses x  share      x (2 b + r 2 b)
    on SSD   accesses x (1 - share) x (2 p + r 2 p)          p = b in whole pages

where a stripe's rows are hot or cold together, because rows are renumbered by heat. Where they are
not, hot rows lie anywhere: a stripe has one among its k with chance 1 - (1 - h)^k, where h is the
share of rows that are hot, and its parity has to be in RAM, which takes more of it. A cold row's
parity is in RAM if one of its k - 1 mates is hot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError
from planaria.kernels.types import Index

Numbers = NDArray[np.float64]

FINER = 8  # points for each step, where straight lines between steps would not do
TOUCHES = 2  # a record is read for a lookup, and written when the step is applied


@dataclass(frozen=True)
class Machine:
    """What one server has for records, in bytes and bytes per second."""

    ram: float
    ssd: float
    ram_rate: float = 10e9
    ssd_rate: float = 1e9


@dataclass(frozen=True)
class Storing:
    """How records are protected and laid out; the same on all servers."""

    k: int = 1
    r: int = 0
    renumbered: bool = True
    page: int = 4096

    def on_ssd(self, record_bytes: int) -> int:
        return -(-record_bytes // self.page) * self.page


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes per sample, float64[n] each: of data and of parity, by tier."""

    ram: Numbers
    ssd: Numbers
    parity_ram: Numbers
    parity_ssd: Numbers

    def seconds(self, machine: Machine) -> Numbers:
        """Per sample, if one such machine did all of it."""
        fast = (self.ram + self.parity_ram) / machine.ram_rate
        return fast + (self.ssd + self.parity_ssd) / machine.ssd_rate


@dataclass(frozen=True, eq=False)
class Heat:
    """A table as planning sees it. The hottest hot[i] rows take share[i] of the accesses."""

    name: str
    rows: int
    record_bytes: int
    accesses: float  # rows per sample
    hot: Index  # int64[n], from 0 to rows, ascending
    share: Numbers  # float64[n], from 0 to 1

    def __post_init__(self) -> None:
        ascend = bool((np.diff(self.hot) > 0).all() and (np.diff(self.share) >= 0).all())
        if not (ascend and self.hot[0] == 0 and self.hot[-1] == self.rows):
            raise ArgumentError(f"table {self.name}: its curve must ascend from 0 to all rows")


class Curve:
    """RAM and traffic of a table over the number of its hot rows, all servers together."""

    def __init__(self, heat: Heat, storing: Storing) -> None:
        self.heat, self.storing = heat, storing
        self.hot = heat.hot if storing.renumbered else _between(heat.hot)
        self.ram = self.ram_of(self.hot.astype(np.float64))
        self.bytes = heat.rows * heat.record_bytes * (1 + storing.r / storing.k)
        self.traffic = self.traffic_of(self.hot.astype(np.float64))

    def share_of(self, hot: Numbers) -> Numbers:
        return np.interp(hot, self.heat.hot, self.heat.share)

    def ram_of(self, hot: Numbers) -> Numbers:
        """Bytes, parity included."""
        stripes = hot / self.heat.rows
        if not self.storing.renumbered:
            stripes = 1 - (1 - stripes) ** self.storing.k
        parity = stripes * self.heat.rows * self.storing.r / self.storing.k
        return self.heat.record_bytes * (hot + parity)

    def hot_of(self, ram: float) -> int:
        """How many rows may be hot with so much RAM."""
        low, high = 0, self.heat.rows
        while low < high:  # ram_of ascends
            middle = (low + high + 1) // 2
            fits = self.ram_of(np.array([float(middle)]))[0] <= ram * (1 + 1e-12)
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def traffic_of(self, hot: Numbers) -> Traffic:
        heat, storing = self.heat, self.storing
        share = self.share_of(hot)
        size = TOUCHES * heat.record_bytes * heat.accesses
        on_ssd = TOUCHES * storing.on_ssd(heat.record_bytes) * heat.accesses
        # Of a cold row's parity, what is in RAM all the same.
        mixed = np.zeros_like(hot)
        if not storing.renumbered:
            mixed = 1 - (1 - hot / heat.rows) ** (storing.k - 1)
        cold = 1 - share
        return Traffic(
            share * size,
            cold * on_ssd,
            storing.r * size * (share + cold * mixed),
            storing.r * on_ssd * cold * (1 - mixed),
        )


def _between(hot: Index) -> Index:
    steps = np.arange(len(hot) - 1, step=1 / FINER)
    finer: Index = np.unique(np.round(np.interp(steps, np.arange(len(hot)), hot))).astype(np.int64)
    return np.union1d(finer, hot)
