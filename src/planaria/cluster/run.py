"""One run of a job on this machine: sets of processes, one after the other where all roll back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from planaria.checkpoints import Lease, new_job_id
from planaria.cluster import preflight
from planaria.cluster.archive import Archive, newest_of, way_back
from planaria.cluster.attempt import Attempt
from planaria.cluster.deciding import settle
from planaria.cluster.events import JobEvent, Observer, RolledBack, StopAsked, Watcher
from planaria.cluster.facts import Facts
from planaria.cluster.files import ANY_JOB, Beginning, home
from planaria.cluster.hosts import Hosts
from planaria.cluster.injecting import Injector
from planaria.cluster.lookups import settle_lookups
from planaria.cluster.reporting import Observe, Progress, Reporter, counted
from planaria.cluster.resuming import FROM_THE_BEGINNING, Resumption
from planaria.cluster.scripts import INTERRUPTED, Scripts
from planaria.cluster.trace import Trace
from planaria.cluster.transport import raise_descriptor_limit
from planaria.config import Config, check_required, describe_protection
from planaria.control.losses import Losses
from planaria.control.rolling_back import RollBackMachine
from planaria.control.saving import SaveMachine
from planaria.data import CriteoFile
from planaria.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Interrupted,
    LossError,
    PlanariaError,
)
from planaria.exactness import Fingerprint
from planaria.schedule import Fault
from planaria.strategies import CHECKPOINT

NOTHING_SAVED = (
    "; nothing was saved: a job bears this with more parity, or with checkpoint.path and "
    "checkpoint.every_steps"
)
POLL_S = 0.01


def check_data(config: Config) -> None:
    """Whether the built-in model can be trained: its tables, and a first sample."""
    if not config.is_built_in:
        return
    if not config.trainer.device.startswith("cpu"):
        raise ConfigError(
            f"trainer.device: the built-in model computes on the CPU; for {config.trainer.device}, "
            "train a model of your own with planaria run"
        )
    if len(config.arenas) > 1:
        raise ConfigError(
            f"tables: the built-in model has tables of one dim and one optimizer, but these need "
            f"{len(config.arenas)}; make them alike, or train a model of your own"
        )
    if config.data.source == "criteo":
        assert config.data.path is not None
        with CriteoFile(config.data.path, config.model.table_rows) as file:
            if not len(file.read(0, 1)):
                raise DataError(f"data.path: {config.data.path} is empty")


class JobRun:
    """A job from start to end. `run` returns the report, or raises what stopped the job."""

    def __init__(
        self,
        config: Config,
        schedule: Sequence[Fault] = (),
        observe: Observe = lambda line, progress: None,
        start: Resumption = FROM_THE_BEGINNING,
        observers: Sequence[Observer] = (),
        injector: Injector | None = None,
        scripts: Scripts | None = None,
        trace: Trace | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """start: where the job begins, as planaria.cluster.resuming finds it. injector: what to
        strike with, instead of what follows the schedule. scripts: the trainers, where they run a
        user's. trace: what to fill with what the processes do. hosts: where they run, if not here.
        """
        self.scripts = scripts
        self.hosts = hosts
        self.strategy = config.strategy
        check_data(config)
        config, self.decision = settle(config)
        away = hosts is not None
        config, self.lookups = settle_lookups(config, start.wire, many_machines=away)
        check_required(config)
        self.losses = Losses(config, start.pls, start.pls_updates)
        if config.survival.partial and self.losses.passes_budget():
            config = replace(config, strategy=CHECKPOINT.name)
            self.decision = "the lost samples have passed the budget: at a failure all roll back"
        self.config = config
        self.start = start
        self.job = start.job if start.restores else new_job_id()
        self.reporter = Reporter(config, observe, start.step)
        self.injector = injector or Injector(schedule)
        self.trace = trace
        watchers = [*observers] if trace is None else [*observers, trace]
        self.observers: list[Observer] = [self.reporter, self.injector, *watchers]
        self.saves = SaveMachine(config, start.step, time.monotonic())
        self.saves.extra.update(self.losses.to_save())
        self._interrupted = 0
        self.scripts_wrong = ""  # with how the scripts have ended
        self._fingerprint: Fingerprint | None = start.fingerprint

    @property
    def progress(self) -> Progress:
        return self.reporter.progress

    def run(self) -> dict[str, Any]:
        try:
            return self._run()
        except ConfigError:  # nothing was started
            raise
        except PlanariaError as error:
            # Whatever ended the job, and wherever: the way back is named here, once for all.
            back = self.way_back()
            if isinstance(error, LossError):
                back = back or NOTHING_SAVED
            error.args = (f"{error}{back}",)
            raise

    def _run(self) -> dict[str, Any]:
        say = self.reporter.say
        raise_descriptor_limit()
        folder = home() / "jobs" / ANY_JOB
        facts = None if self.hosts is None else Facts()  # what other machines have is not known
        fits = preflight.check(self.config, self.start.bytes, folder=folder, facts=facts)
        for note in (*fits, *self.start.notes, self.decision, self.lookups):
            if note:
                say(note)
        say(describe_protection(self.config))
        with self._signals(), self._archive() as archive:
            window = self.trace.window if self.trace else (0, 0)
            beginning = Beginning(self.job, self.start.step, self.start.imported, trace=window)
            rolling_back = RollBackMachine(self.config.survival, beginning.step)
            while failure := self._run_processes(beginning, archive):
                beginning = self._roll_back(rolling_back, failure, archive)
            self._close(archive)
        if self.scripts_wrong == INTERRUPTED:
            raise Interrupted(f"{INTERRUPTED} after the last step: the scripts were stopped")
        return self.report()

    def way_back(self) -> str:
        """The end of a sentence that says what was lost."""
        return way_back(self.config, self.job, self.saves.newest())

    def report(self) -> dict[str, Any]:
        return {**self.reporter.result(), **self._what_happened(self.config.steps)}

    def report_failure(self, error: Exception) -> dict[str, Any]:
        """Of a job that could not go on: why, and how far it came."""
        steps = max(self.reporter.committed, self.saves.newest())
        return {"failed": str(error), **self._what_happened(steps)}

    def interrupt(self) -> None:
        """The job is to end: its current step is saved first, where it saves at all."""
        self._interrupted += 1

    # ------------------------------------------------------------------ inside

    def _run_processes(self, beginning: Beginning, archive: Archive | None) -> str | None:
        """From the start to the end, or to a loss that the survivors cannot make good: which."""
        config = self.config
        attempt = Attempt(
            config,
            beginning,
            self.saves,
            archive,
            self.losses,
            [*self.observers, _Interrupts(self)],
            self._fingerprint,
            self.scripts,
            self.hosts,
        )
        self._processes = attempt
        with attempt:
            self.reporter.say(
                f"{counted(config.servers, 'server')}, {counted(config.spares, 'spare')} and "
                f"{counted(config.trainers, 'trainer')} start; the job's folder is {attempt.folder}"
            )
            verdict = attempt.run()
            if self.trace is not None:
                self.trace.gather(attempt.files)
            self.config = self.reporter.config = attempt.config  # a script may end before its time
            if verdict.sentence is None:
                self.scripts_wrong = attempt.launcher.see_out(lambda: self._interrupted > 0)
        self._fingerprint = attempt.fingerprint
        if verdict.sentence is None or verdict.lost:
            return verdict.sentence
        self._close(archive, goes_on=True)
        if verdict.sentence.startswith(INTERRUPTED):
            raise Interrupted(verdict.sentence)
        raise ClusterError(verdict.sentence + attempt.files.where_logs_are())

    def _wait_for_hosts(self) -> None:
        """Until there is room again, but for spares: who has lost machines goes on without."""
        if self.hosts is None:
            return
        needs = {"server": self.config.servers, "trainer": self.config.trainers}
        self.hosts.wait_for(needs, self.reporter.say, lambda: self._interrupted > 0)
        if self._interrupted:
            raise Interrupted(f"{INTERRUPTED} before the processes were started again")

    def _roll_back(
        self, machine: RollBackMachine, failure: str, archive: Archive | None
    ) -> Beginning:
        """Everybody starts again from the newest whole checkpoint, if the strategy has one."""
        now, lost_at = time.monotonic(), self.progress.step
        self._close(archive, goes_on=True)
        try:
            newest = newest_of(self.config, self.job) if archive else None
        except CheckpointError as error:
            raise LossError(f"{failure}; {error}") from None
        back = machine.on_lost(lost_at, newest[0] if newest else None)
        # The beginning of a job that was imported is a checkpoint, too.
        if back is None or (back == 0 and self.start.imported and newest is None):
            raise LossError(failure + self._processes.files.where_logs_are())
        if self.losses.over_budget:
            self.config = replace(self.config, strategy=CHECKPOINT.name)
        self.saves = self.saves.after_rollback(self.config, back, now)
        self._processes.emit("", RolledBack(lost_at, back, failure))
        self._wait_for_hosts()
        window = self.trace.window if self.trace else (0, 0)
        return Beginning(self.job, back, self.start.imported and back == 0, trace=window)

    def unsaved(self, report: dict[str, Any]) -> str:
        """Why the trained model is not where it should be, though the job is done; "" if it is."""
        steps = self.config.steps
        if not self.config.saves_last_step or self.start.step >= steps:
            return ""
        saves = [save for save in report["checkpoints"] if save["step"] == steps]
        if any("failed" not in save for save in saves):
            return ""
        why = saves[-1]["failed"] if saves else "nobody told of it"
        return f"the trained model was not saved: {why}{self.way_back()}"

    def _close(self, archive: Archive | None, *, goes_on: bool = False) -> None:
        """What is being published is waited for; what is not whole now never will be."""
        now = time.monotonic()
        deadline = now + self.config.checkpoint.stall_s
        self.saves.close(now, goes_on=goes_on)
        while archive and time.monotonic() < deadline:
            for work in self.saves.take_work():
                archive.submit(work)
            archive.report_to(self.saves, self.reporter.say)
            if not self.saves.busy:
                break
            time.sleep(POLL_S)
        if self.saves.busy:
            stall_s = self.config.checkpoint.stall_s
            self.saves.give_up_publishing(
                f"it was not published within {stall_s:.0f} s (checkpoint.stall_s)"
            )
        for line in self.saves.notes:
            self.reporter.say(line)
        self.saves.notes.clear()

    @contextlib.contextmanager
    def _archive(self) -> Iterator[Archive | None]:
        """The folder of checkpoints, which is this job's alone meanwhile."""
        if self.config.checkpoint.path is None:
            yield None
            return
        with contextlib.ExitStack() as stack:
            owner = f"process {os.getpid()} on {socket.gethostname()}"
            lease = Lease(self.config.checkpoint.path, self.job, owner=owner)
            lease.acquire(time.monotonic())
            stack.callback(_give_back, lease)
            archive = Archive(self.config, self.job, lease)
            stack.callback(archive.close)
            yield archive

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, and whatever else raises KeyboardInterrupt, is a request; twice, an order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.interrupt()
            if self._interrupted > 1:
                raise KeyboardInterrupt

        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is signal.default_int_handler
        ]
        of_children = signal.getsignal(signal.SIGCHLD)
        if of_children is signal.SIG_IGN:  # as inherited: then nobody is told how a process ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in numbers:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, of_children)
            for number in numbers:
                signal.signal(number, signal.default_int_handler)

    def _what_happened(self, steps: int) -> dict[str, Any]:
        return {
            **self.reporter.what_happened(steps),
            "strategy": self.strategy,
            "decision": self.decision,
            "resumed_from": self.start.step if self.start.restores else None,
            "pls": self.losses.pls,
            "pls_updates": self.losses.pls_updates,
            "reloads": self.losses.reloads,
            "checkpoints": self.saves.published,
        }


def _give_back(lease: Lease) -> None:
    """What cannot be given back is taken over, for this process ends: no failure of the job."""
    with contextlib.suppress(CheckpointError):
        lease.release()


class _Interrupts(Watcher):
    """Passes a request to end on to the processes."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._passed_on = False

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        # It may be asked more than once, where its answer is late; that is no order to hurry.
        if isinstance(event.what, StopAsked) and not self._run._interrupted:
            self._run.interrupt()

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self._run._interrupted and not self._passed_on:
            self._passed_on = True
            processes.leave(INTERRUPTED)
