"""Where a row lives: plain arithmetic over the groups, vectorised, without per-row maps.

    row x      -> data position x % k of stripe x // k
    stripe s   -> group s % G, slot s // G
    group g    -> groups[g], k + r places

On each server the records of one group form one *region*, indexed by slot. Data regions come
first, in ascending order of group, then parity regions, likewise:

    server p, arena with S slots:
    | data region 0 | data region 1 | ... | parity region 0 | ... |
    | S records     | S records     |     | S records       |     |
    record index = region * S + slot

So the data records of a server are its first records, and all servers' regions have equal length;
the last stripes of an arena may be padding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planaria.errors import LayoutError
from planaria.layout.groups import check_sizes, choose_groups, default_k
from planaria.layout.regroup import Domains, GroupArray, regroup

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of one server, in the order in which they lie in its arenas."""

    group: Ints32  # [regions]
    position: Ints32  # [regions], 0 .. k-1 data, k .. k+r-1 parity
    data_regions: int  # the first so many hold data, the rest parity


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups, checked once, and the numbering of regions that follows from them.

    All arrays are read-only; a layout can be shared between threads.
    """

    groups: GroupArray  # [G, k + r]
    k: int
    places: tuple[int, ...] = field(init=False)  # ascending
    region_of: Ints32 = field(init=False, repr=False)  # [G, k + r], on the member's own server
    _regions: dict[int, Regions] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        groups = _checked_groups(self.groups, self.k)
        regions, region_of = _number_regions(groups, self.k)
        # The dataclass is frozen for its users; this is the one place that fills it.
        object.__setattr__(self, "groups", _frozen(groups))
        object.__setattr__(self, "places", tuple(regions))
        object.__setattr__(self, "region_of", _frozen(region_of))
        object.__setattr__(self, "_regions", regions)

    @classmethod
    def fresh(
        cls,
        servers: int,
        r: int,
        k: int | None = None,
        domains: Domains | None = None,
        scatter: int | None = None,
    ) -> "Layout":
        """The layout of a new cluster with places 0 .. servers-1; k and scatter follow unless
        given.
        """
        k = default_k(servers, r) if k is None else k
        return cls(choose_groups(servers, k, r, domains, scatter), k)

    def resized(self, places: Iterable[int], domains: Domains | None = None) -> "Layout":
        """The layout for the servers in `places`, with as few records moved as can be."""
        return Layout(regroup(self.groups, self.k, places, domains), self.k)

    @property
    def r(self) -> int:
        """Parity records per stripe."""
        return int(self.groups.shape[1]) - self.k

    @property
    def n_groups(self) -> int:
        """The number of groups, G."""
        return int(self.groups.shape[0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.k == other.k and np.array_equal(self.groups, other.groups)

    def __hash__(self) -> int:
        return hash((self.k, self.groups.tobytes()))

    def regions(self, place: int) -> Regions:
        """What the server at `place` holds, region by region."""
        try:
            return self._regions[place]
        except KeyError:
            raise LayoutError(
                f"no server stands at place {place}; this layout has the places {self.places}."
            ) from None

    def mates(self, place: int) -> dict[int, int]:
        """The servers that share groups with `place`, and how many groups each."""
        shared = self.groups[self.regions(place).group]
        mates, counts = np.unique(shared[shared != place], return_counts=True)
        return dict(zip(mates.tolist(), counts.tolist(), strict=True))

    def holders(self, place: int) -> tuple[int, ...]:
        """The servers that hold parity for data of `place`: where its deltas go, ascending."""
        own = self.regions(place)
        groups = self.groups[own.group[: own.data_regions], self.k :]
        return tuple(np.unique(groups).tolist())

    def sources(self, place: int) -> tuple[int, ...]:
        """The servers whose data `place` holds parity for: where deltas come from, ascending."""
        own = self.regions(place)
        groups = self.groups[own.group[own.data_regions :], : self.k]
        return tuple(np.unique(groups).tolist())

    def arena(self, rows: int) -> "ArenaLayout":
        """The layout of an arena with so many rows."""
        return ArenaLayout(self, rows)


@dataclass(frozen=True)
class ArenaLayout:
    """Where the rows of one arena live: row <-> (place, index), stripe <-> members."""

    layout: Layout
    rows: int
    stripes: int = field(init=False)
    slots: int = field(init=False)  # records per region, padding included

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise LayoutError(f"an arena of {self.rows} rows cannot be laid out; it needs one.")
        stripes = -(-self.rows // self.layout.k)
        object.__setattr__(self, "stripes", stripes)
        object.__setattr__(self, "slots", -(-stripes // self.layout.n_groups))

    def records(self, place: int) -> int:
        """Records that the server at `place` holds: data, parity and padding."""
        return int(self.layout.regions(place).group.size) * self.slots

    def data_records(self, place: int) -> int:
        """Of these, the ones that are data; their indices are the lowest."""
        return self.layout.regions(place).data_regions * self.slots

    def locate(self, rows: npt.ArrayLike) -> tuple[Ints32, Ints64]:
        """The place (int32 [n]) and the index there (int64 [n]) of each row."""
        row = _checked_numbers(rows, self.rows, "row")
        stripe, position = np.divmod(row, self.layout.k)
        slot, group = np.divmod(stripe, self.layout.n_groups)
        # One flat index serves both tables: two-dimensional indexing costs twice as much.
        member = group * self.layout.groups.shape[1] + position
        region = self.layout.region_of.ravel()[member].astype(np.int64)
        return self.layout.groups.ravel()[member], region * self.slots + slot

    def stripe_at(self, place: int, index: npt.ArrayLike) -> tuple[Ints32, Ints64, Ints32]:
        """Group, slot and position of the records at `index` on one server, each [n]."""
        own = self.layout.regions(place)
        records = own.group.size * self.slots
        region, slot = np.divmod(_checked_numbers(index, records, "index"), self.slots)
        return own.group[region], slot, own.position[region]

    def row_at(self, place: int, index: npt.ArrayLike) -> Ints64:
        """The arena row of the records at `index` on one server; -1 for parity and padding."""
        group, slot, position = self.stripe_at(place, index)
        row = (slot * self.layout.n_groups + group) * self.layout.k + position
        return np.where((position < self.layout.k) & (row < self.rows), row, -1)

    def members(self, group: npt.ArrayLike, slot: npt.ArrayLike) -> tuple[Ints32, Ints64]:
        """The places and indices, each [n, k + r], of the records of stripes (group, slot)."""
        groups = _checked_numbers(group, self.layout.n_groups, "group")
        slots = _checked_numbers(slot, self.slots, "slot")
        if groups.shape != slots.shape:
            raise LayoutError(
                f"{groups.size} groups and {slots.size} slots were given; a stripe needs one each."
            )
        region = self.layout.region_of[groups].astype(np.int64)
        return self.layout.groups[groups], region * self.slots + slots[:, None]


def _checked_groups(groups: npt.ArrayLike, k: int) -> GroupArray:
    given = np.asarray(groups)
    if given.ndim != 2 or given.size == 0 or given.dtype.kind not in "iu":
        raise LayoutError(
            f"groups must be whole numbers of shape [G, k + r], not {given.dtype} {given.shape}."
        )
    check_sizes(given.shape[1], k, given.shape[1] - k)
    if given.min() < 0 or given.max() > np.iinfo(np.int32).max:
        raise LayoutError("a group names a place outside 0 .. 2^31 - 1.")
    ordered = np.sort(given, axis=1)
    twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if twice.size:
        raise LayoutError(
            f"group {twice[0]} names a place twice: {given[twice[0]].tolist()}; losing that server "
            f"would lose two records of a stripe."
        )
    return np.array(given, dtype=np.int32, order="C")


def _number_regions(groups: GroupArray, k: int) -> tuple[dict[int, Regions], Ints32]:
    n_groups, width = groups.shape
    group, position = (grid.ravel() for grid in np.indices((n_groups, width), dtype=np.int32))
    order = np.lexsort((group, position >= k, groups.ravel()))
    places, starts, counts = np.unique(groups.ravel()[order], return_index=True, return_counts=True)
    region_of = np.empty(groups.size, dtype=np.int32)
    region_of[order] = np.arange(groups.size) - np.repeat(starts, counts)
    regions: dict[int, Regions] = {}
    for place, start, count in zip(places.tolist(), starts, counts, strict=True):
        own = order[start : start + count]
        data_regions = int(np.count_nonzero(position[own] < k))
        regions[place] = Regions(_frozen(group[own]), _frozen(position[own]), data_regions)
    return regions, region_of.reshape(groups.shape)


def _frozen(array: Ints32) -> Ints32:
    array.flags.writeable = False
    return array


def _checked_numbers(numbers: npt.ArrayLike, below: int, name: str) -> Ints64:
    """`numbers` as int64 [n], all in 0 .. below-1."""
    given = np.asarray(numbers)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise LayoutError(
            f"{name} numbers must be a one-dimensional array of whole numbers, not {given.dtype} "
            f"of shape {given.shape}."
        )
    if given.size and (given.min() < 0 or given.max() >= below):
        wrong = given[(given < 0) | (given >= below)][0]
        raise LayoutError(f"{name} {wrong} does not exist; the numbers are 0 .. {below - 1}.")
    return given.astype(np.int64, copy=False)
