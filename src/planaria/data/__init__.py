"""Where samples come from, and how well a model predicts them.

Samples are numbered from 0, and a source gives any range of them at any time, so that what a
trainer reads is a function of (step, rank) alone: the step is the whole position of a reader.

planaria.data.parquet and planaria.data.csv are imported by whoever reads such files: PyArrow takes
a second and a hundred megabytes, which servers can do without.
"""

from planaria.data.ahead import Ahead
from planaria.data.criteo import CriteoFile
from planaria.data.metrics import (
    Evaluation,
    Quality,
    RecentQuality,
    auc,
    chances,
    log_loss,
    normalized_entropy,
)
from planaria.data.order import Order
from planaria.data.presets import PRESETS
from planaria.data.samples import Samples, concat
from planaria.data.schema import Dense, Schema, Sparse
from planaria.data.source import DENSE_FEATURES, Batch, Source, sample_range
from planaria.data.synthetic import Synthetic

__all__ = [
    "DENSE_FEATURES",
    "PRESETS",
    "Ahead",
    "Batch",
    "CriteoFile",
    "Dense",
    "Evaluation",
    "Order",
    "Quality",
    "RecentQuality",
    "Samples",
    "Schema",
    "Source",
    "Sparse",
    "Synthetic",
    "auc",
    "chances",
    "concat",
    "log_loss",
    "normalized_entropy",
    "sample_range",
]
