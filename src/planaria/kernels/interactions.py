"""The kernels of DLRM's interaction, checked: a sample's vectors, multiplied with one another.

What planaria.kernels promises of its functions holds for these. The vectors of a sample are its
`first`, where there is one, and then those of `rest`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planaria import kernels
from planaria.kernels import twin_interactions as twin
from planaria.kernels.checks import array, optional, require, require_apart
from planaria.kernels.types import Floats


def _backend() -> Any:
    return twin if kernels.level() == "numpy" else kernels.native


def interact(first: Floats | None, rest: Floats, out: Floats | None = None) -> Floats:
    """float32[samples, (dim +) pairs]: the first vector, then the products of all pairs.

    first: [samples, dim] or None; rest: [samples, count, dim]. Pairs are (1, 0), (2, 0), (2, 1),
    (3, 0) and so on. Each product is summed in the order of the vectors' elements.
    """
    shape = _result_shape(first, rest)
    if out is None:
        out = np.empty(shape, np.float32)
    array("out", out, np.float32, 2, shape=shape, writable=True)
    require_apart([out], [rest, *optional(first)])
    _backend().interact(first, rest, out)
    return out


def interact_backward(
    grads: Floats, first: Floats | None, rest: Floats
) -> tuple[Floats | None, Floats]:
    """The gradients of `first` and `rest`, in new memory, from those of what interact gives."""
    array("grads", grads, np.float32, 2, shape=_result_shape(first, rest))
    of_first = None if first is None else np.empty_like(first)
    of_rest = np.empty_like(rest)
    _backend().interact_backward(grads, first, rest, of_first, of_rest)
    return of_first, of_rest


def _result_shape(first: Floats | None, rest: Floats) -> tuple[int, int]:
    array("rest", rest, np.float32, 3)
    samples, count, dim = rest.shape
    if first is not None:
        array("first", first, np.float32, 2, shape=(samples, dim))
        count += 1
    require(count > 0 and dim > 0, "there are no vectors; a sample needs one or more, of one float")
    return samples, (0 if first is None else dim) + count * (count - 1) // 2
