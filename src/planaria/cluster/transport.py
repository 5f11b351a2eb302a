"""ZeroMQ: one ROUTER that a process listens on, one DEALER to each peer that it writes to.

Queues are bounded. A message that finds a queue full is dropped, as one that meets a broken
connection is: the protocol sends again what is not answered. Keys are made per job; with encryption
on, whoever lacks the job's key does not get past the handshake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from planaria.errors import ClusterError, WireError
from planaria.wire.codec import Envelope, decode, encode
from planaria.wire.messages import Member

QUEUE = 2000  # messages per peer
LINGER_MS = 500  # how long the last messages may take after close
MAX_FRAMES = 256
MAX_FRAME_BYTES = 1 << 33


class Keys(NamedTuple):
    """What the members of one job share, and nobody else knows."""

    token: bytes
    public: bytes | None  # CURVE; None: no encryption
    secret: bytes | None

    @classmethod
    def make(cls, token: bytes, *, encrypt: bool) -> Keys:
        public, secret = zmq.curve_keypair() if encrypt else (None, None)
        return cls(token, public, secret)


class Transport:
    """A process's sockets. Not for several threads."""

    def __init__(self, member: Member, keys: Keys, bind: str) -> None:
        """bind: "tcp://127.0.0.1:*" or "ipc://some/path"; `address` says what it became."""
        self.member = member
        self.keys = keys
        self.context = zmq.Context(io_threads=1)
        self.refused = 0
        self.dropped = 0
        self._router = self._socket(zmq.ROUTER)
        self._router.maxmsgsize = MAX_FRAME_BYTES
        if keys.secret is not None:
            self._router.curve_server = True
            self._router.curve_secretkey = keys.secret
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            raise ClusterError(
                f"cannot listen on {bind}: {error}; is the address in use?"
            ) from None
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = endpoint.rstrip("\0")
        self._dealers: dict[str, zmq.Socket[bytes]] = {}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set_hwm(QUEUE)
        socket.linger = LINGER_MS
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def new_dealer(self, address: str) -> zmq.Socket[bytes]:
        """A connection of its own, for a thread of its own; the caller closes it."""
        dealer = self._socket(zmq.DEALER)
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
            self._dealer(address).send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.dropped += 1

    def encode(self, message: Any) -> list[Any]:
        return encode(self.keys.token, self.member, self.address, message)

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._router.poll(timeout_ms))

    def receive(self, limit: int = 256) -> Iterator[Envelope]:
        """The messages that are here now, at most `limit`; what is not ours is counted."""
        for _ in range(limit):
            try:
                _, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if not 1 <= len(frames) <= MAX_FRAMES:
                    raise WireError(f"a message of {len(frames)} frames")
                yield decode(self.keys.token, [frame.buffer for frame in frames])
            except WireError:
                self.refused += 1

    def forget(self, addresses: set[str]) -> None:
        """Closes the connections to all other addresses: those peers are gone."""
        for address in set(self._dealers) - addresses:
            self._dealers.pop(address).close(linger=0)

    def close(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
        self._router.close(linger=0)
        self.context.term()
