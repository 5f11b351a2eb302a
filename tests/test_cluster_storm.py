"""A small storm: no fault to any process of a job changes a bit, hangs it or ends it in silence.

PLANARIA_STORM=50 python -m pytest -s tests/test_cluster_storm.py does the whole one, which is that
of `make storm`; tests/storm.py says what a storm is.
"""

from __future__ import annotations

import os

import pytest
from storm import Campaign, closing_line

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

JOBS = int(os.environ.get("PLANARIA_STORM", "2"))
SMALL = JOBS <= 2


def test_no_fault_changes_a_bit_hangs_a_job_or_ends_it_in_silence() -> None:
    campaign = Campaign(seed=7, faults=6 if SMALL else 20, steps=600 if SMALL else 2000)
    outcomes = [campaign.run(number) for number in range(JOBS)]
    print(closing_line(outcomes))
    assert [one.wrong for one in outcomes if one.wrong] == []
    assert sum(one.faults for one in outcomes) >= JOBS  # a storm it was
