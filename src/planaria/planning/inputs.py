"""What a plan is made from: the job, its machines, its failures and its budgets.

Names end with their unit. A cost that is not given follows from the bandwidths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from planaria.codes import MAX_K, MAX_R
from planaria.config.job import MAX_PROCESSES
from planaria.errors import ConfigError
from planaria.optimizers import NAMES as OPTIMIZERS
from planaria.optimizers import Optimizer
from planaria.planning.bandwidth import WAYS, Cluster, Link, lost_bytes, rebuild_time
from planaria.planning.memory import VARIANTS, WORD
from planaria.planning.options import Option, check_options, require

MAX_SERVERS = 100_000  # of a cluster; a job has fewer
OF_A_JOB = ", as many as a job may have"
LEAST_HOURS, MAX_HOURS = 1e-3, 10 * 8766.0
MAX_FAILURES = 200_000  # of one job, on average: what fits into memory many times over
FAILURES_IN_ALL = 1_000_000
FEWEST_RUNS, MOST_RUNS = 50, 200
FAILURES = ("auto", "exponential", "weibull", "gamma", "replay")
SHAPED = ("weibull", "gamma")
MAX_PARITY = MAX_R
SECONDS = 1e9  # the most of a cost

_JOB = "The job (else from JOB)"
_MACHINES = "Bandwidths of one server"
_COSTS = "Costs (else from the bandwidths, or --measure)"
_FAILURES = "Failures"
_BUDGETS = "Budgets"
_SIMULATION = "The simulation"


def _rate(text: str) -> Option:
    return Option(text, _MACHINES, above=True)


def _cost(text: str, most: float = SECONDS) -> Option:
    return Option(text, _COSTS, 0, most)


@dataclass(frozen=True)
class PlanInputs:
    """Make one and call `check`: the constructor checks nothing."""

    servers: Annotated[
        int, Option("Embedding servers.", _JOB, 1, MAX_PROCESSES, limits=OF_A_JOB)
    ] = 8
    trainers: Annotated[
        int,
        Option("Trainers; they idle when the job does.", _JOB, 1, MAX_PROCESSES, limits=OF_A_JOB),
    ] = 8
    hours: Annotated[
        float, Option("The job's length, were nothing to fail.", _JOB, LEAST_HOURS, MAX_HOURS)
    ] = 720.0
    model_gb: Annotated[
        float, Option("All records: weights, optimizer state.", _JOB, above=True)
    ] = 1000.0
    dim: Annotated[int, Option("Weights of a row.", _JOB, 1, 2**16)] = 64
    optimizer: Annotated[
        str, Option("Whose state a record has beside its weights.", _JOB, names=OPTIMIZERS)
    ] = "adagrad"
    touched_mb: Annotated[float, Option("Records that one step changes.", _JOB, above=True)] = 20.0
    step_seconds: Annotated[float, Option("One step, unprotected.", _JOB, above=True)] = 0.1
    k: Annotated[
        int | None, Option("Data records per stripe; else it follows.", _JOB, 1, MAX_K)
    ] = None
    scatter: Annotated[
        int | None, Option("Mates of a server; else 4 (k + parity).", _JOB, 1, MAX_PROCESSES)
    ] = None
    rebuild_by: Annotated[
        str, Option("Who rebuilds a lost server: rebuild.by.", _JOB, names=WAYS[:2])
    ] = WAYS[0]
    history_steps: Annotated[
        int, Option("Whose deltas a server keeps: history.steps.", _JOB, 1, 1024)
    ] = 2
    cpr_variant: Annotated[
        str, Option("How partial recovery chooses the rows it saves.", _JOB, names=VARIANTS)
    ] = "vanilla"
    rho: Annotated[
        float, Option("The share of the rows that a save of it has.", _JOB, 0, 1, above=True)
    ] = 0.125
    dense_mb: Annotated[float, Option("Weights of the dense network.", _JOB, 0)] = 4.0
    network_gb_per_s: Annotated[float, _rate("Network; or --link.")] = 2.5
    disk_gb_per_s: Annotated[float, _rate("To the checkpoints.")] = 0.5
    memory_gb_per_s: Annotated[float, _rate("A copy in memory.")] = 10.0
    latency_us: Annotated[float, Option("From one machine to another.", _MACHINES, 0, 1e9)] = 50.0
    rebuild_gb_per_s: Annotated[
        float | None, _rate("Decoding a lost server; else k times that come over its network.")
    ] = None
    save_seconds: Annotated[float | None, _cost("One synchronous save.")] = None
    load_seconds: Annotated[float | None, _cost("Loading a checkpoint.")] = None
    restart_seconds: Annotated[float, _cost("Rescheduling after a failure.")] = 300.0
    protection_percent: Annotated[
        float | None, _cost("How much longer a step takes per parity.", 1e4)
    ] = None
    pause_seconds: Annotated[float, _cost("From a death until training goes on, with erasure.")] = (
        1.0
    )
    rebuild_seconds: Annotated[float | None, _cost("Until it is whole.")] = None
    slowdown_percent: Annotated[float, _cost("How much slower training is until then.", 100)] = 10.0
    backup_hours: Annotated[
        float, Option("Between the checkpoints beneath erasure.", _COSTS, above=True)
    ] = 24.0
    mtbf_hours: Annotated[
        float,
        Option(
            "From one failure in the whole job to the next, on average, whichever server fails and "
            "however many there are; --server-mtbf-hours is that of one server.",
            _FAILURES,
            1e-3,
            1e9,
        ),
    ] = 28.0
    trace_servers: Annotated[
        int | None,
        Option(
            "Servers of the trace's cluster; else those that failed.", _FAILURES, 1, MAX_SERVERS
        ),
    ] = None
    failures: Annotated[
        str,
        Option(
            "What the simulation draws: exponential, weibull, gamma (fitted, with a trace) or "
            "replay. auto: replay with a trace, else exponential.",
            _FAILURES,
            names=FAILURES,
        ),
    ] = "auto"
    shape: Annotated[
        float | None,
        Option(
            "Of --failures weibull or gamma, without a trace; below 1 is bursty.",
            _FAILURES,
            0.1,
            20,
        ),
    ] = None
    burst_percent: Annotated[
        float, Option("Share of failures that take several servers at once.", _FAILURES, 0, 100)
    ] = 0.0
    burst_servers: Annotated[
        int | None, Option("How many those take; else 2.", _FAILURES, 1, MAX_PROCESSES)
    ] = None
    lost_samples_percent: Annotated[
        float, Option("Accuracy: the share of samples that may be lost (PLS).", _BUDGETS, 0, 100)
    ] = 0.0
    memory_budget_gb: Annotated[float | None, Option("Of one server.", _BUDGETS, above=True)] = None
    loss_percent: Annotated[
        float,
        Option("The chance to lose all: beyond r, with no checkpoint beneath.", _BUDGETS, 0, 100),
    ] = 1.0
    runs: Annotated[
        int | None, Option("Simulated runs; else 50 to 200.", _SIMULATION, 2, 100_000)
    ] = None
    seed: Annotated[int, Option("Of the simulation.", _SIMULATION, 0, 2**63)] = 0

    def check(self) -> PlanInputs:
        """Itself, or a ConfigError that names the option."""
        check_options(self)
        # 100 % would mean that a rebuild stops training for good.
        require(self.slowdown_percent < 100, "slowdown_percent", "below 100", self.slowdown_percent)
        if self.shape is not None and self.failures not in SHAPED:
            raise ConfigError(
                "--shape: it is the shape of weibull or gamma failures; add --failures weibull or "
                f"--failures gamma, for these are {self.failures}"
            )
        if self.burst_servers is not None:
            if self.burst_percent == 0:
                raise ConfigError("--burst-servers: add --burst-percent, how many failures do that")
            require(
                self.burst_servers <= self.servers,
                "burst_servers",
                f"at most --servers, {self.servers}",
                self.burst_servers,
            )
        return self

    # ------------------------------------------------------------------ what follows

    @property
    def server_gb(self) -> float:
        """The records of one server, without protection."""
        return self.model_gb / self.servers

    @property
    def server_rows(self) -> float:
        return self.server_gb * 1e9 / (WORD * Optimizer(self.optimizer).record_words(self.dim))

    @property
    def save_hours(self) -> float:
        """A synchronous save: every server writes its records."""
        return _given_or(self.save_seconds, self.server_gb / self.disk_gb_per_s) / 3600

    @property
    def snapshot_hours(self) -> float:
        """What an asynchronous save stops training for: a copy in memory."""
        return min(self.server_gb / self.memory_gb_per_s / 3600, self.save_hours)

    @property
    def load_hours(self) -> float:
        return _given_or(self.load_seconds, self.server_gb / self.disk_gb_per_s) / 3600

    @property
    def repair_hours(self) -> float:
        """Loading and rescheduling."""
        return self.load_hours + self.restart_seconds / 3600

    @property
    def burst_sizes(self) -> tuple[int, ...]:
        """Servers that a failure takes: one of these, each as likely as the others."""
        bursts = round(self.burst_percent)
        several = min(2, self.servers) if self.burst_servers is None else self.burst_servers
        return (several,) * bursts + (1,) * (100 - bursts) if bursts else (1,)

    def runs_for(self, mtbf: float) -> int:
        """A run with many failures says as much as many runs with few."""
        if self.runs is not None:
            return self.runs
        return int(min(max(FAILURES_IN_ALL * mtbf / self.hours, FEWEST_RUNS), MOST_RUNS))

    def protection(self, r: int) -> float:
        """The share that r parities add to a step, as if none of it overlapped with other work."""
        if self.protection_percent is not None:
            return r * self.protection_percent / 100
        gb = self.touched_mb / 1000 / self.servers
        return r * gb * (1 / self.network_gb_per_s + 1 / self.memory_gb_per_s) / self.step_seconds

    @property
    def link(self) -> Link:
        return Link(self.network_gb_per_s * 8e9, self.latency_us / 1e6)

    def cluster(self, k: int, r: int) -> Cluster:
        return Cluster(self.servers, self.trainers, k, r, self.scatter)

    def rebuild_hours(self, k: int, r: int) -> float:
        """All that a server holds, parity as well, by the bandwidth model unless it is measured."""
        cluster = self.cluster(k, r)
        lost = lost_bytes(self.model_gb * 1e9, cluster)
        if self.rebuild_gb_per_s is None:
            way = self.rebuild_by
            if math.isinf(rebuild_time(way, lost, cluster, self.link).seconds):
                way = WAYS[0]  # survivors are too few
            seconds = rebuild_time(way, lost, cluster, self.link).seconds
        else:
            seconds = lost / (self.rebuild_gb_per_s * 1e9)
        return _given_or(self.rebuild_seconds, seconds) / 3600


def _given_or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given
