"""Servers that come and go: which memberships move, and where they lie meanwhile and afterwards.

A resize keeps G, k and r: rows keep their stripes, and stripes their groups and slots. Memberships
move (regroup.py), in two stages. In the first, *staged*, everybody holds what it held, and who is
to take over a membership has a mirror of it, which is filled like records that are rebuilt. When
all mirrors are whole, one view makes them what they mirror, and who has given something away
forgets it. Nothing is copied within a server: a region stays where it is.

Places are numbered 0 .. N-1 at all times. Newcomers stand behind the others, and when some have
gone, those that stay are numbered anew, in the order of `Resize.stay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planaria.errors import LayoutError
from planaria.layout.arithmetic import NOBODY, Layout, Mirrors
from planaria.layout.board import GroupArray
from planaria.layout.regroup import regroup

STRIDE = 32


class Resize(NamedTuple):
    """Which servers stay, by their places, and how many come."""

    stay: tuple[int, ...]
    come: int
    domains: tuple[str, ...] | None = None  # of those that stay, then of those that come
    lost: int = 0  # so many do not stay because they were lost, and will be made up for

    @property
    def servers(self) -> int:
        """How many there are afterwards."""
        return len(self.stay) + self.come

    def places(self, servers: int) -> list[int]:
        """Of so many, newcomers included, those that stay, in the order of their new places."""
        return [*self.stay, *range(servers - self.come, servers)]


@lru_cache(maxsize=16)
def staged(layout: Layout, resize: Resize) -> Layout:
    """What holds until all mirrors are whole."""
    target, region_of = _target(layout, resize)
    moves = target != layout.groups
    mirrors = Mirrors(
        np.where(moves, target, NOBODY).astype(np.int32),
        np.where(moves, region_of, 0).astype(np.int32),
    )
    return Layout(layout.groups, layout.k, layout.region_of, mirrors)


@lru_cache(maxsize=16)
def resized(layout: Layout, resize: Resize) -> Layout:
    """What holds from then on."""
    target, region_of = _target(layout, resize)
    before = len(layout.places)
    number = np.full(before + resize.come, NOBODY, np.int32)
    number[[*resize.stay, *range(before, before + resize.come)]] = np.arange(resize.servers)
    return Layout(number[target], layout.k, region_of)


def layout_after(first: Layout, done: Sequence[Resize], moving: Resize | None = None) -> Layout:
    """The layout of a job that began with `first`: after these resizes, and during another."""
    layout = first
    for count in range(STRIDE, len(done), STRIDE):  # so that it does not go too deep
        layout = _after(first, tuple(done[:count]))
    layout = _after(first, tuple(done))
    return layout if moving is None else staged(layout, moving)


@lru_cache(maxsize=64)
def _after(first: Layout, done: tuple[Resize, ...]) -> Layout:
    """One after the other, from the longest beginning that is kept: where survivors rebuild, every
    loss adds two.
    """
    return resized(_after(first, done[:-1]), done[-1]) if done else first


def check_resize(layout: Layout, resize: Resize) -> None:
    """Raises LayoutError unless it can be done."""
    places = range(len(layout.places))
    if len(set(resize.stay)) < len(resize.stay) or not set(resize.stay) <= set(places):
        raise LayoutError(f"places {resize.stay} cannot stay; there are 0 to {len(places) - 1}.")
    least = layout.groups.shape[1]
    if resize.servers < least or resize.come < 0:
        raise LayoutError(
            f"{resize.servers} servers are too few: a stripe has k + parity = {least} records, "
            f"each on a server of its own; keep at least {least}."
        )
    most = layout.n_groups * (min(layout.k, layout.r) if layout.r else layout.k)
    if resize.servers > most:
        raise LayoutError(
            f"{resize.servers} servers are too many for the {layout.n_groups} groups that this job "
            f"began with: {most} can have a share each. Start it anew from a checkpoint, with "
            f"servers: {resize.servers}."
        )


@lru_cache(maxsize=16)  # `staged` and `resized` are both asked for
def _target(layout: Layout, resize: Resize) -> tuple[GroupArray, GroupArray]:
    """The groups and regions to come, by the places of now and, behind them, the newcomers."""
    check_resize(layout, resize)
    before = len(layout.places)
    places = [*resize.stay, *range(before, before + resize.come)]
    domains = None if resize.domains is None else dict(zip(places, resize.domains, strict=True))
    target = regroup(layout.groups, layout.k, places, domains)
    region_of = layout.region_of.copy()
    moves = target != layout.groups
    for place in np.unique(target[moves]).tolist():
        taken = layout.regions(place).group if place < before else np.zeros(0, np.int32)
        wanted = np.argwhere(moves & (target == place))
        # Data before parity, each by group, as in a fresh layout.
        wanted = wanted[np.lexsort((wanted[:, 0], wanted[:, 1] >= layout.k))]
        free = np.flatnonzero(taken < 0)[: len(wanted)]
        behind = np.arange(len(taken), len(taken) + len(wanted) - len(free))
        region_of[tuple(wanted.T)] = np.concatenate([free, behind])
    return target, region_of
