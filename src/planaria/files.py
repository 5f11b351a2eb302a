"""Files that are whole at any moment, and folders whose names outlive a power cut."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(
    path: Path, content: bytes, mode: int = 0o666, *, temporary: str | None = None
) -> None:
    """At any moment there is the old file or the new one, also after a crash.

    A power cut may bring the old one back until `sync_names` was called for its folder.

    mode: before the umask.
    temporary: the name that it has until it is whole, and that a crash may leave.
    """
    unfinished = path.with_name(temporary or f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def make_durably(path: Path) -> None:
    """A new folder that is lost in a power cut takes along all that is in it."""
    if path.is_dir():
        return
    make_durably(path.parent)
    path.mkdir(exist_ok=True)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Which files are in a folder, and under which names, is on the disk from here on."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
