"""Rows spread over all servers, as Planaria has them: what is in whose RAM.

A server with a share w of the rows has w of every table's accesses, so it costs

    w x C(RAM / w)        C(m): the seconds of all tables with m bytes of RAM in all

and nothing is decided between servers but w. Today's layout gives every server the same. With
shares that are free, all servers cost the same in the best case, or their disks are full: the cost
of a server ascends with w, so the largest cost is found by halving. C is convex, and so is this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planaria.errors import PlacementError
from planaria.kernels.types import Index
from planaria.placing.costs import Curve, Machine, Numbers
from planaria.placing.filling import Menu, hot_rows, menu_of, seconds_of

HALVINGS = 60


@dataclass(frozen=True, eq=False)
class Spread:
    """Shares and hot rows by kind of machine; kinds are those that differ."""

    kinds: tuple[Machine, ...]
    kind: tuple[int, ...]  # of each server
    shares: Numbers  # float64[kinds], of each server of a kind
    hot: Index  # int64[kinds, tables]
    seconds: Numbers  # float64[kinds]: per sample and server
    bound: float  # of the linear program: no largest cost is below it

    @property
    def largest(self) -> float:
        return float(self.seconds.max())


def kinds_of(machines: Sequence[Machine]) -> tuple[tuple[Machine, ...], tuple[int, ...]]:
    kinds = tuple(dict.fromkeys(machines))
    return kinds, tuple(kinds.index(machine) for machine in machines)


def check_room(curves: Sequence[Curve], machines: Sequence[Machine], *, even: bool) -> None:
    """Raises PlacementError that says how much is missing."""
    size = sum(curve.bytes for curve in curves)
    room = sum(machine.ram + machine.ssd for machine in machines)
    if size > room:
        raise PlacementError(
            f"the tables have {in_bytes(size)}, parity included, and the servers have room for "
            f"{in_bytes(room)}: {in_bytes(size - room)} are missing; raise --ram, --ssd or "
            "--servers"
        )
    if even:
        share = size / len(machines)
        least = min(machines, key=lambda machine: machine.ram + machine.ssd)
        if share > least.ram + least.ssd:
            raise PlacementError(
                f"each server has {in_bytes(share)} of records, and the smallest one has room for "
                f"{in_bytes(least.ram + least.ssd)}: {in_bytes(share - least.ram - least.ssd)} are "
                "missing there; raise its --ram or --ssd, or let --shares differ"
            )


def spread(curves: Sequence[Curve], machines: Sequence[Machine], *, even: bool = True) -> Spread:
    check_room(curves, machines, even=even)
    kinds, kind = kinds_of(machines)
    menus = [menu_of(curves, machine) for machine in kinds]
    counts = np.bincount(kind, minlength=len(kinds))
    if even:
        shares = np.full(len(kinds), 1 / len(machines))
    else:
        shares = _level_shares(curves, kinds, menus, counts)
    found = [_filled(curves, *pair) for pair in zip(kinds, menus, shares, strict=True)]
    hulls = [_hull_seconds(*pair) for pair in zip(kinds, menus, shares, strict=True)]
    return Spread(
        kinds,
        kind,
        shares,
        np.array([hot for hot, _ in found]),
        np.array([seconds for _, seconds in found]),
        # Between its points a curve may bend below their hull, by less than a ten-thousandth.
        min(float(max(hulls)), max(seconds for _, seconds in found)),
    )


def _filled(
    curves: Sequence[Curve], machine: Machine, menu: Menu, share: float
) -> tuple[Index, float]:
    segments = np.arange(len(menu.table))
    hot = hot_rows(curves, menu.fill(segments, machine.ram / max(share, 1e-300)))
    each = [seconds_of(curve, int(n), machine) for curve, n in zip(curves, hot, strict=True)]
    return hot, float(share * sum(each))


def _hull_seconds(machine: Machine, menu: Menu, share: float) -> float:
    segments = np.arange(len(menu.table))
    budget = machine.ram / max(share, 1e-300)
    return share * (float(menu.base.sum()) - menu.saving(segments, budget))


def _level_shares(
    curves: Sequence[Curve], kinds: Sequence[Machine], menus: Sequence[Menu], counts: Index
) -> Numbers:
    """The shares with which the largest cost is least; they add up to 1 over all servers."""
    size = sum(curve.bytes for curve in curves)
    most = np.array([min(1.0, (machine.ram + machine.ssd) / size) for machine in kinds])
    low, high = 0.0, max(_hull_seconds(*pair) for pair in zip(kinds, menus, most, strict=True))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fits = _shares_within(middle, kinds, menus, most) @ counts >= 1
        low, high = (low, middle) if fits else (middle, high)
    shares = _shares_within(high, kinds, menus, most)
    return shares / (shares @ counts)


def _shares_within(
    seconds: float, kinds: Sequence[Machine], menus: Sequence[Menu], most: Numbers
) -> Numbers:
    """The largest share of each kind that costs no more than this."""
    found = np.empty(len(kinds))
    for number, (machine, menu) in enumerate(zip(kinds, menus, strict=True)):
        low, high = 0.0, float(most[number])
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = _hull_seconds(machine, menu, middle) <= seconds
            low, high = (middle, high) if fits else (low, middle)
        found[number] = high
    return found


def in_bytes(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.4g} {unit}"
    return f"{size:,.0f} bytes"
