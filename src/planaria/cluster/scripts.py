"""Trainers that run a user's script: started before the job, and given their part in it later.

A script runs up to its first batch by itself, declares its tables there, and waits. Those that the
job starts with are given their ranks; the others are spares, ready to take over in a moment,
however long the script takes to get there. One that is missing is made by running it again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from planaria.cluster.accounts import is_stopped, name_of_signal
from planaria.cluster.files import HOME
from planaria.cluster.script import POLL_S, Script, ScriptProcess
from planaria.collecting import collect_rarely
from planaria.config import Config
from planaria.control.children import EXIT_REFUSED
from planaria.errors import ClusterError, ConfigError
from planaria.exactness import environment
from planaria.trainer.declaring import (
    SETTINGS,
    Assignment,
    Declaration,
    Refusal,
    Settings,
    difference,
)

WAITED_S = 5.0  # before it is said who is waited for
SPARE_AGAIN_S = 30.0  # before a spare that could not be started is tried again
SHOWN_LINES = 50  # of a script, before others have their turn
INTERRUPTED = "interrupted"
FINAL = "the traceback that ends the job"
SPARE = -1  # the RANK of a process that has none yet
# The script of `planaria train`, for models and data that a configuration names.
INCLUDED = Path(__file__).parents[1] / "models" / "named.py"

Say = Callable[[str], None]


class Scripts:
    """The processes of one command on one machine. Use it as a context manager; leaving it leaves
    none behind.
    """

    def __init__(
        self,
        command: Sequence[str],
        trainers: int,
        spares: int,
        environment: Mapping[str, str],
        say: Say,
        folder: Path | None = None,
    ) -> None:
        """command: the script and its arguments. folder: where they run, if this is one of several
        machines; then `seat` says which ranks are here.
        """
        self.command = command
        self.trainers = trainers
        self.spares = spares
        self.say = say
        self.declared: Declaration | None = None
        inherited = {name: value for name, value in os.environ.items() if name != HOME}
        self._environment = {**inherited, **environment}
        self._folder = folder
        self._first: list[ScriptProcess] = []  # that the job begins with
        self._waiting: list[ScriptProcess] = []  # without a part in the job so far
        self._placed: list[ScriptProcess] = []
        self._holders: dict[int, ScriptProcess] = {}  # of ranks: the last of those that had each
        self._ours = command[0] == str(INCLUDED)
        self._raised: set[str] = set()  # tracebacks that were shown; FINAL for the last one
        self._spare_at = 0.0  # when one may be started again

    def __enter__(self) -> Scripts:
        self.seat(range(self.trainers))
        for _ in range(self.spares):
            self._start_spare()
        return self

    def seat(self, ranks: Sequence[int]) -> None:
        """Starts those that the job begins with, each once."""
        for rank in ranks:
            if all(one.rank != rank for one in self._first):
                self._first.append(self._start(rank))

    def __exit__(self, *_: object) -> None:
        for script in [*self._waiting, *self._placed]:
            if script.poll() is None:
                script.kill()
            script.wait()
        self.show(everything=True)
        for script in [*self._waiting, *self._placed]:
            script.close()

    def _start(self, rank: int) -> ScriptProcess:
        local = None if rank == SPARE else self._local_rank()
        variables, folder = self._environment, self._folder
        script = Script(self.command, variables, rank, self.trainers, local, folder)
        self._waiting.append(script)
        return script

    def _local_rank(self) -> int | None:
        """One that nobody has on this machine; None where all ranks are on it."""
        if self._folder is None:
            return None
        alive = {one.local_rank for one in (*self._waiting, *self._placed) if one.poll() is None}
        return next(number for number in itertools.count() if number not in alive)

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
        self.declared = wait_for_all(self.look, self.trainers, self._ours, self.say)
        return self.declared

    def look(self) -> dict[int, Declaration]:
        """Of those that the job begins with, by rank: who has reached its first batch. It raises if
        one never will.
        """
        for script in self._first:
            if script.declared is None:
                script.look()
                if script.declared is None and script.poll() is not None:
                    self._give_up(script)
        self.show()
        return {one.rank: one.declared for one in self._first if one.declared is not None}

    def _give_up(self, script: ScriptProcess) -> None:
        code = script.wait()
        if script.raised and self._is_sentence(script):
            raise ConfigError(script.raised.rstrip())
        self.show(everything=True)
        if script.raised:
            raise ClusterError(f"{self.command[0]} has raised an exception before its first batch")
        what = how_it_ended(code) if code else "ended"
        raise ClusterError(
            f"rank {script.rank} of {self.command[0]} {what} before its first batch; a script "
            "trains in a loop over job.batches(...)"
        )

    # ------------------------------------------------------------------ during the job

    def place(self, assignment: Assignment, log: Path) -> ScriptProcess:
        """A process for this part: one that waits if there is any, or a new one."""
        script = self._choose(assignment.rank)
        self._waiting.remove(script)
        self._placed.append(script)
        if script.local_rank == SPARE and (local := self._local_rank()) is not None:
            script.local_rank = local
            assignment = msgspec.structs.replace(assignment, local_rank=local)
        script.give(assignment, log)
        if assignment.rank is not None:
            script.rank = assignment.rank
        return script

    def _choose(self, rank: int | None) -> ScriptProcess:
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
        spares = [one for one in self._waiting if one.rank == SPARE and not is_stopped(one.pid)]
        if len(spares) < self.spares:
            self._start_spare()
        self.show()

    def starting(self) -> list[int]:
        """By process number: who has a part in the job, and is on its way to its first batch."""
        return [one.pid for one in self._placed if one.declared is None and one.poll() is None]

    def _refuse_if_it_differs(self, script: ScriptProcess) -> None:
        if script.declared is not None and self.declared is not None:
            if differ := difference(self.declared, script.declared):
                why = f"this run of the script has other ideas than the first about {differ}"
                script.give(Refusal(why))

    def _is_lost(self, script: ScriptProcess) -> bool:
        if script.poll() is None:
            return False
        code = script.wait()
        self.spares = max(self.spares - 1, 0)  # the next one would end the same way
        self.say(f"a spare trainer {how_it_ended(code)} before it was needed")
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
        if trainers:  # who was retired has no rank any more
            self._holders = {r: one for r, one in self._holders.items() if r in trainers.values()}

    def show(self, *, everything: bool = False) -> None:
        """What they have printed: some of it, for there is other work, or all that is held."""
        scripts = [*self._waiting, *self._placed]
        for script in scripts:
            self._show_lines(script, len(script.lines) if everything else SHOWN_LINES)
        for script in scripts:
            if script.raised and script.poll() is not None and self._is_shown(script):
                self._show_traceback(script)

    def _show_traceback(self, script: ScriptProcess) -> None:
        """Once, however many ranks have raised it, or replacements: they are in their logs."""
        # Those that end the job are alike. One that did not must not hide them.
        key = FINAL if script.wait() == EXIT_REFUSED else script.raised
        if not self._is_sentence(script) and not self._raised & {key, script.raised}:
            self._raised |= {key, script.raised}
            self._show_lines(script, len(script.lines))
            self.say("\n".join(self._marked(script, line) for line in script.raised.splitlines()))

    def _is_shown(self, script: ScriptProcess) -> bool:
        """A spare that is not needed so far has nothing to say."""
        return script in self._placed or script.rank != SPARE

    def _is_sentence(self, script: ScriptProcess) -> bool:
        """What is no traceback is said by the command."""
        return "\n" not in script.raised.rstrip()

    def _show_lines(self, script: ScriptProcess, most: int) -> None:
        for _ in range(min(most, len(script.lines))):
            line = script.lines.popleft()
            if self._is_shown(script):
                self.say(self._marked(script, line))

    def _marked(self, script: ScriptProcess, line: str) -> str:
        return f"[rank {script.rank}] {line}" if self.trainers > 1 else line

    def see_out(self, is_interrupted: Callable[[], bool]) -> str:
        """The job is done: waits until the scripts have ended; what is wrong with how, if anything.

        They may take as long as they like, unless somebody interrupts them. Who was to have a rank
        and never took it, or was retired, has nothing left to do.
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
        wrong = [f"rank {rank} {how_it_ended(code)}" for rank, code in codes.items() if code]
        return " and ".join(wrong)


def wait_for_all(
    look: Callable[[], Mapping[int, Declaration]], trainers: int, ours: bool, say: Say
) -> Declaration:
    """Until all ranks have reached their first batch, wherever they are: what all declare.

    look: by rank, who has reached it. ours: whether the script is the one that is ours.
    """
    began = told = time.monotonic()
    while missing := range(trainers) - (found := look()).keys():
        if time.monotonic() - told > WAITED_S:
            told = time.monotonic()
            ranks = ", ".join(map(str, sorted(missing)))
            whose = "trainers'" if ours else "script's"
            waited = f"{told - began:.0f} s"
            say(f"waiting for the {whose} first batch, {waited} so far: rank {ranks}")
        time.sleep(POLL_S)
    for rank in range(1, trainers):
        if differ := difference(found[0], found[rank], begins=True):
            raise ClusterError(f"ranks 0 and {rank} of the script disagree about {differ}")
    return found[0]


def how_it_ended(code: int) -> str:
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
    """What a script's process has above the variables of its machine. As torchrun does it, several
    trainers share one.
    """
    return {**environment(config), SETTINGS: msgspec.json.encode(settings).decode()}
