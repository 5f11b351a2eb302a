"""What the processes of a job do, and when, in one file that a browser shows: ui.perfetto.dev, or
chrome://tracing.

All clocks are one: the kernel's, which starts with the machine. So nothing has to be aligned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import Exited, JobEvent, Struck, Watcher
from planaria.cluster.files import JobFiles
from planaria.cluster.injecting import KILLED
from planaria.cluster.tracing import ANY, Span
from planaria.control.children import Failure
from planaria.errors import ClusterError
from planaria.files import write_atomically
from planaria.wire.control import Rebuilt, Viewed
from planaria.wire.messages import Member


class Trace(Watcher):
    """The supervisor's side: gathers what the processes wrote, and adds what happened to them.

    `window`: from which step on, and up to which.
    """

    def __init__(self, first: int, steps: int, *, until_whole: bool = False) -> None:
        """until_whole: before its last step the job waits until killed servers are whole again, so
        that all of a recovery is seen, however fast steps are.
        """
        self.window = (first, first + steps)
        self._pause = max(first, first + steps - 2) if until_whole else 0
        self._killed: set[Member] = set()  # servers, and still in the view
        self._rebuilding: set[int] = set()
        self._spans: dict[Member, list[Span]] = {}
        self._moments: list[tuple[float, Member, str]] = []

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        match event.what:
            case Struck(who=who, how=how):
                said = how
                if how == KILLED and who.startswith("server"):
                    self._killed.add(event.member)
            case Exited():
                said = f"ended with {event.what.code}"
            case Failure():
                said = "is gone"
            case Viewed():
                said = f"view, committed step {event.what.committed}"
                self._killed &= {*event.what.servers}
                self._rebuilding = {*event.what.rebuilding}
            case Rebuilt():
                said = "whole again"
                self._rebuilding.discard(event.what.place)
            case _:
                return
        self._moments.append((event.at, event.member or "supervisor", said))

    def on_tick(self, now: float, processes: Attempt) -> None:
        if processes.step >= self._pause and not self._killed and not self._rebuilding:
            self._pause = 0

    def pauses_after(self) -> int:
        return self._pause

    def gather(self, files: JobFiles) -> None:
        """Before the folder goes. The last line of one that was killed may not be whole."""
        for path in sorted(files.folder.glob("*.trace")):
            spans = self._spans.setdefault(path.stem, [])
            for line in path.read_bytes().splitlines():
                try:
                    spans.append(msgspec.json.decode(line, type=Span))
                except msgspec.MsgspecError:
                    break

    @property
    def spans(self) -> int:
        return sum(map(len, self._spans.values()))

    @property
    def members(self) -> int:
        return sum(map(bool, self._spans.values()))

    def write(self, path: Path) -> None:
        """As Chrome's trace events; ClusterError if there is nothing, or no room for it."""
        stepped = [span for spans in self._spans.values() for span in spans if span.step != ANY]
        if not stepped:
            raise ClusterError(
                f"nothing was traced: the job has ended before step {self.window[0]}"
            )
        first_us = min(span.began_ns for span in stepped) / 1000
        last_us = max(span.began_ns + span.took_ns for span in stepped) / 1000
        events: list[dict[str, Any]] = []
        numbers = {member: number for number, member in enumerate(sorted(self._spans), 1)}
        for member, number in numbers.items():
            events.append(_named("process_name", number, 0, member))
            threads = {span.thread: 0 for span in self._spans[member]}
            for at, thread in enumerate(sorted(threads), 1):
                threads[thread] = at
                events.append(_named("thread_name", number, at, thread))
            events += [
                {
                    "name": span.name,
                    "ph": "X",
                    "ts": span.began_ns / 1000 - first_us,
                    "dur": span.took_ns / 1000,
                    "pid": number,
                    "tid": threads[span.thread],
                    "args": {"step": span.step},
                }
                for span in self._spans[member]
                if first_us <= span.began_ns / 1000 <= last_us
            ]
        for at_s, member, said in self._moments:
            if first_us <= at_s * 1e6 <= last_us:
                where = {"pid": numbers.get(member, 0), "tid": 0, "s": "g"}
                when = {"ph": "i", "ts": at_s * 1e6 - first_us}
                events.append({"name": f"{member}: {said}", **when, **where})
        content = {"traceEvents": events, "displayTimeUnit": "ms"}
        try:
            write_atomically(path.resolve(), msgspec.json.encode(content))
        except OSError as error:
            raise ClusterError(f"the trace could not be written: {error}") from None


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
