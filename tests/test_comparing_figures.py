"""The figures of a comparison: the time of a step, the cost of protection, means and intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planaria.comparing import CONTENDERS, Emulation
from planaria.comparing.accounts import (
    T_95,
    Account,
    interval,
    mean_account,
    protection_of,
    slowdown_of,
    step_seconds,
)


@pytest.mark.parametrize(
    ("name", "given", "slowdowns", "source", "share"),
    [
        ("erasure", None, [0.19, 0.2, 0.21], "measured", 0.2),
        ("erasure", None, [0.199, None, 0.201], "measured", 0.2),
        ("erasure", None, [0.0, 0.3957], "noise", 0.19785),
        ("erasure", None, [-0.2, -0.2], "noise", -0.2),
        ("erasure", None, [0.3957], "not measured", None),  # and 0.00 in the next run
        ("erasure", None, [None], "not measured", None),
        ("erasure", 5.0, [0.2, 0.2], "given", 0.05),
        ("erasure-2", 5.0, [0.2], "given", 0.1),
        ("cpr-mfu", None, [0.02], "not measured", None),  # it counts accesses
        ("cpr-mfu", 5.0, [0.02, 0.02], "measured", 0.02),
        ("cpr-vanilla", None, [0.2, 0.2], "none", 0.0),
        ("checkpoint", 5.0, [0.2], "none", 0.0),
        ("none", None, [0.2], "none", 0.0),
    ],
)
def test_protection_is_given_or_measured_with_its_interval_or_not_there(
    name: str, given: float | None, slowdowns: list[float | None], source: str, share: float | None
) -> None:
    found = protection_of(Emulation(protection_percent=given), CONTENDERS[name], slowdowns)
    assert found.source == source
    assert (found.share is None) == (share is None)
    if found.share:
        assert found.share.mean == pytest.approx(share)
        assert (found.share.error is not None) == (source in ("measured", "noise"))
    assert found.is_known == (source not in ("noise", "not measured"))
    assert found.charged == pytest.approx(share if share and found.is_known else 0)


def test_the_time_of_a_step_passes_over_pauses_and_what_rolled_back() -> None:
    steady = [(step, step * 0.01) for step in range(1, 101)]
    assert step_seconds(steady) == pytest.approx(0.01)
    paused = [(step, at + 5.0 * (step > 60)) for step, at in steady]
    assert step_seconds(paused) == pytest.approx(0.01)
    back = [*steady[:60], *((step, at + 9.0) for step, at in steady[50:])]
    assert step_seconds(back) == pytest.approx(0.01)
    assert step_seconds(steady[:8]) is None
    assert step_seconds([]) is None
    assert slowdown_of(0.012, 0.01) == pytest.approx(0.2)
    assert slowdown_of(None, 0.01) is slowdown_of(0.01, None) is slowdown_of(0.01, 0.0) is None


def test_the_quantiles_are_students() -> None:
    for freedom, quantile in enumerate(T_95, start=1):
        x = np.linspace(0, quantile, 20_001)
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
        density = (
            scale / math.sqrt(freedom * math.pi) * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        )
        inside = 2 * float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x)))
        assert inside == pytest.approx(0.95, abs=5e-5)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    draws = np.random.default_rng(1).normal(3.0, 2.0, (4000, 4))
    found = [interval(list(map(float, row))) for row in draws]
    held = [abs(one.mean - 3) <= one.error for one in found if one and one.error is not None]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)
    assert interval([]) is None
    single = interval([2.0])
    assert single is not None
    assert (single.mean, single.error) == (2.0, None)


def test_the_mean_of_accounts_is_taken_part_by_part() -> None:
    mean = mean_account([Account(1, 2, 3, 4, 5), Account(3, 2, 1, 0, 5)])
    assert mean == Account(2, 2, 2, 2, 5)
    assert mean_account([]) is None
