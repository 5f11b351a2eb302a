"""What a network makes of a step and of a rebuild: bytes on each link, and the seconds they take.

Every machine has one link, as fast in one direction as in the other, and between the links there is
room for all. Servers have equal shares of everything, so one of them stands for all; so does one
trainer. What waits for one another is added up, and of what travels at the same time the slowest
link counts. Nothing here knows cores: what they take is an input, or left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from planaria.config.wire import bits_per_s
from planaria.dense import keepers
from planaria.errors import ConfigError
from planaria.layout.groups import default_scatter, least_scatter

WORD, ID_BYTES = 4, 8
MESSAGE_BYTES = 100  # around the arrays of a message
MOST_BUSY = 0.5  # steps that would fill a link share it with a rebuild, and take longer
PAYLOAD_SHARE = 1448 / 1538  # of TCP in frames of 1,500 bytes

# How a lost server is rebuilt: as rebuild.by says; sums are what could be done.
WAYS = ("replacement", "survivors", "partial sums")


class Link(NamedTuple):
    """Of one machine."""

    bits_per_s: float
    latency_s: float = 0.0  # one way

    def seconds(self, size: float) -> float:
        """For so many bytes, one way."""
        return size / (self.bits_per_s / 8 * PAYLOAD_SHARE)


class Table(NamedTuple):
    rows: int
    dim: int
    record_words: int


class Cluster(NamedTuple):
    servers: int
    trainers: int
    k: int
    r: int
    scatter: int | None = None

    @property
    def mates(self) -> int:
        """Others that a server shares groups with, and with them its rebuild."""
        scatter = default_scatter(self.k, self.r)
        if self.scatter is not None:
            scatter = max(self.scatter, least_scatter(self.k, self.r))
        return self.servers - 1 if scatter >= self.servers - 1 else scatter // 2 * 2


def link_of(text: str, latency_s: float = 0.0) -> Link:
    """From a number and its unit: 10Gbit, 300Mbit/s, 10Gbps."""
    rate = bits_per_s(text)
    if not rate:
        raise ConfigError(f"--link: expected a rate in bits, such as 10Gbit or 300Mbit, got {text}")
    return Link(rate, latency_s)


# ---------------------------------------------------------------- a step


class StepBytes(NamedTuple):
    """What the arrays of one step's messages come to."""

    lookups: float  # of one trainer, to all servers
    pushes: float
    answers: float  # of all servers, to one trainer
    deltas: float  # of all owners, to one holder of each record
    gradient: float = 0.0  # of the dense network, of one trainer
    state: float = 0.0  # of the dense network, as keepers are given it


def distinct_rows(rows: float, draws: float) -> float:
    """How many rows so many draws name, each row as likely as the others; fewer, where they are
    not.
    """
    return draws if rows <= 1 else -rows * math.expm1(draws * math.log1p(-1 / rows))


def bytes_of_rows(asked: float, touched: float, dim: float, record_bytes: float) -> StepBytes:
    """asked: distinct rows that one trainer names. touched: those that all of them name."""
    return StepBytes(
        lookups=asked * ID_BYTES,
        pushes=asked * (dim * WORD + ID_BYTES),
        answers=asked * dim * WORD,
        deltas=touched * (record_bytes + ID_BYTES),
    )


def bytes_of_tables(tables: Iterable[Table], batch: float, trainers: int) -> StepBytes:
    """batch: samples of one trainer, each with one id per table."""
    found = [
        bytes_of_rows(
            distinct_rows(table.rows, batch),
            distinct_rows(table.rows, batch * trainers),
            table.dim,
            table.record_words * WORD,
        )
        for table in tables
    ]
    return StepBytes(*map(sum, zip(*found, strict=True)))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what waits for what."""

    push: float  # gradients and the next lookups, until all servers have them
    answers: float  # rows, until all trainers have them
    compute: float
    protect: float  # deltas and copies, which travel while trainers compute
    latency: float
    servers: int
    bounds: tuple[str, str, str]  # whose link push, answers and protect wait for

    @property
    def seconds(self) -> float:
        """At most: as if all servers had their gradients at the same moment."""
        return self.push + self.answers + max(self.compute, self.protect) + self.latency

    @property
    def least(self) -> float:
        """As if they had them one after the other, and each answered while the next one waits."""
        shorter, longer = sorted((self.push, self.answers))
        piped = longer + shorter / self.servers
        return piped + max(self.compute, self.protect) + self.latency


def step_time(sent: StepBytes, cluster: Cluster, link: Link, compute_s: float = 0.0) -> StepTime:
    (push, by_push), (answers, by_answers), (protect, by_protect) = (
        slowest(phase, link)
        for phase in (
            push_bytes(sent, cluster),
            answer_bytes(sent, cluster),
            protect_bytes(sent, cluster),
        )
    )
    return StepTime(
        push=push,
        answers=answers,
        compute=compute_s,
        protect=protect,
        latency=(3 if cluster.r else 2) * link.latency_s,  # and the vote
        servers=cluster.servers,
        bounds=(by_push, by_answers, by_protect),
    )


def push_bytes(sent: StepBytes, cluster: Cluster) -> dict[str, float]:
    """By link. Other trainers are given their parts of the dense gradient meanwhile."""
    servers, trainers, *_ = cluster
    pushed = sent.pushes + sent.lookups + 2 * servers * MESSAGE_BYTES
    parts = sent.gradient * (trainers - 1) / trainers
    return {
        "trainer out": pushed + parts,
        "trainer in": parts,
        "server in": trainers * pushed / servers,
    }


def answer_bytes(sent: StepBytes, cluster: Cluster) -> dict[str, float]:
    """By link. Each part of the dense gradient comes back as a sum meanwhile."""
    servers, trainers, *_ = cluster
    answered = sent.answers + servers * MESSAGE_BYTES
    parts = sent.gradient * (trainers - 1) / trainers
    return {
        "trainer in": answered + parts,
        "trainer out": parts,
        "server out": trainers * answered / servers,
    }


def protect_bytes(sent: StepBytes, cluster: Cluster) -> dict[str, float]:
    """By link. The first trainer sends keepers the dense state, where there are any."""
    copies = keepers(cluster.r, cluster.trainers)
    deltas = cluster.r * sent.deltas / cluster.servers
    if cluster.r:
        deltas += cluster.mates * MESSAGE_BYTES
    return {
        "server out": deltas,
        "server in": deltas + (sent.state if copies else 0.0),
        "trainer out": copies * sent.state,
    }


def slowest(phase: dict[str, float], link: Link) -> tuple[float, str]:
    """Its seconds, and its name."""
    name = max(phase, key=phase.__getitem__)
    return link.seconds(phase[name]), name


# ---------------------------------------------------------------- a rebuild


@dataclass(frozen=True)
class RebuildTime:
    seconds: float  # infinite where it cannot be done that way
    bound: str  # whose link it waits for


def lost_bytes(record_bytes: float, cluster: Cluster) -> float:
    """What one server holds. record_bytes: of all records, without parity."""
    return record_bytes / cluster.servers * (cluster.k + cluster.r) / cluster.k


def rebuild_bytes(way: str, lost: float, cluster: Cluster) -> dict[str, float]:
    """By link. Each lost record is made out of k mates' records, whoever makes it."""
    k, of_mate = cluster.k, lost / cluster.mates
    return {
        # Mates send what they have to the replacement, which decodes.
        "replacement": {"replacement in": k * lost, "survivor out": k * of_mate},
        # A mate adds its own to what came from another, and hands it on: the last one to the
        # replacement, which is sent every record once.
        "partial sums": {
            "replacement in": lost,
            "survivor out": k * of_mate,
            "survivor in": (k - 1) * of_mate,
        },
        # Every mate takes over some of the lost server's memberships, and decodes those.
        "survivors": {"survivor in": k * of_mate, "survivor out": k * of_mate},
    }[way]


def rebuild_time(
    way: str, lost: float, cluster: Cluster, link: Link, busy: float = 0.0
) -> RebuildTime:
    """busy: the share of a link that steps have meanwhile."""
    if way == "survivors" and cluster.servers - 1 < cluster.k + cluster.r:
        return RebuildTime(math.inf, "nobody is left outside of a group")
    seconds, bound = slowest(rebuild_bytes(way, lost, cluster), link)
    return RebuildTime(seconds / (1 - busy), bound)


def busy_share(sent: StepBytes, cluster: Cluster, link: Link, step_s: float) -> float:
    """How much of the link into a server steps have that take so long."""
    came = push_bytes(sent, cluster)["server in"] + protect_bytes(sent, cluster)["server out"]
    return min(link.seconds(came) / step_s, MOST_BUSY)
