"""How well a model predicts clicks: AUC, log loss, normalized entropy.

A measure that is not defined is NaN: the AUC or normalized entropy of samples with one label only,
anything of no samples, and anything of a model whose output is NaN.
"""

from __future__ import annotations

from collections import deque
from math import nan
from typing import Any, NamedTuple

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
    clicked = labels.astype(bool)
    clicks, others = np.sort(scores[clicked]), np.sort(scores[~clicked])
    pairs = len(clicks) * len(others)
    if pairs == 0:
        return nan
    # Twice the pairs won, in integers: nothing is rounded before the division.
    others_below = np.searchsorted(others, clicks, "left")
    others_below_or_tied = np.searchsorted(others, clicks, "right")
    won_twice = int(others_below.sum()) + int(others_below_or_tied.sum())
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


def chances(logits: Reals) -> NDArray[np.float64]:
    """Of a click."""
    with np.errstate(over="ignore"):  # 1 / infinity is the right answer
        return 1 / (1 + np.exp(-logits.astype(np.float64)))


def normalized_entropy(labels: Labels, probabilities: Reals) -> float:
    """Log loss divided by that of always predicting the mean click rate: below 1 is learning.

    Probabilities are kept 2^-24 away from 0 and 1, where those from float32 logits end.
    """
    _check(labels, probabilities)
    if bool(((probabilities < 0) | (probabilities > 1)).any()):
        raise ArgumentError("a probability is outside 0 to 1; logits go to `chances` first")
    p = probabilities.astype(np.float64).clip(SMALLEST_CHANCE, 1 - SMALLEST_CHANCE)
    return _normalized(labels, log_loss(labels, np.log(p / (1 - p))))


class Quality(NamedTuple):
    auc: float
    normalized_entropy: float


class Evaluation:
    """Samples and what was predicted for them, as batches and parts bring them, in any sizes.

    An exact AUC needs every score: 5 bytes are kept per sample. The measures are those of the
    functions above, to the last bit, and depend on the order of what was added: add the parts of
    several ranks in rank order.
    """

    def __init__(self) -> None:
        self._labels: list[NDArray[np.uint8]] = []
        self._logits: list[NDArray[np.float32]] = []

    def add(self, labels: Labels, logits: Reals) -> None:
        """Takes a copy: the caller may reuse its memory."""
        _check(labels, logits)
        self._labels.append(labels.astype(np.uint8))
        self._logits.append(logits.astype(np.float32))

    def __len__(self) -> int:
        return sum(map(len, self._labels))

    @property
    def labels(self) -> NDArray[np.uint8]:
        """uint8[samples]: this and `logits` are what another process adds to its own evaluation."""
        self._labels = [np.concatenate([np.empty(0, np.uint8), *self._labels])]
        return self._labels[0]

    @property
    def logits(self) -> NDArray[np.float32]:
        """float32[samples]"""
        self._logits = [np.concatenate([np.empty(0, np.float32), *self._logits])]
        return self._logits[0]

    def measure(self) -> Quality:
        labels, logits = self.labels, self.logits
        return Quality(auc(labels, logits), normalized_entropy(labels, chances(logits)))


class RecentQuality:
    """How well the last samples were predicted before they were learnt, while a model trains.

    When to measure depends on the number of the step alone, so that equal runs say equal things.
    """

    def __init__(self, window_samples: int) -> None:
        if window_samples < 1:
            raise ArgumentError(f"a window needs at least 1 sample, not {window_samples}")
        self._window = window_samples
        self._batches: deque[tuple[NDArray[np.uint8], NDArray[np.float32]]] = deque()
        self._samples = 0

    def add(self, labels: Labels, logits: Reals) -> None:
        _check(labels, logits)
        self._batches.append((labels.astype(np.uint8), logits.astype(np.float32)))
        self._samples += len(labels)
        while self._samples - len(self._batches[0][0]) >= self._window:
            self._samples -= len(self._batches.popleft()[0])

    def due(self, step: int, steps: int) -> bool:
        """Whether to measure after the batch of this step, of all `steps`, was added.

        Each time that the window is filled with new samples, but at each tenth of a short job and
        in the end as well. So a sample is measured about once, which costs next to nothing beside
        learning from it.
        """
        if not self._batches:
            return False
        batches_in_window = -(-self._window // max(len(self._batches[-1][0]), 1))
        return step == steps or step % min(batches_in_window, max(steps // 10, 1)) == 0

    def measure(self) -> Quality:
        recent = Evaluation()
        for labels, logits in self._batches:
            recent.add(labels, logits)
        labels, logits = recent.labels[-self._window :], recent.logits[-self._window :]
        return Quality(auc(labels, logits), normalized_entropy(labels, chances(logits)))


def _normalized(labels: Labels, loss: float) -> float:
    rate = int(np.count_nonzero(labels)) / max(len(labels), 1)  # the same for every dtype
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
