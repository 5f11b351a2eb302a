"""Packed arrays on the wire: the same message in fewer bytes, and nothing that claims too much."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from planaria.errors import WireError
from planaria.kernels.types import Index, Records
from planaria.wire.codec import LEAST_PACKED, Frames, decode, encode
from planaria.wire.limits import Limits
from planaria.wire.messages import NO_VIEW, Delta, MateReply, Push

TOKEN = bytes(range(16))
DELTAS = GRADIENTS = 4  # where they stand in the header of a Delta and of a Push


def changes(rows: int, words: int, seed: int = 0) -> tuple[Index, Records]:
    """As a step makes them: old XOR new of floats that have moved a little."""
    rng = np.random.default_rng(seed)
    old = rng.normal(0, 0.1, (rows, words)).astype(np.float32)
    new = (old + rng.normal(0, 1e-4, old.shape)).astype(np.float32)
    numbers = np.sort(rng.choice(100_000, rows, replace=False))
    return numbers, old.view(np.uint32) ^ new.view(np.uint32)


def delta(rows: int = 300, words: int = 32) -> Delta:
    numbers, records = changes(rows, words)
    return Delta(view=NO_VIEW, place=1, step=7, indices=[numbers], deltas=[records])


def sent(message: object, *, packs: bool = True, limits: Limits | None = None) -> Frames:
    return encode(TOKEN, "server-1", "tcp://somewhere:1", message, limits, packs=packs)


def as_bytes(frames: Frames) -> list[bytes]:
    return [bytes(memoryview(frame).cast("B")) for frame in frames]


def test_a_packed_message_is_smaller_and_the_same() -> None:
    message = delta()
    plain, packed = sent(message, packs=False), sent(message)
    assert plain.array_bytes == packed.array_bytes == plain.packed_bytes == message.array_bytes()
    assert packed.packed_bytes < 0.7 * plain.packed_bytes
    found = decode(TOKEN, as_bytes(packed)).message
    assert isinstance(found, Delta)
    assert (found.indices[0] == message.indices[0]).all()
    assert (found.deltas[0] == message.deltas[0]).all()
    assert found.deltas[0].flags.aligned


def test_floats_and_small_arrays_are_sent_as_they_are() -> None:
    numbers, _ = changes(LEAST_PACKED // 8 - 1, 1)
    push = Push(
        view=NO_VIEW,
        rank=0,
        step=1,
        indices=[numbers],
        gradients=[np.zeros((len(numbers), 64), np.float32)],
        lrs=[0.1],
    )
    assert sent(push)[1:] == sent(push, packs=False)[1:]


def test_what_would_not_get_smaller_is_sent_as_it_is() -> None:
    noise = np.random.default_rng(1).integers(0, 2**32, (64, 32), np.uint32)
    reply = MateReply(view=NO_VIEW, request=1, place=0, status="ok", committed=3, records=noise)
    assert sent(reply)[2] is noise


def test_a_packed_array_counts_with_its_full_size() -> None:
    message = delta()
    tight = Limits(arrays={Delta: message.array_bytes() - 1}, other=1 << 20)
    with pytest.raises(WireError, match="config"):
        sent(message, limits=tight)
    with pytest.raises(WireError, match="config"):
        decode(TOKEN, as_bytes(sent(message)), tight)


def test_more_than_any_message_may_have_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token, header, *arrays = as_bytes(sent(delta()))
    claims = msgspec.msgpack.decode(header)
    claims[2][DELTAS][0][1] = [2**30, 32]
    monkeypatch.setattr("planaria.kernels.packing.unpack_records", pytest.fail)
    with pytest.raises(WireError, match=f"{2**30 * 128:d}|a message with arrays"):
        decode(TOKEN, [token, msgspec.msgpack.encode(claims), *arrays])


@pytest.mark.parametrize("rest", [[False], [1, 1], ["yes"], [None]])
def test_an_array_is_packed_or_not_and_nothing_else(rest: list[object]) -> None:
    token, header, *arrays = as_bytes(sent(delta()))
    claims = msgspec.msgpack.decode(header)
    claims[2][DELTAS][0][2:] = rest
    with pytest.raises(WireError):
        decode(TOKEN, [token, msgspec.msgpack.encode(claims), *arrays])


def test_floats_that_are_no_frame_cannot_claim_to_be_packed() -> None:
    push = Push(
        view=NO_VIEW,
        rank=0,
        step=1,
        indices=[np.arange(2)],
        gradients=[np.zeros((2, 4), np.float32)],
        lrs=[0.1],
    )
    token, header, *arrays = as_bytes(sent(push))
    claims = msgspec.msgpack.decode(header)
    claims[2][GRADIENTS][0].append(True)
    with pytest.raises(WireError, match="no frame"):
        decode(TOKEN, [token, msgspec.msgpack.encode(claims), *arrays])


def test_any_changed_byte_of_a_packed_array_is_refused() -> None:
    frames = as_bytes(sent(delta(rows=LEAST_PACKED // 8)))
    draw = random.Random(3)
    for _ in range(2_000):
        frame = draw.randrange(2, len(frames))
        at = draw.randrange(len(frames[frame]))
        damaged = bytearray(frames[frame])
        damaged[at] ^= draw.randrange(1, 256)
        with pytest.raises(WireError):
            decode(TOKEN, [*frames[:frame], bytes(damaged), *frames[frame + 1 :]])
