"""Where checkpoints lie: a local folder, or any other that fsspec can reach.

Both kinds have the same few methods, and both raise OSError and nothing else. What differs is how a
file becomes durable and how it appears at once: a local file is synced to the disk, and replaced by
renaming; an object of a store is there, whole, when its one upload has ended.

fsspec is imported only for folders that need it, so that a server starts fast without it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

from planaria.checkpoints.direct import DirectFile
from planaria.checkpoints.names import temporary_name
from planaria.errors import CheckpointError
from planaria.files import make_durably, sync_names, write_atomically

READ_BUFFER_BYTES = 4 << 10  # serves headers; payloads go past it
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FOLDER = (errno.EEXIST, errno.ENOTDIR)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Folder(Protocol):
    """A folder and the files in it, by name."""

    def folder(self, name: str) -> Folder:
        """A folder in this one; it need not exist."""

    def names(self) -> list[str]:
        """What is in it, files and folders; nothing if it does not exist."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def read(self, name: str) -> bytes:
        """A whole, small file."""

    def write(self, name: str, content: bytes, job: str = "") -> None:
        """A whole, small file: at any moment there is the old one or the new one, on the disk.

        job: whose id stands in the name of what a crash may leave.
        """

    def create(self, name: str, content: bytes) -> None:
        """A new, small file. FileExistsError if there is one: of many callers one succeeds."""

    def replace_if(self, name: str, old: bytes, new: bytes) -> bool:
        """Puts `new`, which is not shorter, into a file that holds `old`; False if it does not.

        A file that took its place meanwhile is never touched.
        """

    def remove_if(self, name: str, old: bytes) -> bool:
        """Removes a file that holds `old`; False if it does not. Of many callers one succeeds."""

    def open_read(self, name: str) -> io.BufferedIOBase: ...

    def open_write(self, name: str) -> BinaryIO:
        """A new file. End it with `finish` or with `discard`."""

    def finish(self, file: BinaryIO) -> None:
        """Closes a new file, which is durable from then on."""

    def discard(self, file: BinaryIO, name: str) -> None:
        """Closes a new file and removes it, as far as that can be done. Raises nothing."""

    def remove(self, name: str) -> None:
        """One file."""

    def remove_if_empty(self) -> None:
        """The folder itself, unless something is in it. Raises nothing: it only takes up room."""


@dataclass(frozen=True)
class LocalFolder:
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes, job: str = "") -> None:
        make_durably(self.path)
        sync_names(self.path)  # the files that `content` speaks of come first
        write_atomically(self.path / name, content, temporary=temporary_name(name, job))
        sync_names(self.path)

    def create(self, name: str, content: bytes) -> None:
        make_durably(self.path)
        with (self.path / name).open("xb", buffering=0) as file:
            try:
                file.write(content)
                os.fsync(file.fileno())
            except BaseException:
                (self.path / name).unlink(missing_ok=True)
                raise
        sync_names(self.path)

    def replace_if(self, name: str, old: bytes, new: bytes) -> bool:
        # In place, through the one descriptor that `old` was read from: what another puts under
        # this name meanwhile is another file.
        try:
            descriptor = os.open(self.path / name, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            if os.pread(descriptor, len(old) + 1, 0) != old:
                return False
            os.pwrite(descriptor, new, 0)
            os.fsync(descriptor)
            return True
        finally:
            os.close(descriptor)

    def remove_if(self, name: str, old: bytes) -> bool:
        # Comparing and removing are one act for all who lock the file first. Who waited finds that
        # it has gone, and that another may be in its place: the lock is on the file, not the name.
        path = self.path / name
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            _lock(descriptor)
            if not os.path.samestat(os.fstat(descriptor), path.stat()):
                return False
            if os.pread(descriptor, len(old) + 1, 0) != old:
                return False
            path.unlink()
            return True
        except (BlockingIOError, FileNotFoundError):
            return False  # somebody else is at it, or was
        finally:
            os.close(descriptor)

    def open_read(self, name: str) -> io.BufferedIOBase:
        file = (self.path / name).open("rb", buffering=READ_BUFFER_BYTES)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # reads further ahead
        return cast(io.BufferedIOBase, file)

    def open_write(self, name: str) -> BinaryIO:
        make_durably(self.path)
        return cast(BinaryIO, DirectFile(self.path / name))

    def finish(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def discard(self, file: BinaryIO, name: str) -> None:
        # Closing may fail again, because it writes what is still buffered; it frees the descriptor
        # all the same.
        for step in (file.close, (self.path / name).unlink):
            with contextlib.suppress(OSError):
                step()

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of any fsspec file system. `files` is that file system; fsspec has no types."""

    files: Any = field(repr=False)
    path: str

    def __str__(self) -> str:
        return str(self.files.unstrip_protocol(self.path))

    def folder(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.files, f"{self.path.rstrip('/')}/{name}")

    def names(self) -> list[str]:
        with _only_os_errors():
            self.files.invalidate_cache()  # other processes write here as well
            try:
                found = self.files.ls(self.path, detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found})

    def size(self, name: str) -> int | None:
        with _only_os_errors():
            self.files.invalidate_cache()
            try:
                return int(self.files.info(self._at(name))["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str) -> bytes:
        with _only_os_errors():
            return bytes(self.files.cat_file(self._at(name)))

    def write(self, name: str, content: bytes, job: str = "") -> None:
        with _only_os_errors():
            self.files.makedirs(self.path, exist_ok=True)
            self.files.pipe_file(self._at(name), content)

    # Stores differ in what they offer to exclude others. These three look and then act: callers
    # must read back what they wrote, and of two that act at the same moment the last one stays.

    def create(self, name: str, content: bytes) -> None:
        if self.size(name) is not None:
            raise FileExistsError(f"{self._at(name)} exists")
        self.write(name, content)

    def replace_if(self, name: str, old: bytes, new: bytes) -> bool:
        if not self._holds(name, old):
            return False
        self.write(name, new)
        return True

    def remove_if(self, name: str, old: bytes) -> bool:
        if not self._holds(name, old):
            return False
        self.remove(name)
        return True

    def open_read(self, name: str) -> io.BufferedIOBase:
        with _only_os_errors():
            return cast(io.BufferedIOBase, self.files.open(self._at(name), "rb"))

    def open_write(self, name: str) -> BinaryIO:
        with _only_os_errors():
            self.files.makedirs(self.path, exist_ok=True)
            return cast(BinaryIO, self.files.open(self._at(name), "wb"))

    def finish(self, file: BinaryIO) -> None:
        with _only_os_errors():
            file.close()

    def discard(self, file: BinaryIO, name: str) -> None:
        steps = (getattr(file, "discard", file.close), file.close, lambda: self.remove(name))
        for step in steps:
            with contextlib.suppress(Exception):
                step()

    def remove(self, name: str) -> None:
        with _only_os_errors():
            self.files.rm_file(self._at(name))

    def remove_if_empty(self) -> None:
        with contextlib.suppress(Exception):  # most stores have no folders
            if not self.names():
                self.files.rmdir(self.path)

    def _holds(self, name: str, content: bytes) -> bool:
        try:
            return self.read(name) == content
        except FileNotFoundError:
            return False

    def _at(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"


AnyFolder: TypeAlias = str | Path | Folder
"""A path, a URL, or a folder that is open already."""


def open_folder(where: AnyFolder) -> Folder:
    """The folder at a path or URL. It need not exist: the first file that is written makes it."""
    if isinstance(where, Path):
        return LocalFolder(where)
    if not isinstance(where, str):
        return where
    scheme, is_url, rest = where.partition("://")
    if not is_url:
        return LocalFolder(Path(where))
    if scheme in ("file", "local"):
        return LocalFolder(Path(rest))
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(where)
    except (ImportError, ValueError, OSError) as why:
        raise CheckpointError(
            f"checkpoints cannot lie on {scheme}://: {why}; install its fsspec driver, or use a "
            "local path"
        ) from why
    return RemoteFolder(files, str(path))


def check_writable(folder: AnyFolder) -> None:
    """Raises CheckpointError unless files can be written here, kept, read and removed.

    For before a job starts: what is found out at its first save costs all work until then.
    """
    root = open_folder(folder)
    content, name = secrets.token_bytes(64), f"probe-{secrets.token_hex(4)}.tmp"
    try:
        root.write(name, content)
        try:
            read = root.read(name)
        finally:
            root.remove(name)
    except OSError as why:
        raise CheckpointError(
            f"checkpoints cannot be written to {root}: {why}; {what_to_do(why)}, or choose another "
            "checkpoint.path"
        ) from why
    if read != content:
        raise CheckpointError(
            f"{root} does not give back what was written to it; choose another checkpoint.path"
        )


def what_to_do(why: Exception) -> str:
    """The advice that fits an error of storage, within a sentence."""
    number = why.errno if isinstance(why, OSError) else None
    if number in NO_SPACE:
        return "make room or lower keep_last"
    if number in _NO_FOLDER:
        return "move away what is no folder and has the name of one"
    if number in _NO_RIGHT:
        return "make the folder writable"
    return "put right what it says"


@contextlib.contextmanager
def _only_os_errors() -> Iterator[None]:
    """Drivers raise what the libraries beneath them raise; here it becomes one kind of error."""
    try:
        yield
    except OSError:
        raise
    except Exception as why:
        raise OSError(f"{type(why).__name__}: {why}") from why


def _lock(descriptor: int) -> None:
    """Raises BlockingIOError if another has locked it. Not every file system can: there, as on a
    store of objects, two that act at the same moment are not kept apart.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as why:
        if why.errno not in _NO_LOCKS:
            raise
