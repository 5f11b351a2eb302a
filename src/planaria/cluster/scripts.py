"""Trainers that run a user's script: started before the job, and given their part in it later.

A script runs up to its first batch by itself, declares its tables there, and waits. Those that the
job starts with are given their ranks; the others are spares, ready to take over in a moment,
however long the script takes to get there. One that is missing is made by running it again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from planaria.cluster.accounts import is_stopped, name_of_signal
from planaria.cluster.files import HOME
from planaria.collecting import collect_rarely
from planaria.config import Config
from planaria.control.children import EXIT_REFUSED
from planaria.errors import ClusterError, ConfigError
from planaria.exactness import environment
from planaria.trainer.declaring import (
    MOST_BYTES,
    SETTINGS,
    SOCKET,
    Assignment,
    Declaration,
    Raised,
    Refusal,
    Reply,
    Settings,
    decode,
    difference,
)

POLL_S = 0.02
WAITED_S = 5.0  # before it is said who is waited for
SPARE_AGAIN_S = 30.0  # before a spare that could not be started is tried again
HELD_LINES = 1000  # printed and not shown so far: a script that prints more has to wait
PIPE_LINES = 1 << 16  # at most, in the pipe of one that has ended
SHOWN_LINES = 50  # of a script, before others have their turn
LINE_CHARS = 1 << 14  # what is longer is shown as several
INTERRUPTED = "interrupted"
FINAL = "the traceback that ends the job"
SPARE = -1  # the RANK of a process that has none yet
# The script of `planaria train`, for models and data that a configuration names.
INCLUDED = Path(__file__).parents[1] / "models" / "named.py"

Say = Callable[[str], None]


class Process(ABC):
    """A trainer's process; it offers what Popen does, and its `stdin` is the socket to it."""

    pid: int

    def __init__(self, line: socket.socket, rank: int) -> None:
        self.stdin = line
        self.rank = rank
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


class Script(Process):
    """One that this process has started."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], rank: int, world_size: int
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, rank)
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
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


class Scripts:
    """The processes of one command. Use it as a context manager; leaving it leaves none behind."""

    def __init__(
        self,
        command: Sequence[str],
        trainers: int,
        spares: int,
        environment: Mapping[str, str],
        say: Say,
    ) -> None:
        """command: the script and its arguments."""
        self.command = command
        self.trainers = trainers
        self.spares = spares
        self.say = say
        self.declared: Declaration | None = None
        self._environment = environment
        self._waiting: list[Process] = []  # without a part in the job so far
        self._placed: list[Process] = []
        self._holders: dict[int, Process] = {}  # of ranks: the last of those that had each
        self._ours = command[0] == str(INCLUDED)
        self._raised: set[str] = set()  # tracebacks that were shown; FINAL for the last one
        self._spare_at = 0.0  # when one may be started again

    def __enter__(self) -> Scripts:
        for rank in range(self.trainers):
            self._start(rank)
        for _ in range(self.spares):
            self._start_spare()
        return self

    def __exit__(self, *_: object) -> None:
        for script in [*self._waiting, *self._placed]:
            if script.poll() is None:
                script.kill()
            script.wait()
        self.show(everything=True)
        for script in [*self._waiting, *self._placed]:
            script.close()

    def _start(self, rank: int) -> Process:
        script = Script(self.command, self._environment, rank, self.trainers)
        self._waiting.append(script)
        return script

    def _start_spare(self) -> None:
        """None is needed so far: what keeps it from starting may pass."""
        if time.monotonic() < self._spare_at:
            return
        try:
            self._start(SPARE)
            self._spare_at = 0.0
        except OSError as error:
            if not self._spare_at:
                self.say(f"a spare trainer could not be started: {error}")
            self._spare_at = time.monotonic() + SPARE_AGAIN_S

    # ------------------------------------------------------------------ before the job

    def declare(self) -> Declaration:
        """Waits until all trainers have reached their first batch, and agree."""
        began = told = time.monotonic()
        first_ranks = self._waiting[: self.trainers]
        while missing := [one for one in first_ranks if one.declared is None]:
            for script in missing:
                script.look()
                if script.declared is None and script.poll() is not None:
                    self._give_up(script)
            if time.monotonic() - told > WAITED_S:
                told = time.monotonic()
                ranks = ", ".join(str(one.rank) for one in missing)
                whose = "trainers'" if self._ours else "script's"
                waited = f"{told - began:.0f} s"
                self.say(f"waiting for the {whose} first batch, {waited} so far: rank {ranks}")
            self.show()
            time.sleep(POLL_S)
        first, *others = (one.declared for one in first_ranks)
        assert first is not None
        for rank, other in enumerate(others, 1):
            assert other is not None
            if differ := difference(first, other, begins=True):
                raise ClusterError(f"ranks 0 and {rank} of the script disagree about {differ}")
        self.declared = first
        return first

    def _give_up(self, script: Process) -> None:
        code = script.wait()
        if script.raised and self._is_sentence(script):
            raise ConfigError(script.raised.rstrip())
        self.show(everything=True)
        if script.raised:
            raise ClusterError(f"{self.command[0]} has raised an exception before its first batch")
        what = _how_it_ended(code) if code else "ended"
        raise ClusterError(
            f"rank {script.rank} of {self.command[0]} {what} before its first batch; a script "
            "trains in a loop over job.batches(...)"
        )

    # ------------------------------------------------------------------ during the job

    def place(self, assignment: Assignment, log: Path) -> Process:
        """A process for this part: one that waits if there is any, or a new one."""
        script = self._choose(assignment.rank)
        self._waiting.remove(script)
        self._placed.append(script)
        script.give(assignment, log)
        if assignment.rank is not None:
            script.rank = assignment.rank
        return script

    def _choose(self, rank: int | None) -> Process:
        alive = [one for one in self._waiting if one.poll() is None and not is_stopped(one.pid)]
        for script in alive:
            if script.rank == (SPARE if rank is None else rank):
                return script
        ready = [one for one in alive if one.declared is not None]
        if not ready and self.declared is not None:
            self.say("no spare trainer is ready: one is waited for, up to its first batch")
        return (ready or alive or [self._start(SPARE if rank is None else rank)])[0]

    def tend(self) -> None:
        """Now and then: takes declarations, shows what is printed, and keeps spares ready."""
        for script in [*self._waiting, *self._placed]:
            if script.declared is None:
                script.look()
                self._refuse_if_it_differs(script)
                script.answer()
        self._waiting = [one for one in self._waiting if not self._is_lost(one)]
        if sum(not is_stopped(one.pid) for one in self._waiting) < self.spares:
            self._start_spare()
        self.show()

    def starting(self) -> list[int]:
        """By process number: who has a part in the job, and is on its way to its first batch."""
        return [one.pid for one in self._placed if one.declared is None and one.poll() is None]

    def _refuse_if_it_differs(self, script: Process) -> None:
        if script.declared is not None and self.declared is not None:
            if differ := difference(self.declared, script.declared):
                why = f"this run of the script has other ideas than the first about {differ}"
                script.give(Refusal(why))

    def _is_lost(self, script: Process) -> bool:
        if script.poll() is None:
            return False
        code = script.wait()
        self.spares = max(self.spares - 1, 0)  # the next one would end the same way
        self.say(f"a spare trainer {_how_it_ended(code)} before it was needed")
        script.close()
        return True

    def refuse(self, why: str) -> None:
        """The job cannot start: those that wait for it are told."""
        for script in self._waiting:
            script.give(Refusal(why))

    def ranks(self, trainers: Mapping[int, int]) -> None:
        """Who has which rank by now: by process number."""
        for script in self._placed:
            if script.pid in trainers:
                script.rank = trainers[script.pid]
                self._holders[script.rank] = script

    def show(self, *, everything: bool = False) -> None:
        """What they have printed: some of it, for there is other work, or all that is held."""
        scripts = [*self._waiting, *self._placed]
        for script in scripts:
            self._show_lines(script, len(script.lines) if everything else SHOWN_LINES)
        for script in scripts:
            if script.raised and script.poll() is not None and self._is_shown(script):
                self._show_traceback(script)

    def _show_traceback(self, script: Process) -> None:
        """Once, however many ranks have raised it, or replacements: they are in their logs."""
        # Those that end the job are alike. One that did not must not hide them.
        key = FINAL if script.wait() == EXIT_REFUSED else script.raised
        if not self._is_sentence(script) and not self._raised & {key, script.raised}:
            self._raised |= {key, script.raised}
            script.lines.extend(script.raised.splitlines())
            self._show_lines(script, len(script.lines))

    def _is_shown(self, script: Process) -> bool:
        """A spare that is not needed so far has nothing to say."""
        return script in self._placed or script.rank != SPARE

    def _is_sentence(self, script: Process) -> bool:
        """What is no traceback is said by the command."""
        return "\n" not in script.raised.rstrip()

    def _show_lines(self, script: Process, most: int) -> None:
        for _ in range(min(most, len(script.lines))):
            line = script.lines.popleft()
            if self._is_shown(script):
                self.say(f"[rank {script.rank}] {line}" if self.trainers > 1 else line)

    def see_out(self, is_interrupted: Callable[[], bool]) -> str:
        """The job is done: waits until the scripts have ended; what is wrong with how, if anything.

        They may take as long as they like, unless somebody interrupts them. Who was to have a rank
        and never took it has nothing left to do.
        """
        for script in self._placed:
            if script not in self._holders.values() and script.poll() is None:
                script.kill()
        while running := [one for one in self._placed if one.poll() is None]:
            if is_interrupted():
                return INTERRUPTED
            self.show()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(POLL_S)
        self.show(everything=True)
        codes = {rank: self._holders[rank].wait() for rank in sorted(self._holders)}
        wrong = [f"rank {rank} {_how_it_ended(code)}" for rank, code in codes.items() if code]
        return " and ".join(wrong)


def _how_it_ended(code: int) -> str:
    if code == EXIT_REFUSED:
        return "has raised an exception"
    return f"was killed by {name_of_signal(-code)}" if code < 0 else f"ended with code {code}"


def run_script(command: Sequence[str]) -> None:
    """What a script's process does: the same as `python script.py`."""
    path, *arguments = command
    collect_rarely()  # until its first batch
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")
    with contextlib.suppress(OSError, ValueError):  # the script may have closed it
        sys.stdout.flush()


def job_of(declared: Declaration, *, own_data: bool = True) -> dict[str, Any]:
    """The configuration of a script's job: what was set, and what it has declared.

    own_data: whether its samples are its own business, and not those that `data` names.
    """
    script = {"parameters": declared.parameters, "ids": declared.ids}
    job = {
        **declared.config,
        "tables": declared.tables,
        "steps": declared.steps,
        "batch": declared.batch,
        "script": {**declared.config["script"], **script},
    }
    if own_data:
        job["data"] = {**declared.config["data"], "source": "script", "path": None}
    return job


def environment_of(config: Config, settings: Settings) -> dict[str, str]:
    """As torchrun does it: several trainers share this machine."""
    inherited = {name: value for name, value in os.environ.items() if name != HOME}
    return {
        **inherited,
        **environment(config),
        SETTINGS: msgspec.json.encode(settings).decode(),
    }
