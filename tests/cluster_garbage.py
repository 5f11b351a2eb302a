"""What strangers, and members that have lost their wits, send to a server's port."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from planaria.cluster import streams
from planaria.cluster.streams import MAGIC, SIZES
from planaria.wire.codec import encode
from planaria.wire.messages import (
    Delta,
    DenseCopy,
    DenseGradient,
    Done,
    Hello,
    Install,
    Lacks,
    Lookup,
    MatePeek,
    MateReply,
    MateRequest,
    Message,
    Prepare,
    Promise,
    Push,
    RangeRequest,
    Spawn,
    Stop,
    Suspect,
    View,
)

FIRST = View(1, 1)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HANDSHAKE = GREETING + b"\x04" + bytes([len(READY)]) + READY


def rows(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def floats(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def words(*shape: int) -> Any:
    return np.ones(shape, np.uint32)


def plausible(step: int) -> list[Message]:
    """Messages that a server would act on if they came from a member."""
    return [
        Lookup(view=FIRST, rank=0, step=step, part=0, indices=[rows(0, 1, 2)]),
        Push(view=FIRST, rank=0, step=step, indices=[rows(1)], gradients=[floats(1, 8)], lrs=[0.1]),
        Delta(view=FIRST, place=0, step=step, indices=[rows(1)], deltas=[words(1, 16)]),
        MateRequest(view=FIRST, request=1, arena=0, as_of=step, indices=rows(0)),
        Prepare(view=View(9, 9)),
        Install(view=View(9, 9), committed=0, servers=["x"], trainers=["y"], rebuilding=[]),
        Stop(view=FIRST, reason="because I say so"),
    ]


def impossible() -> list[Message]:
    """Messages of the right form, with the right token, that fit no job: a server changes nothing.

    What is within its job is a member's to say, and not among them.
    """
    far = 10**12
    lookup: dict[str, Any] = {"view": FIRST, "rank": 0, "step": 6}
    delta: dict[str, Any] = {"view": FIRST, "place": 1, "step": 6}
    mate: dict[str, Any] = {"view": FIRST, "request": 1, "arena": 0, "as_of": 3}
    return [
        Lookup(view=FIRST, rank=99, step=6, part=0, indices=[rows(0)]),
        Lookup(view=FIRST, rank=-1, step=6, part=0, indices=[rows(0)]),
        Lookup(view=FIRST, rank=0, step=far, part=0, indices=[rows(0)]),
        Lookup(**lookup, part=0, indices=[]),
        Lookup(**lookup, part=0, indices=[rows(0), rows(0)]),
        Lookup(**lookup, part=0, indices=[rows(far)]),
        Lookup(**lookup, part=0, indices=[rows(-1)]),
        Push(**lookup, indices=[rows(0)], gradients=[floats(1, 9)], lrs=[0.1]),
        Push(**lookup, indices=[rows(0)], gradients=[floats(2, 8)], lrs=[0.1]),
        Push(**lookup, indices=[rows(0)], gradients=[floats(8)], lrs=[0.1]),
        Push(**lookup, indices=[rows(0)], gradients=[], lrs=[0.1]),
        Push(**lookup, indices=[rows(0)], gradients=[floats(1, 8)], lrs=[]),
        Push(**lookup, indices=[rows(0)], gradients=[floats(1, 8)], lrs=[float("inf")]),
        Push(**lookup, indices=[rows(0)], gradients=[floats(1, 8)], lrs=[-0.1]),
        Push(**lookup, indices=[rows(0, 0)], gradients=[floats(2, 8)], lrs=[0.1]),
        Delta(view=FIRST, place=77, step=6, indices=[rows(0)], deltas=[words(1, 16)]),
        Delta(**delta, indices=[rows(0)], deltas=[]),
        Delta(**delta, indices=[], deltas=[]),
        Delta(**delta, indices=[rows(far)], deltas=[words(1, 16)]),
        Delta(**delta, indices=[rows(0)], deltas=[words(1, 3)]),
        Lacks(view=FIRST, place=99, deltas=[far]),
        MateRequest(**{**mate, "arena": -1}, indices=rows(0)),
        MateRequest(**{**mate, "arena": 99}, indices=rows(0)),
        MateRequest(**{**mate, "as_of": -far}, indices=rows(0)),
        MateRequest(**{**mate, "as_of": far}, indices=rows(0)),
        MateRequest(**mate, indices=rows(far)),
        MateReply(view=FIRST, request=far, place=0, status="?", committed=far, records=words(1, 1)),
        RangeRequest(**mate, first=far, count=1, peeks=True),
        MatePeek(
            view=FIRST,
            request=far,
            place=0,
            process=far,
            at=0,
            counter=0,
            key=0,
            count=0,
            ends=[far],
            indices=rows(0),
            deltas=words(1, 1),
        ),
        DenseGradient(view=FIRST, rank=0, step=6, gradient=floats(1)),
        DenseCopy(view=FIRST, step=far, state=np.zeros(8, np.uint8)),
        Install(view=View(0, 5), committed=far, servers=[], trainers=[], rebuilding=[]),
        Promise(view=FIRST, held=-far, blank=True, whole=False, dense=False),
        Done(view=FIRST),
        Hello(view=FIRST, member="server-0", role="trainer", address="nowhere"),
        Suspect(view=FIRST, member="server-0", gone=False),
        Spawn(view=FIRST, role="server", count=far),
    ]


def mutated(draw: random.Random, frames: Sequence[Any]) -> list[bytes]:
    """The same message with some bytes changed, cut, doubled or put in, or with other frames."""
    changed = [bytearray(memoryview(frame).cast("B")) for frame in frames]
    for _ in range(draw.randint(1, 4)):
        frame = draw.choice(changed) if draw.random() < 0.2 else changed[1]
        at = draw.randrange(len(frame) + 1)
        match draw.randrange(5):
            case 0 if at < len(frame):
                frame[at] = draw.randrange(256)
            case 1:
                del frame[at:]
            case 2:
                frame[at:at] = draw.randbytes(draw.randint(1, 9))
            case 3:
                frame[at:at] = frame[: draw.randint(0, 40)]
            case _:
                draw.shuffle(changed)
    return [bytes(frame) for frame in changed]


def misshapen(token: bytes) -> list[list[bytes]]:
    """Messages with the right token whose arrays are not what their frames are."""
    heads: list[Any] = [
        [1, [2**39]], [1, [2**62, 4]], [1, [2**63]], [1, [-1]], [1, [0, 2**39]], [1, [1, 1, 1]],
        [1, []], [1, [1.0]], [1, ["1"]], [2, [1]], [0, [1]], [-1, [1]], [2**64 - 1, [1]], [1],
        [1, [2]], "1", None, {"frame": 1}, [[1, [1]], [1]], b"\x01", 1.5,
    ]  # fmt: skip
    headers = [
        msgspec.msgpack.encode(["server-1", "", ["Lookup", 0, 6, 0, nested, False, FIRST]])
        for head in heads
        for nested in ([head], [[head]], head)
    ]
    headers.append(headers[0].replace(msgspec.msgpack.encode([heads[0]]), b"\x91" * 3000 + b"\xc0"))
    return [[token, header, bytes(8)] for header in headers]


def strange_streams(seed: int, count: int, token: bytes) -> Iterator[bytes]:
    """What connections begin with that are no member's: noise, the wrong token, sizes beyond all
    limits; none may have an effect.
    """
    draw = random.Random(seed)
    greeting = MAGIC + token + b"\1"
    for number in range(count):
        real = encode(token, "trainer-0", "", draw.choice(plausible(draw.randint(1, 40))))
        claim = draw.choice([2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1])
        sizes = draw.choice([(claim, 9, 1), (8, 2**31, 1), (8, 9, 2**31)])
        match number % 5:
            case 0:
                yield draw.randbytes(draw.randrange(300))
            case 1:
                yield draw.choice([b"", b"GET / HTTP/1.1\r\n\r\n", HANDSHAKE])
            case 2:
                yield MAGIC + draw.choice([bytes(16), token[::-1]]) + b"\0" + as_stream(real)
            case 3:
                yield greeting[: draw.randrange(len(greeting))]
            case _:
                yield greeting + SIZES.pack(*sizes) + draw.randbytes(50)


def as_stream(frames: Sequence[Any]) -> bytes:
    """Of a token, a header and arrays, as plain sockets have it."""
    token, header, *rest = frames
    arrays = [np.frombuffer(one, np.uint8) if isinstance(one, bytes) else one for one in rest]
    return b"".join(streams.as_stream([token, header, *arrays])[0])


def zmtp_noise(draw: random.Random) -> bytes:
    """No ZMTP, some of it, or enough to claim 4 exabytes."""
    claim = draw.choice([2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1]).to_bytes(8, "big")
    said: bytes = draw.choice(
        [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            draw.randbytes(draw.randrange(300)),
            GREETING + draw.randbytes(100),
            HANDSHAKE[: draw.randrange(len(HANDSHAKE))],
            HANDSHAKE + draw.randbytes(300),
            HANDSHAKE + b"\x02" + claim + draw.randbytes(50),
            HANDSHAKE + b"\x01\x05abcde" * draw.randint(1, 600),
        ]
    )
    return said


def knock(address: str, said: bytes) -> None:
    """One TCP connection."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        try:
            connection.sendall(said)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was refused before it had finished
