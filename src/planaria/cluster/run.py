"""One run of a job on this machine: start, watch, disturb on schedule, and report."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from planaria.cluster.node import EXIT_FAILED, EXIT_FENCED, EXIT_REFUSED
from planaria.cluster.partial import Losses, settle
from planaria.cluster.resuming import FROM_THE_BEGINNING, Start, roll_back_to
from planaria.cluster.saves import Saves
from planaria.cluster.supervisor import Event, Supervisor
from planaria.config import Config
from planaria.data import CriteoFile, auc, normalized_entropy
from planaria.errors import ClusterError, DataError, LossError
from planaria.schedule import Event as Scheduled
from planaria.schedule import Freeze
from planaria.server.digest import Digest
from planaria.wire.messages import Member

POLL_S = 0.05
NOTHING_SAVED = (
    "; nothing was saved: a job bears this with more parity, or with checkpoint.path and "
    "checkpoint.every_steps"
)
RESTORED_BYTES_PER_S = 10_000_000  # the slowest storage that a checkpoint may be restored from


@dataclass
class Disturbance:
    """One failure and what it cost. Times are milliseconds after the kill."""

    who: str
    step: int
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
    rebuilding: dict[int, int] = field(default_factory=dict)  # place -> rows so far
    failures: list[Disturbance] = field(default_factory=list)


Observer = Callable[[str, Progress], None]
"""Called with a line worth showing, or an empty one when only numbers changed."""


def check_data(config: Config) -> None:
    """Whether there is a first sample, before anything is started."""
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
        schedule: Sequence[Scheduled] = (),
        observe: Observer = lambda line, progress: None,
        start: Start = FROM_THE_BEGINNING,
    ) -> None:
        """start: where the job begins, as planaria.cluster.resuming finds it."""
        self.strategy = config.strategy
        check_data(config)
        config, self.decision = settle(config)
        self.losses_of_rows = Losses(config, start.pls, start.pls_updates)
        if config.strategy == "cpr" and self.losses_of_rows.passes_budget():
            config = replace(config, strategy="checkpoint")
            self.decision = "the lost samples have passed the budget: at a failure all roll back"
        self.config = config
        self.start = start
        self.resumed_from = start.step or None
        self.pending = sorted(schedule, key=lambda item: item.step)
        self.observe = observe
        self.progress = Progress(step=start.step)
        self.saves = Saves(config, self._observe_save, start.step)
        self.saves.extra = self.losses_of_rows.to_save()
        self.digests: dict[str, Digest] = {}
        self.left: set[Member] = set()
        self.memory: dict[str, tuple[int, int]] = {}
        self.resident: dict[str, int] = {}
        self.evaluated: dict[int, tuple[list[int], list[float]]] = {}
        self.losses: dict[int, float] = {}
        self.failure: str | None = None
        self.shown_view: list[int] = []  # a new coordinator tells of the last one again
        self.rollbacks: list[dict[str, int]] = []
        self.scrubs: dict[int, int] = {}  # round -> wrong records
        self.scrubbed_records = 0
        self.wakes: list[tuple[float, Member]] = []
        self.last_progress = time.monotonic()

    def run(self) -> dict[str, Any]:
        for note in filter(None, (*self.start.notes, self.decision)):
            self.observe(note, self.progress)
        while self._attempt():
            self._roll_back()
        self.saves.close()
        return self.report()

    def _attempt(self) -> str | None:
        """From the start to the end, or to a loss that the survivors cannot make good: which."""
        config = self.config
        with Supervisor(config, self.start.step) as supervisor:
            self.observe(
                f"{config.servers} servers, {config.spares} spares and {config.ranks} trainers "
                f"start; the job's folder is {supervisor.folder}",
                self.progress,
            )
            while not self._over(supervisor):
                for event in supervisor.events(POLL_S):
                    self._on_event(supervisor, event)
                if order := self.saves.take_order():
                    supervisor.order_all(**order)
                self._wake_frozen(supervisor)
                self._check_deadline(supervisor)
        return self.failure

    def _roll_back(self) -> None:
        """Everybody starts again from the newest whole checkpoint, if the strategy has one."""
        assert self.failure
        config, lost_at = self.config, self.progress.step
        self.saves.close()
        start = roll_back_to(config)
        if start is None or lost_at == self.start.step:  # nothing, or not one step since it
            raise LossError(self.failure + (self.saves.way_back(self.start.step) or NOTHING_SAVED))
        self.observe(
            f"{self.failure}; all roll back from step {lost_at} to {start.step}", self.progress
        )
        self.rollbacks.append({"from_step": lost_at, "to_step": start.step})
        for failure in self.progress.failures:
            if failure.gap_ms is None:
                failure.view_at = time.monotonic()  # the next step is one of the new processes
        self.start, self.failure = start, None
        if self.losses_of_rows.over_budget:
            self.config = config = replace(config, strategy="checkpoint")
        self.saves = self.saves.after_rollback(config, start.step)
        self.progress.step = start.step
        self.progress.servers, self.progress.trainers, self.progress.rebuilding = [], [], {}
        self.last_progress = time.monotonic()
        for ended in (self.digests, self.memory, self.resident, self.evaluated, self.losses):
            ended.clear()
        self.left.clear()
        self.wakes.clear()

    def _observe_save(self, line: str) -> None:
        self.observe(line, self.progress)

    def _over(self, supervisor: Supervisor) -> bool:
        """Everybody told what it holds before the end; they may still be writing a checkpoint."""
        if not supervisor.finished:
            return False
        if self.failure:
            return True
        members = {*self.progress.servers, *self.progress.trainers}
        return not (members & supervisor.children.keys()) - self.left

    def _check_deadline(self, supervisor: Supervisor) -> None:
        quiet_s = time.monotonic() - self.last_progress
        limit_s = self.config.cluster.deadline_s + 30
        if not self.progress.servers:  # they read the checkpoint before they say a word
            limit_s += self.start.bytes / RESTORED_BYTES_PER_S
        if quiet_s > limit_s:
            raise ClusterError(
                f"nothing happened for {quiet_s:.0f} s at step {self.progress.step}; the processes "
                f"are {', '.join(supervisor.children)}"
            )

    # ------------------------------------------------------------------ events

    def _on_event(self, supervisor: Supervisor, event: Event) -> None:
        facts = event.facts
        match event.name:
            case "step":
                self._on_step(supervisor, event)
            case "view":
                self._on_view(event)
            case "exit":
                self._on_exit(supervisor, event)
            case "silent":
                self._detected(facts["member"], event.at)
                self.observe(f"{facts['member']} is silent", self.progress)
            case "rebuilding":
                self.progress.rebuilding[facts["place"]] = facts["rows"]
                self.last_progress = time.monotonic()
                self.observe("", self.progress)
            case "rebuilt":
                self._on_rebuilt(event)
            case "server done" | "trainer done":
                self.digests[event.member] = Digest(*map(int, facts["digest"]))
                if event.name == "server done":
                    self.memory[event.member] = (facts["data"], facts["parity"])
                    self.resident[event.member] = facts["resident"]
                elif facts["loss"] is not None:
                    self.losses[facts["rank"]] = facts["loss"]
            case "short":
                self.observe(
                    f"{event.member} found {facts['samples']} of {facts['wanted']} samples behind "
                    "those of the job: the model is judged by fewer than data.test_samples",
                    self.progress,
                )
            case "left":
                self.left.add(event.member)
            case "evaluated":
                self.evaluated[facts["rank"]] = (facts["labels"], facts["logits"])
            case "scrubbed":
                self.scrubs[facts["round"]] = self.scrubs.get(facts["round"], 0) + facts["wrong"]
                self.scrubbed_records += facts["records"]
                if facts["wrong"]:
                    self.observe(
                        f"SCRUB: {facts['wrong']} parity records of server:{facts['place']} do not "
                        "match their data",
                        self.progress,
                    )
            case "updates":
                self.losses_of_rows.on_updates(facts)
            case "reloaded":
                self._on_reloaded(supervisor, event)
            case "saved":
                self.saves.on_saved(facts)
            case "save failed":
                self.saves.on_failed(facts)
            case "finished":
                self.failure = facts["failure"]
            case "refused":
                self.observe(f"{event.member} refused a message: {facts['what']}", self.progress)

    def _on_step(self, supervisor: Supervisor, event: Event) -> None:
        progress = self.progress
        progress.step, progress.loss = event.facts["step"], event.facts["loss"]
        progress.auc = event.facts.get("auc", progress.auc)
        progress.normalized_entropy = event.facts.get(
            "normalized_entropy", progress.normalized_entropy
        )
        progress.step_at.append((progress.step, event.at))
        self.last_progress = time.monotonic()
        self.saves.on_step(progress.step, event.at)
        for failure in progress.failures:
            if failure.gap_ms is None and failure.view_at and event.at > failure.view_at:
                failure.gap_ms = (event.at - failure.at) * 1000
        while self.pending and self.pending[0].step <= progress.step:
            self._disturb(supervisor, self.pending.pop(0))
        self.observe("", progress)

    def _on_view(self, event: Event) -> None:
        progress = self.progress
        before = {*progress.servers, *progress.trainers}
        progress.servers, progress.trainers = event.facts["servers"], event.facts["trainers"]
        self.saves.on_lost(len(before - {*progress.servers, *progress.trainers}))
        if event.facts["view"] not in ([1, 1], self.shown_view):
            self.shown_view = event.facts["view"]
            for failure in progress.failures:
                if failure.view_at is None and failure.detected_ms is not None:
                    failure.view_at = event.at
            self.observe(
                f"view {tuple(event.facts['view'])}: committed step {event.facts['committed']}, "
                f"rebuilding {event.facts['rebuilding'] or 'nothing'}",
                progress,
            )
        # Later views are no progress: replacements may die one by one.
        if progress.step == self.start.step:
            self.last_progress = time.monotonic()

    def _on_exit(self, supervisor: Supervisor, event: Event) -> None:
        self._detected(event.member, event.at)
        member, code = event.member, event.facts["code"]
        if code == EXIT_REFUSED:
            raise ClusterError(supervisor.log_of(member).rpartition("\n")[2])
        if code == EXIT_FAILED:
            # An exception is no fault: a replacement would run into the same one.
            log = supervisor.log_of(member) or f"empty; is {supervisor.folder} full?"
            last = log.rstrip().rpartition("\n")[2]
            raise ClusterError(f"{member} failed: {last}\nThe end of its log:\n{log}")
        expected = code in (0, EXIT_FENCED) or any(
            failure.member == member for failure in self.progress.failures
        )
        if not expected:
            self.observe(
                f"{member} ended with code {code}: {supervisor.log_of(member)}", self.progress
            )

    def _detected(self, member: Member, at: float) -> None:
        for failure in self.progress.failures:
            if failure.member == member and failure.detected_ms is None:
                failure.detected_ms = (at - failure.at) * 1000
                self.observe(f"{failure.who} ({member}) is gone", self.progress)

    def _on_rebuilt(self, event: Event) -> None:
        place = event.facts["place"]
        self.progress.rebuilding.pop(place, None)
        for failure in self.progress.failures:
            if failure.place == place and failure.rebuilt_ms is None:
                failure.rebuilt_ms = (event.at - failure.at) * 1000
                failure.rows_rebuilt = event.facts["rows"]
                failure.bytes_rebuilt = event.facts["bytes"]
                self.observe(
                    f"{failure.who} is whole again after {failure.rebuilt_ms:.0f} ms", self.progress
                )

    def _on_reloaded(self, supervisor: Supervisor, event: Event) -> None:
        saved = event.facts["saved"]
        counted = self.saves.last_of_all_rows(event.facts["place"], saved)
        since = max(counted, min(self.start.step, saved))
        losses = self.losses_of_rows
        self.observe(losses.on_reloaded(event.facts, since), self.progress)
        self.saves.extra = losses.to_save()
        self._on_rebuilt(event)
        self.last_progress = time.monotonic()
        if losses.passes_budget():
            supervisor.order_all(partial=False)
            self.observe(
                "the lost samples have passed the budget: at the next failure all roll back",
                self.progress,
            )

    # ------------------------------------------------------------------ disturbing

    def _disturb(self, supervisor: Supervisor, item: Scheduled) -> None:
        member, place = self._member_of(supervisor, item)
        if member not in supervisor.children:
            self.observe(f"{item.who} is not there to be disturbed", self.progress)
            return
        number = signal.SIGSTOP if isinstance(item, Freeze) else signal.SIGKILL
        at = supervisor.kill(member, number)
        failure = Disturbance(item.who, item.step, at, member=member, place=place)
        if item.role != "spare":
            self.progress.failures.append(failure)
        if isinstance(item, Freeze):
            self.wakes.append((at + item.seconds, member))
        verb = f"frozen for {item.seconds:g} s" if isinstance(item, Freeze) else "killed"
        self.observe(f"{item.who} {verb} at step {item.step}", self.progress)

    def _member_of(self, supervisor: Supervisor, item: Scheduled) -> tuple[Member, int | None]:
        assert item.number is not None or item.role == "coordinator"
        number = item.number or 0
        if item.role == "coordinator":
            return supervisor.coordinator, None
        if item.role == "spare":
            spares = supervisor.spares
            return (spares[number] if number < len(spares) else ""), None
        if item.role == "server":
            return self.progress.servers[number], number
        return self.progress.trainers[number], None

    def _wake_frozen(self, supervisor: Supervisor) -> None:
        now = time.monotonic()
        for at, member in list(self.wakes):
            if now >= at:
                self.wakes.remove((at, member))
                if member in supervisor.children:
                    supervisor.kill(member, signal.SIGCONT)

    # ------------------------------------------------------------------ the report

    def report(self) -> dict[str, Any]:
        """Of a job that was done; docs/report.md explains every field."""
        config = self.config
        records = sum((self.digests[server] for server in self.progress.servers), Digest())
        replica, *others = (self.digests[trainer] for trainer in self.progress.trainers)
        if any(other != replica for other in others):
            raise ClusterError(
                f"the replicas of the dense network differ: {', '.join(map(str, others))} are not "
                f"all {replica}"
            )
        position = Digest(config.steps * config.batch, 0)
        return {
            "digest": str(records + replica + position),
            **self._quality(),
            "test_samples": sum(len(labels) for labels, _ in self.evaluated.values()),
            "loss": float(np.mean(list(self.losses.values()))) if self.losses else None,
            "bytes_records": sum(data for data, _ in self.memory.values()),
            "bytes_parity": sum(parity for _, parity in self.memory.values()),
            **self._what_happened(config.steps),
        }

    def report_failure(self, error: Exception) -> dict[str, Any]:
        """Of a job that could not go on: why, and how far it came."""
        return {"failed": str(error), **self._what_happened(self.progress.step)}

    def _what_happened(self, steps: int) -> dict[str, Any]:
        config, layout = self.config, self.config.layout
        return {
            "steps": steps,
            "samples": steps * config.batch,
            "samples_per_s": self._samples_per_s(),
            "strategy": self.strategy,
            "decision": self.decision,
            "servers": config.servers,
            "k": layout.k,
            "parity": layout.r,
            "trainers": config.trainers,
            "scrubbed": {
                "rounds": len(self.scrubs),
                "records": self.scrubbed_records,
                "wrong": sum(self.scrubs.values()),
            },
            "failures": [self._failure(failure) for failure in self.progress.failures],
            "resumed_from": self.resumed_from,
            "rollbacks": self.rollbacks,
            "pls": self.losses_of_rows.pls,
            "pls_updates": self.losses_of_rows.pls_updates,
            "reloads": self.losses_of_rows.reloads,
            "checkpoints": self.saves.found,
        }

    def _quality(self) -> dict[str, float | None]:
        labels = np.array([x for rank in sorted(self.evaluated) for x in self.evaluated[rank][0]])
        logits = np.array([x for rank in sorted(self.evaluated) for x in self.evaluated[rank][1]])
        if not len(labels) or labels.min() == labels.max():
            return {"auc": None, "normalized_entropy": None}
        chances = 1 / (1 + np.exp(-logits))
        return {
            "auc": auc(labels.astype(np.float32), logits),
            "normalized_entropy": normalized_entropy(labels.astype(np.float32), chances),
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
