"""ZeroMQ, for messages that are encrypted: one ROUTER that a process listens on, one DEALER to each
peer that it writes to.

Keys are made per job; whoever lacks the job's key does not get past the handshake. What a stranger
without encryption sends is dropped by its first frame; it waits in a queue of its own, which ZeroMQ
serves in turn with the members', and its connections are closed when they lead to nothing.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from planaria.cluster.transport import (
    BACKLOG,
    GONE_S,
    HANDSHAKE_S,
    LINGER_S,
    MAX_QUEUE,
    QUEUE_BYTES,
    SILENT_S,
    Keys,
    Transport,
)
from planaria.errors import ClusterError, WireError
from planaria.wire.codec import Envelope, decode_trusted, is_from_job
from planaria.wire.limits import Limits
from planaria.wire.messages import Member

MIN_INCOMING = 8  # a full queue makes the sender wait
MIN_OUTGOING = 64  # a full queue costs a message, and what a peer says within a step must fit
MAX_SOCKETS = 8192  # of one process: a DEALER for each peer, and a heart's
REFUSED_FRAMES = 1024  # that one look at what has come is spent on, at most
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


def queue_messages(limits: Limits, least: int) -> int:
    """How many messages may wait for one peer, or from it.

    ZeroMQ counts messages, not bytes, so this is the number of the largest that QUEUE_BYTES hold,
    but at least `least`.
    """
    return min(max(QUEUE_BYTES // limits.largest, least), MAX_QUEUE)


class Dealer:
    """A connection to one peer."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, frames: Sequence[Any]) -> None:
        """A full queue costs the message."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def flush(self) -> bool:
        return False  # ZeroMQ does, in a thread of its own

    def close(self, linger_s: float = LINGER_S) -> None:
        self._socket.close(linger=round(linger_s * 1000))


class ZeroMQ(Transport):
    def __init__(self, member: Member, keys: Keys, bind: str, limits: Limits | None = None) -> None:
        super().__init__(member, keys, limits)
        self.context = zmq.Context(io_threads=1)
        self.context.max_sockets = MAX_SOCKETS
        self._refusing = False  # the next frame belongs to a message that was refused
        self._router = self._listening_socket()
        try:
            self._router.bind(bind)
            if bind.startswith("ipc://"):  # before that, its folder keeps others out
                Path(bind.removeprefix("ipc://")).chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            raise ClusterError(
                f"cannot listen on {bind}: {error}; it must be one of this machine, and free"
            ) from None
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._failures = self._watch_handshakes()
        self._poller.register(self._failures, zmq.POLLIN)
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = endpoint.rstrip("\0")
        self._dealers: dict[str, zmq.Socket[bytes]] = {}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.linger = round(LINGER_S * 1000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
        return socket

    def _listening_socket(self) -> zmq.Socket[bytes]:
        router = self._socket(zmq.ROUTER)
        router.rcvhwm = queue_messages(self.limits, least=MIN_INCOMING)
        router.maxmsgsize = self.limits.largest
        router.backlog = BACKLOG
        # Protocols before ZMTP 3 know neither limit, and the first bytes of many a stranger look
        # like one of them. ZeroMQ refuses these where a domain is named; nobody answers for it.
        router.zap_domain = b"planaria"
        router.setsockopt(zmq.HEARTBEAT_IVL, round(SILENT_S * 1000))
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(GONE_S * 1000))
        if self.keys.secret is not None:
            router.curve_server = True
            router.curve_secretkey = self.keys.secret
        return router

    def _watch_handshakes(self) -> zmq.Socket[bytes]:
        """Where ZeroMQ tells of those that failed: whoever has no key, or an old one, or repeats
        what others have said.
        """
        self._router.monitor("inproc://failures", FAILED)
        failures = self._socket(zmq.PAIR)
        failures.rcvhwm = 0  # so that ZeroMQ never waits for this process to listen
        failures.connect("inproc://failures")
        return failures

    def connect(self, address: str) -> Dealer:
        try:
            return Dealer(self._new_dealer(address))
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from None

    def _new_dealer(self, address: str) -> zmq.Socket[bytes]:
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
            self._dealers[address] = self._new_dealer(address)
        return self._dealers[address]

    def send(self, address: str, frames: Sequence[Any]) -> None:
        try:
            dealer = self._dealer(address)
            try:
                dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                # It may only seem full: what has left meanwhile is noticed now and then, or here.
                dealer.poll(0, zmq.POLLOUT)
                dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # A full queue, or no descriptor left for a new connection: both may pass, and what
            # matters is sent again.
            if error.errno not in (errno.EAGAIN, errno.EMFILE):
                raise

    def watch(self, descriptor: int) -> None:
        self._poller.register(descriptor, zmq.POLLIN)

    def poll(self, timeout_ms: int) -> bool:
        ready = dict(self._poller.poll(timeout_ms))
        if self._failures in ready:
            self._count_failures()
        return bool(ready)

    def _count_failures(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(REFUSED_FRAMES):
                self._failures.recv_multipart(zmq.NOBLOCK)
                self.refused += 1

    def defer(self, *, on: bool) -> None:
        """Everything wakes it: all that comes is in one queue."""

    def receive(self, limit: int = 256) -> Iterator[Envelope]:
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
        for address in set(self._dealers) - addresses:
            self._dealers.pop(address).close(linger=0)

    def close(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
        self._router.disable_monitor()
        self._failures.close(linger=0)
        self._router.close(linger=0)
        self.context.term()
