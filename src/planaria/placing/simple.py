"""What people do without a plan: the same RAM for every table, and greedy sharding of whole tables.

They are what a plan is compared with, costed by the same model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria.errors import PlacementError
from planaria.kernels.types import Index
from planaria.placing.costs import Curve, Machine, Numbers
from planaria.placing.filling import hot_rows

METRICS = ("size", "lookups", "size x lookups")


def even_split(curves: Sequence[Curve], ram: float) -> Index:
    """Hot rows of each table, which all get the same RAM; what small ones leave goes to others."""
    whole = np.array([float(curve.ram[-1]) for curve in curves])
    order = np.argsort(whole, kind="stable")
    given, left = np.zeros(len(curves)), ram
    for place, table in enumerate(order):
        given[table] = min(whole[table], left / (len(curves) - place))
        left -= given[table]
    return hot_rows(curves, given)


def slow_lookups(curves: Sequence[Curve], hot: Index) -> float:
    """Rows per sample that come from an SSD."""
    return sum(
        curve.heat.accesses * (1 - float(curve.share_of(np.array([float(n)]))[0]))
        for curve, n in zip(curves, hot, strict=True)
    )


def greedy(curves: Sequence[Curve], machines: Sequence[Machine], metric: str) -> Numbers:
    """Seconds of each server: whole tables, the largest first, to whoever has least of the metric.

    A table lies in RAM as a whole where one of the servers has room for it in RAM, and else on the
    SSD as a whole.
    """
    size = np.array([curve.bytes for curve in curves])
    lookups = np.array([curve.heat.accesses for curve in curves])
    weight = dict(zip(METRICS, (size, lookups, size * lookups), strict=True))[metric]
    ram = np.array([machine.ram for machine in machines])
    ssd = np.array([machine.ssd for machine in machines])
    load, seconds = np.zeros(len(machines)), np.zeros(len(machines))
    for table in np.argsort(-weight, kind="stable"):
        fast = ram >= size[table]
        fits = fast if fast.any() else ssd >= size[table]
        if not fits.any():
            raise PlacementError(
                f"by {metric}: there is no room left for {curves[table].heat.name}"
            )
        server = int(np.argmin(np.where(fits, load, np.inf)))
        load[server] += weight[table]
        (ram if fast.any() else ssd)[server] -= size[table]
        each = curves[table].traffic.seconds(machines[server])
        seconds[server] += each[-1 if fast.any() else 0]
    return seconds
