"""The garbage collector: out of the way while a process starts, itself again afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from planaria import collecting


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_a_process_starts_with_is_not_looked_at_again() -> None:
    collecting.collect_rarely()
    assert gc.get_threshold() == collecting.IMPORTING
    collecting.keep_what_is_there()
    assert gc.get_threshold() == collecting.USUAL
    assert gc.get_freeze_count() > 0


def test_a_script_that_has_its_own_idea_of_it_is_left_alone() -> None:
    frozen = gc.get_freeze_count()
    collecting.collect_rarely()
    gc.set_threshold(1234, 5, 6)
    collecting.keep_what_is_there()
    assert gc.get_threshold() == (1234, 5, 6)
    assert gc.get_freeze_count() == frozen


def test_a_nursery_has_frozen_what_its_children_share() -> None:
    """In a process of its own, which does what a nursery does before it forks."""
    code = (
        "import gc; from planaria import collecting; collecting.collect_rarely();"
        "import planaria.cluster.server_node; collecting.keep_what_is_there();"
        "print(gc.get_freeze_count() > 10_000, gc.get_threshold() == collecting.USUAL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
