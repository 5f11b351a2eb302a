"""The lease of a folder of checkpoints: one holder, whoever dies or sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from checkpoint_leases import ELSEWHERE, OURS, THEIRS, lease, left_by, read

from planaria.checkpoints import Lease
from planaria.checkpoints.folders import LocalFolder, RemoteFolder
from planaria.checkpoints.lease import LEASE, Holder, Process
from planaria.errors import ArgumentError, CheckpointError, LeaseHeld, LeaseLost

# ---------------------------------------------------------------------------- one holder


def test_the_second_job_is_refused_and_told_who_and_what_to_do(tmp_path: Path) -> None:
    first, second = lease(tmp_path / "new"), lease(tmp_path / "new", THEIRS)
    first.acquire(0.0)
    says = rf"belong to job {OURS} \(host-1, process 5\).*another checkpoint.path, or end process "
    with pytest.raises(LeaseHeld, match=says + f"{os.getpid()}, which runs"):
        second.acquire(0.0)
    first.check()
    with pytest.raises(LeaseLost, match="never acquired"):
        second.check()
    with pytest.raises(LeaseLost, match="never acquired"):
        second.renew(0.0)
    second.release()  # which is not its own
    first.check()
    first.release()
    assert list((tmp_path / "new").iterdir()) == []
    second.acquire(0.0)  # control
    with pytest.raises(LeaseLost, match="given back"):
        first.check()
    second.check()


def test_a_process_that_runs_keeps_its_lease_however_long_it_sleeps(tmp_path: Path) -> None:
    first, second = lease(tmp_path), lease(tmp_path, THEIRS, stale_s=1.0)
    first.acquire(0.0)
    for now in (0.0, 10.0, 1e9):
        with pytest.raises(LeaseHeld):
            second.acquire(now)
    first.check()


def test_renewing_counts_now_and_then_and_finds_out_that_another_took_over(tmp_path: Path) -> None:
    ours = lease(tmp_path, stale_s=60.0)
    ours.acquire(100.0)
    inode = (tmp_path / LEASE).stat().st_ino
    for now in (100.0, 105.0, 111.0, 112.0, 122.0):
        ours.renew(now)
    assert read(tmp_path).renewals == 2
    assert (tmp_path / LEASE).stat().st_ino == inode
    for now in range(200, 400, 10):  # more digits
        ours.renew(now)
    assert read(tmp_path).renewals == 22
    ours.acquire(500.0)  # it has it already
    left_by(tmp_path, ELSEWHERE)
    for act in (ours.check, lambda: ours.renew(1000.0)):
        with pytest.raises(LeaseLost, match=rf"belong to job {THEIRS} \(host-2.*Stop one of the"):
            act()
    ours.release()
    assert read(tmp_path).job == THEIRS  # and is left alone


@pytest.mark.parametrize("act", ["check", "renew"])
@pytest.mark.parametrize("folder_too", [False, True])
def test_a_lease_that_vanished_while_nobody_else_was_there_is_taken_again(
    tmp_path: Path, act: str, folder_too: bool
) -> None:
    """Every later save failed, the last one too: the only job was told that it had lost its lease,
    and to stop one of the jobs.
    """
    ours = lease(tmp_path / "saved")
    ours.acquire(0.0)
    (tmp_path / "saved" / LEASE).unlink()
    if folder_too:
        (tmp_path / "saved").rmdir()
    if act == "check":
        ours.check()
    else:
        ours.renew(1000.0)
    (note,) = ours.notes
    assert f"job {OURS} has taken the folder again" in note
    assert read(tmp_path / "saved").job == OURS
    with pytest.raises(LeaseHeld, match=OURS):
        lease(tmp_path / "saved", THEIRS).acquire(0.0)
    ours.renew(2000.0)
    assert (read(tmp_path / "saved").renewals, len(ours.notes)) == (1, 1)
    ours.release()
    with pytest.raises(LeaseLost, match="given back"):  # and is not taken again
        ours.check()
    assert list((tmp_path / "saved").iterdir()) == []


def test_who_takes_a_lease_again_never_takes_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another comes between the look that finds nothing and the file that is made."""
    ours, theirs = lease(tmp_path), lease(tmp_path, THEIRS)
    ours.acquire(0.0)
    (tmp_path / LEASE).unlink()
    create = LocalFolder.create

    def be_overtaken(self: LocalFolder, name: str, content: bytes) -> None:
        monkeypatch.undo()
        theirs.acquire(0.0)
        create(self, name, content)

    monkeypatch.setattr(LocalFolder, "create", be_overtaken)
    with pytest.raises(LeaseLost, match=f"now belong to job {THEIRS}"):
        ours.check()
    theirs.check()
    assert ours.notes == []


def test_a_renewal_never_lands_in_another_s_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder has read its own lease, and is stopped; another takes over; it goes on writing."""
    ours = lease(tmp_path)
    ours.acquire(0.0)
    pread = os.pread

    def read_then_sleep(descriptor: int, size: int, at: int) -> bytes:
        content = pread(descriptor, size, at)
        monkeypatch.undo()
        (tmp_path / LEASE).unlink()
        left_by(tmp_path, ELSEWHERE)
        return content

    monkeypatch.setattr(os, "pread", read_then_sleep)
    ours.renew(1000.0)
    assert read(tmp_path).job == THEIRS
    with pytest.raises(LeaseLost):
        ours.check()


def test_ids_are_checked_and_folders_that_fail_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="id has 8 to 64"):
        lease(tmp_path, "../x")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"LEASE.json in .*file cannot be read or written"):
        lease(tmp_path / "file").acquire(0.0)


# ---------------------------------------------------------------------------- left behind


def ended_process() -> Process:
    """One that has ended on this machine."""
    code = "from planaria.checkpoints.lease import Process; import msgspec; "
    code += "print(msgspec.json.encode(Process.this()).decode())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=Process)


def test_what_a_dead_process_of_this_machine_left_is_taken_over_at_once(tmp_path: Path) -> None:
    process = ended_process()
    assert process.machine == Process.this().machine
    left_by(tmp_path, process)
    ours = lease(tmp_path)
    ours.acquire(0.0)
    ours.check()
    assert (read(tmp_path).job, [path.name for path in tmp_path.iterdir()]) == (OURS, [LEASE])


def test_a_process_that_got_the_number_of_a_dead_one_is_another(tmp_path: Path) -> None:
    me = Process.this()
    left_by(tmp_path, me)
    with pytest.raises(LeaseHeld, match="which runs"):  # control
        lease(tmp_path).acquire(0.0)
    left_by(tmp_path, msgspec.structs.replace(me, started="1"))
    lease(tmp_path).acquire(0.0)


def test_a_dead_process_that_nobody_waited_for_is_dead(tmp_path: Path) -> None:
    """In a container without an init process it stays in the list for ever."""
    code = f"""
from planaria.checkpoints import Lease
Lease({str(tmp_path)!r}, {THEIRS!r}, owner="killed").acquire(0.0)
print("held", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LeaseHeld, match=f"end process {process.pid}, which runs"):
            lease(tmp_path).acquire(0.0)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet waited for
        lease(tmp_path).acquire(0.0)
    assert read(tmp_path).job == OURS


def test_a_lease_of_another_machine_is_taken_when_it_stood_still_by_our_clock(
    tmp_path: Path,
) -> None:
    left_by(tmp_path, ELSEWHERE)
    ours = lease(tmp_path, stale_s=60.0)
    says = r"not renewed its lease for {} s as far as this job has watched.*remove LEASE.json there"
    for now, watched in ((1000.0, 0), (1059.0, 59)):
        with pytest.raises(LeaseHeld, match=says.format(watched)):
            ours.acquire(now)
    left_by(tmp_path, ELSEWHERE, renewals=1)  # it lives
    for now, watched in ((1061.0, 0), (1120.0, 59)):
        with pytest.raises(LeaseHeld, match=says.format(watched)):
            ours.acquire(now)
    ours.acquire(1121.0)
    ours.check()


def test_waiting_has_an_end_and_watches_meanwhile(tmp_path: Path) -> None:
    left_by(tmp_path, ELSEWHERE)
    slept: list[float] = []
    with pytest.raises(LeaseHeld, match="for 30 s as far"):
        lease(tmp_path).acquire(5.0, wait_s=30.0, sleep=slept.append)
    assert sum(slept) == 30.0
    slept.clear()
    lease(tmp_path).acquire(5.0, wait_s=90.0, sleep=slept.append)
    assert sum(slept) == 60.0
    slept.clear()
    holder = lease(tmp_path / "b")
    holder.acquire(0.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            holder.release()

    lease(tmp_path / "b", THEIRS).acquire(0.0, wait_s=30.0, sleep=sleep)
    assert len(slept) == 3


def test_a_lease_that_was_never_written_to_the_end_is_one_of_somebody(tmp_path: Path) -> None:
    """A crash between creating and writing it; or another process is right there."""
    for content in (b"", b'{"token":', b"\xff\xfe"):
        (tmp_path / LEASE).write_bytes(content)
        ours = lease(tmp_path, stale_s=60.0)
        with pytest.raises(LeaseHeld, match="a job that cannot be made out"):
            ours.acquire(0.0)
        assert (tmp_path / LEASE).read_bytes() == content
        ours.acquire(60.0)
        ours.release()


def test_a_lease_that_could_not_be_written_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        lease(tmp_path).acquire(0.0)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- object stores


@pytest.fixture
def store() -> Iterator[RemoteFolder]:
    import fsspec

    files = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
    yield RemoteFolder(files, "/leases")
    if files.exists("/leases"):
        files.rm("/leases", recursive=True)


def test_a_store_of_objects_has_leases_as_well(store: RemoteFolder) -> None:
    first, second = (Lease(store, job, owner=job[:2]) for job in (OURS, THEIRS))
    first.acquire(0.0)
    first.renew(100.0)
    with pytest.raises(LeaseHeld, match=OURS):
        second.acquire(0.0)
    first.check()
    first.release()
    assert store.names() == []
    second.acquire(0.0)
    dead = msgspec.structs.replace(Process.this(), started="1")
    store.write(LEASE, msgspec.json.encode(Holder("f" * 32, THEIRS, "", dead, 0)))
    with pytest.raises(LeaseLost):
        second.renew(100.0)
    first.acquire(0.0)
    first.check()


def test_of_two_who_write_a_store_s_lease_at_once_the_last_one_has_it(
    store: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is read back: the other may have come in between."""
    first, second = (Lease(store, job, owner=job[:2]) for job in (OURS, THEIRS))
    create = RemoteFolder.create

    def create_and_be_overtaken(self: RemoteFolder, name: str, content: bytes) -> None:
        monkeypatch.undo()
        create(self, name, content)
        self.remove(name)
        second.acquire(0.0)

    monkeypatch.setattr(RemoteFolder, "create", create_and_be_overtaken)
    with pytest.raises(LeaseHeld, match=THEIRS):
        first.acquire(0.0)
    second.check()
