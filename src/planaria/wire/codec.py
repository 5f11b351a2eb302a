"""Messages as frames: the job's token, one msgpack header, then each array, without a copy.

    [token] [sender, address, message] [array 1] [array 2] ...

The token has a frame of its own because it is compared before anything else is looked at: what a
stranger sends is never decoded. Then sizes are compared with the limits of the job, and only then
is the header read. Arrays stand in it as [frame, shape], in the order of their frames; their dtype
is the one that the message's type asks for, never one that the sender claims. There is no pickle
anywhere.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, get_args

import msgspec
import numpy as np

from planaria.errors import WireError
from planaria.kernels import packing
from planaria.kernels.types import Bytes
from planaria.wire import rounding
from planaria.wire.control import AnyControl
from planaria.wire.limits import Limits
from planaria.wire.messages import AnyMessage, Member, Push
from planaria.wire.rounding import EXACT

ANY_JOB = Limits()
LEAST_PACKED = 512  # bytes of an array; less is hardly a frame
RECORDS, INDEX, FLOATS = np.dtype(np.uint32), np.dtype(np.int64), np.dtype(np.float32)


class Envelope(msgspec.Struct, array_like=True):
    sender: Member
    address: str
    message: AnyMessage | AnyControl


class Frames(list[Any]):
    """A message to send. array_bytes: of its arrays, before any was packed."""

    array_bytes: int

    @property
    def packed_bytes(self) -> int:
        """Of its arrays, as they are sent."""
        return sum([array.nbytes for array in self[2:]])


def encode(
    token: bytes,
    sender: Member,
    address: str,
    message: Any,
    limits: Limits | None = None,
    *,
    packs: bool = False,
    gradients: str = EXACT,
) -> Frames:
    """Frames to send. The arrays among them are the message's own: do not write them again.

    packs: whether arrays that can be are packed, where that makes them smaller. gradients: what
    those of rows were rounded to. WireError for a message that no receiver with the same limits
    would take: sent, it would break the connection, and again whenever it is repeated.
    """
    arrays: list[Any] = []
    sizes: list[int] = []
    floats = gradients if isinstance(message, Push) else EXACT

    def array_as_number(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be sent")
        array = np.ascontiguousarray(value)
        sizes.append(array.nbytes)
        packed = _packed(array, packs, floats) if array.nbytes >= LEAST_PACKED else None
        if packed is None:
            arrays.append(array)
            return (len(arrays), value.shape)
        arrays.append(packed)
        return (len(arrays), value.shape, True)

    envelope = Envelope(sender, address, message)
    header = msgspec.msgpack.encode(envelope, enc_hook=array_as_number)
    limits = limits or ANY_JOB
    _check_sizes(limits, len(header), len(arrays))
    frames = Frames((token, header, *arrays))
    frames.array_bytes = sum(sizes)
    _check_arrays(limits, type(message), frames.array_bytes)
    return frames


def is_from_job(token: bytes, frame: Any) -> bool:
    """Whether a message that starts with this frame is one of the job's. frame: bytes-like."""
    return len(frame) == len(token) and hmac.compare_digest(frame, token)


def decode(token: bytes, frames: Sequence[Any], limits: Limits | None = None) -> Envelope:
    """The message in these frames; WireError if it is not one of this job's."""
    if not frames or not is_from_job(token, frames[0]):
        raise WireError("a message without the job's token")
    return decode_trusted(frames[1:], limits)


def decode_trusted(frames: Sequence[Any], limits: Limits | None = None) -> Envelope:
    """The same for what follows a token that was compared already: header and arrays."""
    limits = limits or ANY_JOB
    if not frames:
        raise WireError("a message without a header")
    header, *arrays = frames
    _check_sizes(limits, len(header), len(arrays))
    array_bytes = sum(map(len, arrays))  # and what is packed in them
    taken = 0

    def number_as_array(kind: Any, value: Any) -> Any:
        nonlocal taken, array_bytes
        taken += 1
        frame, dtype, shape, packed = _claim(kind, value, taken, frames)
        if packed:
            array_bytes += max(prod(shape) * dtype.itemsize - len(frame), 0)
            check_largest()
        return _unpacked(frame, dtype, shape) if packed else _plain(frame, dtype, shape)

    def check_largest() -> None:
        if array_bytes > limits.largest:
            raise WireError(f"a message with arrays of {array_bytes} bytes")

    check_largest()

    try:
        envelope = msgspec.msgpack.decode(header, type=Envelope, dec_hook=number_as_array)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a header that is not of this protocol: {error}") from None
    if taken != len(arrays):
        raise WireError(f"{len(arrays)} frames for {taken} arrays")
    _check_arrays(limits, type(envelope.message), array_bytes)
    return envelope


def _check_sizes(limits: Limits, header_bytes: int, arrays: int) -> None:
    if header_bytes > limits.header:
        raise WireError(f"a header of {header_bytes} bytes, where {limits.header} are the limit")
    if 2 + arrays > limits.frames:
        raise WireError(f"a message of {2 + arrays} frames, where {limits.frames} are the limit")


def _check_arrays(limits: Limits, kind: type[Any], array_bytes: int) -> None:
    if array_bytes > limits.of(kind):
        raise WireError(
            f"a {kind.__name__} with arrays of {array_bytes} bytes, where this job's config "
            f"implies {limits.of(kind)} at most"
        )


@cache
def _dtype_of(kind: Any) -> np.dtype[Any]:
    """Of an array's type."""
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(kind)[1])[0])
    return dtype


def _claim(
    kind: Any, value: Any, expected: int, frames: Sequence[Any]
) -> tuple[Any, np.dtype[Any], list[int], bool]:
    """The frame of an array, and what is said to be in it. frames: the header, then the arrays."""
    dtype = _dtype_of(kind)
    match value:
        case [int(number), [*shape], *rest] if (
            number == expected
            and number < len(frames)
            and 1 <= len(shape) <= 2
            and rest in ([], [True])
        ):
            pass
        case _:
            raise WireError("an array that names no frame, or not its own")
    if not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape):
        raise WireError(f"an array of shape {shape}")
    return frames[number], dtype, shape, bool(rest)


def _plain(frame: Any, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray[Any, Any]:
    if prod(shape) * dtype.itemsize != len(frame):
        raise WireError(f"{len(frame)} bytes for an array of {dtype} {shape}")
    found = np.frombuffer(frame, dtype).reshape(shape)
    # Small frames lie anywhere in the receive buffer; kernels want aligned memory.
    return found if found.flags.aligned else found.copy()


def _packed(array: np.ndarray[Any, Any], packs: bool, floats: str) -> Bytes | None:
    """If it can and may be, and is smaller for it."""
    kind, packed = (array.dtype, array.ndim), None
    if packs and kind == (RECORDS, 2):
        packed = packing.pack_records(array)
    elif packs and kind == (INDEX, 1):
        packed = packing.pack_index(array)
    elif floats != EXACT and kind == (FLOATS, 2):
        packed = rounding.pack(array, floats)
    return packed if packed is not None and packed.nbytes < array.nbytes else None


def _unpacked(frame: Any, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray[Any, Any]:
    if (dtype, len(shape)) == (RECORDS, 2):
        return packing.unpack_records(np.frombuffer(frame, np.uint8), shape[0], shape[1])
    if (dtype, len(shape)) == (INDEX, 1):
        return packing.unpack_index(np.frombuffer(frame, np.uint8), shape[0])
    if (dtype, len(shape)) == (FLOATS, 2):
        return rounding.unpack(np.frombuffer(frame, np.uint8), shape[0], shape[1])
    raise WireError(f"a packed array of {dtype} {shape}")
