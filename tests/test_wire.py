"""Messages as frames: what goes in comes out, without copies; anything else is refused."""

from __future__ import annotations

import random
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from cluster_garbage import floats, impossible, misshapen, mutated, plausible, rows, words
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from planaria.errors import WireError
from planaria.kernels.types import Bytes, Floats, Index, Records
from planaria.layout.resizing import Resize
from planaria.wire import messages
from planaria.wire.codec import Envelope, decode, encode
from planaria.wire.limits import Limits
from planaria.wire.messages import (
    NO_VIEW,
    AnyMessage,
    Delta,
    Lookup,
    Message,
    Push,
    Shift,
    Stop,
    View,
)

TOKEN = bytes(range(16))
TYPES: tuple[type[Message], ...] = get_args(AnyMessage)

NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=20)
RESIZES = st.builds(
    Resize,
    st.lists(NUMBERS, max_size=3).map(tuple),
    NUMBERS,
    st.none() | st.lists(TEXTS, max_size=2).map(tuple),
    NUMBERS,
)
SHIFTS = st.builds(Shift, NUMBERS, NUMBERS)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    str: TEXTS,
    View: st.builds(View, NUMBERS, NUMBERS),
    Index: arrays(np.int64, st.integers(0, 5)),
    Floats: arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(0, 3))),
    Records: arrays(np.uint32, st.tuples(st.integers(0, 4), st.integers(0, 3))),
    list[str]: st.lists(TEXTS, max_size=3),
    list[int]: st.lists(NUMBERS, max_size=3),
    list[tuple[int, int]]: st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3),
    Bytes: arrays(np.uint8, st.integers(0, 5)),
    list[float]: st.lists(st.floats(allow_nan=False), max_size=3),
    dict[str, str]: st.dictionaries(TEXTS, TEXTS, max_size=3),
    int | None: st.none() | NUMBERS,
    list[Resize]: st.lists(RESIZES, max_size=2),
    Resize | None: st.none() | RESIZES,
    list[Shift]: st.lists(SHIFTS, max_size=2),
    Shift | None: st.none() | SHIFTS,
}
for _array in (Index, Floats, Records, Bytes):
    VALUES[list[_array]] = st.lists(VALUES[_array], max_size=3)  # type: ignore[valid-type]
    VALUES[_array | None] = st.none() | VALUES[_array]


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    return st.builds(kind, **{name: VALUES[hint] for name, hint in get_type_hints(kind).items()})


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit: NaNs too, and shapes and dtypes."""
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Message):
        names = one.__struct_fields__
        return type(one) is type(other) and all(
            same(getattr(one, n), getattr(other, n)) for n in names
        )
    return bool(one == other)


def sent(message: Message, sender: str = "me", address: str = "") -> list[bytes]:
    """The frames as they arrive: bytes."""
    token, header, *arrays = encode(TOKEN, sender, address, message)
    return [token, header, *(array.tobytes() for array in arrays)]


# ---------------------------------------------------------------------------- there and back


def test_every_message_of_the_protocol_can_be_sent() -> None:
    defined = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
    assert defined == set(TYPES)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_sent_is_what_arrives(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    sender, address = data.draw(TEXTS), data.draw(TEXTS)
    envelope = decode(TOKEN, sent(message, sender, address))
    assert (envelope.sender, envelope.address) == (sender, address)
    assert same(envelope.message, message)
    other = data.draw(messages_of(kind))
    if not same(message, other):  # a control: `same` can tell messages apart
        assert not same(decode(TOKEN, sent(other)).message, message)


def test_arrays_are_neither_copied_when_sent_nor_when_received() -> None:
    gradients = floats(1000, 8)
    push = Push(view=NO_VIEW, rank=0, step=1, indices=[rows(1)], gradients=[gradients], lrs=[0.1])
    frames = encode(TOKEN, "me", "", push)
    assert np.shares_memory(frames[3], gradients)
    arrived = [np.zeros(f.nbytes, np.uint8) for f in frames[2:]]
    message = decode(TOKEN, [*frames[:2], *arrived]).message
    assert isinstance(message, Push)
    assert np.shares_memory(message.gradients[0], arrived[1])
    strided = np.zeros((8, 1000), np.float32).T
    again = encode(
        TOKEN,
        "",
        "",
        Push(view=NO_VIEW, rank=0, step=1, indices=[], gradients=[strided], lrs=[0.1]),
    )
    assert not np.shares_memory(again[2], strided)  # a control: this one has to be
    assert again[2].flags.c_contiguous


def test_arrays_are_aligned_wherever_their_frame_lies() -> None:
    lookup = Lookup(view=NO_VIEW, rank=0, step=1, part=0, indices=[rows(5, 6, 7)])
    token, header, _ = encode(TOKEN, "me", "", lookup)
    for offset in range(8):
        buffer = bytes(offset) + rows(5, 6, 7).tobytes()
        message = decode(TOKEN, [token, header, memoryview(buffer)[offset:]]).message
        assert isinstance(message, Lookup)
        assert message.indices[0].flags.aligned
        assert message.indices[0].tolist() == [5, 6, 7]


def test_what_is_no_array_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="object cannot be sent"):
        encode(TOKEN, "me", "", object())


# ---------------------------------------------------------------------------- refused


@pytest.mark.parametrize("token", [b"", TOKEN[:-1], TOKEN + b"\0", bytes(16), TOKEN[::-1]])
def test_a_message_with_another_token_is_refused(token: bytes) -> None:
    frames = encode(token, "me", "", Stop(view=NO_VIEW, reason="please"))
    with pytest.raises(WireError, match="token"):
        decode(TOKEN, frames)
    assert isinstance(decode(token, frames).message, Stop)  # a control


@pytest.mark.parametrize("message", plausible(3) + impossible(), ids=lambda m: type(m).__name__)
def test_a_message_that_is_cut_anywhere_is_refused(message: Message) -> None:
    frames = sent(message)
    assert same(decode(TOKEN, frames).message, message)
    for cut in (0, 1):
        for size in range(len(frames[cut])):
            with pytest.raises(WireError):
                decode(TOKEN, [*frames[:cut], frames[cut][:size], *frames[cut + 1 :]])
    for number in range(1, len(frames)):
        if frames[number]:
            with pytest.raises(WireError):
                decode(TOKEN, [*frames[:number], frames[number][:-1], *frames[number + 1 :]])
        with pytest.raises(WireError):
            decode(TOKEN, frames[:number])
    with pytest.raises(WireError):
        decode(TOKEN, [])


def test_arrays_that_are_not_what_their_frames_are_are_refused() -> None:
    for frames in misshapen(TOKEN):
        with pytest.raises(WireError):
            decode(TOKEN, frames)
    sound = msgspec.msgpack.encode(
        ["", "", ["Lookup", 0, 6, 0, [[1, [1]]], False, False, [], NO_VIEW]]
    )
    assert decode(TOKEN, [TOKEN, sound, bytes(8)])  # a control: what they are made from is sound


def test_every_frame_is_one_array_and_every_array_one_frame() -> None:
    """No memory is read as two arrays, and none comes along that nobody asked for."""
    push = sent(
        Push(
            view=NO_VIEW,
            rank=0,
            step=1,
            indices=[rows(1), rows(2)],
            gradients=[floats(1, 2)],
            lrs=[0.1],
        )
    )
    assert decode(TOKEN, push)  # a control
    for wrong in ([*push, b""], [*push, bytes(8)], push[:-1]):
        with pytest.raises(WireError):
            decode(TOKEN, wrong)
    for numbers in ([1, 1, 3], [2, 1, 3], [1, 3, 3]):
        indices, gradients = [[n, [1]] for n in numbers[:2]], [[numbers[2], [1, 2]]]
        message = ["Push", 0, 1, indices, gradients, [0.1], NO_VIEW]
        header = msgspec.msgpack.encode(["me", "", message])
        with pytest.raises(WireError, match="names no frame, or not its own"):
            decode(TOKEN, [TOKEN, header, *push[2:]])
    with pytest.raises(WireError, match="1 frames for 0 arrays"):
        decode(TOKEN, [*sent(Stop(view=NO_VIEW, reason="")), bytes(1000)])


class Unreadable:
    """A frame that only tells its length: whoever looks into it fails the test."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def test_nothing_of_a_message_is_read_before_its_token() -> None:
    for token in (bytes(16), b"", TOKEN[:-1], TOKEN + b"\0"):
        with pytest.raises(WireError, match="token"):
            decode(TOKEN, [token, Unreadable(900_000), Unreadable(900_000)])
    with pytest.raises(WireError, match="token"):  # nor is the token, where its length is wrong
        decode(TOKEN, [Unreadable(1 << 30)])
    with pytest.raises(TypeError):  # a control: with the token, the header is
        decode(TOKEN, [TOKEN, Unreadable(100)])


def test_a_dtype_is_the_receivers_choice() -> None:
    """A frame of other numbers, of the right size, is read as the type that the message has."""
    push = Push(view=NO_VIEW, rank=0, step=1, indices=[rows(0)], gradients=[words(1, 2)], lrs=[0.1])
    message = decode(TOKEN, sent(push)).message
    assert isinstance(message, Push)
    assert message.gradients[0].dtype == np.float32


SMALL = Limits(header=1000, arrays={Lookup: 80, Push: 200}, other=300, frames=6)


def test_a_header_beyond_the_limit_is_refused_unread() -> None:
    stop = Stop(view=NO_VIEW, reason="x" * 900)
    assert isinstance(decode(TOKEN, sent(stop), SMALL).message, Stop)  # a control: small enough
    stop.reason += "x" * 200
    with pytest.raises(WireError, match=r"header of \d+ bytes, where 1000"):
        decode(TOKEN, sent(stop), SMALL)
    with pytest.raises(WireError, match="header of 1001 bytes"):
        decode(TOKEN, [TOKEN, Unreadable(1001)], SMALL)


def lookup_of(count: int) -> Lookup:
    return Lookup(view=NO_VIEW, rank=0, step=1, part=0, indices=[np.zeros(count, np.int64)])


def test_arrays_beyond_the_limit_of_their_kind_are_refused() -> None:
    assert decode(TOKEN, sent(lookup_of(10)), SMALL)  # a control: as large as can be
    with pytest.raises(WireError, match="a Lookup with arrays of 88 bytes"):
        decode(TOKEN, sent(lookup_of(11)), SMALL)
    push = Push(view=NO_VIEW, rank=0, step=1, indices=[rows(*range(11))], gradients=[], lrs=[0.1])
    assert decode(TOKEN, sent(push), SMALL)  # a control: another kind, another limit
    delta = Delta(view=NO_VIEW, place=0, step=1, indices=[rows(*range(37))], deltas=[])
    assert decode(TOKEN, sent(delta), SMALL)  # and a kind without a limit of its own
    delta.deltas.append(words(1, 2))
    with pytest.raises(WireError, match="arrays of 304 bytes"):
        decode(TOKEN, sent(delta), SMALL)
    with pytest.raises(WireError, match="arrays of 1001 bytes"):  # beyond all limits: unread
        decode(TOKEN, [TOKEN, Unreadable(10), Unreadable(1001)], SMALL)
    many = Lookup(view=NO_VIEW, rank=0, step=1, part=0, indices=[rows()] * 5)
    with pytest.raises(WireError, match="7 frames"):
        decode(TOKEN, sent(many), SMALL)


def test_what_no_receiver_would_take_is_not_sent() -> None:
    assert encode(TOKEN, "me", "", lookup_of(10), SMALL)  # a control
    with pytest.raises(WireError, match="a Lookup with arrays of 88 bytes"):
        encode(TOKEN, "me", "", lookup_of(11), SMALL)
    with pytest.raises(WireError, match="header"):
        encode(TOKEN, "me", "", Stop(view=NO_VIEW, reason="x" * 1000), SMALL)


def test_20000_mutated_messages_are_refused_or_understood_but_never_raise() -> None:
    """Letters that are no UTF-8 once took a server down, and it needed no token."""
    draw = random.Random(6)
    real = [sent(message) for message in plausible(3) + impossible()]
    refused = understood = 0
    for _ in range(20_000):
        frames = mutated(draw, draw.choice(real))
        try:
            assert isinstance(decode(TOKEN, frames), Envelope)
            understood += 1
        except WireError:
            refused += 1
    assert refused > 10_000
    assert understood > 100  # some changes leave a sound message
    not_text = msgspec.msgpack.encode(["me", "", ["Stop", "reason", NO_VIEW]])
    with pytest.raises(WireError, match="not of this protocol"):
        decode(TOKEN, [TOKEN, not_text.replace(b"reason", b"\xff\xfe\xfd\xfc\xfb\xfa")])


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_noise_is_refused(frames: list[bytes]) -> None:
    for noise in (frames, [TOKEN, *frames]):
        with pytest.raises(WireError):
            decode(TOKEN, noise)
