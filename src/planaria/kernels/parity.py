"""The kernels of protection, checked: what a step's deltas are for each holder, and what a holder
does with them. What planaria.kernels promises of its functions holds for these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.kernels import twin
from planaria.kernels.checks import array, require, require_apart
from planaria.kernels.types import Bytes, Index, Records


def _backend() -> Any:
    return twin if kernels.level() == "numpy" else kernels.native


class Shares(NamedTuple):
    """Deltas sorted by holder. Those of holder h are the h-th run of `indices` and `delta`."""

    indices: Index  # the parity records' numbers on the holder
    delta: Records
    counts: Index  # deltas per holder


def share_deltas(
    index: Index,
    delta: Records,
    slots: int,
    holder: NDArray[np.int32],
    region: NDArray[np.int32],
    holders: int,
) -> Shares:
    """For each of its holders, what changed in an owner's data records, each of them once.

    holder, region: int32[data regions, r], who protects a region, and where.
    """
    array("index", index, np.int64, 1)
    array("delta", delta, np.uint32, 2)
    array("delta", delta, np.uint32, 2, shape=(len(index), delta.shape[1]))
    array("holder", holder, np.int32, 2)
    array("region", region, np.int32, 2, shape=holder.shape)
    require(1 <= slots < 2**40, f"slots must be 1 or more, not {slots}")
    require(
        holder.size > 0 and int(holder.min()) >= 0 and int(holder.max()) < holders,
        f"regions name holders outside 0 to {holders - 1}",
    )
    n = len(index) * holder.shape[1]
    shares = Shares(
        np.empty(n, np.int64), np.empty((n, delta.shape[1]), np.uint32), np.empty(holders, np.int64)
    )
    _backend().share_deltas(index, delta, slots, holder, region, *shares)
    return shares


def add_delta(
    records: Records,
    index: Index,
    slots: int,
    by_region: Bytes,
    delta: Records,
    valid: Bytes | None = None,
) -> Bytes | None:
    """records[index[i]] ^= coef[i] * delta[i], where by_region[index[i] // slots] is coef[i].

    valid: a bitmap, if not all records are; those that are not stay as they are. Returns coef, or
    None if all of it is 1. RowError where one is 0, as for records outside.
    """
    array("records", records, np.uint32, 2, writable=True)
    array("index", index, np.int64, 1)
    array("by_region", by_region, np.uint8, 1)
    array("delta", delta, np.uint32, 2, shape=(len(index), records.shape[1]))
    require(
        1 <= slots < 2**40 and len(by_region) * slots >= len(records),
        f"{len(by_region)} regions of {slots} slots do not cover {len(records)} records",
    )
    require_apart([records], [index, by_region, delta])
    if valid is not None:
        array("valid", valid, np.uint8, 1)
        require(len(valid) * 8 >= len(records), f"valid has no bit for each of {len(records)}")
        require_apart([records], [valid])
    coef = np.empty(len(index), np.uint8)
    other: bool = _backend().add_delta(records, index, slots, by_region, delta, coef, valid)
    return coef if other else None
