"""Samples of any shape: labels, numbers, and bags of rows in KeyedJaggedTensor's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError
from planaria.kernels.types import Floats, Index

T = TypeVar("T", bound=np.generic)
Lengths: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples in order. The reader owns the arrays; no source writes to them again.

    A bag is what one sample has of one key: no row, one, or several. Bags stand key by key: those
    of all samples for the first key, then for the second one.
    """

    labels: Floats  # float32[n]
    dense: Floats  # float32[n, numbers per sample]
    keys: tuple[str, ...]
    values: Index  # int64[total]: rows, bag after bag
    lengths: Lengths  # int32[len(keys) * n]: rows per bag
    weights: Floats | None = None  # float32[total]: one per row; None if all are 1

    def __post_init__(self) -> None:
        n = len(self.labels)
        if self.dense.ndim != 2 or len(self.dense) != n:
            raise ArgumentError(
                f"expected dense[{n}, any], like the labels, got {self.dense.shape}"
            )
        if len(self.lengths) != len(self.keys) * n:
            raise ArgumentError(
                f"{n} samples with {len(self.keys)} keys have {len(self.keys) * n} bags, "
                f"but {len(self.lengths)} lengths are given"
            )
        if self.lengths.min(initial=0) < 0:
            bag = int(np.argmax(self.lengths < 0))
            raise ArgumentError(
                f"key {self.keys[bag // n]!r}, sample {bag % n}: expected a length of 0 or more, "
                f"got {self.lengths[bag]}"
            )
        total = int(self.lengths.sum(dtype=np.int64))
        if total != len(self.values):
            raise ArgumentError(f"lengths add up to {total}, but there are {len(self.values)} rows")
        if self.weights is not None and len(self.weights) != total:
            raise ArgumentError(f"{total} rows have {len(self.weights)} weights; expected one each")

    def __len__(self) -> int:
        return len(self.labels)

    def bags(self, key: str) -> tuple[Index, Lengths]:
        """(rows, lengths) of one key."""
        number, n = self.keys.index(key), len(self)
        lengths = self.lengths[number * n : (number + 1) * n]
        start = int(self.lengths[: number * n].sum(dtype=np.int64))
        return self.values[start : start + int(lengths.sum(dtype=np.int64))], lengths

    def slice(self, start: int, stop: int) -> Samples:
        """Samples start to stop - 1, fewer at the end."""
        return self.take(np.arange(*slice(start, stop).indices(len(self)), dtype=np.int64))

    def take(self, index: Index) -> Samples:
        """Samples by number, in that order; one may stand twice. Nothing is shared with these."""
        shape = (len(self.keys), len(self))
        lengths = self.lengths.reshape(shape).take(index, axis=1).ravel()
        weights = self.weights
        if self._one_each:
            values = self.values.reshape(shape).take(index, axis=1).ravel()
            if weights is not None:
                weights = weights.reshape(shape).take(index, axis=1).ravel()
        else:
            new_starts = np.cumsum(lengths, dtype=np.int64) - lengths
            starts = self._starts.take(index, axis=1).ravel()
            places = np.repeat(starts - new_starts, lengths)
            places += np.arange(len(places))
            values = self.values[places]
            if weights is not None:
                weights = weights[places]
        dense = self.dense.take(index, axis=0)
        return Samples(self.labels[index], dense, self.keys, values, lengths, weights)

    @cached_property
    def _one_each(self) -> bool:
        return len(self.values) == len(self.lengths) and bool((self.lengths == 1).all())

    @cached_property
    def _starts(self) -> Index:
        """int64[keys, n]: where each bag begins."""
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return starts.reshape(len(self.keys), len(self))


def concat(parts: Sequence[Samples]) -> Samples:
    """All samples of the first part, then all of the second; one part at least, with equal keys."""
    if not parts:
        raise ArgumentError("there is nothing to put together; give one part at least")
    if len(parts) == 1:
        return parts[0]
    keys = parts[0].keys
    for part in parts[1:]:
        if part.keys != keys or part.dense.shape[1] != parts[0].dense.shape[1]:
            raise ArgumentError(
                f"samples with the keys {keys} and {parts[0].dense.shape[1]} numbers do not go "
                f"together with {part.keys} and {part.dense.shape[1]}"
            )
    weighted = any(part.weights is not None for part in parts)
    return Samples(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.dense for part in parts]),
        keys,
        _by_key(parts, [part.values for part in parts], np.int64),
        np.concatenate([part.lengths.reshape(len(keys), len(part)) for part in parts], 1).ravel(),
        _by_key(parts, [_weights(part) for part in parts], np.float32) if weighted else None,
    )


def _weights(part: Samples) -> Floats:
    return np.ones(len(part.values), np.float32) if part.weights is None else part.weights


def _by_key(parts: Sequence[Samples], arrays: Sequence[NDArray[T]], dtype: type[T]) -> NDArray[T]:
    """What each part has of the first key, then of the second."""
    ends = [
        np.cumsum(part.lengths.reshape(len(part.keys), len(part)).sum(1, dtype=np.int64))
        for part in parts
    ]
    pieces = [
        array[end[key - 1] if key else 0 : end[key]]
        for key in range(len(parts[0].keys))
        for array, end in zip(arrays, ends, strict=True)
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)
