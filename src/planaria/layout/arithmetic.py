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

So the data records of a fresh server are its first records, and all servers' regions have equal
length; the last stripes of an arena may be padding.

When servers come or go (resizing.py), whoever keeps a membership keeps its region where it is:
nothing is copied within a server. What it is given is added behind its other regions, or where
something was that it has given away. Then data lies between parity, and some regions hold nothing.
"""

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt

from planaria.errors import LayoutError
from planaria.layout.board import GroupArray
from planaria.layout.groups import check_sizes, choose_groups, default_k
from planaria.layout.regroup import Domains, regroup

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


NOTHING = -1  # the group of a region that holds nothing
NOBODY = -1


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of one server, in the order in which they lie in its arenas."""

    group: Ints32  # [regions]; NOTHING, where nothing is held
    position: Ints32  # [regions], 0 .. k-1 data, k .. k+r-1 parity
    is_data: Flags  # [regions]; the rest is parity, mirrors, or nothing
    is_mirror: Flags  # [regions]; of somebody else's position

    @property
    def data_end(self) -> int:
        """Behind the last region that holds data."""
        return int(np.flatnonzero(self.is_data)[-1]) + 1 if self.is_data.any() else 0

    @property
    def in_order(self) -> bool:
        """Whether all data comes first, as in a fresh layout."""
        return bool(self.is_data[: self.data_end].all())


@dataclass(frozen=True, eq=False)
class Mirrors:
    """Memberships on their way to another place, which until then has a copy of each: whatever
    changes the holder's records changes these, too. Both int32[G, k + r].
    """

    place: Ints32  # who has a mirror of that position; NOBODY, if none is on its way
    region: Ints32  # where it is there


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups, checked once, and the numbering of regions that follows from them.

    All arrays are read-only; a layout can be shared between threads.
    """

    groups: GroupArray  # [G, k + r]
    k: int
    numbering: InitVar[Ints32 | None] = None  # the `region_of` to have, if not a fresh cluster's
    mirrors: Mirrors | None = field(default=None, repr=False)
    region_of: Ints32 = field(init=False, repr=False)  # [G, k + r], on the member's own server
    places: tuple[int, ...] = field(init=False)  # ascending
    _regions: dict[int, Regions] = field(init=False, repr=False)

    def __post_init__(self, numbering: Ints32 | None) -> None:
        groups = _checked_groups(self.groups, self.k)
        region_of = _number_regions(groups, self.k) if numbering is None else numbering.copy()
        regions = _regions_by_place(groups, self.k, region_of, self.mirrors)
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
    def is_fresh(self) -> bool:
        """Whether regions lie as the groups alone say."""
        return np.array_equal(self.region_of, _number_regions(self.groups, self.k))

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
        return (
            self.k == other.k
            and self.mirrors is other.mirrors
            and np.array_equal(self.groups, other.groups)
            and np.array_equal(self.region_of, other.region_of)
        )

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
        held = self.regions(place).group
        shared = self.groups[held[held != NOTHING]]
        mates, counts = np.unique(shared[shared != place], return_counts=True)
        return dict(zip(mates.tolist(), counts.tolist(), strict=True))

    def holders(self, place: int) -> tuple[int, ...]:
        """The servers that are sent what changes in the data of `place`, ascending: those that hold
        parity for it, or mirrors.
        """
        found = self.protecting(place)[0]
        return tuple(np.unique(found[found != NOBODY]).tolist())

    def sources(self, place: int) -> tuple[int, ...]:
        """The servers whose data `place` holds parity for, or mirrors: where deltas come from,
        ascending.
        """
        own = self.regions(place)
        copies = own.is_mirror & (own.position < self.k)
        parity = ~own.is_data & ~copies & (own.group != NOTHING)
        data_of_parity = self.groups[own.group[parity], : self.k].ravel()
        data_of_copies = self.groups[own.group[copies], own.position[copies]]
        return tuple(np.unique(np.concatenate([data_of_parity, data_of_copies])).tolist())

    def protecting(self, place: int) -> tuple[Ints32, Ints32]:
        """By region of `place`, up to the last with data: who must be told what changes there, and
        in which region it has the parity or the mirror; both int32[regions, most of them], NOBODY
        where there are fewer.
        """
        own = self.regions(place)
        group, position = own.group[: own.data_end], own.position[: own.data_end]
        whom, where = self.groups[group, self.k :], self.region_of[group, self.k :]
        if (mirrors := self.mirrors) is not None:
            at = np.arange(self.groups.shape[1])[None, :]
            concerned = (at >= self.k) | (at == position[:, None])
            whom = np.hstack([whom, np.where(concerned, mirrors.place[group], NOBODY)])
            where = np.hstack([where, mirrors.region[group]])
            used = (whom != NOBODY).any(axis=0)
            whom, where = whom[:, used], where[:, used]
        whom = np.where(own.is_data[: own.data_end, None], whom, NOBODY)
        return np.ascontiguousarray(whom, np.int32), np.ascontiguousarray(where, np.int32)

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
        """All data has lower indices than this; in a fresh layout all that have are data."""
        return self.layout.regions(place).data_end * self.slots

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
        """Group, slot and position of the records at `index` on one server, each [n]; NOTHING is
        the group of what is not in use.
        """
        own = self.layout.regions(place)
        records = own.group.size * self.slots
        region, slot = np.divmod(_checked_numbers(index, records, "index"), self.slots)
        return own.group[region], slot, own.position[region]

    def row_at(self, place: int, index: npt.ArrayLike) -> Ints64:
        """The arena row of the data records at `index` on one server; -1 for all that is not data,
        and for padding.
        """
        group, slot, position = self.stripe_at(place, index)
        row = (slot * self.layout.n_groups + group) * self.layout.k + position
        is_data = self.layout.regions(place).is_data[np.asarray(index) // self.slots]
        return np.where(is_data & (row < self.rows), row, -1)

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


def _number_regions(groups: GroupArray, k: int) -> Ints32:
    """Of a fresh cluster, by membership: data first, then parity, each by group."""
    n_groups, width = groups.shape
    group, position = (grid.ravel() for grid in np.indices((n_groups, width), dtype=np.int32))
    order = np.lexsort((group, position >= k, groups.ravel()))
    _, starts, counts = np.unique(groups.ravel()[order], return_index=True, return_counts=True)
    region_of = np.empty(groups.size, dtype=np.int32)
    region_of[order] = np.arange(groups.size) - np.repeat(starts, counts)
    return region_of.reshape(groups.shape)


def _regions_by_place(
    groups: GroupArray, k: int, region_of: Ints32, mirrors: Mirrors | None
) -> dict[int, Regions]:
    """The same by place, in ascending order, and what is mirrored there."""
    held = np.indices(groups.shape).reshape(2, -1)
    # Rows: place, region, group, position, and whether it is a mirror.
    found = np.stack([groups.ravel(), region_of.ravel(), *held, np.zeros(groups.size, np.int64)])
    if mirrors is not None:
        group, position = np.nonzero(mirrors.place != NOBODY)
        place, region = mirrors.place[group, position], mirrors.region[group, position]
        more = np.stack([place, region, group, position, np.ones(len(group), np.int64)])
        found = np.hstack([found, more])
    found = found[:, np.argsort(found[0], kind="stable")]
    places, starts = np.unique(found[0], return_index=True)
    return {
        place: _regions(k, *mine)
        for place, mine in zip(
            places.tolist(), np.split(found[1:], starts[1:], axis=1), strict=True
        )
    }


def _regions(k: int, region: Ints64, group: Ints64, position: Ints64, mirror: Ints64) -> Regions:
    """Of one server, from a list of what is where."""
    count = int(region.max()) + 1
    all_groups, positions = np.full(count, NOTHING, np.int32), np.zeros(count, np.int32)
    is_data, is_mirror = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    all_groups[region], positions[region] = group, position
    is_data[region], is_mirror[region] = (position < k) & (mirror == 0), mirror == 1
    for array in (all_groups, positions, is_data, is_mirror):
        array.flags.writeable = False
    return Regions(all_groups, positions, is_data, is_mirror)


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
