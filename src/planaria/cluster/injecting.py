"""Faults on purpose: kills and freezes at the steps that a schedule names."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, RolledBack, Struck, Watcher
from planaria.schedule import Fault, Freeze
from planaria.wire.control import StepDone, Viewed
from planaria.wire.messages import Member

KILLED = "killed"


class Injector(Watcher):
    """An observer that strikes, right after the steps that the schedule names: the job waits there
    for it. hold: while it says so, what is due waits, and the job goes on.
    """

    def __init__(self, schedule: Sequence[Fault], hold: Callable[[], bool] | None = None) -> None:
        self.pending = sorted(schedule, key=lambda fault: fault.step)
        self.done: list[tuple[Fault, int]] = []  # and the step at which it was done
        self._hold = hold
        self._wakes: list[tuple[float, Member]] = []

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if isinstance(event.what, RolledBack):
            self._wakes.clear()
        if isinstance(event.what, StepDone | Viewed):
            step = processes.step
            if isinstance(event.what, Viewed):  # who was to tell of a step may be gone
                step = max(step, event.what.committed)
            while self.pending and self.pending[0].step <= step and not self._holds():
                self._strike(self.pending.pop(0), event.at, processes)

    def _holds(self) -> bool:
        return self._hold is not None and self._hold()

    def pauses_after(self) -> int:
        return self.pending[0].step if self.pending and self._hold is None else 0

    def on_tick(self, now: float, processes: Attempt) -> None:
        for at, member in list(self._wakes):
            if now >= at:
                self._wakes.remove((at, member))
                processes.signal(member, signal.SIGCONT)

    def _strike(self, fault: Fault, now: float, processes: Attempt) -> None:
        member = processes.member_of(fault.role, fault.number or 0)
        if member is None:
            processes.note(f"{fault.who} is not there to be disturbed")
            return
        frozen = isinstance(fault, Freeze)
        how = f"frozen for {fault.seconds:g} s" if isinstance(fault, Freeze) else KILLED
        processes.signal(member, signal.SIGSTOP if frozen else signal.SIGKILL)
        if isinstance(fault, Freeze):
            self._wakes.append((now + fault.seconds, member))
        self.done.append((fault, processes.step))
        number = None if fault.role in ("coordinator", "spare") else fault.number
        processes.emit(member, Struck(fault.who, number, fault.step, how))
