"""Plain sockets, of this machine or of TCP, driven from the loop of whoever owns them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from planaria.cluster.streams import MAGIC, NO_ROOM, Incoming, Outgoing, parse
from planaria.cluster.transport import BACKLOG, HANDSHAKE_S, LINGER_S, Keys, Transport
from planaria.errors import ClusterError, WireError
from planaria.kernels.types import Bytes
from planaria.wire.codec import Envelope, decode_trusted
from planaria.wire.limits import Limits
from planaria.wire.messages import Member

STAGING_BYTES = 64 << 10
MOST_STRANGERS = 256  # that may be about to greet
PAUSE_S = 0.1  # of the door, where no descriptor is left


class Sockets(Transport):
    """Messages that are not encrypted."""

    def __init__(
        self,
        member: Member,
        keys: Keys,
        bind: str,
        limits: Limits | None = None,
        *,
        can_wait: bool = False,
    ) -> None:
        super().__init__(member, keys, limits)
        self._greeting = MAGIC + keys.token
        self._can_wait = can_wait
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._epoll = select.epoll()
        self._later = select.epoll()  # of those whose messages can wait
        self._epoll.register(self._later, select.EPOLLIN)
        self._deferring = False
        self._peers: dict[str, Outgoing] = {}
        self._outgoing: dict[int, Outgoing] = {}  # by descriptor, as far as they are connected
        self._incoming: dict[int, Incoming] = {}
        self._patient: set[int] = set()  # of these, whose messages can wait
        self._watched: set[int] = set()  # by others
        self._received: deque[Envelope] = deque()
        self._strangers: deque[Incoming] = deque()  # in the order in which they came
        self._opens_at: float | None = None  # the door is shut until then
        try:
            self._door = _listen(bind)
        except OSError as error:
            self._later.close()
            self._epoll.close()
            raise ClusterError(
                f"cannot listen on {bind}: {error}; it must be one of this machine, and free"
            ) from None
        self._epoll.register(self._door, select.EPOLLIN)
        self.address = _address_of(self._door, bind)

    # ------------------------------------------------------------------ sending

    def send(self, address: str, frames: Sequence[Any]) -> None:
        self.send_all([(address, frames)])

    def send_all(self, messages: Sequence[tuple[str, Sequence[Any]]]) -> None:
        for address, frames in messages:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = self._new_peer(address, self._unwatch)
            peer.put(frames)
        for address in dict.fromkeys(address for address, _ in messages):
            self._tend(self._peers[address])

    def room(self, address: str, size: int) -> Bytes | None:
        peer = self._peers.get(address)
        return None if peer is None else peer.room(size)

    def connect(self, address: str) -> Outgoing:
        return self._new_peer(address)

    def _new_peer(self, address: str, on_close: Callable[[int], None] = lambda _: None) -> Outgoing:
        return Outgoing(address, self._greeting + bytes([self._can_wait]), on_close)

    def _tend(self, peer: Outgoing) -> None:
        """Sends what it can, and has the kernel tell when there is room for more, or nobody."""
        peer.flush()
        if peer.starved:
            peer.starved = False
            self._make_room()
        if peer.descriptor == -1:
            return
        # That it is closed shows as something to read: nobody writes in this direction.
        events = select.EPOLLIN | (select.EPOLLOUT if peer.waiting else 0)
        if peer.descriptor not in self._outgoing:
            self.starved_at = None
            self._outgoing[peer.descriptor] = peer
            self._epoll.register(peer.descriptor, events)
        elif peer.events != events:
            self._epoll.modify(peer.descriptor, events)
        peer.events = events

    def _unwatch(self, descriptor: int) -> None:
        """Before it is closed: somebody may have a copy of it, a child that was forked, say, and as
        long as that is open, the kernel would go on telling.
        """
        if self._outgoing.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    # ------------------------------------------------------------------ receiving

    def watch(self, descriptor: int) -> None:
        self._epoll.register(descriptor, select.EPOLLIN)
        self._watched.add(descriptor)

    def poll(self, timeout_ms: int) -> bool:
        """A message that comes in many pieces is put together here: its owner's loop, which does
        much more than that, turns for whole ones only.
        """
        until = time.monotonic() + timeout_ms / 1000
        while not self._received:
            ready = self._epoll.poll(max(until - time.monotonic(), 0))
            if self._attend(ready, 1):
                return True
            if not ready or time.monotonic() >= until:
                return bool(self._received)
        return True

    def defer(self, *, on: bool) -> None:
        if on != self._deferring:
            self._deferring = on
            self._epoll.modify(self._later, 0 if on else select.EPOLLIN)

    def receive(self, limit: int = 256) -> Iterator[Envelope]:
        self._attend([*self._epoll.poll(0), (self._later.fileno(), 0)], limit)
        for _ in range(limit):
            if not self._received:
                return
            yield self._received.popleft()

    def _attend(self, ready: Sequence[tuple[int, int]], limit: int) -> bool:
        """To those that are ready; whether any of them is only watched, and its owner's. While
        `limit` messages wait here, no more are read: then their senders wait.
        """
        descriptors = [descriptor for descriptor, _ in ready]
        if self._later.fileno() in descriptors:
            descriptors += [descriptor for descriptor, _ in self._later.poll(0)]
        others = False
        for descriptor in descriptors:
            if descriptor in self._incoming:
                connection = self._incoming[descriptor]
                if len(self._received) < limit or not connection.greeted:
                    self._read(connection)
            elif descriptor in self._outgoing:
                self._tend(self._outgoing[descriptor])
            else:
                others |= descriptor in self._watched
        if self._door.fileno() in descriptors:
            self._accept()  # last: whoever has greeted meanwhile is no stranger any more
        for peer in self._peers.values():
            if peer.waiting and peer.descriptor == -1:
                self._tend(peer)
        self._see_off_strangers()
        return others

    def _read(self, connection: Incoming) -> None:
        before = connection.greeted
        try:
            for frames in connection.read(self._staging):
                try:
                    self._received.append(decode_trusted(frames, self.limits))
                except WireError:
                    self.refused += 1
        except (OSError, WireError) as error:
            self.refused += isinstance(error, WireError)
            self._drop(connection)
        if connection.greeted and not before:
            self._strangers.remove(connection)
            if connection.can_wait and connection.descriptor in self._incoming:
                self._epoll.unregister(connection.descriptor)
                self._later.register(connection.descriptor, select.EPOLLIN)
                self._patient.add(connection.descriptor)

    def _drop(self, connection: Incoming) -> None:
        del self._incoming[connection.descriptor]
        if not connection.greeted:
            self._strangers.remove(connection)
        patient = connection.descriptor in self._patient
        (self._later if patient else self._epoll).unregister(connection.descriptor)
        self._patient.discard(connection.descriptor)
        connection.close()

    def _make_room(self) -> bool:
        """Whether a connection was closed: that of the stranger who has been silent for longest."""
        while self._strangers:
            oldest = self._strangers[0]
            self._read(oldest)
            if self._strangers and self._strangers[0] is oldest:
                self._drop(oldest)
                return True
        self.starved_at = self.starved_at or time.monotonic()
        return False

    def _accept(self) -> None:
        for _ in range(MOST_STRANGERS):
            try:
                own, _ = self._door.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    continue  # who was about to come in has gone
                if self._make_room():
                    continue
                # Somebody waits at the door; to look again at once would change nothing.
                self._epoll.modify(self._door, 0)
                self._opens_at = time.monotonic() + PAUSE_S
                return
            self.starved_at = None
            connection = Incoming(own, self._greeting, self.limits)
            self._incoming[connection.descriptor] = connection
            self._strangers.append(connection)
            self._epoll.register(connection.descriptor, select.EPOLLIN)
            if len(self._strangers) > MOST_STRANGERS:
                self._make_room()

    def _see_off_strangers(self) -> None:
        if self._opens_at is None and not self._strangers:
            return
        now = time.monotonic()
        while self._strangers and now - self._strangers[0].since > HANDSHAKE_S:
            self.refused += 1
            self._drop(self._strangers[0])
        if self._opens_at is not None and now >= self._opens_at:
            self._opens_at = None
            self._epoll.modify(self._door, select.EPOLLIN)

    # ------------------------------------------------------------------ the end

    def forget(self, addresses: set[str]) -> None:
        for address in set(self._peers) - addresses:
            self._forget(address)

    def _forget(self, address: str) -> None:
        self._peers.pop(address).close(linger_s=0)

    def close(self) -> None:
        deadline = time.monotonic() + LINGER_S
        for peer in self._peers.values():
            peer.close(linger_s=max(deadline - time.monotonic(), 0))
        for connection in self._incoming.values():
            connection.close()
        self._door.close()
        self._later.close()
        self._epoll.close()
        if self.address.startswith("ipc://"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.removeprefix("ipc://"))


def _listen(bind: str) -> socket.socket:
    family, where = parse(bind)
    door = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_INET:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(where)
        if family == socket.AF_UNIX:  # before that, its folder keeps others out
            Path(where).chmod(0o600)
        door.listen(BACKLOG)
    except BaseException:
        door.close()
        raise
    return door


def _address_of(door: socket.socket, bind: str) -> str:
    if door.family == socket.AF_UNIX:
        return bind
    host, port = door.getsockname()
    return f"tcp://{host}:{port}"
