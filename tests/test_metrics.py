"""Metrics: exact, with ties, and the same whether batches come at once or one by one."""

from __future__ import annotations

from math import isnan, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data import Evaluation, RecentQuality, auc, chances, log_loss, normalized_entropy
from planaria.data.metrics import Labels, Reals
from planaria.errors import ArgumentError

few_scores = st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), min_size=1, max_size=60)


def brute_force_auc(labels: Labels, scores: Reals, tie: float = 0.5) -> float:
    clicks, others = scores[labels == 1], scores[labels == 0]
    won = sum(1.0 if c > o else tie if c == o else 0.0 for c in clicks for o in others)
    return won / (len(clicks) * len(others))


def a_pass(samples: int = 5000) -> tuple[Labels, Reals]:
    rng = np.random.default_rng(3)
    logits = rng.normal(-1, 1.5, samples)
    labels = (rng.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return labels, logits.astype(np.float32)


@given(few_scores)
def test_auc_is_that_of_counting_every_pair(samples: list[tuple[bool, int]]) -> None:
    labels = np.array([click for click, _ in samples], np.float32)
    scores = np.array([score for _, score in samples], np.float32)
    if 0 < labels.sum() < len(labels):
        assert auc(labels, scores) == pytest.approx(brute_force_auc(labels, scores), abs=1e-12)
    else:
        assert isnan(auc(labels, scores))


def test_ties_count_half() -> None:
    labels = np.array([1, 0, 1, 0])
    scores = np.array([0.5, 0.5, 0.9, 0.1])
    assert auc(labels, scores) == 0.875
    assert brute_force_auc(labels, scores, tie=0.0) != 0.875  # control


def test_auc_of_perfect_reversed_and_constant_scores() -> None:
    labels = np.array([0, 0, 1, 1, 1])
    scores = np.array([-np.inf, 0.0, 0.1, 3.0, np.inf])
    assert auc(labels, scores) == 1.0
    assert auc(labels, -scores) == 0.0
    assert auc(labels, np.zeros(5)) == 0.5


def test_log_loss_is_the_textbook_formula_and_survives_huge_logits() -> None:
    labels, logits = a_pass()
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    textbook = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    assert log_loss(labels, logits) == pytest.approx(textbook, rel=1e-12)
    assert log_loss(1 - labels, logits) != pytest.approx(textbook, rel=1e-2)  # control
    assert log_loss(np.array([1.0, 0.0]), np.array([-1e4, 1e4])) == 1e4
    assert log_loss(np.array([1.0, 0.0]), np.array([1e4, -1e4])) == 0.0


def test_predicting_the_mean_has_a_normalized_entropy_of_one() -> None:
    labels, logits = a_pass()
    mean = np.full(len(labels), labels.mean(), np.float64)
    assert normalized_entropy(labels, mean) == pytest.approx(1.0, rel=1e-6)
    assert normalized_entropy(labels, mean * 0.5) > 1.01
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    rate = float(labels.mean())
    entropy = -rate * log(rate) - (1 - rate) * log(1 - rate)
    assert normalized_entropy(labels, p) == pytest.approx(log_loss(labels, logits) / entropy)
    assert normalized_entropy(labels, p) < 0.9


def test_a_certain_and_wrong_prediction_costs_much_but_not_infinity() -> None:
    labels, certain = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert normalized_entropy(labels, certain) == pytest.approx(24, rel=1e-6)


def same(found: object, wanted: object) -> bool:
    """To the last bit."""
    return repr(found) == repr(wanted)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 300), max_size=8))
def test_an_evaluation_of_batches_is_that_of_the_whole(cuts: list[int]) -> None:
    labels, logits = a_pass(300)
    evaluation = Evaluation()
    ends = [*sorted(cuts), len(labels)]
    for start, end in zip([0, *ends], ends, strict=False):
        evaluation.add(labels[start:end], logits[start:end])
    assert len(evaluation) == 300
    found = evaluation.measure()
    assert same(found.auc, auc(labels, logits))
    assert same(found.normalized_entropy, normalized_entropy(labels, chances(logits)))
    evaluation.add(labels[:50], -logits[:50])  # it goes on after it was asked
    assert evaluation.measure().auc < found.auc


def test_parts_of_several_ranks_are_one_evaluation() -> None:
    """What travels is 5 bytes per sample; added in rank order it is the same to the last bit."""
    labels, logits = a_pass(1000)
    parts = [Evaluation() for _ in range(3)]
    for rank, part in enumerate(parts):
        part.add(labels[rank * 333 :][: 333 + rank // 2], logits[rank * 333 :][: 333 + rank // 2])
        assert part.labels.dtype == np.uint8
        assert part.logits.dtype == np.float32
    whole, merged, wrong = Evaluation(), Evaluation(), Evaluation()
    whole.add(labels, logits)
    for part in parts:
        merged.add(part.labels, part.logits)
        wrong.add(part.labels, -part.logits)
    assert len(merged) == 1000
    assert same(merged.measure(), whole.measure())
    assert not same(wrong.measure(), whole.measure())  # control


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.bool_])
def test_measures_do_not_depend_on_the_type_of_the_labels(dtype: type) -> None:
    labels, logits = a_pass(4999)
    p = chances(logits)
    wanted = normalized_entropy(labels.astype(np.float64), p)
    assert same(normalized_entropy(labels.astype(dtype), p), wanted)


def test_an_evaluation_keeps_a_copy_of_what_it_was_given() -> None:
    labels, logits = a_pass(100)
    evaluation = Evaluation()
    evaluation.add(labels, logits)
    before = auc(labels, logits)
    logits *= -1
    assert evaluation.measure().auc == before
    assert auc(labels, logits) != before  # control


def test_recent_quality_is_that_of_the_last_samples() -> None:
    labels, logits = a_pass(1000)
    recent = RecentQuality(256)
    for start in range(0, 1000, 100):
        recent.add(labels[start : start + 100], logits[start : start + 100])
        last = slice(max(start + 100 - 256, 0), start + 100)
        wanted = (
            auc(labels[last], logits[last]),
            normalized_entropy(labels[last], chances(logits[last])),
        )
        assert same(tuple(recent.measure()), wanted)
        assert recent._samples < 256 + 100  # it forgets
    assert not same(recent.measure().auc, auc(labels, logits))  # control


def due_steps(steps: int, batch: int, window: int) -> list[int]:
    recent = RecentQuality(window)
    due: list[int] = []
    for step in range(1, steps + 1):
        recent.add(np.zeros(batch), np.zeros(batch))
        due += [step] if recent.due(step, steps) else []
    return due


def test_when_quality_is_measured_is_a_matter_of_steps_alone() -> None:
    assert due_steps(1000, batch=100, window=1000) == list(range(10, 1001, 10))
    assert due_steps(25, batch=100, window=1000) == [*range(2, 25, 2), 25]
    assert due_steps(10_001, batch=1, window=1000) == [*range(1000, 10_001, 1000), 10_001]
    assert due_steps(3, batch=5000, window=1000) == [1, 2, 3]
    assert due_steps(4, batch=0, window=1000) == [1, 2, 3, 4]
    assert not RecentQuality(10).due(1, 1)  # nothing was predicted yet


def test_a_replaced_trainer_measures_at_the_same_steps() -> None:
    """Its window is empty at first, but when it measures does not depend on that."""
    fresh = RecentQuality(1000)
    due: list[int] = []
    for step in range(43, 101):
        fresh.add(np.zeros(100), np.zeros(100))
        due += [step] if fresh.due(step, 1000) else []
    assert due == [50, 60, 70, 80, 90, 100]


def test_what_is_not_defined_is_nan() -> None:
    none: Reals = np.zeros(0)
    one = np.ones(3)
    assert isnan(auc(none, none))
    assert isnan(log_loss(none, none))
    assert isnan(normalized_entropy(none, none))
    assert isnan(auc(one, one))
    assert isnan(normalized_entropy(one, one))
    assert all(map(isnan, Evaluation().measure()))
    assert all(map(isnan, RecentQuality(5).measure()))
    diverged = np.array([0.5, np.nan])
    for measure in (auc, log_loss, normalized_entropy):
        assert isnan(measure(np.array([0, 1]), diverged))
        assert not isnan(measure(np.array([0, 1]), np.array([0.4, 0.6])))  # control


def test_wrong_arguments_get_a_sentence() -> None:
    for measure in (auc, log_loss, normalized_entropy, Evaluation().add, RecentQuality(9).add):
        with pytest.raises(ArgumentError, match="equal length"):
            measure(np.zeros(3), np.zeros(2))
        with pytest.raises(ArgumentError, match="flatten"):
            measure(np.zeros((3, 1)), np.zeros((3, 1)))
        with pytest.raises(ArgumentError, match="0 or 1"):
            measure(np.array([0.0, 0.5]), np.zeros(2))
    with pytest.raises(ArgumentError, match="outside 0 to 1"):
        normalized_entropy(np.array([0, 1]), np.array([0.5, 1.5]))
    with pytest.raises(ArgumentError, match="at least 1 sample"):
        RecentQuality(0)
