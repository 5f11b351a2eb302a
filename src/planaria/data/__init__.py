"""Where samples come from, and how well a model predicts them.

Samples are numbered from 0, and a source gives any range of them at any time, so that what a
trainer reads is a function of (step, rank) alone: the step is the whole position of a reader.
"""

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
from planaria.data.source import DENSE_FEATURES, Batch, Source, sample_range
from planaria.data.synthetic import Synthetic

__all__ = [
    "DENSE_FEATURES",
    "Batch",
    "CriteoFile",
    "Evaluation",
    "Quality",
    "RecentQuality",
    "Source",
    "Synthetic",
    "auc",
    "chances",
    "log_loss",
    "normalized_entropy",
    "sample_range",
]
