"""What a kernel demands of an array before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planaria.errors import ArgumentError


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ArgumentError(otherwise)


def array(
    name: str,
    value: Any,
    dtype: type[np.generic],
    dimensions: int,
    *,
    shape: tuple[int, ...] | None = None,
    writable: bool = False,
) -> None:
    """Raises ArgumentError unless `value` is a contiguous NumPy array of this kind."""
    if not isinstance(value, np.ndarray):
        raise ArgumentError(f"{name} must be a NumPy array, not {type(value).__name__}")
    if value.dtype != dtype:
        raise ArgumentError(f"{name} must be {dtype.__name__}, not {value.dtype}")
    if value.ndim != dimensions:
        raise ArgumentError(f"{name} must have {dimensions} dimensions, not shape {value.shape}")
    if shape is not None and value.shape != shape:
        raise ArgumentError(f"{name} must have shape {shape}, not {value.shape}")
    flags = value.flags
    if not flags.c_contiguous:
        raise ArgumentError(f"{name} must be C-contiguous; pass numpy.ascontiguousarray({name})")
    if not flags.aligned:
        raise ArgumentError(f"{name} must be aligned in memory; pass a copy")
    if writable and not flags.writeable:
        raise ArgumentError(f"{name} is read-only, but would be written; pass a copy")


def arrays(
    name: str,
    values: Sequence[Any],
    dtype: type[np.generic],
    dimensions: int,
    *,
    shape: tuple[int, ...] | None = None,
    writable: bool = False,
) -> None:
    for i, value in enumerate(values):
        array(f"{name}[{i}]", value, dtype, dimensions, shape=shape, writable=writable)


def require_apart(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises ArgumentError if an output shares memory with an input or with another output."""
    for j, output in enumerate(outputs):
        for other in (*inputs, *outputs[:j]):
            if np.may_share_memory(output, other):
                raise ArgumentError(
                    f"output {j} shares memory with another argument; give it its own"
                )


def optional(value: Any) -> tuple[Any, ...]:
    """The value as a sequence of one, or of none where it is None."""
    return () if value is None else (value,)
