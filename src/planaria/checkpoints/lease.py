"""The lease of a folder of checkpoints: one job at a time publishes and removes there.

LEASE.json in the folder says who. A holder raises the count in it now and then, and looks at it
right before it changes anything; one that finds another's lease there must stop. One that finds
none, because somebody removed the file or the whole folder, takes it again, as anybody could.

A lease that was left behind is taken over

    at once           if its process ran on this machine and runs no more
    after `stale_s`   if it is of another machine and the count has stood still for so long, by
                      the clock of whoever watches: clocks of two machines are never compared

and never while its process runs on this machine, however long it sleeps. In a local folder one of
many who want it gets it. A store of objects has no means for that: there the last one who wrote
has it, and the others find out when they next look.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from planaria.checkpoints.folders import AnyFolder, open_folder, what_to_do
from planaria.checkpoints.names import check_job_id, said_job
from planaria.errors import CheckpointError, LeaseHeld, LeaseLost

LEASE = "LEASE.json"
STALE_S = 60.0
RENEWALS_PER_STALE = 6  # a holder that misses a few is not taken for dead
LOOK_EVERY_S = 1.0  # while waiting for another's lease
ATTEMPTS = 8  # each of which another was faster in


class Process(msgspec.Struct, frozen=True):
    """A process such that no other, before or after, is taken for it."""

    machine: str  # this boot of a kernel, and the namespace that process ids count in
    pid: int
    started: str  # clock ticks since boot

    @classmethod
    def this(cls) -> Process:
        return cls(_machine(), os.getpid(), _stat(os.getpid())[1])


class Holder(msgspec.Struct, frozen=True):
    """The content of LEASE.json."""

    token: str
    job: str
    owner: str  # for people
    process: Process
    renewals: int  # last, so that renewing changes nothing but the end


class Lease:
    """A job's right to change a folder, for one thread at a time.

    All raise CheckpointError if the folder cannot be read or written; then nothing is known.
    """

    def __init__(
        self, folder: AnyFolder, job: str, *, owner: str, stale_s: float = STALE_S
    ) -> None:
        """owner: host and process in words, for whoever is refused."""
        check_job_id(job)
        self._root = open_folder(folder)
        self._me = Holder(secrets.token_hex(16), job, owner, Process.this(), 0)
        self._stale_s = stale_s
        self.notes: list[str] = []  # for whoever shows them
        self._written = b""  # what LEASE.json holds while we have it
        self._renewed_at = 0.0
        self._watched: bytes | None = None  # another's lease, and since when it is the same
        self._since = 0.0

    def acquire(
        self, now: float, *, wait_s: float = 0.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Takes the lease, or raises LeaseHeld after `wait_s`.

        What was seen of another's lease is remembered: calling again later is as good as waiting.
        """
        end = now + wait_s
        while True:
            try:
                self._try_to_acquire(now)
                return
            except LeaseHeld:
                if now >= end:
                    raise
            pause_s = min(LOOK_EVERY_S, end - now)
            sleep(pause_s)
            now += pause_s

    def check(self) -> None:
        """Raises LeaseLost unless the lease in the folder is ours, or ours again because there was
        none. To be called right before something is changed.
        """
        content = self._read()
        if content is None and self._written:
            content = self._take_again()
        if not self._written or self._me.token.encode() not in (content or b""):
            raise self._lost(content)

    def renew(self, now: float) -> None:
        """Shows the others that we live. Does nothing if it was done just before."""
        if self._written and now - self._renewed_at < self._stale_s / RENEWALS_PER_STALE:
            return
        me = msgspec.structs.replace(self._me, renewals=self._me.renewals + 1)
        content = msgspec.json.encode(me)
        with self._told():
            is_ours = bool(self._written) and self._root.replace_if(LEASE, self._written, content)
        if not is_ours:
            self.check()  # it is lost, or has just been taken again
            return
        self._me, self._written, self._renewed_at = me, content, now

    def release(self) -> None:
        """Gives it back if it is still ours."""
        written, self._written = self._written, b""
        if written:
            with self._told():
                self._root.remove_if(LEASE, written)

    # ------------------------------------------------------------------ inside

    def _try_to_acquire(self, now: float) -> None:
        content = msgspec.json.encode(self._me)
        for _ in range(ATTEMPTS):
            with self._told():
                with contextlib.suppress(FileExistsError):
                    self._root.create(LEASE, content)
                seen = self._read()
                if seen == content:
                    self._written, self._renewed_at = content, now
                    return
                if seen is None:
                    continue
                if not self._is_left_behind(seen, now):
                    raise self._held(seen, now)
                self._root.remove_if(LEASE, seen)  # if another was faster, so be it
        raise LeaseHeld(
            f"{LEASE} in {self._root} changes hands all the time: several jobs want this folder. "
            "Give each its own checkpoint.path"
        )

    def _take_again(self) -> bytes | None:
        """What LEASE.json holds after an attempt to create it: ours, unless another was faster."""
        with self._told():
            with contextlib.suppress(FileExistsError):
                self._root.create(LEASE, self._written)
            content = self._read()
        if content == self._written:
            self.notes.append(
                f"{LEASE} in {self._root} was gone and nobody else's was there: "
                f"{said_job(self._me.job)} has taken the folder again, and goes on saving there"
            )
        return content

    def _is_left_behind(self, seen: bytes, now: float) -> bool:
        if seen != self._watched:
            self._watched, self._since = seen, now
        holder = _holder(seen)
        if holder and holder.process.machine == self._me.process.machine:
            return not _runs(holder.process)
        return now - self._since >= self._stale_s

    def _held(self, seen: bytes, now: float) -> LeaseHeld:
        holder = _holder(seen)
        told = (
            f"the checkpoints in {self._root} belong to {_name(holder)}; two jobs would remove "
            "each other's. Choose another checkpoint.path"
        )
        if holder and holder.process.machine == self._me.process.machine:
            return LeaseHeld(f"{told}, or end process {holder.process.pid}, which runs, first")
        return LeaseHeld(
            f"{told}, or end that job first. It has not renewed its lease for "
            f"{now - self._since:.0f} s as far as this job has watched, and counts as dead after "
            f"{self._stale_s:.0f} s. If you know that it is dead, remove {LEASE} there"
        )

    def _lost(self, seen: bytes | None) -> LeaseLost:
        if not self._written:
            return LeaseLost(f"the lease of {self._root} was never acquired, or was given back")
        whose = "nobody" if seen is None else _name(_holder(seen))  # nobody's: it comes and goes
        return LeaseLost(
            f"the checkpoints in {self._root} now belong to {whose}: {said_job(self._me.job)} "
            f"({self._me.owner}) has lost its lease, and neither publishes there nor touches a "
            "file but parts that it wrote itself. Stop one of the jobs, or give each its own "
            "checkpoint.path"
        )

    def _read(self) -> bytes | None:
        """None if there is none."""
        with self._told():
            try:
                return self._root.read(LEASE)
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as why:
            raise CheckpointError(
                f"{LEASE} in {self._root} cannot be read or written: {why}; {what_to_do(why)}, or "
                "choose another checkpoint.path"
            ) from why


def _holder(content: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(content, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _name(holder: Holder | None) -> str:
    return f"{said_job(holder.job)} ({holder.owner})" if holder else "a job that cannot be made out"


def _machine() -> str:
    """Within which process ids mean one thing: containers on one kernel may count their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, str]:
    """State and start of a process; its name, which comes before, can hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


def _runs(process: Process) -> bool:
    """A dead one that nobody has waited for does not run: it has no files and no memory."""
    try:
        with contextlib.suppress(PermissionError):  # another user's, so there is one
            os.kill(process.pid, 0)
        state, started = _stat(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # hidden from us
        return True
    return state not in ("Z", "X") and started == process.started
