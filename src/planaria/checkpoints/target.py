"""What one place of a layout needs of an arena's rows, whatever layout they come from.

A row matters to a place in one of two ways: the place holds it as data, or holds parity of its
stripe. It is never both, because a place stands in a group once. So one table, with an entry per
group and data position, says for each row where on the place it goes and what it is multiplied by
on the way; multiplied by nothing, it is data and is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planaria import kernels
from planaria.codes import COEFFICIENTS
from planaria.kernels.types import Bytes, Index, Records
from planaria.layout import ArenaLayout
from planaria.records import StoredRecords


@dataclass(frozen=True, eq=False)
class Taken:
    """Rows that a place needs, out of some that were offered."""

    at: Index  # which of those offered
    index: Index  # record number on the place
    coef: Bytes  # 0 for data
    position: Index  # in the stripe


class Taker(Protocol):
    """Somebody who needs some rows of one arena, each once."""

    @property
    def lacking(self) -> int:
        """How many of the rows that are needed were not taken yet."""

    def take(self, rows: Index) -> Taken:
        """Those of `rows`, distinct, that are needed and were not taken before; -1 is no row."""


class Target:
    """Tells which rows of one arena a place still needs, and puts them in."""

    def __init__(
        self,
        arena: ArenaLayout,
        place: int,
        *,
        data: bool = True,
        parity: bool = True,
        each_once: bool = False,
    ) -> None:
        """each_once: rows will be offered more than once, and only the first one counts."""
        layout = arena.layout
        own = layout.regions(place)
        self._arena = arena
        self._k, self._n_groups = layout.k, layout.n_groups
        region = np.full((layout.n_groups, layout.k), -1, np.int64)
        coef = np.zeros((layout.n_groups, layout.k), np.uint8)
        for number, (group, position) in enumerate(zip(own.group, own.position, strict=True)):
            if position < layout.k and data:
                region[group, position] = number
            elif position >= layout.k and parity:
                region[group] = number
                coef[group] = COEFFICIENTS[position - layout.k, : layout.k]
        self._region, self._coef = region.ravel(), coef.ravel()
        self._data_records = arena.data_records(place)
        parity_records = arena.records(place) - self._data_records
        flags = self._data_records + layout.k * parity_records
        self._seen = np.zeros(flags if each_once else 0, np.bool_)
        self._each_once = each_once
        self._lacking = self._needed()

    @property
    def lacking(self) -> int:
        return self._lacking

    def take(self, rows: Index) -> Taken:
        member = rows % (self._n_groups * self._k)
        region = self._region[member]
        at = np.flatnonzero((region >= 0) & (rows >= 0))
        if len(at):
            member, slot = member[at], rows[at] // (self._n_groups * self._k)
            index, coef = region[at] * self._arena.slots + slot, self._coef[member]
            taken = Taken(at, index, coef, member % self._k)
            if self._each_once:
                taken = self._unseen(taken)
        else:
            taken = Taken(at, at, self._coef[:0], at)
        self._lacking -= len(taken.at)
        return taken

    def put(self, taken: Taken, records: Records, out: StoredRecords) -> None:
        """Puts records[taken.at] where they belong in the place's arena."""
        is_parity = taken.coef > 0
        if not is_parity.any():
            out.scatter(taken.index, pick(records, taken.at))
            return
        if not is_parity.all():
            data = ~is_parity
            out.scatter(taken.index[data], kernels.gather(records, taken.at[data]))
        for position in np.unique(taken.position[is_parity]):
            # Rows at one position are of different stripes, and so of different parity records.
            some = np.flatnonzero(is_parity & (taken.position == position))
            values = pick(records, taken.at[some])
            out.add(taken.index[some], taken.coef[some], values)

    def _unseen(self, taken: Taken) -> Taken:
        parity = taken.index - self._data_records
        flag = np.where(
            taken.coef > 0, self._data_records + parity * self._k + taken.position, taken.index
        )
        fresh = ~self._seen[flag]
        self._seen[flag] = True
        return Taken(taken.at[fresh], taken.index[fresh], taken.coef[fresh], taken.position[fresh])

    def _needed(self) -> int:
        """Rows x with x % (G * k) == member, for each member that matters here."""
        period = self._n_groups * self._k
        member = np.flatnonzero(self._region >= 0)
        return int((-(-(self._arena.rows - member) // period)).clip(min=0).sum())


def pick(records: Records, at: Index) -> Records:
    """records[at], distinct and ascending; no copy if that is all of them."""
    return records if len(at) == len(records) else kernels.gather(records, at)
