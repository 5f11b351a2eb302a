"""Local files: written past the page cache, also where that way is closed, and read by threads."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_jobs import Model, restored

from planaria import Layout
from planaria.checkpoints import Checkpoint, PartWriter
from planaria.checkpoints.direct import BLOCK_BYTES, DirectFile
from planaria.errors import CheckpointError, DamagedCheckpoint

LAYOUT = Layout.fresh(3, 1)
SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77]


def refuse_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no direct way."""

    def refuse(file: DirectFile, on: bool) -> bool:
        if on:
            raise OSError(errno.EINVAL, "Invalid argument")
        return False

    monkeypatch.setattr(DirectFile, "_set_direct", refuse)


def refuse_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says it has, and refuses then."""
    write = os.write

    def refuse(descriptor: int, content: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", refuse)


def write_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes a part of what it is given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, content: write(to, content[: 1 << 20]))


@pytest.mark.parametrize(
    "change", [lambda monkeypatch: None, refuse_flag, refuse_writes, write_little]
)
@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_what_was_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    change(monkeypatch)
    content = np.random.default_rng(size).bytes(size)
    with DirectFile(tmp_path / "file") as file:
        for at in range(0, size, 999_983):
            assert file.write(memoryview(content)[at : at + 999_983]) == len(
                content[at : at + 999_983]
            )
        file.flush()
        assert (tmp_path / "file").read_bytes() == content
        file.write(b"more")
    assert (tmp_path / "file").read_bytes() == content + b"more"


def test_no_file_is_written_twice(tmp_path: Path) -> None:
    DirectFile(tmp_path / "file").close()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")


@pytest.mark.parametrize("limit", [20_000, BLOCK_BYTES, 2 * BLOCK_BYTES + 5000])
def test_a_disk_that_is_full_after_some_blocks_is_named_and_leaves_no_file(
    tmp_path: Path, limit: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        part = PartWriter(tmp_path, 4, 0)
        with pytest.raises(CheckpointError, match="no space is left"):
            part.add(0, 0, np.zeros((5 * BLOCK_BYTES // 16, 4), np.uint32))
        assert list((tmp_path / "step-00000004").iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------------------- other threads read


def broken(descriptor: int, views: list[memoryview], position: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (broken, "cannot be read: .*Input/output error"),
        (lambda *call: 0, "the file ends in the middle of it"),
        (lambda descriptor, views, position: views[0].nbytes, "do not match their checksum"),
    ],
)
def test_what_other_threads_could_not_read_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[int, list[memoryview], int], int],
    message: str,
) -> None:
    Model().save(tmp_path, 2, LAYOUT)
    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(DamagedCheckpoint, match=rf"chunk 0 of place-00001-.*{message}"):
        restored(Checkpoint(tmp_path, 2), Model().arenas, LAYOUT, 1)


def test_a_read_that_brings_little_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def read_little(descriptor: int, views: list[memoryview], position: int) -> int:
        calls.append(position)
        return preadv(descriptor, [views[0][:100]], position)

    preadv = os.preadv
    Model().save(tmp_path, 2, LAYOUT)
    expected = restored(Checkpoint(tmp_path, 2), Model().arenas, LAYOUT, 1)
    monkeypatch.setattr(os, "preadv", read_little)
    found = restored(Checkpoint(tmp_path, 2), Model().arenas, LAYOUT, 1)
    assert len(calls) > 2
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
