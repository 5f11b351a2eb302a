"""Hosts that Ray starts: an actor for each process of a job, spread over its nodes.

Ray places them and starts them again elsewhere when a node is lost. It carries no rows and no
messages: an actor joins the job as any other host does, and tells of its process itself.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from planaria.cluster.host import Host
from planaria.cluster.transport import Keys
from planaria.config import Config
from planaria.errors import ClusterError, ConfigError

PLACE_S = 120.0  # within which Ray must have room for everybody
ANSWER_S = 10.0  # within which the cluster's head must take a connection
WAIT_S = 60.0  # for which an actor looks for the job


@contextmanager
def connected(address: str | None) -> Iterator[str]:
    """To a Ray cluster, or to one that is started here; gives this machine's address in it."""
    ray = _ray()
    head = address or os.environ.get("RAY_ADDRESS")
    if head and head not in ("auto", "local"):
        _check_answers(head.removeprefix("ray://"))
    # Ray's workers, and so what they start, yield the CPU to anything else unless told not to.
    own = {"_system_config": {"worker_niceness": 0}} if is_started_here(address) else {}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **own)
    except Exception as error:  # whatever Ray may raise
        raise ConfigError(f"--on ray: no connection to {address or 'a cluster'}: {error}") from None
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        ray.shutdown()  # and with it everything that was started for this process


def _check_answers(address: str) -> None:
    """Ray itself looks for a cluster that is not there for many minutes, and says so all along."""
    host, colon, port = address.rpartition(":")
    try:
        if not colon or not host:
            raise ValueError("expected HOST:PORT")
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S):
            pass
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"--on ray: no connection to {address}: {error}") from None


def is_started_here(address: str | None) -> bool:
    """Whether the cluster is this machine and no other."""
    return address is None and not os.environ.get("RAY_ADDRESS")


def start_actors(
    keys: Keys, job: Config, here: bool, join: str, role: str, count: int, waits: bool
) -> None:
    """With room for one process each. They end with the connection.

    here: on a cluster that is this machine alone, whose cores they share as processes do that are
    started without Ray. waits: until Ray has room for all; else it starts each as soon as it has.
    """
    ray = _ray()
    actor = ray.remote(max_restarts=-1, max_task_retries=-1)(RayHost)
    places: list[dict[str, Any]]
    if here:
        places = [{"num_cpus": 0}] * count
    elif waits:
        places = _placement(ray, job, role, count)
    else:
        places = [{"num_cpus": _cpus(job, role), "scheduling_strategy": "SPREAD"}] * count
    for options in places:
        actor.options(**options).remote().run.remote(join, tuple(keys), role)


def _placement(ray: Any, job: Config, role: str, count: int) -> list[dict[str, Any]]:
    """Of so many actors, spread over the nodes."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if role == "coordinator":  # it computes next to nothing
        return [{"num_cpus": 0, "scheduling_strategy": "SPREAD"}] * count
    cpus = _cpus(job, role)
    bundles = [{"CPU": cpus}] * count
    group = ray.util.placement_group(bundles, strategy="SPREAD")
    if not group.wait(PLACE_S):
        raise ClusterError(
            f"Ray has had no room for {count} {role}s with {cpus * count} CPUs together within "
            f"{PLACE_S:.0f} s; add nodes, or lower servers, spares, trainers or threads"
        )
    where = [PlacementGroupSchedulingStrategy(group, number) for number in range(count)]
    return [{"num_cpus": cpus, "scheduling_strategy": strategy} for strategy in where]


def _cpus(job: Config, role: str) -> int:
    return job.threads.server if role == "server" else job.threads.trainer


class RayHost:
    """In a process of Ray's."""

    def run(self, join: str, keys: tuple[bytes, bytes | None, bytes | None], role: str) -> None:
        ray = _ray()
        node = ray.get_runtime_context().get_node_id()
        own = ray.util.get_node_ip_address()
        Host(join, Keys(*keys), {role: 1}, own, node, print).run(WAIT_S)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray: Ray is not installed; pip install 'planaria[ray]'") from None
    return ray
