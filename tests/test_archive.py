"""The disk's side of saving: what is said of it is true, also when others were at the folder."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from checkpoint_jobs import Model
from checkpoint_leases import DEAD, OURS, THEIRS, lease, left_by

from planaria import Layout
from planaria.checkpoints import Checkpoint, PartWriter, list_checkpoints
from planaria.checkpoints.folders import LocalFolder
from planaria.cluster import archive
from planaria.cluster.archive import NotPublished, way_back
from planaria.config import Config
from planaria.control.saving import Discard, Publish
from planaria.errors import CheckpointError

LAYOUT = Layout.fresh(3, 1)


def job(folder: Path) -> Config:
    return Config.load(None, [f"checkpoint.path={folder}", "servers=3"])


def test_what_counts_is_not_discarded_with_a_later_try_at_it(tmp_path: Path) -> None:
    """All rolled back while it was published, came to that step again, and could not save it."""
    model = Model(job=OURS)
    model.save(tmp_path, 25, LAYOUT)
    before = {path.name for path in (tmp_path / "step-00000025").iterdir()}
    again = model.save_part(tmp_path, 25, LAYOUT, 0)
    archive._discard(str(tmp_path), Discard(25, (again.file,)), OURS, None)
    assert {path.name for path in (tmp_path / "step-00000025").iterdir()} == before
    model.check_restored(Checkpoint(tmp_path, 25), LAYOUT)
    (tmp_path / "step-00000025" / "MANIFEST.json").unlink()
    archive._discard(str(tmp_path), Discard(25), OURS, None)  # control: one that does not count
    assert list_checkpoints(tmp_path) == []


# ---------------------------------------------------------------------------- the way back


def test_the_way_back_is_the_newest_own_checkpoint_that_is_there_now(tmp_path: Path) -> None:
    """A job named its checkpoint of step 80, when its folder had long been replaced by another's.

    What counts is what is there, not what was once published.
    """
    config = job(tmp_path)
    assert way_back(config, OURS, 0) == ""
    assert way_back(Config(), OURS, 0) == ""
    for step in (60, 80):
        Model(job=OURS).save(tmp_path, step, LAYOUT)
    assert way_back(config, OURS, 80) == "; go on from the checkpoint of step 80 with --resume"
    (tmp_path / "step-00000080" / "MANIFEST.json").unlink()
    assert way_back(config, OURS, 80) == "; go on from the checkpoint of step 60 with --resume"
    Model(job=THEIRS).save(tmp_path, 400, LAYOUT)
    assert way_back(config, OURS, 80) == (
        f"; move what another job has saved, up to step 400, out of {tmp_path}; go on from the "
        "checkpoint of step 60 with --resume"
    )
    shutil.rmtree(tmp_path / "step-00000060")
    nothing = f"; there is nothing to go on from: {tmp_path} has no whole checkpoint of this job"
    assert way_back(config, OURS, 80) == nothing
    shutil.rmtree(tmp_path)
    assert way_back(config, OURS, 80) == nothing
    tmp_path.write_text("a file")
    assert "nothing to go on from: the checkpoints in " in way_back(config, OURS, 80)
    tmp_path.unlink()
    tmp_path.mkdir()


def test_a_disk_that_does_not_answer_does_not_keep_whoever_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def hang(folder: str, job: str) -> str:
        gate.wait()
        return ""

    monkeypatch.setattr(archive, "_look_back", hang)
    monkeypatch.setattr(archive, "LOOK_S", 0.01)
    said = way_back(job(tmp_path), OURS, 80)
    gate.set()
    assert said.startswith(f"; {tmp_path} does not answer: whether its checkpoint of step 80")


# ---------------------------------------------------------------------------- a lost lease


def test_who_has_lost_the_lease_removes_the_parts_that_it_wrote_and_no_others(
    tmp_path: Path,
) -> None:
    """They stayed, and it was said that nothing had been changed. The job that has the folder now
    may be the same one, resumed elsewhere: its parts have the same job in their names.
    """
    config, ours = job(tmp_path), lease(tmp_path)
    ours.acquire(0.0)
    parts = [Model(job=OURS).save_part(tmp_path, 5, LAYOUT, place) for place in range(3)]
    theirs = Model(job=OURS).save_part(tmp_path, 5, LAYOUT, 0)
    left_by(tmp_path, DEAD)
    outcome = archive.do(Publish(5, tuple(parts), (), "all", {}), config, OURS, ours)
    assert isinstance(outcome, NotPublished)
    assert "changed nothing" not in outcome.why
    assert archive.do(Discard(5, tuple(part.file for part in parts)), config, OURS, ours) is None
    assert os.listdir(tmp_path / "step-00000005") == [theirs.file]
    archive.do(Discard(5, (theirs.file,)), config, OURS, ours)
    assert list_checkpoints(tmp_path) == []  # nor is an empty folder left


# ---------------------------------------------------------------------------- advice


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room or lower keep_last"),
        (errno.EDQUOT, "make room or lower keep_last"),
        (errno.EFBIG, "make room or lower keep_last"),
        (errno.EEXIST, "move away what is no folder"),
        (errno.EACCES, "make the folder writable"),
        (errno.EIO, "put right what it says"),
    ],
)
def test_advice_fits_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    """Room was to be made for a file that had the name of the folder."""

    def fail(self: LocalFolder, name: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalFolder, "open_write", fail)
    with pytest.raises(CheckpointError, match=f"To save again, {advice}"):
        PartWriter(tmp_path, 5)
