"""Packed arrays on real processes: fewer bytes of changes, and the digest is the one without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import BeatenRun, Blow, leaving_nothing, tiny, undisturbed

pytestmark = pytest.mark.torch

# So many that a message has more than the 512 bytes from which on it is packed.
JOB = ("batch=256", "steps=60")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def report_of(packing: str, *overrides: str, plan: tuple[Blow, ...] = ()) -> dict[str, Any]:
    run = BeatenRun(tiny(*JOB, "servers=4", f"wire.packing={packing}", *overrides), plan)
    report = run.run()
    assert len(run.killed) == len(plan)
    assert report["digest"] == undisturbed(*JOB)
    return report


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_packed_changes_are_fewer_bytes_and_give_the_same_digest(transport: str) -> None:
    plain = report_of("off", f"cluster.transport={transport}")["sent"]
    packed = report_of("on", f"cluster.transport={transport}")["sent"]
    assert all(kind["packed"] == kind["bytes"] for kind in plain.values())
    assert packed["Delta"]["packed"] < 0.95 * packed["Delta"]["bytes"]
    assert packed["Push"]["packed"] < packed["Push"]["bytes"]


def test_a_server_that_is_killed_is_rebuilt_from_packed_records() -> None:
    sent = report_of("on", plan=(Blow(20, ("server:1",)), Blow(40, ("server:2",))))["sent"]
    assert sent["MateReply"]["messages"] > 0
    assert all(kind["packed"] <= kind["bytes"] for kind in sent.values())
    assert sent["Delta"]["packed"] < sent["Delta"]["bytes"]
