"""The job's folder: what its processes must share before they can talk.

supervisor         the process that the job ends with
config.json        the checked configuration
start              the step of the checkpoint that the job starts from; 0 for none
keys               token and CURVE keys, readable by the owner alone
epoch-N            which coordinator has claimed epoch N; created once, never written again
coordinator-N.json views that it used and the membership in force; written atomically
*.ipc              sockets, where the transport is ipc
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from planaria.cluster.transport import Keys
from planaria.coordinator.machine import CoordinatorState
from planaria.errors import ClusterError


@dataclass(frozen=True)
class JobFiles:
    folder: Path

    def create(self, config: dict[str, Any], *, encrypt: bool, start: int = 0) -> None:
        keys = Keys.make(secrets.token_bytes(16), encrypt=encrypt)
        write_atomically(self.folder / "supervisor", str(os.getpid()).encode())
        write_atomically(self.folder / "config.json", msgspec.json.encode(config))
        write_atomically(self.folder / "start", str(start).encode())
        write_atomically(self.folder / "keys", msgspec.msgpack.encode(keys), 0o600)

    def running(self) -> bool:
        """Whether the job's supervisor is there; a folder may outlive it where all was killed."""
        try:
            return Path(f"/proc/{int((self.folder / 'supervisor').read_text())}").exists()
        except (OSError, ValueError):
            return False

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = msgspec.json.decode((self.folder / "config.json").read_bytes())
        return config

    def start(self) -> int:
        return int((self.folder / "start").read_text())

    def keys(self) -> Keys:
        return msgspec.msgpack.decode((self.folder / "keys").read_bytes(), type=Keys)

    # One coordinator at a time. Each one claims an epoch, then loads the newest state; it saves,
    # then looks whether a later epoch is claimed, and only then speaks. So of an old and a new one
    # either the old one's look comes after the new one's claim: it says nothing of what it saved.
    # Or it came before: then its save came before the new one's load, which knows all that was
    # said. A zombie may still write its own file, but says nothing, and no view of its older epoch
    # counts with members that have promised a view of a later one.

    def claim(self, owner: str) -> int:
        """The lowest epoch above all that were ever claimed; it is the owner's alone."""
        while True:
            epoch = max(self._claimed(), default=0) + 1
            try:
                with self._epoch_file(epoch).open("xb") as file:
                    file.write(owner.encode())
                    file.flush()
                    os.fsync(file.fileno())
            except FileExistsError:
                continue  # somebody was faster
            return epoch

    def save(self, state: CoordinatorState, owner: str) -> None:
        """Refuses when another coordinator, of a later epoch, has taken over."""
        self._check_owner(state.epoch, owner)
        write_atomically(self._state_file(state.epoch), msgspec.json.encode(state))
        self._check_owner(state.epoch, owner)

    def load(self) -> CoordinatorState | None:
        """The newest state that was saved."""
        for epoch in sorted(self._claimed(), reverse=True):
            try:
                text = self._state_file(epoch).read_bytes()
            except FileNotFoundError:
                continue  # claimed, and nothing was said yet
            return msgspec.json.decode(text, type=CoordinatorState)
        return None

    def _check_owner(self, epoch: int, owner: str) -> None:
        newest = max(self._claimed(), default=0)
        if newest > epoch:
            raise ClusterError(f"epoch {newest} has replaced this coordinator's, {epoch}")
        try:
            named = self._epoch_file(epoch).read_text()
        except OSError as error:
            raise ClusterError(f"the claim of epoch {epoch} cannot be read: {error}") from None
        if named != owner:
            raise ClusterError(f"epoch {epoch} is claimed by {named!r}, not by {owner!r}")

    def _claimed(self) -> list[int]:
        return [int(path.name.removeprefix("epoch-")) for path in self.folder.glob("epoch-*")]

    def _epoch_file(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:08}"

    def _state_file(self, epoch: int) -> Path:
        return self.folder / f"coordinator-{epoch:08}.json"

    def remove(self) -> None:
        """Only what is a job's folder: it has keys in it."""
        if (self.folder / "keys").exists():
            shutil.rmtree(self.folder, ignore_errors=True)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """The file is the old one or the new one, also after a crash. mode: before the umask."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
