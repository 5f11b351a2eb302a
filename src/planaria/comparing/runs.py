"""The runs of a comparison: each strategy meets the failures that all the others meet."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from planaria.cluster.injecting import Injector
from planaria.cluster.lookups import settle_lookups
from planaria.cluster.reporting import Observe
from planaria.cluster.run import JobRun
from planaria.comparing.accounts import (
    Account,
    Interval95,
    Protection,
    account_of,
    interval,
    mean_account,
    protection_of,
    slowdown_of,
    step_seconds,
)
from planaria.comparing.emulation import CONTENDERS, Emulation
from planaria.config import Config
from planaria.errors import ClusterError, Interrupted, LossError, PlanariaError
from planaria.planning.jobs import memory_of_job
from planaria.planning.memory import Memory
from planaria.schedule import Fault

UNDISTURBED = "undisturbed"


@dataclass(frozen=True)
class Outcome:
    """One run, with the report of JobRun: that of a failure, if it did not reach its end."""

    seed: int
    report: dict[str, Any]
    step_s: float | None = None
    killed: tuple[dict[str, int], ...] = ()  # each kill: the server, when due and when done
    lost: bool = False  # more was lost than the strategy bears, as against: something is wrong

    @property
    def ended(self) -> bool:
        return "failed" not in self.report


Runner = Callable[[str, Config, Sequence[Fault]], Outcome]
"""Runs one job; its first argument is what to call it."""


@dataclass(frozen=True)
class Row:
    """A strategy in all its runs, beside undisturbed ones of the same seeds."""

    name: str
    every_steps: int
    every_hours: float
    formula: float | None  # overhead as a share
    memory: Memory  # of one server
    protection: Protection
    outcomes: tuple[Outcome, ...]
    references: tuple[Outcome, ...]
    accounts: tuple[Account, ...]  # of the runs that reached the end

    @property
    def ended(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The report of each run that reached the end, and that of its reference."""
        both = zip(self.outcomes, self.references, strict=True)
        return [(run.report, other.report) for run, other in both if run.ended]

    @property
    def account(self) -> Account | None:
        return mean_account(self.accounts)

    @property
    def equal(self) -> int:
        """Runs that ended with the digest of the undisturbed one."""
        return sum(report["digest"] == other["digest"] for report, other in self.ended)

    @property
    def overhead_hours(self) -> dict[str, float] | None:
        """By its parts; without protection that is not known, which the total lacks as well."""
        if (account := self.account) is None:
            return None
        hours = {**asdict(account), "total": account.total}
        if not self.protection.is_known:
            del hours["protection"]
        return hours

    @property
    def stopped(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.ended]

    def mean(self, key: str) -> float | None:
        found = interval([report[key] for report, _ in self.ended if report[key] is not None])
        return found.mean if found else None

    def difference(self, key: str) -> Interval95 | None:
        """Of the runs from their references."""
        return interval(
            [
                report[key] - other[key]
                for report, other in self.ended
                if report[key] is not None and other[key] is not None
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        slowdowns = _slowdowns(self.outcomes, self.references)
        return {
            "name": self.name,
            "checkpoint_every_steps": self.every_steps,
            "checkpoint_every_hours": self.every_hours,
            "overhead_hours": self.overhead_hours,
            "protection": self.protection,
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
            "overhead_by_formula": self.formula,
            "pls": self.mean("pls"),
            "auc": self.mean("auc"),
            "auc_difference": self.difference("auc"),
            "normalized_entropy": self.mean("normalized_entropy"),
            "normalized_entropy_difference": self.difference("normalized_entropy"),
            "runs": len(self.outcomes),
            "digests_equal": self.equal,
            "outcomes": [
                {**asdict(outcome), "slowdown_measured": slowdown}
                for outcome, slowdown in zip(self.outcomes, slowdowns, strict=True)
            ],
            "accounts_hours": self.accounts,
        }


@dataclass(frozen=True)
class Comparison:
    emulation: Emulation
    job: Config
    schedules: tuple[tuple[str, ...], ...]  # of each seed
    references: tuple[Outcome, ...]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it: also what no table shows."""
        emulation = {
            **asdict(self.emulation),
            "mtbf_hours": self.emulation.expected_mtbf,
            "hours_per_step": self.emulation.hours_per_step(self.job),
        }
        values: dict[str, Any] = msgspec.to_builtins(
            {
                "emulation": emulation,
                "job": self.job.to_dict(),
                "schedules": self.schedules,
                "undisturbed": self.references,
                "strategies": [row.to_dict() for row in self.rows],
            }
        )
        return values


def prepare(emulation: Emulation, job: Config, names: Sequence[str]) -> None:
    """Raises ConfigError for whatever would stop a comparison later."""
    emulation.check(job)
    for name in (*names, "none"):
        emulation.config(name, job, job.seed, folder="saves")
    for seed in _seeds(emulation, job):
        emulation.schedule(job, seed)


def compare(emulation: Emulation, job: Config, names: Sequence[str], run: Runner) -> Comparison:
    """Runs everything. `prepare` has found nothing wrong."""
    job, _ = settle_lookups(job)  # once for all, for it follows measured rates
    seeds = _seeds(emulation, job)
    of, number = len(seeds) * (len(names) + 1), 0
    references: list[Outcome] = []
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    schedules: list[tuple[str, ...]] = []
    for turn, seed in enumerate(seeds):
        schedule = emulation.schedule(job, seed)
        schedules.append(tuple(map(str, schedule)))
        note = f", seed {seed}" if len(seeds) > 1 else ""
        order = (UNDISTURBED, *names)
        # There and back: what drifts on the machine does not always fall to the same ones.
        for name in order[::-1] if turn % 2 else order:
            number += 1
            # One folder per run, because a job refuses one that has checkpoints.
            with tempfile.TemporaryDirectory(prefix="planaria-saves-") as folder:
                is_reference = name == UNDISTURBED
                config = emulation.config("none" if is_reference else name, job, seed, folder)
                title = f"{number} of {of}: {name}{note}"
                found = run(title, config, [] if is_reference else schedule)
            if not is_reference:
                outcomes[name].append(found)
            elif found.ended:
                references.append(found)
            else:
                why = found.report["failed"]
                raise ClusterError(f"the undisturbed run did not reach its end: {why}")
    rows = [_row(emulation, job, name, outcomes[name], references) for name in names]
    return Comparison(emulation, job, tuple(schedules), tuple(references), tuple(rows))


def run_here(observe: Observe, config: Config, schedule: Sequence[Fault]) -> Outcome:
    """A run on this machine. One that cannot go on is an outcome like others.

    Its failures are as far apart as those of the job that it stands for: there, hours lie between
    two and a server is whole again in minutes. Here a rebuild may take as long as many steps, so a
    kill that is due waits until all servers are whole.
    """

    def somebody_is_not_whole() -> bool:
        began = job.reporter.rolled_back_at  # when all servers started whole
        return any(
            failure.rebuilt_ms is None and failure.at > began for failure in job.progress.failures
        )

    injector = Injector(schedule, hold=somebody_is_not_whole)
    job, lost = JobRun(config, observe=observe, injector=injector), False
    try:
        report = job.run()
    except Interrupted:
        raise
    except PlanariaError as error:
        report, lost = job.report_failure(error), isinstance(error, LossError)
    killed = tuple(
        {"server": fault.number or 0, "due_step": fault.step, "step": step}
        for fault, step in injector.done
    )
    return Outcome(config.seed, report, step_seconds(job.progress.step_at), killed, lost)


def _row(
    emulation: Emulation,
    job: Config,
    name: str,
    outcomes: Sequence[Outcome],
    references: Sequence[Outcome],
) -> Row:
    contender, hours_per_step = CONTENDERS[name], emulation.hours_per_step(job)
    every = emulation.every_steps(name, job)
    protection = protection_of(emulation, contender, _slowdowns(outcomes, references))
    return Row(
        name,
        every,
        every * hours_per_step,
        emulation.formula(name, job),
        memory_of_job(emulation.config(name, job, job.seed, folder="saves")),
        protection,
        tuple(outcomes),
        tuple(references),
        tuple(
            account_of(emulation, contender, hours_per_step, run.report, protection)
            for run in outcomes
            if run.ended
        ),
    )


def _slowdowns(runs: Sequence[Outcome], references: Sequence[Outcome]) -> list[float | None]:
    """How much longer the steps of each run were than those of its reference, as a share."""
    both = zip(runs, references, strict=True)
    return [slowdown_of(run.step_s, other.step_s) for run, other in both]


def _seeds(emulation: Emulation, job: Config) -> list[int]:
    return [job.seed + number for number in range(emulation.seeds)]
