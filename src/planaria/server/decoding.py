"""Which stripe-mates a lost record is decoded from, and the decoding itself.

The mates of a record, and the coefficients that make the record out of theirs, depend only on the
record's region and on which places are absent; so they are worked out once per region and looked
up per record.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.codes import COEFFICIENTS, Code
from planaria.errors import CodeError
from planaria.kernels.types import Bytes, Index, Records
from planaria.layout import ArenaLayout, Layout
from planaria.layout.arithmetic import NOTHING


class Mates(NamedTuple):
    """For n records, the k records that each is decoded from; of those with coefficient 0, nothing
    is needed.
    """

    places: NDArray[np.int32]  # [n, k]
    indices: Index  # [n, k], record number on that place
    coef: NDArray[np.uint8]  # [n, k]


def find_mates(
    layout: ArenaLayout, place: int, index: Index, absent: Collection[int] = ()
) -> Mates:
    """The mates of records `index` of server `place`, none of them on an absent place."""
    groups, k, r = layout.layout.groups, layout.layout.k, layout.layout.r
    code = Code(k, r)
    own = layout.layout.regions(place)
    layout.stripe_at(place, index)  # refuses what this server does not hold
    region, slot = np.divmod(index, layout.slots)
    needed = np.unique(region)
    have = np.zeros((len(own.group), k), np.int64)  # positions of the mates, by region
    coef = np.zeros((len(own.group), k), np.uint8)
    gone = {place, *absent}
    for at in needed:
        group, wanted = int(own.group[at]), int(own.position[at])
        members = groups[group].tolist()
        present = [p for p in range(k + r) if members[p] not in gone]
        if own.is_mirror[at] and (wanted in present or len(present) < k):
            have[at, 0], coef[at, 0] = wanted, 1  # a copy of what its holder has
            continue
        if len(present) < k:
            raise CodeError(
                f"group {group} on places {groups[group].tolist()} has only {len(present)} members "
                f"left and needs {k}: more than {r} were lost"
            )
        have[at] = present[:k]
        coef[at] = code.decoding_rows(tuple(present[:k]), (wanted,))[0]
    where = own.group[region][:, None], have[region]
    mate_regions = layout.layout.region_of[where].astype(np.int64)
    return Mates(groups[where], mate_regions * layout.slots + slot[:, None], coef[region])


def decode(mates: Mates, shards: Sequence[Records]) -> Records:
    """The records whose i-th mates are shards[i], each uint32[n, words]."""
    k = mates.coef.shape[1]
    if len(shards) != k:
        raise CodeError(f"{len(shards)} shards, but each record is decoded from {k}")
    out = np.zeros_like(shards[0])
    every = np.arange(len(out))
    for i, shard in enumerate(shards):
        kernels.mul_add(out, every, np.ascontiguousarray(mates.coef[:, i]), shard)
    return out


def delta_coefficients(layout: Layout, place: int, source: int) -> Bytes:
    """By region of `place`: what it multiplies the source's deltas by; 0 where it must not."""
    own, k = layout.regions(place), layout.k
    members = layout.groups[own.group]  # [regions, k + r]; of regions in use, that is
    here, position = np.nonzero(members[:, :k] == source)
    concerned = ~own.is_data[here] & (own.group[here] != NOTHING)
    here, position = here[concerned], position[concerned]
    wanted = own.position[here]  # what is held there
    parity = wanted >= k
    coef = np.zeros(len(own.group), np.uint8)
    coef[here[parity]] = COEFFICIENTS[wanted[parity] - k, position[parity]]
    coef[here[~parity & (wanted == position)]] = 1  # a mirror of its data
    return coef
