"""The words that cross the native boundary: array types, optimizer rules, enumerations."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError

Records: TypeAlias = NDArray[np.uint32]
"""Records, deltas or values: uint32[n, words]. Bits, not numbers: only optimizers look inside."""
Index: TypeAlias = NDArray[np.int64]
"""Record numbers, rows, ids, offsets or counts: int64[n]."""
Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]
Keys: TypeAlias = NDArray[np.uint64]

NO_ROW = np.uint64(0xFFFFFFFFFFFFFFFF)
"""The key of a record that the digest passes over: padding or parity."""


class OptimizerKind(IntEnum):
    SGD = 0
    MOMENTUM = 1
    ADAGRAD = 2
    ROWWISE_ADAGRAD = 3
    ADAM = 4


def record_words(kind: int, dim: int) -> int:
    """Size of a record in 4-byte words: `dim` weights and the optimizer's state."""
    match kind:
        case OptimizerKind.SGD:
            return dim
        case OptimizerKind.MOMENTUM | OptimizerKind.ADAGRAD:
            return 2 * dim
        case OptimizerKind.ROWWISE_ADAGRAD:
            return dim + 1
        case OptimizerKind.ADAM:
            return 3 * dim + 1
    raise ArgumentError(f"there is no optimizer number {kind}")


class Distribution(IntEnum):
    ZEROS = 0
    UNIFORM = 1
    NORMAL = 2


class Pooling(IntEnum):
    SUM = 0
    MEAN = 1
    WEIGHTED = 2


class PooledFeatures(NamedTuple):
    """Bags of several features of the same samples, feature by feature, pooled side by side."""

    poolings: Index  # Pooling of each; WEIGHTED for all or for none
    columns: Index  # of the pooled rows: where each one's begin, in rising order


class OptimizerRule(NamedTuple):
    """One optimizer step's numbers. Momentum's factor is beta1."""

    kind: int
    lr: float
    weight_decay: float
    eps: float
    beta1: float
    beta2: float


class InitTables(NamedTuple):
    """How the tables of one arena are initialised; one entry per table, ascending first_row."""

    table_ids: Index  # what the random numbers depend on
    first_rows: Index  # the table's first row in the arena; starts with 0
    distributions: Index  # Distribution
    parameters: Floats  # float32[n, 2]: low and high, or mean and std
