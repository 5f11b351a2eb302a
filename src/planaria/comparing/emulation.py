"""A long job on a production cluster, mapped to a short run: hours to steps, failures to kills.

As in CPR's emulation, everything scales linearly: the job's hours are the run's steps, failures
come at the same share of the way, and saves are as many steps apart as they would be hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from planaria.config import CheckpointConfig, Config
from planaria.config.job import FailuresConfig
from planaria.errors import ConfigError
from planaria.formulas import partial_interval, young_interval
from planaria.planning.options import Option, check_options, require
from planaria.schedule import Fault, parse_kill, resolve
from planaria.strategies import CHECKPOINT, CPR, ERASURE, NONE, Strategy

MAX_FAILURES = 1000
MAX_SEEDS = 100
LEAST_STEPS_BETWEEN = 10  # failures, on average: what is lost and redone must show in steps
LARGEST = 1e6  # of hours, minutes and percent
BACKUP_HOURS = 24.0  # between the checkpoints beneath erasure: what `planaria plan` assumes


@dataclass(frozen=True)
class Contender:
    """What a name of --strategy stands for: a strategy, and how it is configured."""

    strategy: Strategy
    parity: int = 0
    variant: str = "vanilla"

    @property
    def works_every_step(self) -> bool:
        """Whether steps themselves do more than those of `none`; saves are charged apart."""
        return self.strategy.keeps_parity or self.variant != "vanilla"


CONTENDERS = {
    "none": Contender(NONE),
    "erasure": Contender(ERASURE, parity=1),
    "erasure-2": Contender(ERASURE, parity=2),
    "checkpoint": Contender(CHECKPOINT),
    "cpr-vanilla": Contender(CPR),
    "cpr-mfu": Contender(CPR, variant="mfu"),
    "cpr-ssu": Contender(CPR, variant="ssu"),
    "cpr-scar": Contender(CPR, variant="scar"),
}


_PANEL = "The emulated job"


@dataclass(frozen=True)
class Emulation:
    """The job that a run stands for. Make one and call `check`: the constructor checks nothing."""

    hours: Annotated[float, Option("The job's length.", _PANEL, 0, LARGEST, above=True)] = 50.0
    failures: Annotated[int, Option("How often servers fail.", _PANEL, 1, MAX_FAILURES)] = 5
    lost: Annotated[int, Option("Servers that each failure takes.", _PANEL, 1, MAX_FAILURES)] = 1
    save_min: Annotated[float, Option("Minutes of a save.", _PANEL, 0, LARGEST, above=True)] = 5.6
    load_min: Annotated[float, Option("Minutes of loading one.", _PANEL, 0, LARGEST)] = 0.4
    reschedule_min: Annotated[
        float, Option("Minutes until a lost server is replaced.", _PANEL, 0, LARGEST)
    ] = 5.0
    mtbf_hours: Annotated[
        float | None,
        Option(
            "What saves are planned by; else --hours / --failures.", _PANEL, 0, LARGEST, above=True
        ),
    ] = None
    protection_percent: Annotated[
        float | None,
        Option("What each parity adds to a step; else measured, with --seeds.", _PANEL, 0, LARGEST),
    ] = None
    seeds: Annotated[
        int, Option("Repeat with so many seeds, for intervals of 95 %.", _PANEL, 1, MAX_SEEDS)
    ] = 1

    def check(self, job: Config) -> Emulation:
        """Itself, or a ConfigError that names the option; job: what is to be run."""
        check_options(self)
        least = LEAST_STEPS_BETWEEN * (self.failures + 1)
        if job.steps < least:
            raise ConfigError(
                f"steps: expected {least} or more for --failures {self.failures}, got {job.steps}; "
                f"set it with --set steps={least}"
            )
        most = f"at most {job.servers}, the servers of the job"
        require(self.lost <= job.servers, "lost", most, self.lost)
        if job.seed + self.seeds > 2**64:
            raise ConfigError(f"seed: expected room for {self.seeds} seeds below 2^64")
        return self

    # ------------------------------------------------------------------ hours

    @property
    def expected_mtbf(self) -> float:
        return self.hours / self.failures if self.mtbf_hours is None else self.mtbf_hours

    @property
    def repair_hours(self) -> float:
        return (self.load_min + self.reschedule_min) / 60

    def hours_per_step(self, job: Config) -> float:
        return self.hours / job.steps

    def interval_hours(self, strategy: Strategy, job: Config) -> float | None:
        """The time between saves that the strategy would choose; None for no saves."""
        if not strategy.rolls_back:
            return None
        if strategy.keeps_parity:
            hours = BACKUP_HOURS
        elif strategy.partial:
            # A failure that takes several servers loses the samples of each of them.
            mtbf_of_servers = self.expected_mtbf / self.lost
            hours = partial_interval(job.cpr.target_pls, mtbf_of_servers, job.servers)
        else:
            hours = young_interval(self.save_min / 60, self.expected_mtbf)
        return min(hours, self.hours)

    def every_steps(self, name: str, job: Config) -> int:
        """The same in steps; 0 for no saves."""
        hours = self.interval_hours(CONTENDERS[name].strategy, job)
        if hours is None:
            return 0
        steps = round(hours / self.hours_per_step(job))
        if steps < 1:
            enough = math.ceil(self.hours / hours)
            raise ConfigError(
                f"steps: expected {enough} or more, because {name} saves every {hours:.3g} h, and "
                f"a step stands for {self.hours_per_step(job):.3g} h; set it with --set "
                f"steps={enough}"
            )
        return steps

    def formula(self, name: str, job: Config) -> float | None:
        """The overhead that CPR's formulas expect of so many failures; None where they have none.

        At the interval that is run, which is a whole number of steps.
        """
        overhead = CONTENDERS[name].strategy.overhead
        if overhead is None:
            return None
        return overhead(
            save=self.save_min / 60,
            interval=self.every_steps(name, job) * self.hours_per_step(job),
            repair=self.repair_hours,
            mtbf=self.hours / self.failures,
        )

    # ------------------------------------------------------------------ what is run

    def config(self, name: str, job: Config, seed: int, folder: str) -> Config:
        """The job under a strategy; checked, as it is made of parts that never met."""
        chosen, every = CONTENDERS[name], self.every_steps(name, job)
        # Saves hold training up, because they are charged as if they did; so each is whole at once.
        saves = replace(
            job.checkpoint,
            path=folder,
            every_steps=every,
            every_s=None,
            mode="sync",
            last_step="if_due",
        )
        made = replace(
            job,
            strategy=chosen.strategy.name,
            parity=chosen.parity,
            seed=seed,
            # A spare stands ready for every server that a failure takes.
            spares=max(job.spares, self.lost),
            checkpoint=saves if every else CheckpointConfig(),
            cpr=replace(job.cpr, variant=chosen.variant),
            failures=FailuresConfig(),  # saves are planned here, in emulated hours
        )
        try:
            return Config.from_dict(made.to_dict())
        except ConfigError as error:
            raise ConfigError(f"--strategy {name}: {error}") from None

    def schedule(self, job: Config, seed: int) -> list[Fault]:
        """The same kills for every strategy: they depend on the seed and on the job's shape."""
        steps = failure_steps(job.steps, self.failures, seed)
        kills = [parse_kill(f"server:any*{self.lost}@{step}") for step in steps]
        return resolve(kills, replace(job, seed=seed))


def failure_steps(steps: int, failures: int, seed: int) -> list[int]:
    """When failures come: exponential gaps, scaled so that the last ends with the job.

    A quarter of the mean gap is kept free before and between them, so that each is a failure of
    its own; and a tenth of the job at its end, because a kill that comes after the last step is
    none, and the processes may be steps ahead of what is known of them.
    """
    free = steps // (4 * (failures + 1))
    gaps = np.random.default_rng(seed).exponential(size=failures + 1)
    spread = steps - failures * free - max(free, steps // 10)
    reached = np.cumsum(gaps / gaps.sum())[:failures] * spread
    return [int(at) + (number + 1) * free for number, at in enumerate(reached)]
