"""Many who want the lease of a folder at the same moment: one gets it, whatever the schedule."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_leases import DEAD, ELSEWHERE, OURS, THEIRS, THIRD, lease, left_by, read

from planaria.checkpoints.folders import LocalFolder
from planaria.checkpoints.lease import ATTEMPTS
from planaria.errors import LeaseHeld, LeaseLost


def race(takers: list[Callable[[], None]]) -> int:
    """All at once; how many were not refused."""
    barrier = threading.Barrier(len(takers))
    won: list[int] = []
    failed: list[Exception] = []

    def take(number: int) -> None:
        barrier.wait()
        try:
            takers[number]()
            won.append(number)
        except LeaseHeld:
            pass
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(len(takers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    return len(won)


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_who_want_it_at_once_one_gets_it(tmp_path: Path, stale: bool) -> None:
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        if stale:
            left_by(folder, DEAD)
        leases = [lease(folder, job) for job in (OURS, THEIRS, THIRD, OURS)]
        assert race([lambda one=one: one.acquire(0.0) for one in leases]) == 1  # type: ignore[misc]
        holding = []
        for one in leases:
            try:
                one.check()
                holding.append(one)
            except LeaseLost:
                pass
        assert len(holding) == 1


def test_processes_that_race_for_a_dead_one_s_lease_are_kept_apart(tmp_path: Path) -> None:
    code = f"""
import sys
from planaria.checkpoints import Lease
from planaria.errors import LeaseHeld
print("ready", flush=True)
for line in sys.stdin:
    lease = Lease({str(tmp_path)!r} + "/" + line.strip(), sys.argv[1], owner=sys.argv[1])
    try:
        lease.acquire(0.0)
        lease.check()
        print("won", flush=True)
    except LeaseHeld:
        print("held", flush=True)
"""
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", code, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in (OURS, THEIRS)
    ]
    try:
        assert [str(taker.stdout and taker.stdout.readline()) for taker in takers] == [
            "ready\n"
        ] * 2
        for number in range(50):
            (tmp_path / str(number)).mkdir()
            left_by(tmp_path / str(number), DEAD)
            for taker in takers:
                assert taker.stdin is not None
                taker.stdin.write(f"{number}\n")
                taker.stdin.flush()
            said = sorted(str(taker.stdout and taker.stdout.readline()) for taker in takers)
            assert said == ["held\n", "won\n"]
    finally:
        for taker in takers:
            taker.kill()
            taker.communicate()


class Between:
    """Acts once, right before a taker compares and removes a lease that it took for dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        remove_if = LocalFolder.remove_if

        def act_first(self: LocalFolder, name: str, old: bytes) -> bool:
            monkeypatch.setattr(LocalFolder, "remove_if", remove_if)
            act()
            return remove_if(self, name, old)

        monkeypatch.setattr(LocalFolder, "remove_if", act_first)


def test_a_slow_taker_does_not_take_what_a_fast_one_has_just_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw the same dead lease. Removing whatever has that name now would rob the fast one."""
    left_by(tmp_path, DEAD)
    fast, slow = lease(tmp_path), lease(tmp_path, THEIRS)
    Between(monkeypatch, lambda: fast.acquire(0.0))
    with pytest.raises(LeaseHeld, match=OURS):
        slow.acquire(0.0)
    fast.check()


def test_a_lock_of_a_file_that_has_gone_is_worth_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow one has opened the dead lease. Until it has locked it, a fast one has removed it,
    and put its own under that name.
    """
    left_by(tmp_path, DEAD)
    fast, slow = lease(tmp_path), lease(tmp_path, THEIRS)
    flock = fcntl.flock

    def sleep_then_lock(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        fast.acquire(0.0)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sleep_then_lock)
    with pytest.raises(LeaseHeld, match=OURS):
        slow.acquire(0.0)
    fast.check()


def test_a_file_system_without_locks_has_leases_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left_by(tmp_path, DEAD)
    ours = lease(tmp_path)
    ours.acquire(0.0)
    ours.release()
    assert list(tmp_path.iterdir()) == []


def test_comparing_and_removing_are_one_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow one has compared, and would remove by name whatever a fast one puts there now."""
    left_by(tmp_path, DEAD)
    fast, slow = lease(tmp_path), lease(tmp_path, THEIRS)
    refused: list[str] = []
    pread = os.pread

    def compare_then_sleep(descriptor: int, size: int, at: int) -> bytes:
        content = pread(descriptor, size, at)
        monkeypatch.undo()
        try:
            fast.acquire(0.0)
        except LeaseHeld as why:
            refused.append(str(why))
        return content

    monkeypatch.setattr(os, "pread", compare_then_sleep)
    slow.acquire(0.0)
    slow.check()
    assert len(refused) == 1
    with pytest.raises(LeaseLost):
        fast.check()


def test_a_holder_that_wakes_up_in_time_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by(tmp_path, ELSEWHERE)
    ours = lease(tmp_path, stale_s=60.0)
    with pytest.raises(LeaseHeld):
        ours.acquire(0.0)
    Between(monkeypatch, lambda: left_by(tmp_path, ELSEWHERE, renewals=1))
    with pytest.raises(LeaseHeld, match="for 0 s"):
        ours.acquire(60.0)
    assert read(tmp_path).renewals == 1


def test_a_folder_that_changes_hands_all_the_time_is_left_after_some_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def come_first(self: LocalFolder, name: str, content: bytes) -> None:
        attempts.append(1)
        left_by(tmp_path, DEAD, len(attempts))
        raise FileExistsError

    monkeypatch.setattr(LocalFolder, "create", come_first)
    with pytest.raises(LeaseHeld, match="changes hands all the time"):
        lease(tmp_path).acquire(0.0)
    assert len(attempts) == ATTEMPTS
