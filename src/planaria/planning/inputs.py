"""What a plan is made from: the job, its machines, its failures and its budgets.

Names end with their unit. A cost that is not given follows from the bandwidths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from planaria.codes import MAX_K, MAX_R
from planaria.errors import ConfigError

MAX_SERVERS = 100_000
MAX_HOURS = 10 * 8766.0
MAX_FAILURES = 200_000  # of one job, on average: what fits into memory many times over
FAILURES_IN_ALL = 1_000_000
FEWEST_RUNS, MOST_RUNS = 50, 200
FAILURES = ("auto", "exponential", "weibull", "gamma", "replay")


@dataclass(frozen=True)
class PlanInputs:
    """Make one and call `check`: the constructor checks nothing."""

    # the job
    servers: int = 8
    trainers: int = 8
    hours: float = 720.0  # of training, were nothing to fail
    model_gb: float = 1000.0  # all records: weights and optimizer state
    touched_mb: float = 20.0  # records that one step changes, over all tables
    step_seconds: float = 0.1
    k: int | None = None
    # bandwidths of one server
    network_gb_per_s: float = 2.5
    disk_gb_per_s: float = 0.5
    memory_gb_per_s: float = 10.0
    rebuild_gb_per_s: float | None = None  # the network's
    # costs
    save_seconds: float | None = None
    load_seconds: float | None = None
    restart_seconds: float = 300.0
    protection_percent: float | None = None
    pause_seconds: float = 1.0
    rebuild_seconds: float | None = None
    slowdown_percent: float = 10.0
    backup_hours: float = 24.0
    # failures
    mtbf_hours: float = 28.0
    failures: str = "auto"
    shape: float = 1.0
    burst_percent: float = 0.0
    burst_servers: int = 2
    trace_servers: int | None = None
    # budgets
    lost_samples_percent: float = 10.0
    memory_budget_gb: float = math.inf
    loss_percent: float = 1.0
    # the simulation
    runs: int | None = None  # as many as `runs_for` says
    seed: int = 0

    def check(self) -> PlanInputs:
        """Itself, or a ConfigError that names the option."""
        for limited in fields(self):
            value = getattr(self, limited.name)
            if value is None or limited.name == "failures":
                continue
            if limited.name in _LIMITS:
                least, most = _LIMITS[limited.name]
                good = least <= value <= most
                expected = f"a number from {least:g} to {most:g}"
            else:
                good = 0 < value < math.inf or (value == math.inf and limited.name in _NO_LIMIT)
                expected = "a number above 0"
            _require(good, limited.name, expected, value)
        _require(
            self.failures in FAILURES, "failures", f"one of {', '.join(FAILURES)}", self.failures
        )
        # 100 % would mean that a rebuild stops training for good.
        _require(
            self.slowdown_percent < 100, "slowdown_percent", "below 100", self.slowdown_percent
        )
        _require(
            self.burst_percent == 0 or self.burst_servers <= self.servers,
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

    def rebuild_hours(self, k: int) -> float:
        """One server's records come in over its network, k times that go out of the survivors."""
        rate = _given_or(self.rebuild_gb_per_s, self.network_gb_per_s)
        reads = max(1.0, k / max(self.servers - 1, 1))
        return _given_or(self.rebuild_seconds, self.server_gb * reads / rate) / 3600


_LIMITS = {
    "servers": (1, MAX_SERVERS),
    "trainers": (1, MAX_SERVERS),
    "hours": (1e-3, MAX_HOURS),
    "k": (1, MAX_K),
    "save_seconds": (0, 1e9),
    "load_seconds": (0, 1e9),
    "restart_seconds": (0, 1e9),
    "protection_percent": (0, 1e4),
    "pause_seconds": (0, 1e9),
    "rebuild_seconds": (0, 1e9),
    "slowdown_percent": (0, 100),
    "mtbf_hours": (1e-3, 1e9),
    "shape": (0.1, 20),
    "burst_percent": (0, 100),
    "burst_servers": (1, MAX_SERVERS),
    "trace_servers": (1, MAX_SERVERS),
    "lost_samples_percent": (0, 100),
    "loss_percent": (0, 100),
    "runs": (2, 100_000),
    "seed": (0, 2**63),
}
_NO_LIMIT = ("memory_budget_gb",)
MAX_PARITY = MAX_R


def _given_or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')}: expected {expected}, got {value}")
