"""Two jobs on one folder of checkpoints: each removes, replaces and resumes what is its own."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from checkpoint_jobs import Model, small_chunks

from planaria import Layout
from planaria.checkpoints import (
    Checkpoint,
    Lease,
    PartSummary,
    PartWriter,
    discard,
    latest,
    list_checkpoints,
    new_job_id,
    prune,
    publish,
    reader,
)
from planaria.checkpoints.folders import LocalFolder
from planaria.checkpoints.manifest import MANIFEST
from planaria.errors import ArgumentError, CheckpointError, LeaseLost

pytestmark = pytest.mark.usefixtures("small_chunks")
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(3, 1)
OURS, THEIRS = "0a" * 16, "b1" * 16


def model_of(job: str) -> Model:
    return Model(job=job)


def files(folder: Path, step: int) -> set[str]:
    return {path.name for path in (folder / f"step-{step:08d}").glob("*")}


def whole(folder: Path) -> list[int]:
    return [one.step for one in list_checkpoints(folder) if one.checkpoint]


# ---------------------------------------------------------------------------- identity


def test_ids_are_new_each_time_and_fit_into_names() -> None:
    assert len({new_job_id() for _ in range(100)}) == 100
    for wrong in ("../x", "ABCDEF01", "0a0a", "0a" * 33, "nothex!!"):
        with pytest.raises(ArgumentError, match="id has 8 to 64 digits"):
            PartWriter("nowhere", 1, job=wrong)
        with pytest.raises(ArgumentError, match="id has 8 to 64 digits"):
            discard("nowhere", 1, job=wrong)


def test_a_job_goes_on_from_its_own_checkpoint_alone(tmp_path: Path) -> None:
    # A roll-back once took the checkpoint of a job with another seed, and ended cleanly.
    model_of(OURS).save(tmp_path, 1, LAYOUT)
    model_of(THEIRS).save(tmp_path, 2, LAYOUT)
    Model().save(tmp_path, 3, LAYOUT)
    found = latest(tmp_path, job=OURS, verify=True)
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.checkpoint.job) == (1, OURS)
    assert [one.problem for one in found.passed_over] == [
        "it was saved by a job without an id",
        f"it was saved by another job, {THEIRS}",
    ]
    anybody_s = latest(tmp_path).checkpoint  # control
    assert anybody_s is not None
    assert anybody_s.step == 3
    assert latest(tmp_path, job=new_job_id()).checkpoint is None


def test_a_manifest_of_before_there_were_ids_is_read(tmp_path: Path) -> None:
    checkpoint = Model().save(tmp_path, 1, LAYOUT)
    facts = msgspec.to_builtins(checkpoint.manifest, str_keys=True)
    del facts["job"]
    content = msgspec.json.encode(facts)
    sealed = {"sha256": hashlib.sha256(content).hexdigest(), "content": msgspec.Raw(content)}
    (tmp_path / "step-00000001" / MANIFEST).write_bytes(msgspec.json.encode(sealed))
    assert Checkpoint(tmp_path, 1).job == ""


def test_a_difference_needs_checkpoints_of_its_own_job(tmp_path: Path) -> None:
    ours, theirs = model_of(OURS), model_of(THEIRS)
    theirs.save(tmp_path, 1, LAYOUT)
    with pytest.raises(CheckpointError, match=f"step 1, which was saved by another job, {THEIRS}"):
        ours.save(tmp_path, 2, LAYOUT, base=[1], changed=ours.train())
    theirs.save(tmp_path, 3, LAYOUT, base=[1], changed=theirs.train())  # control


def test_parts_of_another_job_are_not_published(tmp_path: Path) -> None:
    ours, theirs = model_of(OURS), model_of(THEIRS)
    parts = [ours.save_part(tmp_path, 1, LAYOUT, place) for place in LAYOUT.places]
    for other in (theirs, Model()):
        with pytest.raises(CheckpointError, match=r"place-00000-0a0a0a0a-\w{8}.part is no part of"):
            publish(tmp_path, 1, parts, other.facts(LAYOUT))
    publish(tmp_path, 1, parts, ours.facts(LAYOUT))  # control


# ---------------------------------------------------------------------------- own files only


def test_a_published_checkpoint_of_another_job_is_not_replaced(tmp_path: Path) -> None:
    theirs = model_of(THEIRS)
    theirs.save(tmp_path, 1, LAYOUT)
    before = files(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"saved by another job, {THEIRS}, and is not repl"):
        model_of(OURS).save(tmp_path, 1, LAYOUT)
    assert before <= files(tmp_path, 1)
    theirs.check_restored(Checkpoint(tmp_path, 1), LAYOUT)
    discard(tmp_path, 1, job=OURS)  # what was refused takes up no room, and only that
    assert files(tmp_path, 1) == before
    theirs.save(tmp_path, 1, LAYOUT)  # control


def test_publishing_leaves_the_parts_that_another_job_is_writing(tmp_path: Path) -> None:
    theirs = model_of(THEIRS)
    part = theirs.save_part(tmp_path, 1, LAYOUT, 0)
    given_up = model_of(OURS).save_part(tmp_path, 1, LAYOUT, 0)
    (tmp_path / "step-00000001/MANIFEST.json.0a0a0a0a-12345678.tmp").touch()
    (tmp_path / "step-00000001/MANIFEST.json.b1b1b1b1-12345678.tmp").touch()
    model_of(OURS).save(tmp_path, 1, LAYOUT)
    left = files(tmp_path, 1)
    assert {part.file, "MANIFEST.json.b1b1b1b1-12345678.tmp"} <= left
    assert not {given_up.file, "MANIFEST.json.0a0a0a0a-12345678.tmp"} & left


def test_what_is_discarded_is_one_s_own(tmp_path: Path) -> None:
    # Two jobs on one folder once removed each other's checkpoints, and both reported success.
    ours, theirs = model_of(OURS), model_of(THEIRS)
    theirs.save(tmp_path, 1, LAYOUT)
    before = files(tmp_path, 1)
    ours.save_part(tmp_path, 1, LAYOUT, 0)
    (tmp_path / "step-00000001/MANIFEST.json.0a0a0a0a-12345678.tmp").touch()
    discard(tmp_path, 1, job=OURS)
    discard(tmp_path, 1)  # nor does one without an id
    assert files(tmp_path, 1) == before
    theirs.check_restored(Checkpoint(tmp_path, 1), LAYOUT)
    ours.save(tmp_path, 2, LAYOUT)
    discard(tmp_path, 2, job=OURS)
    assert not (tmp_path / "step-00000002").exists()  # control
    discard(tmp_path, 1, job=THEIRS)
    assert not (tmp_path / "step-00000001").exists()


def test_pruning_leaves_the_checkpoints_of_others(tmp_path: Path) -> None:
    ours, theirs = model_of(OURS), model_of(THEIRS)
    for step in (1, 3, 5):
        theirs.save(tmp_path, step, LAYOUT)
    for step in (2, 4, 6):
        ours.save(tmp_path, step, LAYOUT)
    ours.save_part(tmp_path, 3, LAYOUT, 0)  # of a save that was given up
    mine = ours.save_part(tmp_path, 7, LAYOUT, 0)  # in the making
    before = {step: files(tmp_path, step) for step in (1, 5)}
    assert prune(tmp_path, 1, job=OURS) == [2, 3, 4]
    assert whole(tmp_path) == [1, 3, 5, 6]
    assert {step: files(tmp_path, step) for step in (1, 5)} == before
    assert not any("0a0a0a0a" in name for name in files(tmp_path, 3))
    assert mine.file in files(tmp_path, 7)
    assert prune(tmp_path, 1) == []  # somebody without an id has nothing here
    assert prune(tmp_path, 1, job=THEIRS) == [1, 3]
    assert whole(tmp_path) == [5, 6]


def test_a_manifest_that_cannot_be_read_goes_with_the_parts_beside_it(tmp_path: Path) -> None:
    for step, job in ((1, OURS), (2, THEIRS), (3, OURS), (4, OURS)):
        model_of(job).save(tmp_path, step, LAYOUT)
    model_of(THEIRS).save_part(tmp_path, 3, LAYOUT, 0)
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:08d}" / MANIFEST).write_bytes(b"{")
    before = files(tmp_path, 2)
    assert prune(tmp_path, 1, job=OURS) == [1, 3]
    assert not (tmp_path / "step-00000001").exists()
    assert files(tmp_path, 2) == before
    assert MANIFEST in files(tmp_path, 3)  # it may be the other's
    assert not any("0a0a0a0a" in name for name in files(tmp_path, 3))


def test_object_stores_keep_to_it_as_well() -> None:
    import fsspec

    where = "memory://shared/of a test"
    try:
        for step, job in ((1, OURS), (2, THEIRS), (3, OURS)):
            model_of(job).save(where, step, LAYOUT)
        model_of(OURS).save_part(where, 2, LAYOUT, 1)
        assert prune(where, 1, job=OURS) == [1, 2]
        assert [one.step for one in list_checkpoints(where)] == [2, 3]
        assert latest(where, job=THEIRS, verify=True).checkpoint is not None
        discard(where, 2, job=THEIRS)
        assert [one.step for one in list_checkpoints(where)] == [3]
    finally:
        fsspec.filesystem("memory").rm("/shared", recursive=True)


# ---------------------------------------------------------------------------- with a lease


def taken_over(folder: Path) -> tuple[Lease, Lease]:
    """The lease of a process that slept, and that of the one which goes on with the same job."""
    slept, awake = (Lease(folder, OURS, owner=name) for name in ("host-1", "host-2"))
    slept.acquire(0.0)
    (folder / "LEASE.json").unlink()  # by a person who took the sleeper for dead
    awake.acquire(0.0)
    return slept, awake


def test_who_has_lost_the_lease_changes_nothing(tmp_path: Path) -> None:
    model = model_of(OURS)
    slept, awake = taken_over(tmp_path)
    for step in (1, 2, 3):
        model.save(tmp_path, step, LAYOUT, lease=awake)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    says = rf"now belong to job {OURS} \(host-2\).*\(host-1\) has lost its lease"
    with pytest.raises(LeaseLost, match=says):
        discard(tmp_path, 3, job=OURS, lease=slept)
    with pytest.raises(LeaseLost, match=says):
        prune(tmp_path, 1, job=OURS, lease=slept)
    parts = Checkpoint(tmp_path, 3).manifest.parts
    with pytest.raises(LeaseLost, match=says):
        publish(tmp_path, 3, parts, model.facts(LAYOUT), lease=slept)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert prune(tmp_path, 1, job=OURS, lease=awake) == [1, 2]  # control


def test_without_the_lease_the_sleeper_removes_what_the_other_saved(tmp_path: Path) -> None:
    """The control of the test above: it is the lease that holds it back, nothing else."""
    _, awake = taken_over(tmp_path)
    model_of(OURS).save(tmp_path, 3, LAYOUT, lease=awake)
    discard(tmp_path, 3, job=OURS)
    assert whole(tmp_path) == []


def test_the_lease_is_looked_at_right_before_the_manifest_and_every_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    lease = Lease(tmp_path, OURS, owner="us")
    lease.acquire(0.0)
    look, write, remove = Lease.check, LocalFolder.write, LocalFolder.remove

    def check(self: Lease) -> None:
        did.append("check")
        look(self)

    def note_write(self: LocalFolder, name: str, content: bytes, job: str = "") -> None:
        did.append(name)
        write(self, name, content, job)

    def note_remove(self: LocalFolder, name: str) -> None:
        did.append(f"{self.path.name} gone")
        remove(self, name)

    monkeypatch.setattr(Lease, "check", check)
    monkeypatch.setattr(LocalFolder, "write", note_write)
    monkeypatch.setattr(LocalFolder, "remove", note_remove)
    for step in (1, 2, 3):
        model_of(OURS).save(tmp_path, step, LAYOUT, lease=lease)
    assert did == ["check", MANIFEST] * 3
    did.clear()
    prune(tmp_path, 1, job=OURS, lease=lease)
    assert list(dict.fromkeys(did)) == ["check", "step-00000002 gone", "step-00000001 gone"]
    assert [number for number, what in enumerate(did) if what == "check"] == [0, len(did) // 2]
    assert prune(tmp_path, 1, job=OURS, lease=lease) == []
    assert did.count("check") == 2  # nothing to change, nothing to ask


# ---------------------------------------------------------------------------- looked at once


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each part was looked for, and each manifest read."""
    counted: Counter[str] = Counter()
    size, read = LocalFolder.size, LocalFolder.read

    def note(self: LocalFolder, name: str) -> None:
        counted[f"{self.path.name}/{name}"] += 1

    def count_size(self: LocalFolder, name: str) -> int | None:
        note(self, name)
        return size(self, name)

    def count_read(self: LocalFolder, name: str) -> bytes:
        note(self, name)
        return read(self, name)

    monkeypatch.setattr(LocalFolder, "size", count_size)
    monkeypatch.setattr(LocalFolder, "read", count_read)
    return counted


def test_publishing_looks_at_each_part_once(tmp_path: Path, looks: Counter[str]) -> None:
    model = model_of(OURS)
    model.save(tmp_path, 1, LAYOUT)
    assert len(looks) == len(LAYOUT.places) + 2
    assert set(looks.values()) == {1}
    looks.clear()
    model.save(tmp_path, 2, LAYOUT, base=[1], changed=model.train())
    assert len(looks) == 2 * (len(LAYOUT.places) + 2)
    assert set(looks.values()) == {1}


def test_looking_for_the_newest_reads_what_many_need_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(OURS)
    model.save(tmp_path, 1, LAYOUT)
    for step in (2, 3, 4):
        model.save(tmp_path, step, LAYOUT, base=range(1, step), changed=model.train())
    for step in (3, 4):
        part = next((tmp_path / f"step-{step:08d}").glob("dense-*"))
        content = part.read_bytes()
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    reads: Counter[str] = Counter()
    verify_part = reader.verify_part

    def count(folder: LocalFolder, step: int, part: PartSummary) -> None:
        reads[part.file] += 1
        verify_part(folder, step, part)

    monkeypatch.setattr("planaria.checkpoints.checkpoint.verify_part", count)
    found = latest(tmp_path, job=OURS, verify=True)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 2
    damaged = {name for step in (3, 4) for name in files(tmp_path, step) if "dense" in name}
    assert all(times == 1 for name, times in reads.items() if name not in damaged)
    reads.clear()
    found.checkpoint.verify()  # whoever asks again wants it read again
    assert set(reads.values()) == {1}
