"""The job's folder: what its processes must share before they can talk, and their logs.

    <home>/jobs/<name>/
        supervisor            locked by the process that the job ends with
        supervisor.address    where it listens
        config.json           the checked configuration
        start.json            the job's identity, and the step that its processes start from
        keys                  token and CURVE keys, readable by the owner alone
        coordinator.address   where the coordinator listens, for whoever looks from outside
        epoch-*, coordinator-*.json   views used and membership in force; see `claim`
        *.ipc                 sockets, where the transport is ipc
        logs/                 what each process printed; kept if anything went wrong
        logs/copy             on a host alone, whose supervisor has the job's folder elsewhere

<home> is PLANARIA_HOME, or planaria in XDG_STATE_HOME: not a temporary folder, which others clean.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from planaria.cluster.transport import Keys
from planaria.config import Config
from planaria.errors import ClusterError
from planaria.files import write_atomically
from planaria.wire.control import CoordinatorState
from planaria.wire.messages import Member

ANY_JOB = "0000-000000-000000"  # as long as the name of any job's folder
SHARED = ("config.json", "start.json", "keys", "supervisor.address")
COPY = "logs/copy"  # kept with them: a host's logs are no job's
JOBS_KEPT = 20  # folders of ended jobs, for their logs


class Beginning(msgspec.Struct, frozen=True):
    """Which job it is, and the step of the checkpoint that its processes start from; 0: none,
    unless a model was imported, which is a checkpoint of step 0.
    """

    job: str
    step: int = 0
    imported: bool = False
    pause_after: int = 0  # as in Orders, until the first of them come
    trace: tuple[int, int] = (0, 0)  # from which step on, and up to which: see cluster/tracing.py

    @property
    def restores(self) -> bool:
        """Whether there is a checkpoint to start from."""
        return self.step > 0 or self.imported


HOME = "PLANARIA_HOME"
_held: dict[Path, int] = {}  # by job's folder: the descriptor whose lock says that it is running


def home() -> Path:
    """Where jobs have their folders."""
    if given := os.environ.get(HOME):
        return Path(given).absolute()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state).absolute() / "planaria"


@dataclass(frozen=True)
class JobFiles:
    folder: Path

    @classmethod
    def fresh(cls) -> JobFiles:
        """A new folder, readable by the owner alone."""
        jobs = home() / "jobs"
        try:
            jobs.mkdir(parents=True, exist_ok=True, mode=0o700)
            forget_old(jobs)
            folder = jobs / f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"
            (folder / "logs").mkdir(parents=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise ClusterError(
                f"no folder for the job could be made: {error}; set PLANARIA_HOME to one with room"
            ) from None
        return cls(folder)

    def create(self, config: Config, beginning: Beginning) -> Keys:
        """Everything but where the supervisor listens."""
        keys = Keys.make(secrets.token_bytes(16), encrypt=config.cluster.encrypted)
        self._hold()
        write_atomically(self.folder / "config.json", msgspec.json.encode(config.to_dict()))
        write_atomically(self.folder / "start.json", msgspec.json.encode(beginning))
        write_atomically(self.folder / "keys", msgspec.msgpack.encode(keys), 0o600)
        return keys

    def shared(self) -> dict[str, bytes]:
        """What the processes on another machine find in a folder there, by name."""
        return {name: (self.folder / name).read_bytes() for name in SHARED}

    def fill(self, files: Mapping[str, bytes]) -> None:
        """A new folder with what another machine's has."""
        (self.folder / COPY).touch()
        self._hold()
        for name in SHARED:
            write_atomically(self.folder / name, files[name], 0o600)

    def _hold(self) -> None:
        """As long as this process lives, it has a lock on a file: that can be seen from another
        container too, where its number means nothing.
        """
        new = self.folder / "supervisor.new"
        descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        _held[self.folder] = descriptor
        with contextlib.suppress(OSError):  # a file system without locks: see `running`
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.folder / "supervisor")

    def running(self) -> bool:
        """Whether the job's supervisor is there; a folder may outlive it where all was killed."""
        try:
            descriptor = os.open(self.folder / "supervisor", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is held, or nobody can tell
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def is_copy(self) -> bool:
        """Whether the supervisor is on another machine, and with it all that must be remembered."""
        return (self.folder / COPY).exists()

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = msgspec.json.decode((self.folder / "config.json").read_bytes())
        return config

    def beginning(self) -> Beginning:
        return msgspec.json.decode((self.folder / "start.json").read_bytes(), type=Beginning)

    def start(self) -> int:
        return self.beginning().step

    def job(self) -> str:
        return self.beginning().job

    def keys(self) -> Keys:
        return msgspec.msgpack.decode((self.folder / "keys").read_bytes(), type=Keys)

    def supervisor(self) -> str:
        """Where it listens."""
        return (self.folder / "supervisor.address").read_text()

    def log(self, member: Member) -> Path:
        return self.folder / "logs" / f"{member}.log"

    def trace(self, member: Member) -> Path:
        return self.folder / f"{member}.trace"

    def where_logs_are(self) -> str:
        """The end of a sentence that says why a job is over."""
        if (self.folder / "logs").is_dir():
            return f"; logs are in {self.folder / 'logs'}"
        return (
            f"; somebody has removed the job's folder, {self.folder}, logs and all: set "
            "PLANARIA_HOME to one that nobody cleans"
        )

    def bind_address(self, config: Config, member: Member) -> str:
        """Wildcard ports are given out by the system, and paths are named after the process."""
        if config.cluster.transport == "ipc":
            return f"ipc://{self.folder}/{member}.ipc"
        return f"tcp://{config.cluster.host}:*"

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

    def remove(self, *, keep_logs: bool = False) -> None:
        """Only what is a job's folder: it has logs in it. Others may be at the same."""
        if (descriptor := _held.pop(self.folder, None)) is not None:
            os.close(descriptor)
        logs = self.folder / "logs"
        if not logs.is_dir():
            return
        # Keys first, whatever comes between; last what others know an ended job by, who go on with
        # this where it was cut short.
        others = [name for name in _names_in(self.folder) if name not in (logs.name, "supervisor")]
        for name in ("keys", *others, "supervisor"):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
        if not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)


def forget_old(jobs: Path) -> None:
    """Removes the folders of jobs that have ended, but for the logs of the newest.

    Keys, sockets and states are left there where a supervisor and its coordinator, which would have
    cleaned up for it, were killed together. A folder without a supervisor's file may be one that is
    being made; the file is locked before it has its name, so where it is there, its lock tells.
    """
    ended = [jobs / name for name in _names_in(jobs) if not JobFiles(jobs / name).running()]
    for number, folder in enumerate(sorted(ended, key=_changed_at, reverse=True)):
        if number >= JOBS_KEPT:
            JobFiles(folder).remove()
        elif (folder / "supervisor").exists() and not JobFiles(folder).running():
            JobFiles(folder).remove(keep_logs=True)


def _names_in(folder: Path) -> list[str]:
    """No names if it is gone: another job may be clearing up, too."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
