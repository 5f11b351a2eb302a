"""One coordinator at a time: epochs in real files, claimed by several at the same moment."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from planaria.cluster.files import JobFiles
from planaria.coordinator.state import first_state
from planaria.errors import ClusterError
from planaria.wire.control import CoordinatorState


def state(epoch: int, n: int = 1) -> CoordinatorState:
    return CoordinatorState(epoch, n, first_state(epoch, ["server-0"], ["trainer-0"]).install)


def test_epochs_are_claimed_once_however_many_start_at_the_same_moment(tmp_path: Path) -> None:
    """Two restarted coordinators once had the same epoch, and both used view (2, 2)."""
    files, owners = JobFiles(tmp_path), 16
    together = threading.Barrier(owners)

    def start(number: int) -> int:
        together.wait()
        return files.claim(f"coordinator-{number}")

    with ThreadPoolExecutor(owners) as pool:
        epochs = list(pool.map(start, range(owners)))
    assert sorted(epochs) == list(range(1, owners + 1))
    for number, epoch in enumerate(epochs):
        if epoch == owners:
            files.save(state(epoch), f"coordinator-{number}")
        else:
            with pytest.raises(ClusterError, match=f"epoch {owners} has replaced"):
                files.save(state(epoch), f"coordinator-{number}")
    assert files.load() == state(owners)


def test_a_coordinator_of_an_older_epoch_is_refused_and_its_state_does_not_count(
    tmp_path: Path,
) -> None:
    files = JobFiles(tmp_path)
    assert files.load() is None
    assert files.claim("old") == 1
    files.save(state(1, n=5), "old")
    assert files.claim("new") == 2
    assert files.load() == state(1, n=5)  # claimed, and nothing saved yet
    with pytest.raises(ClusterError, match="epoch 2 has replaced this coordinator's, 1"):
        files.save(state(1, n=6), "old")
    assert files.load() == state(1, n=5)
    files.save(state(2), "new")
    assert files.load() == state(2)


def test_an_equal_epoch_of_another_owner_is_refused(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.claim("one")
    with pytest.raises(ClusterError, match="claimed by 'one', not by 'other'"):
        files.save(state(1), "other")
    assert files.load() is None


def test_a_takeover_while_the_old_one_saves_stops_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor may have loaded before the old one's file was there: it must say nothing."""
    files = JobFiles(tmp_path)
    files.claim("old")
    replace = Path.replace

    def taken_over(self: Path, target: Path) -> Path:
        JobFiles(tmp_path).claim("new")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", taken_over)
    with pytest.raises(ClusterError, match="epoch 2 has replaced"):
        files.save(state(1), "old")
