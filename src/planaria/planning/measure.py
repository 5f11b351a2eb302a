"""Costs measured here, by short runs of a real job and a bounded write to the disk.

All processes share this machine, so a job without a network of its own looks slower, and
protection dearer, than on a cluster; whoever reads the plan is told. What is measured replaces a
default, never what was given.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planaria.cluster.run import JobRun
from planaria.config import CheckpointConfig, Config
from planaria.errors import ClusterError
from planaria.planning.machine import Machine
from planaria.schedule import Fault, parse_kill, resolve

STEPS = 120
MOST_PROCESSES = 6  # of one role: more would only wait for one another
DISK_MB = 64
MEMORY_MB = 64

Runner = Callable[[Config, Sequence[Fault]], dict[str, Any]]


@dataclass(frozen=True)
class Measurement:
    costs: dict[str, float]  # inputs of a plan, by name
    job: Config  # that was run
    machine: Machine

    def sentence(self, servers: int) -> str:
        """What it was measured on, for a plan of so many servers."""
        job = self.job
        processes = job.servers + job.spares + job.trainers + 1  # and the coordinator
        shared = "one core" if self.machine.cores == 1 else f"{self.machine.cores} cores"
        return (
            f"measured here: {processes} processes, {job.servers} of them servers, shared {shared} "
            f"({self.machine.cpu}). The plan has {servers:,} servers and takes each for as fast as "
            "one of those: with cores of their own, steps and rebuilds are faster, and protection "
            "costs less"
        )


def run_here(config: Config, schedule: Sequence[Fault]) -> dict[str, Any]:
    return JobRun(config, schedule).run()


def short_job(base: Config | None, servers: int, trainers: int) -> Config:
    """The user's own job, cut short; else a small one of the shape that is planned."""
    if base is not None:
        return replace(
            base,
            strategy="erasure",
            parity=max(base.parity, 1),
            steps=STEPS,
            checkpoint=CheckpointConfig(),
        )
    return Config.from_dict(
        {
            "servers": max(3, min(servers, MOST_PROCESSES)),
            "trainers": min(trainers, 2),
            "steps": STEPS,
            "data": {"test_samples": 0},
        }
    )


def measure(
    servers: int,
    trainers: int,
    base: Config | None = None,
    folder: Path | None = None,
    run: Runner = run_here,
    observe: Callable[[str], None] = lambda what: None,
) -> Measurement:
    """The costs of a plan. `folder` is where checkpoints would go; else a temporary one."""
    protected = short_job(base, servers, trainers)
    observe("training without protection")
    plain = _samples_per_s(run(replace(protected, strategy="none"), []))
    observe("training with parity")
    undisturbed = _samples_per_s(run(protected, []))
    observe("training with parity, and killing a server")
    kill = resolve([parse_kill(f"server:any@{STEPS // 2}")], protected)
    failures = run(protected, kill)["failures"]
    observe("writing to the disk and copying memory")
    costs = {
        "step_seconds": protected.batch / plain,
        "protection_percent": max(plain / undisturbed - 1, 0.0) * 100 / protected.r,
        "disk_gb_per_s": disk_gb_per_s(folder),
        "memory_gb_per_s": memory_gb_per_s(),
        **_recovery(failures, undisturbed),
    }
    return Measurement(costs, protected, Machine.here())


def _samples_per_s(report: dict[str, Any]) -> float:
    rate = report["samples_per_s"]
    if rate is None:
        raise ClusterError("the short runs were too short to measure; give the costs instead")
    return float(rate)


def _recovery(failures: Sequence[dict[str, Any]], undisturbed: float) -> dict[str, float]:
    """Of the killed server: the pause, and how fast and at what cost it was rebuilt."""
    costs: dict[str, float] = {}
    for failure in failures:
        if failure["gap_ms"] is not None:
            costs["pause_seconds"] = failure["gap_ms"] / 1000
        if failure["rebuilt_ms"] and failure["bytes_rebuilt"]:
            costs["rebuild_gb_per_s"] = failure["bytes_rebuilt"] / failure["rebuilt_ms"] / 1e6
        if failure["samples_per_s_during"] is not None:
            slower = 1 - failure["samples_per_s_during"] / undisturbed
            costs["slowdown_percent"] = min(max(slower, 0.0), 0.99) * 100
    return costs


def disk_gb_per_s(folder: Path | None = None, megabytes: int = DISK_MB) -> float:
    """A file written and synced, then removed."""
    block = np.random.default_rng(0).bytes(1_000_000)  # nothing that a disk could compress
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(megabytes):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return megabytes / 1000 / (time.perf_counter() - started)


def memory_gb_per_s(megabytes: int = MEMORY_MB) -> float:
    """The better of two copies: the first also fetches the pages."""
    source = np.ones(megabytes * 1_000_000, np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return megabytes / 1000 / min(seconds)
