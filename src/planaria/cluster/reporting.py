"""What a job came to: lines while it runs, and in the end the report of docs/report.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Note, RolledBack, Struck, Watcher
from planaria.config import Config
from planaria.control.children import Child, Failure
from planaria.data.metrics import Evaluation
from planaria.errors import ClusterError
from planaria.layout.resizing import Resize
from planaria.server.digest import Digest
from planaria.wire.control import (
    HeldOut,
    Ready,
    Rebuilding,
    Rebuilt,
    Refused,
    Reloaded,
    ScrubFound,
    ServerHolds,
    Short,
    StepDone,
    TrainerHolds,
    Viewed,
    Working,
)
from planaria.wire.messages import NO_VIEW, Member, Shift

CURVE_POINTS = 1000  # of the loss curve in the report
STEPS_KEPT = 100_000  # whose times are known
START_SAID_S = 1.0  # between two words on who is waited for before the first step


@dataclass
class Disturbance:
    """One failure and what it cost. Times are milliseconds after it struck, or was noticed."""

    who: str
    step: int
    reason: str
    on_purpose: bool
    at: float
    detected_ms: float | None = None
    gap_ms: float | None = None
    rebuilt_ms: float | None = None
    rows_rebuilt: int = 0
    bytes_rebuilt: int = 0
    samples_per_s_during: float | None = None
    member: Member = ""
    view_at: float | None = None
    place: int | None = None


@dataclass
class Progress:
    """Where a run is: what a display shows."""

    step: int = 0
    loss: float = float("nan")
    auc: float | None = None  # of the last samples, before they were learnt
    normalized_entropy: float | None = None
    step_at: list[tuple[int, float]] = field(default_factory=list)
    servers: list[Member] = field(default_factory=list)
    trainers: list[Member] = field(default_factory=list)
    rebuilding: dict[int, Rebuilding] = field(default_factory=dict)  # by place
    failures: list[Disturbance] = field(default_factory=list)
    working: str = ""  # a long piece of work before or after training
    waiting_for: str = ""  # before the first step of a set of processes: who is not ready
    saved: int = 0  # the newest checkpoint


Observe = Callable[[str, Progress], None]
"""Called with a line worth showing, or an empty one when only numbers changed."""


class Reporter(Watcher):
    def __init__(self, config: Config, observe: Observe, start: int) -> None:
        self.config = config
        self.progress = Progress(step=start)
        self.rollbacks: list[dict[str, int]] = []
        self.scrubs: dict[int, int] = {}  # round -> wrong records
        self.scrubbed_records = 0
        self.servers: dict[Member, ServerHolds] = {}
        self.trainers: dict[Member, TrainerHolds] = {}
        self.shifts: list[Shift] = []
        self.held_out: dict[int, dict[int, HeldOut]] = {}  # by rank and first sample
        self.curve: list[tuple[int, float]] = []
        self.committed = start  # the last step that every server is known to have
        self.rolled_back_at = 0.0
        self._view, self._resizes, self._moves = NO_VIEW, 0, False  # of a set of processes
        self._starting = True  # until the first step of one
        self._start_said_at = 0.0
        self._observe = observe

    def say(self, line: str = "") -> None:
        self._observe(line, self.progress)

    # ------------------------------------------------------------------ events

    def on_tick(self, now: float, processes: Attempt) -> None:
        self.progress.saved = processes.saves.newest()
        if self._starting and now - self._start_said_at >= START_SAID_S:
            # Nothing may happen for long that would be worth a word.
            self._start_said_at = now
            self.progress.waiting_for = waiting_for(processes.machine.children.values())
            self.say()

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        what, progress = event.what, self.progress
        match what:
            case StepDone():
                self._on_step(what, event.at)
            case Viewed():
                self._on_view(what, event.at)
            case Struck():
                self._on_struck(event.member, what, event.at)
            case Failure():
                self._on_failure(what, event.at)
            case Rebuilding():
                progress.rebuilding[what.place] = what
                self.say()
            case Rebuilt() | Reloaded():
                self._on_rebuilt(what, event.at)
            case ServerHolds():
                self.servers[event.member] = what
            case TrainerHolds():
                self.trainers[event.member] = what
                self.committed = self.config.steps  # it is told after the last one
            case HeldOut():
                self.held_out.setdefault(what.rank, {})[what.first] = what
            case Short():
                self.say(
                    f"{event.member} found {what.samples} of {what.wanted} samples behind those of "
                    "the job: the model is judged by fewer than data.test_samples"
                )
            case ScrubFound():
                self._on_scrubbed(what)
            case Refused() if not what.ends:
                self.say(f"{event.member} refused a message: {what.what}")
            case Ready():
                progress.working = ""
            case Working():
                progress.working = f"{event.member}: {what.what}"
                self.say()
            case Note():
                self.say(what.line)
            case RolledBack():
                self._on_rolled_back(what, event.at)

    def _on_step(self, done: StepDone, at: float) -> None:
        # It was computed with rows of every server as of the step before.
        self.committed = max(self.committed, done.step - 1)
        if done.rank != 0:
            return
        progress = self.progress
        self._starting = False
        progress.step = done.step
        progress.loss = float("nan") if done.loss is None else done.loss
        progress.working = progress.waiting_for = ""
        if done.auc is not None:
            progress.auc, progress.normalized_entropy = done.auc, done.normalized_entropy
        progress.step_at.append((done.step, at))
        if len(progress.step_at) > 2 * STEPS_KEPT:
            del progress.step_at[:STEPS_KEPT]
        if done.loss is not None:
            self.curve.append((done.step, done.loss))
        if len(self.curve) > 2 * CURVE_POINTS:
            del self.curve[1::2]  # every second, so that it stays a curve of the whole run
        for failure in progress.failures:
            since = failure.at if failure.who == "coordinator" else failure.view_at
            if failure.gap_ms is None and since is not None and at > since:
                failure.gap_ms = (at - failure.at) * 1000
        self.say()

    def _on_view(self, viewed: Viewed, at: float) -> None:
        if viewed.view <= self._view:
            return  # a new coordinator tells of the last one again
        self._view = viewed.view
        progress = self.progress
        first = not progress.servers
        self.committed = viewed.committed
        progress.servers, progress.trainers = viewed.servers, viewed.trainers
        for shift in viewed.shifts[len(self.shifts) :]:
            self.shifts.append(shift)
            self.say(f"from step {shift.after + 1} on, {counted(shift.trainers, 'trainer')}")
        for resize in viewed.resizes[self._resizes :]:
            self._on_resized(resize, at)
            self.say(f"from step {viewed.committed + 1} on, {counted(resize.servers, 'server')}")
        if viewed.moving is not None and not self._moves:
            self.say(f"records move, to {counted(viewed.moving.servers, 'server')}")
        self._resizes, self._moves = len(viewed.resizes), viewed.moving is not None
        members = {*viewed.servers, *viewed.trainers}
        for failure in progress.failures:
            if failure.view_at is None and failure.member not in members:
                failure.view_at = at
        if not first:
            self.say(
                f"view {tuple(viewed.view)}: committed step {viewed.committed}, "
                f"rebuilding {viewed.rebuilding or 'nothing'}"
            )

    def _on_struck(self, member: Member, struck: Struck, at: float) -> None:
        if struck.who.startswith("spare"):
            self.say(f"{struck.who} {struck.how} at step {struck.step}")
            return
        place = struck.number if struck.who.startswith("server") else None
        self.progress.failures.append(
            Disturbance(struck.who, struck.step, struck.how, True, at, member=member, place=place)
        )
        self.say(f"{struck.who} {struck.how} at step {struck.step}")

    def _on_failure(self, failure: Failure, at: float) -> None:
        """Whoever struck: the same lines, the same report."""
        known = [one for one in self.progress.failures if one.member == failure.member]
        if not known:
            place = failure.number if failure.role == "server" else None
            one = Disturbance(
                failure.who, failure.step, failure.reason, False, at, member=failure.member
            )
            one.place = place
            self.progress.failures.append(one)
            known = [one]
        for one in known:
            if one.detected_ms is None:
                one.detected_ms = (at - one.at) * 1000
        self.say(f"{failure.who} ({failure.member}) is gone: {failure.reason}")

    def _on_rebuilt(self, rebuilt: Rebuilt | Reloaded, at: float) -> None:
        self.progress.rebuilding.pop(rebuilt.place, None)
        lost = [
            failure
            for failure in self.progress.failures
            if failure.place == rebuilt.place and failure.rebuilt_ms is None
        ]
        for failure in lost:
            failure.rebuilt_ms = (at - failure.at) * 1000
            failure.rows_rebuilt, failure.bytes_rebuilt = rebuilt.rows, rebuilt.bytes
        if lost:  # and whoever replaced it meanwhile
            self.say(f"{lost[0].who} is whole again after {lost[0].rebuilt_ms:.0f} ms")

    def _on_resized(self, resize: Resize, at: float) -> None:
        """Whoever was lost is not rebuilt, where the others have taken over what it held."""
        for failure in self.progress.failures if resize.lost else ():
            if failure.place is not None and failure.place not in resize.stay:
                if failure.rebuilt_ms is None:
                    failure.rebuilt_ms = (at - failure.at) * 1000
                    self.say(
                        f"the others have what {failure.who} held after {failure.rebuilt_ms:.0f} ms"
                    )

    def _on_scrubbed(self, found: ScrubFound) -> None:
        self.scrubs[found.round] = self.scrubs.get(found.round, 0) + found.wrong
        self.scrubbed_records += found.records
        if found.wrong:
            self.say(
                f"SCRUB: {found.wrong} parity records of server:{found.place} do not match their "
                "data"
            )

    def _on_rolled_back(self, back: RolledBack, at: float) -> None:
        self.say(f"{back.why}; all roll back from step {back.from_step} to {back.to_step}")
        self.rollbacks.append({"from_step": back.from_step, "to_step": back.to_step})
        self.rolled_back_at, progress = at, self.progress
        for failure in progress.failures:
            if failure.gap_ms is None:
                failure.view_at = at  # the next step is one of the new processes
        progress.step = back.to_step
        self.committed, self._starting = back.to_step, True
        self._view, self._resizes, self._moves = NO_VIEW, 0, False
        progress.servers, progress.trainers, progress.rebuilding = [], [], {}
        self.curve = [point for point in self.curve if point[0] <= back.to_step]
        for ended in (self.servers, self.trainers, self.held_out):
            ended.clear()

    # ------------------------------------------------------------------ the report

    def result(self) -> dict[str, Any]:
        """Of a job that was done: the digest of its model, and how good it is."""
        progress, config = self.progress, self.config
        untold = [name for name in progress.servers if name not in self.servers]
        untold += [name for name in progress.trainers if name not in self.trainers]
        if untold or not progress.trainers:
            named = ", ".join(untold) or "every process"
            raise ClusterError(
                f"all steps are done, but {named} ended before it could tell what it holds: the "
                "digest is not known"
            )
        records = sum((_digest(self.servers[name]) for name in progress.servers), Digest())
        replica, *others = (_digest(self.trainers[name]) for name in progress.trainers)
        if any(other != replica for other in others):
            raise ClusterError(
                f"the replicas of the dense network differ: {', '.join(map(str, others))} are not "
                f"all {replica}"
            )
        position = Digest(config.steps * config.batch, 0)
        losses = [one.loss for one in self.trainers.values() if one.loss is not None]
        return {
            "digest": str(records + replica + position),
            **self._quality(),
            "loss": float(np.mean(losses)) if losses else None,
            "bytes_records": sum(one.data for one in self.servers.values()),
            "bytes_parity": sum(one.parity for one in self.servers.values()),
            "refused": sum(one.refused for one in self.servers.values()),
            "sent": self._sent(),
            "tiers": self._tiers(),
        }

    def _tiers(self) -> dict[str, float] | None:
        told = [one.tiers for one in self.servers.values() if one.tiers]
        return {name: sum(one[name] for one in told) for name in told[0]} if told else None

    def _sent(self) -> dict[str, dict[str, int]]:
        """By those who were there in the end."""
        total: dict[str, dict[str, int]] = {}
        by_process = [one.sent for one in self.servers.values()]
        by_process += [one.sent for one in self.trainers.values()]
        for sent in by_process:
            for kind, counts in sent.items():
                sums = total.setdefault(kind, {"messages": 0, "bytes": 0, "packed": 0})
                for name, count in zip(sums, counts, strict=True):
                    sums[name] += count
        return dict(sorted(total.items()))

    def what_happened(self, steps: int) -> dict[str, Any]:
        config, layout = self.config, self.config.layout
        return {
            "steps": steps,
            "samples": steps * config.batch,
            "samples_per_s": self._samples_per_s(),
            "servers": len(self.progress.servers) or config.servers,
            "k": layout.k,
            "parity": layout.r,
            "trainers": self.shifts[-1].trainers if self.shifts else config.trainers,
            "shifts": [list(shift) for shift in self.shifts],
            "scrubbed": {
                "rounds": len(self.scrubs),
                "records": self.scrubbed_records,
                "wrong": sum(self.scrubs.values()),
            },
            "failures": [self._failure(failure) for failure in self.progress.failures],
            "rollbacks": self.rollbacks,
            "loss_curve": self.curve,
            "config": config.to_dict(),
        }

    def _quality(self) -> dict[str, Any]:
        evaluation = Evaluation()
        for rank in sorted(self.held_out):
            for first in sorted(self.held_out[rank]):
                part = self.held_out[rank][first]
                evaluation.add(part.labels, part.logits)
        labels = evaluation.labels
        judged = len(labels) > 0 and labels.min() != labels.max()
        found = evaluation.measure() if judged else None
        return {
            "auc": found and found.auc,
            "normalized_entropy": found and found.normalized_entropy,
            "test_samples": len(evaluation),
        }

    def _samples_per_s(self, since: float = 0.0, until: float = float("inf")) -> float | None:
        """Steady state: without the first tenth of the steps, which start up and warm caches."""
        times = [at for _, at in self.progress.step_at]
        if since == 0.0:
            times = times[len(times) // 10 :]
        times = [at for at in times if since <= at <= until]
        if len(times) < 2 or times[-1] == times[0]:
            return None
        return (len(times) - 1) * self.config.batch / (times[-1] - times[0])

    def _failure(self, failure: Disturbance) -> dict[str, Any]:
        if failure.rebuilt_ms is not None:
            failure.samples_per_s_during = self._samples_per_s(
                failure.at, failure.at + failure.rebuilt_ms / 1000
            )
        facts = asdict(failure)
        for private in ("at", "member", "view_at", "place"):
            del facts[private]
        return facts


def waiting_for(children: Iterable[Child]) -> str:
    """Who keeps the first step waiting, in words. Spares do not."""
    children = list(children)
    missing = Counter(child.role for child in children if child.placed and not child.ready)
    if not any(child.role == "coordinator" and child.listening for child in children):
        return "waiting for the coordinator"
    named = [
        f"{count} {role}{'s' * (count > 1)}"
        for role in ("trainer", "server")
        if (count := missing[role])
    ]
    return f"waiting for {', '.join(named) or 'the first step'}"


def _digest(holds: ServerHolds | TrainerHolds) -> Digest:
    return Digest(*map(int, holds.digest))


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
