"""The NumPy twin of the interaction: the same operations in the same order, sample by sample."""

from __future__ import annotations

import numpy as np

from planaria.kernels.types import Floats


def interact(first: Floats | None, rest: Floats, out: Floats) -> None:
    vectors = _all(first, rest)
    row, column = np.tril_indices(vectors.shape[1], -1)
    products = np.zeros((len(vectors), len(row)), np.float32)
    for d in range(vectors.shape[2]):
        products += vectors[:, row, d] * vectors[:, column, d]
    if first is not None:
        out[:, : first.shape[1]] = first
    out[:, out.shape[1] - len(row) :] = products


def interact_backward(
    grads: Floats, first: Floats | None, rest: Floats, of_first: Floats | None, of_rest: Floats
) -> None:
    vectors = _all(first, rest)
    samples, count, dim = vectors.shape
    row, column = np.tril_indices(count, -1)
    factors = np.zeros((samples, count, count), np.float32)
    products = grads[:, grads.shape[1] - len(row) :]
    factors[:, row, column] = factors[:, column, row] = products
    of_all = np.zeros_like(vectors)
    if of_first is not None:
        of_all[:, 0] = grads[:, :dim]
    for i in range(count):
        for j in range(count):
            if j != i:
                of_all[:, i] += factors[:, i, j, None] * vectors[:, j]
    if of_first is not None:
        of_first[:] = of_all[:, 0]
    of_rest[:] = of_all[:, count - rest.shape[1] :]


def _all(first: Floats | None, rest: Floats) -> Floats:
    return rest if first is None else np.concatenate([first[:, None], rest], axis=1)
