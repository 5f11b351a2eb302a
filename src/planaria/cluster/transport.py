"""How the messages of a job travel: over plain sockets, or over ZeroMQ where they are encrypted.

Either way a process listens at one address, has one connection to each peer that it writes to, and
bounded queues. A message that finds a queue full is dropped, as one that meets a broken connection
is: the protocol sends again what is not answered. A stranger can connect, and must not matter: it
cannot prove that it belongs to the job, so nothing that it says is decoded.
"""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from planaria.kernels.types import Bytes
from planaria.wire.codec import ANY_JOB, Envelope, Frames, encode
from planaria.wire.limits import Limits
from planaria.wire.messages import Member
from planaria.wire.rounding import EXACT

QUEUE_BYTES = 256 << 20  # that may wait per peer
MAX_QUEUE = 2000  # messages per peer
LINGER_S = 0.5  # how long the last messages may take after close
BACKLOG = 1024  # connections that may wait to be accepted; as many as one role has processes
# A stranger that does not finish its handshake is cut off, as is whoever is not there any more.
HANDSHAKE_S = 5.0
SILENT_S = 10.0
GONE_S = 30.0


class Keys(NamedTuple):
    """What the members of one job share, and nobody else knows."""

    token: bytes
    public: bytes | None  # CURVE; None: no encryption
    secret: bytes | None

    @classmethod
    def make(cls, token: bytes, *, encrypt: bool) -> Keys:
        if not encrypt:
            return cls(token, None, None)
        import zmq  # processes that do without start faster

        return cls(token, *zmq.curve_keypair())


class Connection(Protocol):
    """To one peer, for a thread of its own, which must `flush` it while something waits."""

    def send(self, frames: Sequence[Any]) -> None: ...

    def flush(self) -> bool:
        """Sends as much as can leave now; whether something still waits for that."""
        ...

    def close(self, linger_s: float = LINGER_S) -> None: ...


class Transport(ABC):
    """A process's sockets. Not for several threads."""

    address: str  # where it listens
    packs = False  # whether record numbers and changes leave packed
    gradients = EXACT  # what those of rows were rounded to

    def __init__(self, member: Member, keys: Keys, limits: Limits | None) -> None:
        self.member = member
        self.keys = keys
        self.limits = limits or ANY_JOB
        self.starved_at: float | None = None  # since when a connection has found no descriptor
        self.refused = 0  # messages that were not the job's, or not well formed

    def encode(self, message: Any) -> Frames:
        return encode(
            self.keys.token,
            self.member,
            self.address,
            message,
            self.limits,
            packs=self.packs,
            gradients=self.gradients,
        )

    @abstractmethod
    def send(self, address: str, frames: Sequence[Any]) -> None: ...

    def send_all(self, messages: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Each to its address; those to the same one leave together where that is possible."""
        for address, frames in messages:
            self.send(address, frames)

    def room(self, address: str, size: int) -> Bytes | None:
        """Memory for the only array of a message that is sent there at once, if there is some that
        saves a copy.
        """
        return None

    @abstractmethod
    def connect(self, address: str) -> Connection:
        """A connection of its own, for a thread of its own; the caller closes it. OSError: no
        descriptor is left.
        """

    @abstractmethod
    def watch(self, descriptor: int) -> None:
        """From now on, `poll` also wakes when this is readable. Its owner reads and closes it."""

    @abstractmethod
    def poll(self, timeout_ms: int) -> bool:
        """Waits until there is something to receive, or to do."""

    @abstractmethod
    def defer(self, *, on: bool) -> None:
        """While it is on, `poll` does not wake for what can wait: the messages of those who said so
        when they connected. `receive` has them all the same.
        """

    @abstractmethod
    def receive(self, limit: int = 256) -> Iterator[Envelope]:
        """The members' messages that are here now, at most `limit`.

        What is not ours is counted and dropped. A flood of it takes no place of a member's message,
        and a bounded time: the rest is for the next call.
        """

    @abstractmethod
    def forget(self, addresses: set[str]) -> None:
        """Closes the connections to all other addresses: those peers are gone."""

    @abstractmethod
    def close(self) -> None: ...


def open_transport(
    member: Member,
    keys: Keys,
    bind: str,
    limits: Limits | None = None,
    *,
    can_wait: bool = False,
) -> Transport:
    """bind: "tcp://127.0.0.1:*" or "ipc://some/path"; `address` says what it became.

    can_wait: its messages can, if they come to somebody who is busy.
    """
    if keys.secret is None:
        from planaria.cluster.sockets import Sockets

        return Sockets(member, keys, bind, limits, can_wait=can_wait)
    from planaria.cluster.zeromq import ZeroMQ

    return ZeroMQ(member, keys, bind, limits)


def raise_descriptor_limit() -> int:
    """Lets this process open as many files and connections as it is allowed to; returns how many.

    Call it first in a process. The usual limit of 1024 is there for programs that use select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
