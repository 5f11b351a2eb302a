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
from planaria.kernels.types import Floats, Index, Records
from planaria.wire import messages
from planaria.wire.codec import MAX_HEADER, Envelope, decode, encode
from planaria.wire.messages import NO_VIEW, AnyMessage, Lookup, Message, Push, Stop, View

TOKEN = bytes(range(16))
TYPES: tuple[type[Message], ...] = get_args(AnyMessage)

NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=20)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    bool: st.booleans(),
    str: TEXTS,
    View: st.builds(View, NUMBERS, NUMBERS),
    Index: arrays(np.int64, st.integers(0, 5)),
    Floats: arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(0, 3))),
    Records: arrays(np.uint32, st.tuples(st.integers(0, 4), st.integers(0, 3))),
    list[str]: st.lists(TEXTS, max_size=3),
    list[int]: st.lists(NUMBERS, max_size=3),
    dict[str, str]: st.dictionaries(TEXTS, TEXTS, max_size=3),
}
for _array in (Index, Floats, Records):
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
    header, *frames = encode(TOKEN, sender, address, message)
    return [header, *(frame.tobytes() for frame in frames)]


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
    push = Push(view=NO_VIEW, rank=0, step=1, indices=[rows(1)], gradients=[gradients])
    frames = encode(TOKEN, "me", "", push)
    assert np.shares_memory(frames[2], gradients)
    arrived = [np.zeros(f.nbytes, np.uint8) for f in frames[1:]]
    message = decode(TOKEN, [frames[0], *arrived]).message
    assert isinstance(message, Push)
    assert np.shares_memory(message.gradients[0], arrived[1])
    strided = np.zeros((8, 1000), np.float32).T
    again = encode(
        TOKEN, "", "", Push(view=NO_VIEW, rank=0, step=1, indices=[], gradients=[strided])
    )
    assert not np.shares_memory(again[1], strided)  # a control: this one has to be
    assert again[1].flags.c_contiguous


def test_arrays_are_aligned_wherever_their_frame_lies() -> None:
    lookup = Lookup(view=NO_VIEW, rank=0, step=1, indices=[rows(5, 6, 7)])
    header, _ = encode(TOKEN, "me", "", lookup)
    for offset in range(8):
        buffer = bytes(offset) + rows(5, 6, 7).tobytes()
        message = decode(TOKEN, [header, memoryview(buffer)[offset:]]).message
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
    for size in range(len(frames[0])):
        with pytest.raises(WireError):
            decode(TOKEN, [frames[0][:size], *frames[1:]])
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
    sound = msgspec.msgpack.encode([TOKEN, "", "", ["Lookup", 0, 6, [[1, [1]]], NO_VIEW]])
    assert decode(TOKEN, [sound, bytes(8)])  # a control: what they are made from is sound


def test_a_dtype_is_the_receivers_choice() -> None:
    """A frame of other numbers, of the right size, is read as the type that the message has."""
    push = Push(view=NO_VIEW, rank=0, step=1, indices=[rows(0)], gradients=[words(1, 2)])
    message = decode(TOKEN, sent(push)).message
    assert isinstance(message, Push)
    assert message.gradients[0].dtype == np.float32


def test_a_header_of_more_than_a_megabyte_is_refused_unread() -> None:
    stop = Stop(view=NO_VIEW, reason="x" * (MAX_HEADER - 100))
    assert isinstance(decode(TOKEN, sent(stop)).message, Stop)  # a control: just small enough
    stop.reason += "x" * 200
    with pytest.raises(WireError, match="megabyte"):
        decode(TOKEN, sent(stop))


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
    not_text = msgspec.msgpack.encode([TOKEN, "me", "", ["Stop", "reason", NO_VIEW]])
    with pytest.raises(WireError, match="not of this protocol"):
        decode(TOKEN, [not_text.replace(b"reason", b"\xff\xfe\xfd\xfc\xfb\xfa")])


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_noise_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(TOKEN, frames)
