"""From the places that a driver names to those of the view, after servers have come or gone.

A driver sorts its rows by whichever layout it likes: that which the job began with, or that of the
view which it last saw, in which case nothing has to be sorted again. What it has asked for or
pushed can be sent again in any later view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from planaria.kernels.types import Floats, Index
from planaria.layout import Layout

RowsByPlace: TypeAlias = Mapping[int, Sequence[Index]]
"""Per place, per arena: record numbers."""
FloatsByPlace: TypeAlias = Mapping[int, Sequence[Floats]]
"""Per place, per arena: what belongs to those records, [n, dim]."""
Part = TypeVar("Part", Index, Floats)


@dataclass(frozen=True)
class Route:
    """Of some rows. Nothing is moved where the layout is the one that they were named in."""

    rows: RowsByPlace  # by the places of the view
    _order: Sequence[Index] | None  # per arena: those rows as numbers of the driver's, in order
    asked: RowsByPlace  # by the driver's places
    layout: Layout  # which these are of
    exact: bool = False  # whether they are to come bit for bit

    def there(self, values: FloatsByPlace) -> FloatsByPlace:
        """What belongs to the driver's rows, by the places of the view."""
        if self._order is None:
            return values
        joined = _joined(values)
        return _split([of[o] for of, o in zip(joined, self._order, strict=True)], self.rows)

    def back(self, values: FloatsByPlace) -> dict[int, list[Floats]]:
        """The other way."""
        if self._order is None:
            return {place: list(values[place]) for place in self.asked}
        found = []
        for of, order in zip(_joined(values), self._order, strict=True):
            found.append(np.empty_like(of))
            found[-1][order] = of
        return _split(found, self.asked)


class Rerouting:
    """Into the layout of one view."""

    def __init__(self, now: Layout, rows: Sequence[int]) -> None:
        """rows: of the arenas."""
        self.layout, self._rows = now, rows
        self._same: dict[Layout, bool] = {now: True}  # whether rows lie there as they do here

    def route(self, rows: RowsByPlace, layout: Layout, *, exact: bool = False) -> Route:
        """layout: whose places they are named by."""
        places = self.layout.places
        if self._is_same(layout):
            nothing = [index[:0] for index in next(iter(rows.values()))]
            there = {place: rows.get(place, nothing) for place in places}
            return Route(there, None, rows, layout, exact)
        orders: list[Index] = []
        found: dict[int, list[Index]] = {place: [] for place in places}
        for number, count in enumerate(self._rows):
            before, now = layout.arena(count), self.layout.arena(count)
            named = [before.row_at(place, indices[number]) for place, indices in rows.items()]
            place, index = now.locate(np.concatenate(named))
            orders.append(np.argsort(place, kind="stable"))
            ends = np.cumsum(np.bincount(place, minlength=len(places)))[:-1]
            for at, part in zip(places, np.split(index[orders[-1]], ends), strict=True):
                found[at].append(part)
        return Route(found, orders, rows, layout, exact)

    def again(self, route: Route) -> Route:
        """What was routed in an earlier view."""
        return self.route(route.asked, route.layout, exact=route.exact)

    def _is_same(self, layout: Layout) -> bool:
        if layout not in self._same:
            self._same[layout] = np.array_equal(
                layout.groups, self.layout.groups
            ) and np.array_equal(layout.region_of, self.layout.region_of)
        return self._same[layout]


def _joined(values: Mapping[int, Sequence[Part]]) -> list[Part]:
    return [np.concatenate(of) for of in zip(*values.values(), strict=True)]


def _split(joined: Sequence[Part], like: RowsByPlace) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = {place: [] for place in like}
    for number, of in enumerate(joined):
        ends = np.cumsum([len(indices[number]) for indices in like.values()])[:-1]
        for place, part in zip(like, np.split(of, ends), strict=True):
            found[place].append(part)
    return found
