"""Messages as frames: one msgpack header, then each array as a frame of its own, without a copy.

A header names the sender, its address and the job's token; a message without the right token is
refused before anything is done with it. Arrays stand in the header as [frame, shape]; their
dtype is the one that the message's type asks for, never one that the sender claims. There is no
pickle anywhere.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from math import prod
from typing import Any, get_args

import msgspec
import numpy as np

from planaria.errors import WireError
from planaria.wire.messages import AnyMessage, Member

MAX_HEADER = 1 << 20
Frame = bytes | memoryview


class Envelope(msgspec.Struct, array_like=True):
    token: bytes
    sender: Member
    address: str
    message: AnyMessage


def encode(token: bytes, sender: Member, address: str, message: Any) -> list[Any]:
    """Frames to send. The arrays among them are the message's own: do not write them again."""
    frames: list[Any] = []

    def array_as_number(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be sent")
        frames.append(np.ascontiguousarray(value))
        return (len(frames), value.shape)

    envelope = Envelope(token, sender, address, message)
    header = msgspec.msgpack.encode(envelope, enc_hook=array_as_number)
    return [header, *frames]


def decode(token: bytes, frames: Sequence[Any]) -> Envelope:
    """The message in these frames; WireError if it is not one of this job's."""
    if not frames or len(frames[0]) > MAX_HEADER:
        raise WireError("a message without a header, or with one of more than a megabyte")

    def number_as_array(kind: Any, value: Any) -> Any:
        return _array(kind, value, frames)

    try:
        envelope = msgspec.msgpack.decode(frames[0], type=Envelope, dec_hook=number_as_array)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a header that is not of this protocol: {error}") from None
    if not hmac.compare_digest(envelope.token, token):
        raise WireError("a message without the job's token")
    return envelope


def _array(kind: Any, value: Any, frames: Sequence[Any]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    match value:
        case [int(number), [*shape]] if 1 <= number < len(frames) and 1 <= len(shape) <= 2:
            pass
        case _:
            raise WireError("an array that names no frame")
    frame = frames[number]
    if not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape):
        raise WireError(f"an array of shape {shape}")
    if prod(shape) * dtype.itemsize != len(frame):
        raise WireError(f"{len(frame)} bytes for an array of {dtype} {shape}")
    found = np.frombuffer(frame, dtype).reshape(shape)
    # Small frames lie anywhere in the receive buffer; kernels want aligned memory.
    return found if found.flags.aligned else found.copy()
