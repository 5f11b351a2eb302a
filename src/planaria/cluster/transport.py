"""ZeroMQ: one ROUTER that a process listens on, one DEALER to each peer that it writes to.

Queues are bounded. A message that finds a queue full is dropped, as one that meets a broken
connection is: the protocol sends again what is not answered. Keys are made per job; with encryption
on, whoever lacks the job's key does not get past the handshake. Without it a stranger on this
machine can connect, and must not matter: what it sends is dropped by its first frame, it waits in
a queue of its own, which ZeroMQ serves in turn with the members', and its connections are
closed when they lead to nothing.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from planaria.errors import ClusterError, WireError
from planaria.wire.codec import ANY_JOB, Envelope, decode_trusted, encode, is_from_job
from planaria.wire.limits import Limits
from planaria.wire.messages import Member

QUEUE_BYTES = 256 << 20  # that may wait per peer, if every message were as large as can be
MAX_QUEUE = 2000  # messages per peer
MIN_INCOMING = 8  # a full queue makes the sender wait
MIN_OUTGOING = 64  # a full queue costs a message, and what a peer says within a step must fit
LINGER_MS = 500  # how long the last messages may take after close
MAX_SOCKETS = 8192  # of one process: a DEALER for each peer, and a heart's
REFUSED_FRAMES = 1024  # that one look at what has come is spent on, at most
BACKLOG = 1024  # connections that may wait to be accepted; as many as one role has processes
# A stranger that does not finish its handshake is cut off, as is one that then keeps silent when
# spoken to, or whose machine is gone. A member that was stopped for longer loses its connection as
# well, and makes a new one when it wakes.
HANDSHAKE_MS = 5_000
HEARTBEAT_MS = 10_000
HEARTBEAT_LIMIT_MS = 30_000


class Keys(NamedTuple):
    """What the members of one job share, and nobody else knows."""

    token: bytes
    public: bytes | None  # CURVE; None: no encryption
    secret: bytes | None

    @classmethod
    def make(cls, token: bytes, *, encrypt: bool) -> Keys:
        public, secret = zmq.curve_keypair() if encrypt else (None, None)
        return cls(token, public, secret)


def raise_descriptor_limit() -> int:
    """Lets this process open as many files and connections as it is allowed to; returns how many.

    Call it first in a process. The usual limit of 1024 is there for programs that use select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def queue_messages(limits: Limits, least: int) -> int:
    """How many messages may wait for one peer, or from it.

    ZeroMQ counts messages, not bytes, so this is the number of the largest that QUEUE_BYTES hold,
    but at least `least`.
    """
    return min(max(QUEUE_BYTES // limits.largest, least), MAX_QUEUE)


class Transport:
    """A process's sockets. Not for several threads."""

    def __init__(self, member: Member, keys: Keys, bind: str, limits: Limits | None = None) -> None:
        """bind: "tcp://127.0.0.1:*" or "ipc://some/path"; `address` says what it became."""
        self.member = member
        self.keys = keys
        self.limits = limits or ANY_JOB
        self.context = zmq.Context(io_threads=1)
        self.context.max_sockets = MAX_SOCKETS
        self.refused = 0
        self.dropped = 0
        self._refusing = False  # the next frame belongs to a message that was refused
        self._router = self._listening_socket()
        try:
            self._router.bind(bind)
            if bind.startswith("ipc://"):  # before that, its folder keeps others out
                Path(bind.removeprefix("ipc://")).chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            raise ClusterError(
                f"cannot listen on {bind}: {error}; is the address in use?"
            ) from None
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = endpoint.rstrip("\0")
        self._dealers: dict[str, zmq.Socket[bytes]] = {}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.linger = LINGER_MS
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        return socket

    def _listening_socket(self) -> zmq.Socket[bytes]:
        router = self._socket(zmq.ROUTER)
        router.rcvhwm = queue_messages(self.limits, least=MIN_INCOMING)
        router.maxmsgsize = self.limits.largest
        router.backlog = BACKLOG
        # Protocols before ZMTP 3 know neither limit, and the first bytes of many a stranger look
        # like one of them. ZeroMQ refuses these where a domain is named; nobody answers for it.
        router.zap_domain = b"planaria"
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LIMIT_MS)
        if self.keys.secret is not None:
            router.curve_server = True
            router.curve_secretkey = self.keys.secret
        return router

    def new_dealer(self, address: str) -> zmq.Socket[bytes]:
        """A connection of its own, for a thread of its own; the caller closes it."""
        dealer = self._socket(zmq.DEALER)
        dealer.sndhwm = queue_messages(self.limits, least=MIN_OUTGOING)
        dealer.setsockopt(zmq.RECONNECT_IVL, 20)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self.keys.public is not None:
            assert self.keys.secret is not None
            dealer.curve_serverkey = self.keys.public
            dealer.curve_publickey = self.keys.public
            dealer.curve_secretkey = self.keys.secret
        dealer.connect(address)
        return dealer

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._dealers:
            self._dealers[address] = self.new_dealer(address)
        return self._dealers[address]

    def send(self, address: str, frames: list[Any]) -> None:
        try:
            dealer = self._dealer(address)
            try:
                dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                # It may only seem full: what has left meanwhile is noticed now and then, or here.
                dealer.poll(0, zmq.POLLOUT)
                dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # A full queue, or no descriptor left for a new connection: both may pass.
            if error.errno not in (errno.EAGAIN, errno.EMFILE):
                raise
            self.dropped += 1

    def encode(self, message: Any) -> list[Any]:
        return encode(self.keys.token, self.member, self.address, message, self.limits)

    @property
    def incoming(self) -> zmq.Socket[bytes]:
        """For whoever polls it together with other things."""
        return self._router

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._router.poll(timeout_ms))

    def receive(self, limit: int = 256) -> Iterator[Envelope]:
        """The members' messages that are here now, at most `limit`.

        What is not ours is counted, and its frames are dropped as they are. A flood of it takes no
        place of a member's message, and no more time than so many frames do: the rest is
        for the next call.
        """
        taken = wasted = 0
        while taken < limit and wasted < REFUSED_FRAMES:
            try:
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self._refusing:
                self._refusing = frame.more
                wasted += 1
                continue
            # This one was ZeroMQ's own name for the peer. Here are whole messages only: what
            # follows is here.
            frames = self._frames_of_member()
            try:
                if frames is None:
                    raise WireError("a message without the job's token, or of too many frames")
                yield decode_trusted(frames, self.limits)
                taken += 1
            except WireError:
                self.refused += 1
                wasted += 1

    def _frames_of_member(self) -> list[Any] | None:
        """What follows the token; None if that is wrong, or if too much follows."""
        receive, most = self._router.recv, self.limits.frames
        frame = receive(copy=False)
        if not is_from_job(self.keys.token, frame.buffer):
            self._refusing = frame.more
            return None
        frames: list[Any] = []
        while frame.more:
            frame = receive(copy=False)
            frames.append(frame.buffer)
            if len(frames) >= most:
                self._refusing = frame.more
                return None
        return frames

    def forget(self, addresses: set[str]) -> None:
        """Closes the connections to all other addresses: those peers are gone."""
        for address in set(self._dealers) - addresses:
            self._dealers.pop(address).close(linger=0)

    def close(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
        self._router.close(linger=0)
        self.context.term()
