"""States as bytes: what a state_dict holds, in one array, and back.

    bytes   what
    4       magic, and the version in its last byte
    4       CRC-32 of everything up to the body
    8       bytes of the header
    8       bytes in all, a multiple of 64
    ...     header: the structure in msgpack, with every number and text
    ...     body: tensors and arrays in the header's order, each at a multiple of 64; zeros between

Equal states give equal bytes: dictionaries keep their order, which is part of a state, and no byte
is left to chance. No code is ever stored or run, as pickle would.

A structure is a tree of nodes. None, bool, int, float, str, bytes and dict are msgpack's own;
everything else is an array that begins with a Tag.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from planaria.errors import StateError

State: TypeAlias = NDArray[np.uint8]
Node: TypeAlias = Any
Piece: TypeAlias = tuple[int, int, torch.Tensor]
"""Bytes of the body: start, size, and a tensor of any layout in memory, on any device."""

MAGIC = b"PLK\x01"
PREFIX = struct.Struct("<4sIQQ")
LENGTHS = struct.Struct("<QQ")
ALIGNMENT_BYTES = 64
PLAIN = frozenset((type(None), bool, float, str, bytes))
ARRAY_KINDS = "biufcmM"  # numbers and times; what has pointers, padding or no size is refused
# By dtype, not by name: some have two names. Quantised ones have scales beside their bytes.
DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Tag(IntEnum):
    LIST = 0
    TUPLE = 1
    ORDERED = 2  # an OrderedDict: its dict; with one of modules' state_dict(), its _metadata
    COUNTER = 3
    BIG = 4  # an int that does not fit 64 bits
    TENSOR = 5  # dtype, shape; and the kind of device unless it is the CPU
    ARRAY = 6  # dtype, shape
    SCALAR = 7  # dtype, bytes
    SIZE = 8
    DTYPE = 9


# As numbers, because these are looked up for every node.
LIST, TUPLE, TENSOR = int(Tag.LIST), int(Tag.TUPLE), int(Tag.TENSOR)


class _Refused(Exception):
    """Collects the path to what cannot be packed, from its end."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[str] = []


# ------------------------------------------------------------------------------------ packing


def pack(value: object) -> State:
    """In fresh memory that nobody else holds, aligned to ALIGNMENT_BYTES."""
    node, pieces, body = _flatten(value)
    try:
        header = msgspec.msgpack.encode(node)
    except (OverflowError, UnicodeEncodeError) as error:
        raise StateError(
            f"a key or text in what is kept cannot be stored: {error}; "
            "use text of valid Unicode, and whole numbers of 64 bits as keys"
        ) from error
    start = _aligned(PREFIX.size + len(header))
    lengths = LENGTHS.pack(len(header), start + body)
    crc = zlib.crc32(header, zlib.crc32(lengths))
    state: State = torch.empty(start + body, dtype=torch.uint8, device="cpu").numpy()
    head = MAGIC + crc.to_bytes(4, "little") + lengths + header
    state[:start] = np.frombuffer(head.ljust(start, b"\0"), np.uint8)
    _fill(state[start:], pieces)
    return state


def fingerprint(value: object) -> str:
    """Of the structure: keys, types, dtypes and shapes, whatever the values are."""
    node, _, _ = _flatten(value)
    return blake2b(msgspec.msgpack.encode(_outline(node)), digest_size=16).hexdigest()


def _flatten(value: object) -> tuple[Node, list[Piece], int]:
    """(the structure, what the body holds, how large that is)."""
    packer = _Packer()
    try:
        node = packer.node(value)
    except _Refused as refused:
        path = ".".join(reversed(refused.path)) or "the state"
        raise StateError(f"{path} is {refused}") from None
    except RecursionError as error:
        raise StateError(
            "what is kept contains itself, or is nested too deeply; keep a state_dict that does not"
        ) from error
    return node, packer.pieces, packer.end


def _fill(body: State, pieces: list[Piece]) -> None:
    fetched = _fetch([piece for piece in pieces if not piece[2].is_cpu])
    base = body.ctypes.data
    for start, size, source in pieces:
        if size:
            source = fetched.get(start, source)
            if not source.is_contiguous() or source.is_neg() or source.is_conj():
                source = in_order(source)
            # A view of each, to copy between views, would cost more than the copy.
            ctypes.memmove(base + start, source.data_ptr(), size)
        if gap := -size % ALIGNMENT_BYTES:
            ctypes.memset(base + start + size, 0, gap)


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    # contiguous() would leave a single element the stride that it has, and views of it fail.
    values = tensor.detach().resolve_conj().resolve_neg()
    return values.clone(memory_format=torch.contiguous_format)


def _fetch(pieces: list[Piece]) -> dict[int, torch.Tensor]:
    """What lies on other devices, by its start: one transfer per device, not one per tensor."""
    by_device: dict[Any, list[Piece]] = {}
    for piece in pieces:
        by_device.setdefault(piece[2].device, []).append(piece)
    found: dict[int, torch.Tensor] = {}
    for some in by_device.values():
        flat = [in_order(source).reshape(-1).view(torch.uint8) for _, _, source in some]
        parts = torch.cat(flat).cpu().split([size for _, size, _ in some])
        found |= {start: part for (start, _, _), part in zip(some, parts, strict=True)}
    return found


@lru_cache(4096)
def _tensor_node(dtype: torch.dtype, shape: torch.Size) -> tuple[Node, int]:
    """(its node, its bytes). Most tensors of a state are like those of the step before."""
    if dtype not in DTYPE_NAMES:
        raise _Refused(f"a tensor of {dtype}, which has no plain bytes; keep another dtype")
    return [TENSOR, DTYPE_NAMES[dtype], list(shape)], prod(shape) * dtype.itemsize


class _Packer:
    """Turns values into nodes, and remembers what belongs into the body."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.end = 0

    def node(self, value: Any) -> Node:
        kind = type(value)
        if kind in PLAIN:
            return value
        packing = _PACKING.get(kind)
        if packing is not None:
            return packing(self, value)
        if isinstance(value, np.generic):
            return self.scalar(value)
        if isinstance(value, torch.Tensor):
            raise _Refused(
                f"a {kind.__name__}, a special kind of tensor; keep an ordinary tensor, "
                "and run lazy modules once before keeping them"
            )
        raise _Refused(
            f"a {kind.__module__}.{kind.__qualname__}; a state_dict that is kept may hold "
            "dictionaries, lists, tuples, numbers, text, bytes, tensors and NumPy arrays"
        )

    def integer(self, value: int) -> Node:
        if -(2**63) <= value < 2**64:
            return value
        return [Tag.BIG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]

    def mapping(self, value: dict[Any, Any]) -> Node:
        found = {}
        for key, one in value.items():
            if type(key) is not str and type(key) is not int:
                raise _Refused(f"a dictionary with the key {key!r}; use text or whole numbers")
            try:
                found[key] = self.node(one)
            except _Refused as refused:
                refused.path.append(str(key))
                raise
        return found

    def ordered(self, value: OrderedDict[Any, Any]) -> Node:
        found = [Tag.ORDERED, self.mapping(value)]
        # Modules put the versions of their formats there, and look for them when they load.
        metadata = getattr(value, "_metadata", None)
        return found if metadata is None else [*found, self.node(metadata)]

    def counter(self, value: Counter[Any]) -> Node:
        return [Tag.COUNTER, self.mapping(value)]

    def items(self, value: list[Any] | tuple[Any, ...]) -> Node:
        found: list[Node] = [LIST if type(value) is list else TUPLE]
        for number, one in enumerate(value):
            try:
                found.append(self.node(one))
            except _Refused as refused:
                refused.path.append(str(number))
                raise
        return found

    def tensor(self, value: torch.Tensor) -> Node:
        node, size = _tensor_node(value.dtype, value.shape)
        if value.layout is not torch.strided or value.is_meta:
            raise _Refused(
                f"a tensor without plain bytes ({value.layout}, on {value.device}); "
                "keep a dense one on a real device"
            )
        self.pieces.append((self.end, size, value))
        self.end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not value.is_cpu:
            return [*node, value.device.type]
        if size and not value.data_ptr():
            raise _Refused("a tensor whose memory was released; keep it while it has some")
        return node

    def array(self, value: NDArray[Any]) -> Node:
        self._check_dtype(value.dtype)
        content = np.frombuffer(value.tobytes(), np.uint8).copy()
        self.tensor(torch.from_numpy(content))
        return [Tag.ARRAY, value.dtype.str, list(value.shape)]

    def scalar(self, value: np.generic) -> Node:
        self._check_dtype(value.dtype)
        return [Tag.SCALAR, value.dtype.str, value.tobytes()]

    def size(self, value: torch.Size) -> Node:
        return [Tag.SIZE, list(value)]

    def dtype(self, value: torch.dtype) -> Node:
        return [Tag.DTYPE, str(value).removeprefix("torch.")]

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype.kind not in ARRAY_KINDS or dtype.char in "gG":
            raise _Refused(f"of NumPy's {dtype}; keep numbers of at most 64 bits per part")


_PACKING: dict[type, Callable[[_Packer, Any], Node]] = {
    int: _Packer.integer,
    dict: _Packer.mapping,
    OrderedDict: _Packer.ordered,
    Counter: _Packer.counter,
    list: _Packer.items,
    tuple: _Packer.items,
    torch.Tensor: _Packer.tensor,
    torch.nn.Parameter: _Packer.tensor,
    np.ndarray: _Packer.array,
    torch.Size: _Packer.size,
    torch.dtype: _Packer.dtype,
}


def _outline(node: Node) -> Node:
    """A node without its values."""
    if isinstance(node, dict):
        return {key: _outline(one) for key, one in node.items()}
    if not isinstance(node, list):
        return type(node).__name__
    tag = node[0]
    if tag in (Tag.LIST, Tag.TUPLE, Tag.ORDERED, Tag.COUNTER):
        return [tag, *map(_outline, node[1:])]
    if tag == Tag.BIG:
        return "int"
    return node[:2] if tag == Tag.SCALAR else node


# ---------------------------------------------------------------------------------- unpacking


def unpack(state: State, *, on_cpu: bool = False) -> Any:
    """The value that was packed, in memory of its own; StateError if these are not its bytes.

    on_cpu: where the devices that tensors were on may not exist.
    """
    header, body = _split(state)
    try:
        unpacker = _Unpacker(body, on_cpu)
        value = unpacker.value(msgspec.msgpack.decode(header))
        if unpacker.end != len(body):
            raise ValueError("the body is longer than the header says")
    except StateError:
        raise
    # Whatever a header of somebody else's making leads to, RecursionError included.
    except Exception as error:
        raise StateError(f"a kept state is damaged: {error}; use another copy of it") from error
    return value


def sections(state: State) -> Iterator[tuple[str, bytes, State]]:
    """Of each key of a dictionary that was packed: what the header says of it, and its body."""
    header, body = _split(state)
    end = 0
    for name, raw in msgspec.msgpack.decode(header, type=dict[str, msgspec.Raw]).items():
        node = bytes(raw)
        start, end = end, end + _body_bytes(node)
        yield name, node, body[start:end]


@lru_cache(256)
def _body_bytes(node: bytes) -> int:
    """Most objects have the same structure in each step."""
    return _bytes_in_body(msgspec.msgpack.decode(node))


def _bytes_in_body(node: Node) -> int:
    if isinstance(node, dict):
        return sum(map(_bytes_in_body, node.values()))
    if not isinstance(node, list):
        return 0
    tag = node[0]
    if tag in (Tag.LIST, Tag.TUPLE, Tag.ORDERED, Tag.COUNTER):
        return sum(map(_bytes_in_body, node[1:]))
    if tag not in (Tag.TENSOR, Tag.ARRAY):
        return 0
    itemsize = DTYPES[node[1]].itemsize if tag == Tag.TENSOR else np.dtype(node[1]).itemsize
    return _aligned(prod(node[2]) * itemsize)


def _split(state: State) -> tuple[bytes, State]:
    if not isinstance(state, np.ndarray) or state.dtype != np.uint8 or state.ndim != 1:
        raise StateError("a kept state is a one-dimensional NumPy array of uint8; pass one")
    if len(state) < PREFIX.size:
        raise StateError(f"a kept state has {len(state)} bytes, too few; use another copy of it")
    magic, crc, header_size, size = PREFIX.unpack(state[: PREFIX.size].tobytes())
    if magic[:3] != MAGIC[:3]:
        raise StateError("these bytes are not a kept state; pass what freeze() returned")
    if magic != MAGIC:
        raise StateError(
            f"a kept state is of version {magic[3]}, and this is version {MAGIC[3]}; "
            "run the same Planaria everywhere"
        )
    start = _aligned(PREFIX.size + header_size)
    if size != len(state) or start > size:
        raise StateError(
            f"a kept state of {size} bytes has come as {len(state)}; use another copy of it"
        )
    header = state[PREFIX.size : PREFIX.size + header_size].tobytes()
    if zlib.crc32(header, zlib.crc32(LENGTHS.pack(header_size, size))) != crc:
        raise StateError("a kept state does not match its checksum; use another copy of it")
    return header, np.ascontiguousarray(state[start:])


class _Unpacker:
    """Turns nodes into values; everything that it raises means damage."""

    def __init__(self, body: State, on_cpu: bool) -> None:
        self._body = body
        self._on_cpu = on_cpu
        self.end = 0

    def value(self, node: Node) -> Any:
        kind = type(node)
        if kind in PLAIN or kind is int:
            return node
        if kind is dict:
            return {key: self.value(one) for key, one in node.items()}
        return _UNPACKING[Tag(node[0])](self, *node[1:])

    def list(self, *nodes: Node) -> Any:
        return [self.value(one) for one in nodes]

    def tuple(self, *nodes: Node) -> Any:
        return tuple(self.value(one) for one in nodes)

    def ordered(self, items: Node, metadata: Node = None) -> Any:
        found = OrderedDict(self.value(items))
        if metadata is not None:
            found._metadata = self.value(metadata)  # type: ignore[attr-defined]
        return found

    def counter(self, items: Node) -> Any:
        return Counter(self.value(items))

    def big(self, digits: bytes) -> Any:
        return int.from_bytes(digits, "little", signed=True)

    def tensor(self, name: str, shape: Any, device: str = "cpu") -> Any:
        dtype = DTYPES[name]
        piece = self._next(shape, dtype.itemsize)
        found = torch.empty(shape, dtype=dtype, device="cpu")
        if len(piece):
            ctypes.memmove(found.data_ptr(), piece.ctypes.data, len(piece))
        return found if device == "cpu" or self._on_cpu else found.to(device)

    def array(self, name: str, shape: Any) -> Any:
        dtype = np.dtype(name)
        piece = self._next(shape, dtype.itemsize)
        return piece.copy().view(dtype).reshape(shape)

    def scalar(self, name: str, content: bytes) -> Any:
        return np.frombuffer(content, np.dtype(name))[0]

    def size(self, shape: Any) -> Any:
        return torch.Size(shape)

    def dtype(self, name: str) -> Any:
        return _dtype_named(name)

    def _next(self, shape: Any, itemsize: int) -> State:
        if not all(type(one) is int and one >= 0 for one in shape):
            raise ValueError(f"there is no shape {shape}")
        size = prod(shape) * itemsize
        start, self.end = self.end, self.end + _aligned(size)
        if self.end > len(self._body):
            raise ValueError("the body is shorter than the header says")
        return self._body[start : start + size]


_UNPACKING: dict[Tag, Callable[..., Any]] = {
    Tag.LIST: _Unpacker.list,
    Tag.TUPLE: _Unpacker.tuple,
    Tag.ORDERED: _Unpacker.ordered,
    Tag.COUNTER: _Unpacker.counter,
    Tag.BIG: _Unpacker.big,
    Tag.TENSOR: _Unpacker.tensor,
    Tag.ARRAY: _Unpacker.array,
    Tag.SCALAR: _Unpacker.scalar,
    Tag.SIZE: _Unpacker.size,
    Tag.DTYPE: _Unpacker.dtype,
}


def _dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
