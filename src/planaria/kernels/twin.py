"""The NumPy twin of planaria._native: the same functions with the same arguments and, bit for
bit, the same results. It is the oracle of the kernel tests, the fallback where no native module
was built, and the place to read what a kernel computes.

Sums start with their first term and go on in order; `fold` and `power` fix the order of the
operations that a library would be free to choose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError, RowError
from planaria.kernels.field import PRODUCT
from planaria.kernels.twin_numbers import digest, fold, init_records, step_records
from planaria.kernels.types import Bytes, Floats, Index, OptimizerRule, Pooling, Records

__all__ = ["digest", "init_records"]  # the rest of the backend is defined below


def check_range(index: Index, limit: int, what: str) -> None:
    wrong = np.flatnonzero((index < 0) | (index >= limit))
    if len(wrong):
        at = int(wrong[0])
        raise RowError(f"{what}[{at}] is {index[at]}; it must be at least 0 and below {limit}")


def _distinct(index: Index, what: str) -> None:
    if len(np.unique(index)) < len(index):
        _, first = np.unique(index, return_index=True)
        at = int(np.setdiff1d(np.arange(len(index)), first)[0])
        raise RowError(
            f"{what}[{at}] is {index[at]}, which stands there already; sum what belongs to one "
            "row before the call"
        )


def check_first_seen(inverse: Index, rows: int) -> None:
    # Numbers seen before each place: in first-seen order, no number is above that.
    highest = np.maximum.accumulate(np.concatenate([np.array([-1], np.int64), inverse]))
    wrong = np.flatnonzero((inverse < 0) | (inverse > highest[:-1] + 1) | (inverse >= rows))
    if len(wrong):
        at = int(wrong[0])
        raise RowError(
            f"inverse[{at}] is {inverse[at]}; it must number the rows in first-seen order, as "
            "dedup gives it"
        )
    if highest[-1] + 1 != rows:
        raise RowError(f"inverse names {highest[-1] + 1} rows, but the result has {rows}")


def allocate(rows: int, words: int, huge: bool) -> Records:
    return np.zeros((rows, words), np.uint32)


def gather(records: Records, index: Index, out: Records) -> None:
    check_range(index, len(records), "index")
    out[:] = records[index, : out.shape[1]]


def scatter(records: Records, index: Index, values: Records) -> None:
    check_range(index, len(records), "index")
    _distinct(index, "index")
    records[index] = values


def _times(coef: Bytes | None, delta: Records) -> Records:
    if coef is None:
        return delta
    product: NDArray[np.uint8] = PRODUCT[coef[:, None], delta.view(np.uint8)]
    return product.view(np.uint32)


def mul_add(records: Records, index: Index, coef: Bytes | None, delta: Records) -> None:
    check_range(index, len(records), "index")
    _distinct(index, "index")
    records[index] ^= _times(coef, delta)


def add_delta(
    records: Records,
    index: Index,
    slots: int,
    by_region: Bytes,
    delta: Records,
    coef: Bytes,
    valid: Bytes | None,
) -> bool:
    check_range(index, len(records), "index")
    coef[:] = by_region[index // slots]
    if not coef.all():
        at = int(np.flatnonzero(coef == 0)[0])
        raise RowError(f"index[{at}] is {index[at]}, which lies in a region whose coefficient is 0")
    _distinct(index, "index")
    there = slice(None) if valid is None else (valid[index // 8] >> (index % 8) & 1).astype(bool)
    mul_add(records, index[there], coef[there], delta[there])
    return bool((coef != 1).any())


def share_deltas(
    index: Index,
    delta: Records,
    slots: int,
    holder: NDArray[np.int32],
    region: NDArray[np.int32],
    out_index: Index,
    out_delta: Records,
    counts: Index,
) -> None:
    check_range(index, len(holder) * slots, "index")
    own, slot = np.divmod(index, slots)
    holders = holder[own].ravel()
    order = np.argsort(holders, kind="stable")
    out_index[:] = (region[own].astype(np.int64) * slots + slot[:, None]).ravel()[order]
    out_delta[:] = delta[order // holder.shape[1]]
    counts[:] = np.bincount(holders, minlength=len(counts))


def mul_add_bytes(target: Bytes, coef: int, delta: Bytes) -> None:
    target ^= PRODUCT[coef][delta]


def undo(values: Records, query: Index, index: Index, coef: Bytes | None, delta: Records) -> None:
    order = np.argsort(index, kind="stable")
    at = np.searchsorted(index, query, sorter=order)
    found = np.flatnonzero(at < len(index))
    found = found[index[order[at[found]]] == query[found]]
    positions = order[at[found]]
    values[found] ^= _times(None if coef is None else coef[positions], delta[positions])


def combine(inputs: Sequence[Bytes], outputs: Sequence[Bytes], coef: NDArray[np.uint8]) -> None:
    for row, output in zip(coef, outputs, strict=True):
        output[:] = 0
        for c, source in zip(row, inputs, strict=True):
            output ^= PRODUCT[c][source]


def apply(
    rule: OptimizerRule,
    records: Records,
    limit: int,
    dim: int,
    indices: Sequence[Index],
    grads: Sequence[Floats],
    index_out: Index,
    delta: Records,
) -> int:
    for index in indices:
        check_range(index, limit, "index")
        _distinct(index, "index")
    if not indices:
        return 0
    ids = np.concatenate(indices)
    inverse = np.empty(len(ids), np.int64)
    distinct = dedup(ids, index_out, inverse)
    summed = np.empty((distinct, dim), np.float32)
    gradient_sum(np.concatenate(grads), inverse, summed)
    rows = index_out[:distinct]
    old = records[rows]
    new = step_records(rule, old, dim, summed)
    delta[:distinct] = old ^ new
    records[rows] = new
    return distinct


def check_distinct(index: Index, limit: int) -> None:
    check_range(index, limit, "index")
    _distinct(index, "index")


def missing(bitmap: Bytes, index: Index, out: Index) -> int:
    check_range(index, len(bitmap) * 8, "index")
    invalid = index[(bitmap[index // 8] >> (index % 8).astype(np.uint8)) & 1 == 0]
    out[: len(invalid)] = invalid
    return len(invalid)


def mark(bitmap: Bytes, index: Index) -> None:
    check_range(index, len(bitmap) * 8, "index")
    np.bitwise_or.at(bitmap, index // 8, np.uint8(1) << (index % 8).astype(np.uint8))


def dedup(ids: Index, unique: Index, inverse: Index) -> int:
    _, first, sorted_inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    unique[: len(order)] = ids[first[order]]
    inverse[:] = number[sorted_inverse]
    return len(order)


def partition(
    rows: Index,
    arena_rows: int,
    place: NDArray[np.int32],
    region: NDArray[np.int32],
    slots: int,
    order: Index,
    index: Index,
    counts: Index,
) -> None:
    check_range(rows, arena_rows, "rows")
    groups, k = place.shape
    stripe, position = rows // k, rows % k
    slot, group = stripe // groups, stripe % groups
    places = place[group, position]
    order[:] = np.argsort(places, kind="stable")
    index[:] = (region[group, position].astype(np.int64) * slots + slot)[order]
    counts[:] = np.bincount(places, minlength=len(counts))


def gradient_sum(grads: Floats, inverse: Index, out: Floats) -> None:
    check_first_seen(inverse, len(out))
    first = np.zeros(len(inverse), bool)
    first[np.unique(inverse, return_index=True)[1]] = True
    out[inverse[first]] = grads[first]
    np.add.at(out, inverse[~first], grads[~first])


OFFSETS = "offsets must start with 0, never fall, and end with the number of ids"


def number_bags(
    ids: Index,
    offsets: Index,
    samples: int,
    keys: Index,
    limits: Index,
    first_rows: Index,
    rows: Index,
    inverse: Index,
    bags: Index,
) -> int:
    check_offsets(offsets, len(ids))
    _check_features(limits, first_rows)
    bags[0] = 0
    arena_rows = [np.empty(0, np.int64)]
    done = 0
    for feature, key in enumerate(keys.tolist() if samples else []):
        own = offsets[key * samples : (key + 1) * samples + 1]
        named = ids[own[0] : own[-1]]
        outside = np.flatnonzero((named < 0) | (named >= limits[feature]))
        if len(outside):
            return -1 - (done + int(outside[0]))
        arena_rows.append(named + first_rows[feature])
        bags[feature * samples + 1 : (feature + 1) * samples + 1] = done + own[1:] - own[0]
        done += len(named)
    return dedup(np.concatenate(arena_rows), rows, inverse)


def _check_features(limits: Index, first_rows: Index) -> None:
    if ((limits < 0) | (limits > 2**40)).any():
        raise ArgumentError("limits must be 0 to 2^40")
    if (first_rows > 2**60).any():
        raise ArgumentError("first_rows must be 2^60 at most")
    behind = first_rows + limits
    same = first_rows[1:] == first_rows[:-1]
    fits = np.where(same, behind[1:] == behind[:-1], first_rows[1:] >= behind[:-1])
    if (len(first_rows) and first_rows[0] < 0) or not fits.all():
        raise ArgumentError("features must be sorted by table, and tables have no row in common")


def _bag_of_each_id(offsets: Index) -> Index:
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def check_offsets(offsets: Index, ids: int) -> None:
    if offsets[0] != 0 or offsets[-1] != ids or (offsets[1:] < offsets[:-1]).any():
        raise ArgumentError(OFFSETS)


def _by_bag(pooled: Floats, bags: int, columns: Index, dim: int) -> Floats:
    """The columns of each feature of pooled rows, one feature behind the other: [bags, dim]."""
    each = pooled[:, columns[:, None] + np.arange(dim)]  # [samples, features, dim]
    return np.ascontiguousarray(each.swapaxes(0, 1)).reshape(bags, dim)


def pool(
    values: Floats,
    index: Index,
    offsets: Index,
    weights: Floats | None,
    poolings: Index,
    columns: Index,
    prefetch_rows: int,
    out: Floats,
) -> None:
    check_offsets(offsets, len(index))
    check_range(index, len(values), "index")
    sizes, dim = np.diff(offsets), values.shape[1]
    pooled = np.zeros((len(sizes), dim), np.float32)
    for nth in range(int(sizes.max(initial=0))):
        bags = np.flatnonzero(sizes > nth)
        ids = offsets[bags] + nth
        term = values[index[ids]]
        if weights is not None:
            term = weights[ids, None] * term
        pooled[bags] = term if nth == 0 else pooled[bags] + term
    several = (sizes > 1) & np.repeat(poolings == Pooling.MEAN, len(out))
    pooled[several] = pooled[several] / sizes.astype(np.float32)[several, None]
    features = pooled.reshape(len(columns), len(out), dim)
    for column, feature in zip(columns.tolist(), features, strict=True):
        out[:, column : column + dim] = feature


def pool_backward(
    grads: Floats,
    inverse: Index,
    offsets: Index,
    weights: Floats | None,
    poolings: Index,
    columns: Index,
    out: Floats,
) -> None:
    check_offsets(offsets, len(inverse))
    sizes = np.diff(offsets)
    by_bag = _by_bag(grads, len(sizes), columns, out.shape[1])
    several = (sizes > 1) & np.repeat(poolings == Pooling.MEAN, len(grads))
    by_bag[several] = by_bag[several] / sizes.astype(np.float32)[several, None]
    expanded = by_bag[_bag_of_each_id(offsets)]
    if weights is not None:
        expanded = weights[:, None] * expanded
    gradient_sum(expanded, inverse, out)


def weight_backward(
    grads: Floats, values: Floats, index: Index, offsets: Index, columns: Index, out: Floats
) -> None:
    check_offsets(offsets, len(index))
    check_range(index, len(values), "index")
    by_bag = _by_bag(grads, len(offsets) - 1, columns, values.shape[1])
    out[:] = fold(by_bag[_bag_of_each_id(offsets)] * values[index])
