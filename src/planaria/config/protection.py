"""What a job's parity protects from and what it costs, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria.config.job import Config
from planaria.errors import ConfigError
from planaria.layout import Layout, default_k

_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
_AFFORDABLE_K = 4  # memory x 1.25 with one parity; more servers save little beyond it


def describe_protection(config: Config) -> str:
    """One sentence for the start of a job: what k became, memory, and how many may die."""
    k, r = config.layout.k, config.r
    if not r:
        return f"no parity (memory x 1.00): {_without_parity(config)}"
    kept = (
        f"every record is kept {_TIMES[r + 1]}"
        if k == 1
        else f"every {k} records share {r} parity record{'s' * (r > 1)}"
    )
    text = (
        f"k = {k}, parity {r}: {kept} (memory x {1 + r / k:.2f}); "
        f"any {r} server{'s' * (r > 1)} of {config.servers} may die at once"
    )
    if config.keeps_domains_apart:
        hosts = len(set(config.cluster.domains or ()))
        text += f", or any {r} host{'s' * (r > 1)} of {hosts} with all servers on "
        text += "them" if r > 1 else "it"
    elif config.cluster.domains is not None:
        text += "; a host that dies may cost more than that"
    if k == 1 and config.k is None:
        servers = r + 1 + _AFFORDABLE_K
        cheaper = default_k(servers, r)
        text += f"; with servers: {servers} k is {cheaper} (memory x {1 + r / cheaper:.2f})"
    return text


def describe_shared(layout: Layout, domains: Sequence[str]) -> str:
    """Which hosts have more than one member of some group; nothing if none has. domains: by place,
    as the servers stand by now.
    """
    names, number = np.unique(np.asarray(domains), return_inverse=True)
    ordered = np.sort(number[layout.groups], axis=1)  # [G, k + r]
    twice = ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]
    if not len(twice):
        return ""
    hosts = ", ".join(names[np.unique(twice)].tolist())
    return (
        f"several members of a group stand on {hosts} now: to lose such a host may cost more than "
        "the parity bears; add a host, or free one with planaria drain"
    )


def check_required(config: Config) -> None:
    """Whether the job bears what cluster.require says: it may be known only when hosts are."""
    if config.cluster.require == "server" or config.keeps_domains_apart:
        return
    hosts, width = len(set(config.cluster.domains or ())), config.layout.k + config.r
    why = (
        f"a group's members, k + parity = {width}, stand on as many hosts, and there are {hosts}; "
        "add hosts (--on none, --on ray) or labels (cluster.domains), or lower k"
    )
    if not config.r:
        why = "there is no parity; set parity to 1 or more"
    raise ConfigError(f"cluster.require: host cannot be: {why}")


def _without_parity(config: Config) -> str:
    if config.survival.partial:
        return "a server that dies goes back to its last save"
    if config.survival.from_nothing:
        return "when a server dies, all roll back to the last checkpoint"
    return "the job does not survive the death of a server"
