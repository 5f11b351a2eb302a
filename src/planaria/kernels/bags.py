"""What the pooling kernels demand of bags and of the rows that they are pooled into."""

from __future__ import annotations

import numpy as np

from planaria.kernels.checks import array, require
from planaria.kernels.types import Floats, Index, PooledFeatures, Pooling

_ONE_FEATURE = {
    pooling: PooledFeatures(np.array([pooling], np.int64), np.zeros(1, np.int64))
    for pooling in Pooling
}


def check_bags(
    index: Index, offsets: Index, weights: Floats | None, pooling: Pooling | PooledFeatures
) -> PooledFeatures:
    array("index", index, np.int64, 1)
    array("offsets", offsets, np.int64, 1)
    require(len(offsets) > 0, "offsets needs one entry more than there are bags")
    if weights is not None:
        array("weights", weights, np.float32, 1, shape=(len(index),))
    if not isinstance(pooling, PooledFeatures):
        require(
            pooling in tuple(Pooling), f"there is no pooling {pooling!r}; use Pooling.SUM or others"
        )
        pooling = _ONE_FEATURE[pooling]
    array("poolings", pooling.poolings, np.int64, 1)
    array("columns", pooling.columns, np.int64, 1, shape=pooling.poolings.shape)
    features, bags = len(pooling.columns), len(offsets) - 1
    require(
        features > 0 and bags % features == 0,
        f"{bags} bags cannot be shared by {features} features; each has as many as the others",
    )
    least, most = int(pooling.poolings.min()), int(pooling.poolings.max())
    require(
        least >= Pooling.SUM and most <= Pooling.WEIGHTED,
        f"there is no pooling {most if least >= 0 else least}; use Pooling.SUM or others",
    )
    weighted = pooling.poolings == Pooling.WEIGHTED
    require(
        bool(weighted.all()) if weights is not None else not weighted.any(),
        "weights go with weighted pooling, and only with it",
    )
    return pooling


def check_pooled(
    name: str, pooled: Floats, offsets: Index, dim: int, features: PooledFeatures
) -> None:
    """Pooled rows, or their gradients: one per sample, with columns for these features."""
    array(name, pooled, np.float32, 2)
    samples = (len(offsets) - 1) // len(features.columns)
    if any(features is one for one in _ONE_FEATURE.values()):
        array(name, pooled, np.float32, 2, shape=(samples, dim))
    require(len(pooled) == samples, f"{name} needs {samples} rows, not {len(pooled)}")
    columns = features.columns
    require(
        columns[0] >= 0
        and bool((columns <= pooled.shape[1] - dim).all())
        and bool((columns[1:] - columns[:-1] >= dim).all()),
        f"columns must rise by {dim} or more, within the {pooled.shape[1]} of {name}",
    )
