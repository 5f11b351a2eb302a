"""Outputs so large that kernels write them past the cache: the same bits as the twin's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from planaria import kernels
from planaria.kernels.types import Floats, Records
from planaria.optimizers import Optimizer

ROWS, DIM = 40_000, 64  # 10 MB
rng = np.random.default_rng(11)


def at_offset(rows: int, words: int, offset_words: int) -> Records:
    """Memory that starts so many words past a 64-byte boundary: streaming needs 16 bytes."""
    block = np.zeros(rows * words + 32, np.uint32)
    first = -(block.ctypes.data // 4) % 16 + offset_words
    return block[first : first + rows * words].reshape(rows, words)


@pytest.mark.parametrize("offset_words", [0, 1, 4])
@pytest.mark.parametrize("repeated", [0, 1000, 20_000])
def test_a_large_gradient_sum_has_the_twins_bits(offset_words: int, repeated: int) -> None:
    grads = rng.standard_normal((ROWS, DIM), np.float32)
    ids = rng.permutation(ROWS)
    ids[rng.choice(ROWS, repeated, replace=False)] = ids[0]
    unique, inverse = kernels.dedup(ids.astype(np.int64))

    def run(level: str, threads: int) -> Floats:
        kernels.select_level(level)
        kernels.set_threads(threads)
        out = at_offset(len(unique), DIM, offset_words).view(np.float32)
        return kernels.gradient_sum(grads, inverse, out)

    compare_levels(run)


@pytest.mark.parametrize("offset_words", [0, 1, 4])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_large_update_has_the_twins_bits(offset_words: int, name: str) -> None:
    optimizer = Optimizer(name, lr=0.1)
    words = optimizer.record_words(DIM)
    index = rng.permutation(ROWS + 500)[:ROWS].astype(np.int64)
    grads = rng.standard_normal((ROWS, DIM), np.float32)
    start = rng.random((ROWS + 500, words), np.float32).view(np.uint32)

    def run(level: str, threads: int) -> Records:
        kernels.select_level(level)
        kernels.set_threads(threads)
        records = start.copy()
        out = kernels.Applied(np.zeros(ROWS, np.int64), at_offset(ROWS, words, offset_words))
        applied = kernels.apply(optimizer.rule(), records, len(records), DIM, [(index, grads)], out)
        assert np.array_equal(records[index] ^ applied.delta, start[index])
        return np.concatenate([records.ravel(), applied.delta.ravel()])

    compare_levels(run)


def compare_levels(run: Callable[[str, int], NDArray[Any]]) -> None:
    before = kernels.level()
    try:
        expected = run("numpy", 1).tobytes()
        for level in kernels.levels()[:-1]:
            for threads in (1, 2):
                assert run(level, threads).tobytes() == expected, f"{level}, {threads} threads"
    finally:
        kernels.select_level(before)
        kernels.set_threads(1)
