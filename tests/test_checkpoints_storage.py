"""Storage that fails: a full disk, a failing driver, a folder that cannot be; and nothing half."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_jobs import Model, small_chunks

from planaria import Layout
from planaria.checkpoints import Checkpoint, PartWriter, check_writable, latest, publish
from planaria.checkpoints.folders import LocalFolder, RemoteFolder
from planaria.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("small_chunks")
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(3, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a checkpoint of step 3."""
    Model().save(tmp_path / "saved", 3, LAYOUT)
    return tmp_path / "saved"


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may exceed 20,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_gives_an_error_and_leaves_no_file(folder: Path, small_files: None) -> None:
    part = PartWriter(folder, 4, 0)
    part.add(0, 0, np.zeros((10_000, 4), np.uint32))
    with pytest.raises(CheckpointError, match="no space is left"):
        part.finish()
    assert list((folder / "step-00000004").iterdir()) == []
    with pytest.raises(CheckpointError, match="given up"):
        part.add(0, 0, np.zeros((1, 4), np.uint32))
    found = latest(folder)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 3
    assert "never saved to the end" in str(found.passed_over[0].problem)


def failing(number: int) -> Callable[[int], None]:
    def sync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    return sync


def test_a_sync_that_fails_is_a_save_that_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    parts = [model.save_part(folder, 4, LAYOUT, place) for place in LAYOUT.places]
    (folder / "step-00000005").mkdir()
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(CheckpointError, match=r"place-00000.*writing failed.*Input/output"):
        model.save_part(folder, 5, LAYOUT, 0)
    assert list((folder / "step-00000005").iterdir()) == []
    with pytest.raises(CheckpointError, match=r"MANIFEST.json of step 4 was not written"):
        publish(folder, 4, parts, model.facts(LAYOUT))
    assert len(list((folder / "step-00000004").iterdir())) == len(parts)
    monkeypatch.undo()
    assert Checkpoint(folder, 3).step == 3
    assert publish(folder, 4, parts, model.facts(LAYOUT)).step == 4


class FullStore:
    """A file system of fsspec that breaks after some bytes, with an error of its own kind."""

    def __init__(self, error: Exception) -> None:
        import fsspec

        self.error = error
        self.files = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def open(self, path: str, mode: str) -> Any:
        file = self.files.open(path, mode)
        if mode == "wb":
            file.write = self.fail
        return file

    def pipe_file(self, path: str, content: bytes) -> None:
        self.fail(content)

    def fail(self, content: bytes) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space is left"),
        (RuntimeError("507 insufficient storage"), "507 insufficient storage"),
    ],
)
def test_any_error_of_a_driver_becomes_a_checkpoint_error(error: Exception, says: str) -> None:
    store = FullStore(error)
    where = RemoteFolder(store, "/a")
    with pytest.raises(CheckpointError, match=says):
        PartWriter(where, 1, 0)
    assert store.files.find("/a") == []
    model, single = Model(), Layout.fresh(1, 0)
    part = model.save_part(RemoteFolder(store.files, "/a"), 1, single, 0)
    with pytest.raises(CheckpointError, match=f"(?s)MANIFEST.*{error}".replace("[", r"\[")):
        publish(where, 1, [part], model.facts(single))


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be listed"):
        latest(tmp_path / "file")
    with pytest.raises(CheckpointError, match="was not saved"):
        PartWriter(tmp_path / "file", 1, 0)


class Forgetful(LocalFolder):
    """A folder that gives back something else than what was written."""

    def read(self, name: str) -> bytes:
        return super().read(name)[::-1]


def test_a_folder_that_cannot_be_written_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "a" / "b")  # control: made where it can be made
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"cannot be written to .*file.* choose another"):
            check_writable(wrong)
    with pytest.raises(CheckpointError, match="does not give back"):
        check_writable(Forgetful(tmp_path))
    with pytest.raises(CheckpointError, match="507"):
        check_writable(RemoteFolder(FullStore(RuntimeError("507 insufficient storage")), "/a"))
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(CheckpointError, match="Input/output error"):
        check_writable(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]
