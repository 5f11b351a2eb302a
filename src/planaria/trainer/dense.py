"""The dense network's state: one record, stepped by the kernels that step the embedding records.

All parameters lie one behind the other in one float32 vector, and that vector is the weights of
one record (see optimizers): [weights: P][optimizer state]. So every trainer that applies the same
gradients holds the same bits, without torch.optim. Copies as of earlier steps are kept elsewhere,
as bytes (see planaria.dense).

One record instead of many because its weights then lie in a row, and torch can use them in place.
One record is one thread's work, but little work beside the network's own.

Row-wise Adagrad means nothing for a dense network, which has no rows: it becomes Adagrad here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planaria import kernels
from planaria.data import DENSE_FEATURES
from planaria.errors import StepError
from planaria.kernels.checks import array, require
from planaria.kernels.types import Bytes, Distribution, Floats, Index, InitTables, Records
from planaria.optimizers import Optimizer
from planaria.server.digest import Digest
from planaria.tables import MAX_TABLES

ALIGNMENT_BYTES = 64
"""Where the state starts in memory. BLAS picks its order of additions by alignment, so two trainers
whose weights start elsewhere within a cache line may disagree in the last bit."""

DENSE_TABLE = 2**23 - 1
"""The table number of the dense state in digests: above all tables, and below 2^24, so that a key
(table << 40 | number) is never NO_ROW."""

DIGEST_WORDS = 1024
_THE_RECORD: Index = np.zeros(1, np.int64)


class Layer(NamedTuple):
    """A linear layer; in the flat vector, its weights [outputs, inputs] and then its biases."""

    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        return (self.inputs + 1) * self.outputs


def dlrm_layers(tables: int, dim: int, bottom: Sequence[int], top: Sequence[int]) -> list[Layer]:
    """Those of the bottom MLP, which ends in dim, and of the top MLP, which ends in 1.

    bottom, top: the hidden layers.
    """
    pairs = (tables + 1) * tables // 2
    sizes = ([DENSE_FEATURES, *bottom, dim], [dim + pairs, *top, 1])
    return [Layer(*pair) for of_mlp in sizes for pair in pairwise(of_mlp)]


def initial_weights(layers: Sequence[Layer], seed: int) -> Floats:
    """float32[P]: where training starts, a function of the layers and the seed alone.

    Normal around zero with DLRM's deviations: sqrt(2 / (inputs + outputs)) for weights and
    sqrt(1 / outputs) for biases. Each is drawn like a one-row table whose number is above that of
    every embedding table, so that no two share random numbers.
    """
    parts: list[Records] = []
    for layer in layers:
        inputs, outputs = layer
        require(inputs >= 1 and outputs >= 1, f"a layer cannot be {inputs} x {outputs}")
        for size, deviation in (
            (inputs * outputs, (2 / (inputs + outputs)) ** 0.5),
            (outputs, (1 / outputs) ** 0.5),
        ):
            table = InitTables(
                np.array([MAX_TABLES + len(parts)], np.int64),
                np.zeros(1, np.int64),
                np.array([Distribution.NORMAL], np.int64),
                np.array([(0, deviation)], np.float32),
            )
            part = np.empty((1, size), np.uint32)
            kernels.init_records(seed, table, 1, _THE_RECORD, np.empty(0, np.uint32), part)
            parts.append(part)
    require(len(parts) > 0, "a network needs at least one layer")
    weights: Floats = np.concatenate(parts, axis=1)[0].view(np.float32)
    return weights


class DenseState:
    """The parameters and their optimizer state after `step`.

    The memory stays where it is for life, so that what torch was given as its parameters follows
    every apply and restore.
    """

    def __init__(
        self,
        parameters: int,
        optimizer: Optimizer,
        *,
        initial: Floats | None = None,  # float32[parameters], copied; zeros without
    ) -> None:
        require(parameters >= 1, f"a dense network has 1 parameter or more, not {parameters}")
        if optimizer.name == "rowwise_adagrad":
            optimizer = replace(optimizer, name="adagrad")
        self.parameters = parameters
        self.optimizer = optimizer
        self.step = 0
        self._record = _aligned_record(optimizer.record_words(parameters))
        if initial is not None:
            array("initial", initial, np.float32, 1, shape=(parameters,))
            self.weights[:] = initial
        self._record[0, parameters:] = optimizer.initial_state(parameters)

    @property
    def words(self) -> int:
        """Size of the whole state in 4-byte words."""
        return self.optimizer.record_words(self.parameters)

    @property
    def weights(self) -> Floats:
        """float32[P], the live parameters: read them, or hand them to torch, but never write."""
        return self._record[0, : self.parameters].view(np.float32)

    def apply(self, step: int, gradient: Floats, lr: float | None = None) -> None:
        """Takes `step` with the gradient summed over all ranks, float32[P], which is not kept."""
        if step != self.step + 1:
            raise StepError(f"step {step} cannot follow step {self.step}; send {self.step + 1}")
        array("gradient", gradient, np.float32, 1, shape=(self.parameters,))
        kernels.apply(
            self.optimizer.rule(lr),
            self._record,
            1,
            self.parameters,
            [(_THE_RECORD, gradient.reshape(1, -1))],
        )
        self.step = step

    def export(self) -> Bytes:
        """A copy of the whole state, uint8[4 * words]."""
        return self._record.copy().reshape(-1).view(np.uint8)

    def restore(self, step: int, state: Bytes) -> None:
        """Becomes what was exported after `step`. The bytes may lie anywhere: they came in a
        message, or from a file.
        """
        require(step >= 0, f"step must be 0 or more, not {step}")
        array("state", state, np.uint8, 1, shape=(4 * self.words,))
        self._record[0].view(np.uint8)[:] = state
        self.step = step

    def digest(self) -> Digest:
        """Of parameters and optimizer state; add it to the digests of the servers."""
        whole = self.words // DIGEST_WORDS * DIGEST_WORDS
        tail = np.zeros((1, DIGEST_WORDS), np.uint32)
        tail[0, : self.words - whole] = self._record[0, whole:]
        total = Digest()
        first = DENSE_TABLE << 40
        for records in (self._record[0, :whole].reshape(-1, DIGEST_WORDS), tail):
            keys = np.arange(first, first + len(records), dtype=np.uint64)
            total += Digest(*kernels.digest(records, keys))
            first += len(records)
        return total


def _aligned_record(words: int) -> Records:
    room = np.zeros(words + ALIGNMENT_BYTES // 4, np.uint32)
    start = -room.ctypes.data % ALIGNMENT_BYTES // 4
    return room[start : start + words].reshape(1, words)
