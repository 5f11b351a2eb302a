"""How well a model predicts clicks: AUC, log loss, normalized entropy.

A measure that is not defined is NaN: the AUC or normalized entropy of samples with one label only,
anything of no samples, and anything of a model whose output is NaN.
"""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError

Reals = NDArray[np.floating[Any]]
Labels = NDArray[np.floating[Any] | np.integer[Any] | np.bool_]

SMALLEST_CHANCE = 2.0**-24


def auc(labels: Labels, scores: Reals) -> float:
    """The chance that a click scores above a non-click; a tie counts half. Exact."""
    _check(labels, scores)
    if len(scores) == 0 or np.isnan(scores).any():
        return nan
    levels, level = np.unique(scores, return_inverse=True)
    clicked = labels.astype(bool)
    clicks = np.bincount(level[clicked], minlength=len(levels))
    others = np.bincount(level[~clicked], minlength=len(levels))
    pairs = int(clicks.sum()) * int(others.sum())
    if pairs == 0:
        return nan
    # Twice the pairs won, in integers: nothing is rounded before the division.
    others_below = np.cumsum(others) - others
    won_twice = int((clicks * (2 * others_below + others)).sum())
    return won_twice / (2 * pairs)


def log_loss(labels: Labels, logits: Reals) -> float:
    """Mean cross entropy in nats, from logits of any size."""
    _check(labels, logits)
    if len(logits) == 0:
        return nan
    z = logits.astype(np.float64)
    # -log(sigmoid(z)) of a click is log1p(exp(-|z|)) + max(-z, 0): exp never overflows.
    wrong = np.where(labels.astype(bool), -z, z)
    return float(np.mean(np.maximum(wrong, 0.0) + np.log1p(np.exp(-np.abs(z)))))


def normalized_entropy(labels: Labels, probabilities: Reals) -> float:
    """Log loss divided by that of always predicting the mean click rate: below 1 is learning.

    Probabilities are kept 2^-24 away from 0 and 1, where those from float32 logits end.
    """
    _check(labels, probabilities)
    if bool(((probabilities < 0) | (probabilities > 1)).any()):
        raise ArgumentError("a probability is outside 0 to 1; logits go to Tally or log_loss")
    p = probabilities.astype(np.float64).clip(SMALLEST_CHANCE, 1 - SMALLEST_CHANCE)
    return _normalized(labels, log_loss(labels, np.log(p / (1 - p))))


class Tally:
    """The measures of a whole pass, whose batches come one at a time, in any sizes.

    An exact AUC needs every score: 5 bytes are kept per sample.
    """

    def __init__(self) -> None:
        self._labels: list[NDArray[np.bool_]] = []
        self._logits: list[NDArray[np.float32]] = []

    def add(self, labels: Labels, logits: Reals) -> None:
        _check(labels, logits)
        self._labels.append(labels.astype(bool))
        self._logits.append(logits.astype(np.float32))  # a copy: the caller may reuse its memory

    def __len__(self) -> int:
        return sum(map(len, self._labels))

    def auc(self) -> float:
        return auc(*self._all())

    def log_loss(self) -> float:
        return log_loss(*self._all())

    def normalized_entropy(self) -> float:
        labels, logits = self._all()
        return _normalized(labels, log_loss(labels, logits))

    def _all(self) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Everything so far, joined into one array each, which replace the pieces."""
        self._labels = [np.concatenate([np.empty(0, bool), *self._labels])]
        self._logits = [np.concatenate([np.empty(0, np.float32), *self._logits])]
        return self._labels[0], self._logits[0]


def _normalized(labels: Labels, loss: float) -> float:
    rate = float(labels.mean()) if len(labels) else 0.0
    if not 0 < rate < 1:
        return nan
    return loss / -(rate * float(np.log(rate)) + (1 - rate) * float(np.log(1 - rate)))


def _check(labels: Labels, scores: Reals) -> None:
    if labels.ndim != 1 or labels.shape != scores.shape:
        raise ArgumentError(
            f"labels {labels.shape} and scores {scores.shape} must be one-dimensional and of equal "
            "length; flatten them first"
        )
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ArgumentError("labels must be 0 or 1")
