"""Early answers on real processes: the digest is the one without them, whoever is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import blows, digest_after, leaving_nothing, tiny, undisturbed
from script_jobs import ScriptRun, undisturbed_script

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

ON = ("cluster.early_answers=on", "cluster.transport=tcp")
VICTIMS = [("server:1",), ("trainer:0",), ("server:0",)]


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def test_the_built_in_loop_ends_with_the_undisturbed_digest() -> None:
    plan = blows(5, VICTIMS, first=5, every=20)
    digest = digest_after(tiny("servers=4", "trainers=2", *ON), plan)
    assert digest == undisturbed("trainers=2")


def test_a_users_loop_ends_with_the_undisturbed_digest() -> None:
    loop = ("loop.py", "two_epochs")
    run = ScriptRun(*loop, sets=("trainers=1", "servers=3", *ON), plan=blows(5, VICTIMS, 3, 10))
    assert run.wrong == ""
    assert run.digest == undisturbed_script(*loop, trainers=1)
