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
from planaria.codes import Code
from planaria.errors import CodeError
from planaria.kernels.types import Index, Records
from planaria.layout import ArenaLayout


class Mates(NamedTuple):
    """For n records, the k records that each is decoded from."""

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
        present = [p for p in range(k + r) if int(groups[group, p]) not in gone]
        if len(present) < k:
            raise CodeError(
                f"group {group} on places {groups[group].tolist()} has only {len(present)} members "
                f"left and needs {k}: more than {r} were lost"
            )
        have[at] = present[:k]
        coef[at] = code.decoding_rows(tuple(present[:k]), (wanted,))[0]
    members = own.group[region][:, None], have[region]
    mate_regions = layout.layout.region_of[members].astype(np.int64)
    return Mates(groups[members], mate_regions * layout.slots + slot[:, None], coef[region])


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
