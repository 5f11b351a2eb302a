"""What a process does, and when.

Each process of a traced job wraps those of its methods that are worth seeing, and writes down when
they ran, line by line, so that one that is killed has said what it did until then. Who is not
traced has nothing of this in its way. cluster/trace.py makes one file of what all have written.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from planaria.cluster.files import JobFiles
from planaria.cluster.transport import Transport
from planaria.wire.machine import Machine
from planaria.wire.messages import Member

Name: TypeAlias = str | Callable[..., str]
"""Of a span; or what gives it, from what the method is called with."""


class Span(msgspec.Struct, array_like=True):
    name: str
    thread: str
    began_ns: int
    took_ns: int
    step: int  # ANY: of none, or of one that is not known here


ANY = -1


class Tracer:
    """Of one process. `window`: the steps in which it writes; `step`: the one that it is at."""

    def __init__(self, files: JobFiles, member: Member, step: Callable[[], int]) -> None:
        self.window = range(*files.beginning().trace)
        self._step = step
        self._file: int | None = None  # open until the process ends
        if self.window:
            self._file = os.open(files.trace(member), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def watch(
        self, owner: object, method: str, name: Name, after: Callable[[], None] | None = None
    ) -> None:
        """From now on, when this method of this object has run is written down; `after`: then."""
        if self._file is None:
            return
        original = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            began_ns = time.monotonic_ns()
            found = original(*args, **options)
            self._note(name if isinstance(name, str) else name(*args), began_ns)
            if after is not None:
                after()
            return found

        setattr(owner, method, timed)

    def between(self, owner: object, first: str, then: str, name: str) -> None:
        """The time from the end of one method to the beginning of another."""
        if self._file is None:
            return
        since = [0]
        begins, ends = getattr(owner, first), getattr(owner, then)

        def begin(*args: Any, **options: Any) -> Any:
            found = begins(*args, **options)
            since[0] = time.monotonic_ns()
            return found

        def end(*args: Any, **options: Any) -> Any:
            if since[0]:
                self._note(name, since[0])
                since[0] = 0
            return ends(*args, **options)

        setattr(owner, first, begin)
        setattr(owner, then, end)

    def _note(self, name: str, began_ns: int) -> None:
        step = self._step()
        if self._file is not None and (step in self.window or step == ANY):
            took_ns = time.monotonic_ns() - began_ns
            span = Span(name, threading.current_thread().name, began_ns, took_ns, step)
            try:
                os.write(self._file, msgspec.json.encode(span) + b"\n")
            except OSError:  # no room: the job matters more
                self._file = None


def trace_member(tracer: Tracer, transport: Transport, machine: Machine) -> None:
    """What servers and trainers have in common."""
    tracer.watch(transport, "poll", "wait")
    tracer.watch(transport, "send_all", "send")
    tracer.watch(machine, "on_message", lambda sender, message: type(message).__name__)
    tracer.watch(machine, "_prepare", "prepare")
    tracer.watch(machine, "on_install", "install")
