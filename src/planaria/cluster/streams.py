"""Messages in a stream of bytes: a connection to a peer, and one from somebody.

A connection carries messages one way. It begins with a greeting: a word, the job's token, which
only its members know, and whether the messages can wait. Before it is whole, nothing is kept and
nothing decoded. Then, for each message:

    bytes      what
    16         sizes of the body and of the header, and the number of arrays
    8 each     sizes of the arrays
    ...        header
    ...        body: the arrays

where everything begins at a multiple of 8. Sizes are compared with the limits of the job before
memory is taken for them; whoever exceeds them loses the connection. A body is received where it
stays: its arrays are views of it. Between processes of one machine, a large body may be lent
(planaria.cluster.lending): then LENT is added to the number of arrays, and instead of the body come
16 bytes that say where it is. Nothing is sent in the other direction.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np

from planaria.cluster.lending import SMALLEST, WHERE, Borrowed, Lent
from planaria.cluster.transport import GONE_S, LINGER_S, MAX_QUEUE, QUEUE_BYTES, SILENT_S
from planaria.errors import WireError
from planaria.kernels.types import Bytes
from planaria.wire.limits import Limits

MAGIC = b"PLANARIA"
SIZES = struct.Struct("<QII")  # of the body and the header, and the number of arrays
LENT = 1 << 31  # is added to that number
DESCRIPTOR = struct.Struct("i")  # as it is passed to another process
ALIGNMENT = 8
PADDING = bytes(ALIGNMENT)
MOST_BYTES = 8 << 20  # that one connection may bring before the others have their turn
MOST_BUFFERS = 256  # of one system call
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 0.5
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Outgoing:
    """A connection to one peer, and what waits for it. It is made when it is needed, and again when
    it breaks. on_close: what is done with a descriptor before it is closed.
    """

    def __init__(
        self, address: str, greeting: bytes, on_close: Callable[[int], None] = lambda _: None
    ) -> None:
        self.address = address
        self._on_close = on_close
        self.descriptor = -1  # while there is no connection
        self.waiting = 0  # bytes
        self.events = 0  # that its owner is told of
        self.starved = False  # there was no descriptor for it
        self._greeting = memoryview(greeting)
        self._socket: socket.socket | None = None
        self._messages: deque[deque[memoryview]] = deque()
        self._begun = False  # the first of them belongs to this connection, and to no other
        self._lent: Lent | None = None  # below this connection
        self._lends = False
        self._retry_at, self._retry_s = 0.0, FIRST_RETRY_S

    def put(self, frames: Sequence[Any]) -> None:
        """Where too much waits already, it is dropped: what matters is sent again."""
        if self._lend(frames):
            return
        message, size = as_stream(frames)
        most = len(self._messages) >= MAX_QUEUE or self.waiting + size > QUEUE_BYTES
        if most and self._messages:
            return
        self._messages.append(message)
        self.waiting += size

    def room(self, size: int) -> Bytes | None:
        """For the only array of a message that is sent at once, if it can be lent."""
        if self._lent is None or self.waiting or not SMALLEST <= size == _padded(size):
            return None
        return self._lent.room(size)

    def _lend(self, frames: Sequence[Any]) -> bool:
        """Whether it leaves as a loan: what is large, and can leave at once. What has to wait may
        have to wait for the next connection, which knows nothing of the loans of this one.
        """
        if not self._lends or self._socket is None or self.waiting:
            return False
        if sum([array.nbytes for array in frames[2:]]) < SMALLEST:
            return False
        if self._lent is None:
            try:
                self._lent = Lent()
            except OSError:
                self._lends = False  # until there is another connection
            return False
        head = lend(self._lent, frames)
        if head is None:
            return False
        self._messages.append(deque([head]))
        self._begun, self.waiting = True, len(head)
        return True

    def send(self, frames: Sequence[Any]) -> None:
        """What finds nobody is not waited for."""
        self.put(frames)
        self.flush()

    def flush(self) -> bool:
        """Sends as much as the kernel takes; or, if nothing waits, looks whether the peer is still
        there. Returns whether something still waits.
        """
        if self._socket is None and self.waiting and time.monotonic() >= self._retry_at:
            self._connect()
        if self._socket is not None:
            self._flush(self._socket)
        return self.waiting > 0

    def _flush(self, own: socket.socket) -> None:
        try:
            if not self.waiting and own.recv(1) == b"":
                self._broken()
            while self.waiting:
                buffers = list(islice(chain.from_iterable(self._messages), MOST_BUFFERS))
                self._sent(self._send(own, buffers))
        except BlockingIOError:
            pass
        except OSError:
            self._broken()

    def _send(self, own: socket.socket, buffers: Sequence[memoryview]) -> int:
        if self._lent is not None and self._lent.descriptor != -1:
            passed = DESCRIPTOR.pack(self._lent.descriptor)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
            try:
                sent = own.sendmsg(buffers, rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                raise
            except OSError:  # no descriptor may be under way, or the connection is broken
                self._end_loans()
                self._lends = False
            else:
                self._lent.passed()
                return sent
        return own.sendmsg(buffers, (), socket.MSG_NOSIGNAL)

    def _end_loans(self) -> None:
        if self._lent is not None:
            self._lent.passed()
            self._lent = None

    def _sent(self, count: int) -> None:
        self.waiting -= count
        self._retry_s = FIRST_RETRY_S
        while count:
            message = self._messages[0]
            first = message.popleft()
            if count < len(first):
                message.appendleft(first[count:])
            count -= min(count, len(first))
            self._begun = bool(message)
            if not message:
                self._messages.popleft()

    def _connect(self) -> None:
        family, where = parse(self.address)
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            _tune(self._socket)
            failed = self._socket.connect_ex(where)
            if failed not in (0, errno.EINPROGRESS):
                raise OSError(failed, os.strerror(failed))
        except OSError as error:  # nobody listens, or no descriptor is left: both may pass
            self.starved = error.errno in NO_ROOM
            self._broken()
            return
        self.starved = False
        self._lends = family == socket.AF_UNIX
        self.descriptor = self._socket.fileno()
        self._messages.appendleft(deque([self._greeting]))
        self._begun = True
        self.waiting += len(self._greeting)

    def _broken(self) -> None:
        """What was begun is lost, and what comes after it waits for the next connection."""
        if self._begun:
            self.waiting -= sum(map(len, self._messages.popleft()))
            self._begun = False
        self._close_socket()
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._on_close(self._socket.fileno())
            self._socket.close()
        self._socket, self.descriptor = None, -1
        self._end_loans()

    def close(self, linger_s: float = LINGER_S) -> None:
        deadline = time.monotonic() + linger_s
        while (
            self._socket is not None and self.waiting and (left := deadline - time.monotonic()) > 0
        ):
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll(left * 1000)
            self.flush()
        self._close_socket()


class Incoming:
    """A connection from somebody, who may be a member."""

    def __init__(self, own: socket.socket, greeting: bytes, limits: Limits) -> None:
        own.setblocking(False)
        _tune(own)
        self.descriptor = own.fileno()
        self.since = time.monotonic()
        self.greeted = self.can_wait = False
        self._socket = own
        self._greeting, self._limits = greeting, limits
        self._head = bytearray()  # what is here of a greeting, or of what precedes a body
        self._wanted = len(greeting) + 1  # bytes of it
        self._sizes: tuple[int, int, int] | None = None
        self._frames: list[Any] = []  # of the message whose body is coming
        self._body, self._filled = memoryview(b""), 0
        self._lends = own.family == socket.AF_UNIX
        self._borrowed: Borrowed | None = None

    def read(self, staging: memoryview) -> Iterator[list[Any]]:
        """Whole messages, as a header and arrays. Raises when the connection has ended, or must."""
        left = MOST_BYTES
        while left > 0:
            missing = len(self._body) - self._filled
            direct = missing > len(staging) // 2  # it is received where it stays
            room = self._body[self._filled :] if direct else staging
            stranger = not self.greeted
            if stranger:  # nothing but a greeting is taken, nor what may come with it
                room = staging[: self._wanted - len(self._head)]
            try:
                got = self._receive_into(room)
            except BlockingIOError:
                return
            if not got:
                raise ConnectionResetError
            if direct:
                self._filled += got
            came = staging[: 0 if direct else got]
            while True:
                came = self._take(came)
                if self._frames and self._filled == len(self._body):
                    yield self._frames
                    self._frames, self._body, self._filled = [], memoryview(b""), 0
                elif not len(came):
                    break
            if stranger or got < len(room):
                return  # there is no more for now
            left -= got

    def _receive_into(self, room: memoryview) -> int:
        if not self._lends or not self.greeted or self._borrowed is not None:
            return self._socket.recv_into(room)
        space = socket.CMSG_LEN(DESCRIPTOR.size)  # for one: the kernel closes what is too much
        got, beside, *_ = self._socket.recvmsg_into([room], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                with contextlib.suppress(OSError):  # its sender sees that it is not mapped
                    self._borrowed = Borrowed(*DESCRIPTOR.unpack(data))
        return got

    def _take(self, came: memoryview) -> memoryview:
        """What has come goes where it belongs; returns the rest of it."""
        if self._frames:
            here = min(len(came), len(self._body) - self._filled)
            self._body[self._filled : self._filled + here] = came[:here]
            self._filled += here
            return came[here:]
        here = min(len(came), self._wanted - len(self._head))
        self._head += came[:here]
        if len(self._head) == self._wanted:
            self._on_head()
        return came[here:]

    def _on_head(self) -> None:
        """A greeting, the sizes of a message, or all of it but its body is whole."""
        if not self.greeted:
            if not hmac.compare_digest(self._head[:-1], self._greeting):
                raise WireError("a connection without the job's token")
            self.greeted, self.can_wait = True, bool(self._head[-1])
        elif self._sizes is None:
            body, header, arrays = SIZES.unpack(self._head)
            lent = 0
            if arrays & LENT and self._borrowed is not None:
                arrays, lent = arrays - LENT, WHERE.size
            self._sizes = body, header, arrays
            limits = self._limits
            if header > limits.header or 2 + arrays > limits.frames:
                raise WireError(f"a header of {header} bytes, for {arrays} arrays")
            if body > limits.largest + arrays * ALIGNMENT:
                raise WireError(f"a message with arrays of {body} bytes")
            self._head.clear()
            self._wanted = arrays * 8 + _padded(header) + lent
            return
        else:
            self._begin_body(*self._sizes)
        self._head.clear()
        self._wanted, self._sizes = SIZES.size, None

    def _begin_body(self, body: int, header: int, arrays: int) -> None:
        sizes = struct.unpack_from(f"<{arrays}Q", self._head)
        if sum(map(_padded, sizes)) != body:
            raise WireError(f"{body} bytes for arrays of {sizes}")
        described = 8 * arrays + _padded(header)
        lent = len(self._head) > described
        if lent and self._borrowed is not None:
            first, number = WHERE.unpack_from(self._head, described)
            room = self._borrowed.take(first, number, body)
        else:
            room = np.empty(body, np.uint8).data  # aligned, and not cleared
        self._frames = [bytes(self._head[8 * arrays : 8 * arrays + header])]
        first = 0
        for size in sizes:
            self._frames.append(room[first : first + size])
            first += _padded(size)
        self._body, self._filled = room, body if lent else 0

    def close(self) -> None:
        self._socket.close()
        if self._borrowed is not None:
            self._borrowed.close()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def as_stream(frames: Sequence[Any]) -> tuple[deque[memoryview], int]:
    """Of a token, which the greeting has said, a header, and arrays; and how many bytes it has."""
    _, header, *arrays = frames
    sizes = [array.nbytes for array in arrays]
    body = sum(map(_padded, sizes))
    head = _head(header, sizes, body, len(sizes))
    stream = deque([memoryview(head)])
    for array, size in zip(arrays, sizes, strict=True):
        if size:
            stream.append(memoryview(array).cast("B"))
        if gap := _padded(size) - size:
            stream.append(memoryview(PADDING)[:gap])
    return stream, len(head) + body


def lend(lent: Lent, frames: Sequence[Any]) -> memoryview | None:
    """The same, if the arrays can be lent: then this is all that is sent."""
    _, header, *arrays = frames
    sizes = [array.nbytes for array in arrays]
    *places, body = accumulate(map(_padded, sizes), initial=0)
    loan = lent.lend(arrays, places, body)
    if loan is None:
        return None
    where = WHERE.pack(loan.first, loan.number)
    return memoryview(_head(header, sizes, body, len(sizes) + LENT) + where)


def _head(header: bytes, sizes: Sequence[int], body: int, arrays: int) -> bytes:
    parts = [
        SIZES.pack(body, len(header), arrays),
        struct.pack(f"<{len(sizes)}Q", *sizes),
        header,
        PADDING[: _padded(len(header)) - len(header)],
    ]
    return b"".join(parts)


def parse(address: str) -> tuple[int, Any]:
    """Family, and where it is within that."""
    if address.startswith("ipc://"):
        return socket.AF_UNIX, address.removeprefix("ipc://")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.AF_INET, (host, 0 if port == "*" else int(port))


def _tune(own: socket.socket) -> None:
    if own.family != socket.AF_INET:
        return
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, round(SILENT_S))
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, round(SILENT_S))
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(GONE_S * 1000))
