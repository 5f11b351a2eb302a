"""A trainer's process that runs a user's script, as whoever has started it sees it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from planaria.trainer.declaring import MOST_BYTES, SOCKET, Declaration, Raised, Reply, decode

POLL_S = 0.02
HELD_LINES = 1000  # printed and not shown so far: a script that prints more has to wait
PIPE_LINES = 1 << 16  # at most, in the pipe of one that has ended
LINE_CHARS = 1 << 14  # what is longer is shown as several


class ScriptProcess(ABC):
    """A trainer's process; it offers what Popen does, and its `stdin` is the socket to it."""

    pid: int

    def __init__(self, line: socket.socket, rank: int) -> None:
        self.stdin = line
        self.rank = rank
        self.local_rank = rank  # among those on this machine
        self.declared: Declaration | None = None
        self.raised = ""  # the traceback that it has ended with
        self.lines: deque[str] = deque(maxlen=HELD_LINES + PIPE_LINES)  # to be shown
        self._waiting: Reply | None = None  # to be sent when it has declared
        self._log: IO[str] | None = None
        self._said: list[str] = []  # before it had a log

    @abstractmethod
    def poll(self) -> int | None: ...

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int: ...

    @abstractmethod
    def send_signal(self, number: int) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    def look(self) -> bool:
        """Takes what it says of itself, if anything has come: whether it has."""
        try:
            message = self.stdin.recv(MOST_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not message:
            return False
        said = decode(message)
        if isinstance(said, Raised):
            self.raised = said.traceback
            self._keep(said.traceback)
        else:
            self.declared = said
        return True

    def give(self, reply: Reply, log: Path | None = None) -> None:
        """Its part in the job, at once or when it has declared itself."""
        if log is not None:
            with contextlib.suppress(OSError):
                self._log = log.open("a", buffering=1)
                self._log.writelines(self._said)
        self._waiting = reply
        self.answer()

    def answer(self) -> None:
        """Sends what waits for its declaration, once that is there."""
        if self.declared is not None and self._waiting is not None:
            self._reply(self._waiting)
            self._waiting = None

    def _keep(self, text: str) -> None:
        """In its log, once it has one."""
        if self._log is None:
            self._said.append(text)
        else:
            with contextlib.suppress(OSError, ValueError):
                self._log.write(text)

    def close(self) -> None:
        """It has ended."""
        self.stdin.close()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()

    def _reply(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # it has ended, which will be noticed
            self.stdin.send(msgspec.json.encode(reply))


class Script(ScriptProcess):
    """One that this process has started."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        rank: int,
        world_size: int,
        local_rank: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """local_rank: among those on this machine; None: the same. folder: where it runs."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, rank)
        self.local_rank = rank if local_rank is None else local_rank
        variables = {"RANK": rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": world_size}
        with theirs, contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "planaria.cluster", "script", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **environment,
                    **{name: str(value) for name, value in variables.items()},
                    "PYTHONUNBUFFERED": "1",
                    SOCKET: str(theirs.fileno()),
                },
                cwd=folder,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
                text=True,
                errors="replace",
            )
            unless_it_starts.pop_all()
        self.pid = self._process.pid
        self._over = threading.Event()  # it has ended
        self._reader = threading.Thread(target=self._read, daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:  # no more threads; nobody would read what it prints
            self.kill()
            self._process.wait()
            self.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def _read(self) -> None:
        """What it prints: to its log, and to whoever watches. Where that one is slower, nothing is
        read, and the pipe holds the script back: neither memory nor the job is lost to it.
        """
        assert self._process.stdout
        for line in iter(partial(self._process.stdout.readline, LINE_CHARS), ""):
            self._keep(line)
            while len(self.lines) >= HELD_LINES and not self._over.wait(POLL_S):
                pass
            self.lines.append(line.rstrip("\n"))

    def poll(self) -> int | None:
        if self._process.returncode is None and self._has_ended():
            self._over.set()
            self._process.wait()
            self._reader.join(1.0)
            while self.look():
                pass
        return self._process.returncode

    def _has_ended(self) -> bool:
        """If so, what it has started ends as well."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # nobody is told here how processes end, and its number is free
            return True
        if ended is None:
            return False
        # Until it is waited for, its number, which is that of its group, is nobody else's.
        with contextlib.suppress(OSError):
            by_itself = ended.si_code == os.CLD_EXITED
            os.killpg(self.pid, signal.SIGTERM if by_itself else signal.SIGKILL)
        return True

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._process.args, timeout or 0.0)
            time.sleep(POLL_S / 4)
        return code

    def close(self) -> None:
        super().close()
        assert self._process.stdout
        if not self._reader.is_alive():  # or something that it has started still has the other end
            self._process.stdout.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
