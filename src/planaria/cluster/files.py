"""The job's folder: what its processes must share before they can talk.

supervisor         the process that the job ends with
config.json        the checked configuration
start              the step of the checkpoint that the job starts from; 0 for none
keys               token and CURVE keys, readable by the owner alone
coordinator.json   views used and membership in force; written atomically
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

    def save(self, state: CoordinatorState) -> None:
        """Refuses when another coordinator, of a later epoch, has taken over."""
        on_disk = self.load()
        if on_disk and on_disk.epoch > state.epoch:
            raise ClusterError(f"epoch {on_disk.epoch} has replaced this coordinator's")
        write_atomically(self.folder / "coordinator.json", msgspec.json.encode(state))

    def load(self) -> CoordinatorState | None:
        try:
            text = (self.folder / "coordinator.json").read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(text, type=CoordinatorState)

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
