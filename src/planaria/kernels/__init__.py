"""The kernels, checked: every array's dtype, shape and memory is looked at before a backend runs.

A backend is the native module at one SIMD level, or the NumPy twin; all give the same bits. The
best that the CPU has is taken, unless the environment variable PLANARIA_SIMD names another:
`gfni`, `avx2`, `portable` or `numpy`.

The caller owns every array. Where an `out` is taken it is overwritten, so that hot paths can reuse
memory: touching fresh pages costs more than most kernels do. No array may be written by anybody
else while a call has it, and no array that a call writes may overlap another of its arguments.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError, RowError
from planaria.kernels import twin
from planaria.kernels.bags import check_bags, check_pooled
from planaria.kernels.checks import array, arrays, optional, require, require_apart
from planaria.kernels.types import (
    Bytes,
    Distribution,
    Floats,
    Index,
    InitTables,
    Keys,
    OptimizerKind,
    OptimizerRule,
    PooledFeatures,
    Pooling,
    Records,
    record_words,
)

native: ModuleType | None
try:
    from planaria import _native as native
except ImportError:  # not built for this platform: the twin does everything, slowly
    native = None

LEVELS = ("gfni", "avx2", "portable", "numpy")
PREFETCH_ROWS = 12
MAX_THREADS = 1024

_backend: Any = twin if native is None else native


def levels() -> list[str]:
    """The levels that this machine can run, best first."""
    return [
        name
        for name in LEVELS
        if name == "numpy" or (native is not None and native.level_supported(name))
    ]


def level() -> str:
    """The level in use."""
    return "numpy" if _backend is twin else str(_backend.level())


def select_level(name: str) -> None:
    """Uses another level from now on, in this process."""
    global _backend
    if name not in levels():
        raise ArgumentError(
            f"SIMD level {name!r} is not to be had here; this machine runs {', '.join(levels())}"
        )
    if name == "numpy":
        _backend = twin
    else:
        assert native is not None
        native.select_level(name)
        _backend = native


if _wanted := os.environ.get("PLANARIA_SIMD"):
    select_level(_wanted)


def set_threads(count: int) -> None:
    """How many threads one call may use, its own included; 1 at the start."""
    require(1 <= count <= MAX_THREADS, f"threads must be between 1 and {MAX_THREADS}, not {count}")
    if native is not None:
        native.set_threads(count)


def threads() -> int:
    return 1 if native is None else int(native.threads())


def allocate(rows: int, words: int, huge_pages: bool = True) -> Records:
    """Zeroed memory for records, uint32[rows, words], on huge pages where the system gives them."""
    require(
        rows >= 0 and words >= 1 and rows * words < 2**60,
        f"cannot allocate {rows} records of {words} words",
    )
    records: Records = _backend.allocate(rows, words, huge_pages)
    return records


# ---------------------------------------------------------------------------- records


def gather(records: Records, index: Index, out: Records | None = None) -> Records:
    """Copies records, or their first out.shape[1] words: out[i] = records[index[i]]."""
    array("records", records, np.uint32, 2)
    array("index", index, np.int64, 1)
    if out is None:
        out = np.empty((len(index), records.shape[1]), np.uint32)
    array("out", out, np.uint32, 2, writable=True)
    require(
        len(out) == len(index) and out.shape[1] <= records.shape[1],
        f"out {out.shape} does not fit {len(index)} records of {records.shape[1]} words",
    )
    require_apart([out], [records, index])
    _backend.gather(records, index, out)
    return out


def scatter(records: Records, index: Index, values: Records) -> None:
    """records[index[i]] = values[i]; no index may stand twice."""
    array("records", records, np.uint32, 2, writable=True)
    array("index", index, np.int64, 1)
    array("values", values, np.uint32, 2, shape=(len(index), records.shape[1]))
    require_apart([records], [values, index])
    _backend.scatter(records, index, values)


def mul_add(records: Records, index: Index, coef: Bytes | None, delta: Records) -> None:
    """records[index[i]] ^= coef[i] * delta[i]; without coef, a plain XOR. The parity update."""
    array("records", records, np.uint32, 2, writable=True)
    array("index", index, np.int64, 1)
    if coef is not None:
        array("coef", coef, np.uint8, 1, shape=(len(index),))
    array("delta", delta, np.uint32, 2, shape=(len(index), records.shape[1]))
    require_apart([records], [delta, index, *optional(coef)])
    _backend.mul_add(records, index, coef, delta)


def mul_add_bytes(target: Bytes, coef: int, delta: Bytes) -> None:
    """target ^= coef * delta, bytes of any length."""
    array("target", target, np.uint8, 1, writable=True)
    array("delta", delta, np.uint8, 1, shape=target.shape)
    require_apart([target], [delta])
    require(0 <= coef <= 255, f"coef must be a byte, 0 to 255, not {coef}")
    _backend.mul_add_bytes(target, coef, delta)


def undo(values: Records, query: Index, index: Index, coef: Bytes | None, delta: Records) -> None:
    """Takes one step's deltas back out of values read for `query`, which may name a row twice."""
    array("values", values, np.uint32, 2, writable=True)
    array("query", query, np.int64, 1, shape=(len(values),))
    array("index", index, np.int64, 1)
    if coef is not None:
        array("coef", coef, np.uint8, 1, shape=(len(index),))
    array("delta", delta, np.uint32, 2, shape=(len(index), values.shape[1]))
    require_apart([values], [delta, query, index, *optional(coef)])
    _backend.undo(values, query, index, coef, delta)


def combine(inputs: Sequence[Bytes], outputs: Sequence[Bytes], coef: NDArray[np.uint8]) -> None:
    """outputs[j] = sum over i of coef[j, i] * inputs[i] over GF(2^8), bytes of equal length."""
    require(len(inputs) > 0, "combine needs at least one input")
    require(1 <= len(outputs) <= 4, f"combine gives 1 to 4 outputs, not {len(outputs)}")
    array("inputs[0]", inputs[0], np.uint8, 1)
    length = inputs[0].shape
    arrays("inputs", inputs, np.uint8, 1, shape=length)
    arrays("outputs", outputs, np.uint8, 1, shape=length, writable=True)
    array("coef", coef, np.uint8, 2, shape=(len(outputs), len(inputs)))
    require_apart(outputs, inputs)
    _backend.combine(inputs, outputs, coef)


class Applied(NamedTuple):
    """What one step changed: each record once, in first-seen order over the ranks."""

    indices: Index
    delta: Records


def apply(
    rule: OptimizerRule,
    records: Records,
    limit: int,
    dim: int,
    contributions: Sequence[tuple[Index, Floats]],
    out: Applied | None = None,
) -> Applied:
    """One optimizer step on records below `limit`, from the gradients of all ranks.

    contributions: per rank, in rank order, distinct record numbers and gradients [n, dim]; a
    record's gradients are summed in that order. `out` has room for all of them.
    """
    array("records", records, np.uint32, 2, writable=True)
    require(
        records.shape[1] == record_words(rule.kind, dim),
        f"records of {records.shape[1]} words are not those of {OptimizerKind(rule.kind).name} "
        f"with {dim} weights",
    )
    require(0 <= limit <= len(records), f"limit {limit} is above the {len(records)} records")
    contributions = list(contributions)
    total = 0
    for rank, (index, grads) in enumerate(contributions):
        array(f"index of rank {rank}", index, np.int64, 1)
        array(f"gradients of rank {rank}", grads, np.float32, 2, shape=(len(index), dim))
        total += len(index)
    if out is None:
        out = Applied(np.empty(total, np.int64), np.empty((total, records.shape[1]), np.uint32))
    array("out.indices", out.indices, np.int64, 1, writable=True)
    array("out.delta", out.delta, np.uint32, 2, writable=True)
    require(
        len(out.indices) >= total and len(out.delta) >= total
        and out.delta.shape[1] == records.shape[1],
        f"out has no room for {total} records of {records.shape[1]} words",
    )  # fmt: skip
    given = [part for contribution in contributions for part in contribution]
    require_apart([records, *out], given)
    indices = [index for index, _ in contributions]
    distinct = _backend.apply(
        rule, records, limit, dim, indices, [grads for _, grads in contributions], *out
    )
    return Applied(out.indices[:distinct], out.delta[:distinct])


def init_records(
    seed: int,
    tables: InitTables,
    rows: int,
    row: Index,
    state: NDArray[np.uint32],
    out: Records,
) -> None:
    """out[i] = the initial record of arena row row[i]: random weights, then `state`.

    A row outside [0, rows) becomes zeros: it is padding.
    """
    require(0 <= seed < 2**64, f"seed must be between 0 and 2^64 - 1, not {seed}")
    array("first_rows", tables.first_rows, np.int64, 1)
    table_shape = (len(tables.first_rows),)
    require(len(tables.first_rows) > 0, "an arena needs at least one table")
    array("table_ids", tables.table_ids, np.int64, 1, shape=table_shape)
    array("distributions", tables.distributions, np.int64, 1, shape=table_shape)
    array("parameters", tables.parameters, np.float32, 2, shape=(*table_shape, 2))
    require(
        tables.first_rows[0] == 0 and bool((tables.first_rows[1:] > tables.first_rows[:-1]).all()),
        "first_rows must start with 0 and rise",
    )
    array("row", row, np.int64, 1)
    array("state", state, np.uint32, 1)
    array("out", out, np.uint32, 2, writable=True)
    require(
        len(out) == len(row) and out.shape[1] >= len(state),
        f"out {out.shape} does not fit {len(row)} rows with {len(state)} words of state",
    )
    require_apart([out], [row, state, *tables])
    require(
        bool(np.isin(tables.distributions, list(Distribution)).all()),
        "distributions must be numbers of planaria.kernels.types.Distribution",
    )
    _backend.init_records(seed, *tables, rows, row, state, out)


def digest(records: Records, keys: Keys) -> tuple[int, int]:
    """Two sums mod 2^64 of hashes of (keys[i], records[i]); key NO_ROW passes a record over."""
    array("records", records, np.uint32, 2)
    array("keys", keys, np.uint64, 1, shape=(len(records),))
    first, second = _backend.digest(records, keys)
    return int(first), int(second)


def check_distinct(index: Index, limit: int) -> None:
    """Raises RowError unless all are below `limit` and none stands twice."""
    array("index", index, np.int64, 1)
    _backend.check_distinct(index, limit)


def missing(bitmap: Bytes, index: Index) -> Index:
    """Those of `index` whose bit is not set, in order."""
    array("bitmap", bitmap, np.uint8, 1)
    array("index", index, np.int64, 1)
    out = np.empty(len(index), np.int64)
    count: int = _backend.missing(bitmap, index, out)
    return out[:count]


def mark(bitmap: Bytes, index: Index) -> None:
    """Sets the bits of `index`."""
    array("bitmap", bitmap, np.uint8, 1, writable=True)
    array("index", index, np.int64, 1)
    require_apart([bitmap], [index])
    _backend.mark(bitmap, index)


# ---------------------------------------------------------------------------- ids and gradients


def dedup(ids: Index) -> tuple[Index, Index]:
    """(unique, inverse): the distinct ids in first-seen order; ids == unique[inverse]."""
    array("ids", ids, np.int64, 1)
    unique, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    count: int = _backend.dedup(ids, unique, inverse)
    return unique[:count], inverse


class Parts(NamedTuple):
    """Rows sorted by place. The rows of place p are the p-th run of `order` and `indices`."""

    order: Index  # position of the row in the argument
    indices: Index  # its record number on its place
    counts: Index  # rows per place


def partition(
    rows: Index,
    arena_rows: int,
    place: NDArray[np.int32],
    region: NDArray[np.int32],
    slots: int,
    places: int,
) -> Parts:
    """Sorts arena rows by the place that holds them; place and region are int32[groups, k]."""
    array("rows", rows, np.int64, 1)
    array("place", place, np.int32, 2)
    array("region", region, np.int32, 2, shape=place.shape)
    require(place.size > 0, "there are no groups")
    require(1 <= slots < 2**40, f"slots must be 1 or more, not {slots}")
    require(int(region.min()) >= 0, "regions are numbered from 0")
    require(
        int(place.min()) >= 0 and int(place.max()) < places,
        f"groups name places outside 0 to {places - 1}",
    )
    n = len(rows)
    parts = Parts(np.empty(n, np.int64), np.empty(n, np.int64), np.empty(places, np.int64))
    _backend.partition(rows, arena_rows, place, region, slots, *parts)
    return parts


def gradient_sum(grads: Floats, inverse: Index, out: Floats) -> Floats:
    """out[u] = sum, in order, of the grads[i] with inverse[i] == u; inverse as dedup gives it."""
    array("grads", grads, np.float32, 2)
    array("inverse", inverse, np.int64, 1, shape=(len(grads),))
    array("out", out, np.float32, 2)
    array("out", out, np.float32, 2, writable=True, shape=(len(out), grads.shape[1]))
    require_apart([out], [grads, inverse])
    _backend.gradient_sum(grads, inverse, out)
    return out


class NumberedBags(NamedTuple):
    """The bags of some features in one arena, one feature behind the other."""

    rows: Index  # the distinct arena rows, in first-seen order
    inverse: Index  # which of them each id is
    offsets: Index  # of the bags: int64[features * samples + 1]


def number_bags(
    ids: Index, offsets: Index, samples: int, keys: Index, limits: Index, first_rows: Index
) -> NumberedBags:
    """From the ids of a batch to the distinct rows of one arena.

    ids, offsets: the bags of all keys of the batch, `samples` of each, key by key.
    keys, limits, first_rows: per feature, its key's number, the rows of its table and the first
    of these in the arena. The features of one table stand side by side, tables in arena order.
    Raises RowError if an id is not below its table's limit.
    """
    array("ids", ids, np.int64, 1)
    array("offsets", offsets, np.int64, 1)
    array("keys", keys, np.int64, 1)
    array("limits", limits, np.int64, 1, shape=keys.shape)
    array("first_rows", first_rows, np.int64, 1, shape=keys.shape)
    bags = len(offsets) - 1
    require(
        samples >= 0 and bags >= 0 and (bags % samples == 0 if samples else bags == 0),
        f"offsets needs an entry per key and sample, and one more, not {bags + 1}",
    )
    counts = np.zeros(len(keys), np.int64)  # ids of each feature
    if samples and len(keys):
        known = bags // samples
        require(
            0 <= keys.min() <= keys.max() < known, f"keys must be numbers from 0 to {known - 1}"
        )
        counts = np.diff(offsets[::samples])[keys]
    require(bool((counts >= 0).all() and (counts <= len(ids)).all()), twin.OFFSETS)
    total = int(counts.sum())
    found = NumberedBags(*(np.empty(n, np.int64) for n in (total, total, len(keys) * samples + 1)))
    distinct: int = _backend.number_bags(ids, offsets, samples, keys, limits, first_rows, *found)
    if distinct < 0:
        feature = int(np.searchsorted(np.cumsum(counts), -1 - distinct, side="right"))
        raise RowError(
            f"feature {feature} has an id outside 0 to {limits[feature] - 1}, which are the rows "
            "of its table"
        )
    return found._replace(rows=found.rows[:distinct])


def pool(
    values: Floats,
    index: Index,
    offsets: Index,
    weights: Floats | None = None,
    pooling: Pooling | PooledFeatures = Pooling.SUM,
    out: Floats | None = None,
    prefetch_rows: int = PREFETCH_ROWS,
) -> Floats:
    """out[b] = sum, mean or weighted sum of values[index[i]], offsets[b] <= i < offsets[b + 1].

    An empty bag gives zeros. With several features, the bags of a sample go into the columns of
    one row of `out`; columns that are not theirs are left alone.
    """
    array("values", values, np.float32, 2)
    dim = values.shape[1]
    features = check_bags(index, offsets, weights, pooling)
    if out is None:
        samples = (len(offsets) - 1) // len(features.columns)
        out = np.empty((samples, int(features.columns[-1]) + dim), np.float32)
    check_pooled("out", out, offsets, dim, features)
    array("out", out, np.float32, 2, writable=True)
    require(prefetch_rows >= 0, f"prefetch_rows must be 0 or more, not {prefetch_rows}")
    require_apart([out], [values, index, offsets, *features, *optional(weights)])
    _backend.pool(values, index, offsets, weights, *features, prefetch_rows, out)
    return out


def pool_backward(
    grads: Floats,
    inverse: Index,
    offsets: Index,
    out: Floats,
    weights: Floats | None = None,
    pooling: Pooling | PooledFeatures = Pooling.SUM,
) -> Floats:
    """The gradient of each distinct row from those of the pooled rows, summed in id order."""
    features = check_bags(inverse, offsets, weights, pooling)
    array("out", out, np.float32, 2, writable=True)
    check_pooled("grads", grads, offsets, out.shape[1], features)
    require_apart([out], [grads, inverse, offsets, *features, *optional(weights)])
    _backend.pool_backward(grads, inverse, offsets, weights, *features, out)
    return out


def weight_backward(
    grads: Floats,
    values: Floats,
    index: Index,
    offsets: Index,
    pooling: Pooling | PooledFeatures = Pooling.SUM,
) -> Floats:
    """The gradient of the weights of weighted bags: dot(grads[bag], values[index[i]])."""
    features = check_bags(index, offsets, None, pooling)
    array("values", values, np.float32, 2)
    check_pooled("grads", grads, offsets, values.shape[1], features)
    out = np.empty(len(index), np.float32)
    _backend.weight_backward(grads, values, index, offsets, features.columns, out)
    return out
