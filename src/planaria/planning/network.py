"""What a plan says of the network: a step and a rebuild on the links that its machines have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.optimizers import Optimizer
from planaria.planning.bandwidth import (
    WAYS,
    WORD,
    RebuildTime,
    StepBytes,
    StepTime,
    bytes_of_rows,
    lost_bytes,
    rebuild_time,
    step_time,
)
from planaria.planning.inputs import PlanInputs
from planaria.planning.simulation import Behaviour


@dataclass(frozen=True)
class NetworkEstimate:
    name: str
    step: StepTime
    rebuild: dict[str, RebuildTime]  # by way; empty without parity


def network_estimates(
    inputs: PlanInputs, named: Iterable[tuple[str, Behaviour]]
) -> tuple[NetworkEstimate, ...]:
    """Without parity, and with as much as each strategy has. Strategies differ by that alone."""
    chosen = [("no parity", 1, 0)]
    chosen += [(name, what.k, what.r) for name, what in named if what.r]
    return tuple(_estimate(inputs, *one) for one in chosen)


def _estimate(inputs: PlanInputs, name: str, k: int, r: int) -> NetworkEstimate:
    sent, link, cluster = step_bytes(inputs), inputs.link, inputs.cluster(k, r)
    lost = lost_bytes(inputs.model_gb * 1e9, cluster)
    return NetworkEstimate(
        name,
        step_time(sent, cluster, link, _compute_seconds(inputs, sent)),
        {way: rebuild_time(way, lost, cluster, link) for way in WAYS} if r else {},
    )


def step_bytes(inputs: PlanInputs) -> StepBytes:
    """At most: as if no two trainers named the same row."""
    optimizer = Optimizer(inputs.optimizer)
    record_bytes = WORD * optimizer.record_words(inputs.dim)
    touched = inputs.touched_mb * 1e6 / record_bytes
    gradient = inputs.dense_mb * 1e6
    state = WORD * optimizer.record_words(round(gradient / WORD)) if gradient else 0.0
    sparse = bytes_of_rows(touched / inputs.trainers, touched, inputs.dim, record_bytes)
    return sparse._replace(gradient=gradient, state=state)


def _compute_seconds(inputs: PlanInputs, sent: StepBytes) -> float:
    """What is left of an unprotected step when the network has had its least time, which is what
    measured steps are nearest to.
    """
    network = step_time(sent, inputs.cluster(1, 0), inputs.link).least
    return max(inputs.step_seconds - network, 0.0)
