"""The NumPy twin of what becomes of codes: packed to their width, Huffman's, rows that repeat.
native/packing.hpp, huffman.hpp and vector_lz.hpp say what the bytes are."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from planaria.kernels.types import Bytes

Codes = NDArray[np.uint8] | NDArray[np.uint16]

HUFFMAN_BITS = 11
HUFFMAN_STREAMS = 4
HUFFMAN_FEW = 4096
LZ_BLOCK_ROWS = 2048
LZ_WINDOW = 255
LZ_LONGEST = 255


class BadCodes(Exception):
    """The bytes are not what an encoder makes."""


def packed_bytes(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def pack(codes: Codes, bits: int) -> Bytes:
    lowest_first = codes.reshape(-1, 1).astype(np.uint16) >> np.arange(bits, dtype=np.uint16) & 1
    return np.packbits(lowest_first.astype(np.uint8).reshape(-1), bitorder="little")


def unpack(packed: Bytes, count: int, bits: int) -> NDArray[np.uint16]:
    each = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    parts = each.astype(np.uint16) << np.arange(bits, dtype=np.uint16)
    codes: NDArray[np.uint16] = parts.sum(1, dtype=np.uint16)
    return codes


# ---------------------------------------------------------------------------- Huffman


def code_lengths(counts: list[int]) -> list[int]:
    """Of each symbol that occurs, 1 to 11; of others 0. Two or more must occur."""
    leaves = sorted((count, symbol) for symbol, count in enumerate(counts) if count)
    waiting = deque((count, [0]) for count, _ in leaves)  # weight, depths of the leaves below
    made: deque[tuple[int, list[int]]] = deque()
    while len(waiting) + len(made) > 1:
        both = [
            waiting.popleft() if not made or (waiting and waiting[0][0] <= made[0][0])
            else made.popleft()
            for _ in range(2)
        ]  # fmt: skip
        made.append((both[0][0] + both[1][0], [depth + 1 for _, ds in both for depth in ds]))
    at_depth = np.bincount(np.minimum(made[0][1], HUFFMAN_BITS), minlength=HUFFMAN_BITS + 1)
    taken = sum(int(n) << (HUFFMAN_BITS - depth) for depth, n in enumerate(at_depth) if depth)
    for _ in range(taken - (1 << HUFFMAN_BITS)):
        depth = max(d for d in range(1, HUFFMAN_BITS) if at_depth[d])
        at_depth[depth] -= 1
        at_depth[depth + 1] += 2
        at_depth[HUFFMAN_BITS] -= 1
    lengths = [0] * len(counts)
    deepest_first = [d for d in range(HUFFMAN_BITS, 0, -1) for _ in range(at_depth[d])]
    for (_, symbol), length in zip(leaves, deepest_first, strict=True):
        lengths[symbol] = length
    return lengths


def codewords(lengths: list[int]) -> list[int]:
    """Canonical codes, their first bit lowest."""
    words, following = [0] * len(lengths), 0
    for length in range(1, HUFFMAN_BITS + 1):
        following <<= 1
        for symbol, own in enumerate(lengths):
            if own == length:
                words[symbol] = int(f"{following:0{length}b}"[::-1], 2)
                following += 1
    return words


def _shares(count: int) -> list[tuple[int, int]]:
    streams = 1 if count < HUFFMAN_FEW else HUFFMAN_STREAMS
    share = -(-count // streams)
    return [(s * share, min((s + 1) * share, count)) for s in range(streams)]


def huffman_encode(codes: NDArray[np.uint8], symbols: int, below: int) -> Bytes | None:
    counts = np.bincount(codes, minlength=symbols).tolist()
    if sum(count > 0 for count in counts) < 2:
        return None
    lengths = code_lengths(counts)
    shares = _shares(len(codes))
    header = (symbols + 1) // 2 + 4 * (len(shares) - 1)
    bits = sum(count * length for count, length in zip(counts, lengths, strict=True))
    if header + bits // 8 + len(shares) >= below:
        return None
    places = np.arange(HUFFMAN_BITS)
    words, widths = np.array(codewords(lengths)), np.array(lengths)
    streams = []
    for first, stop in shares:
        own = codes[first:stop]
        each = (words[own][:, None] >> places & 1)[places < widths[own][:, None]]
        streams.append(np.packbits(each.astype(np.uint8), bitorder="little"))
    sizes = np.array([len(stream) for stream in streams[:-1]], "<u4").view(np.uint8)
    return np.concatenate([pack(np.array(lengths, np.uint8), 4), sizes, *streams])


def huffman_decode(content: Bytes, symbols: int, count: int) -> NDArray[np.uint8]:
    shares = _shares(count)
    size = (symbols + 1) // 2
    if len(content) < size + 4 * (len(shares) - 1):
        raise BadCodes
    lengths = unpack(content[:size], symbols, 4).tolist()
    full = 1 << HUFFMAN_BITS
    if max(lengths) > HUFFMAN_BITS or sum(full >> n for n in lengths if n) != full:
        raise BadCodes
    if max(lengths) == 0:
        raise BadCodes
    symbol_at, length_at = np.zeros(full, np.uint8), np.zeros(full, np.int64)
    for symbol, (word, length) in enumerate(zip(codewords(lengths), lengths, strict=True)):
        if length:
            symbol_at[word :: 1 << length] = symbol
            length_at[word :: 1 << length] = length
    at = size + 4 * (len(shares) - 1)
    sizes = content[size:at].view("<u4").tolist()
    if sum(sizes) > len(content) - at:
        raise BadCodes
    parts = []
    for (first, stop), own in zip(shares, [*sizes, len(content) - at - sum(sizes)], strict=True):
        parts.append(_decode_stream(content[at : at + own], stop - first, symbol_at, length_at))
        at += own
    return np.concatenate(parts)


def _decode_stream(
    content: Bytes, count: int, symbol_at: NDArray[np.uint8], length_at: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """From every bit on, which symbol would begin there; then from one to the next."""
    bits = np.unpackbits(np.append(content, np.zeros(2, np.uint8)), bitorder="little")
    total = len(content) * 8
    ahead = np.zeros(total, np.int64)
    for place in range(HUFFMAN_BITS):
        ahead |= bits[place : place + total].astype(np.int64) << place
    steps, at, starts = length_at[ahead].tolist(), 0, []
    for _ in range(count):
        if at >= total:
            raise BadCodes
        starts.append(at)
        at += steps[at]
    if at > total or (at + 7) // 8 != len(content):
        raise BadCodes
    return symbol_at[ahead[starts]]


# ---------------------------------------------------------------------------- rows that repeat


def vector_lz_encode(codes: Codes, rows: int, bits: int, below: int) -> Bytes | None:
    each = codes.reshape(rows, -1)
    as_bytes = [row.tobytes() for row in each]
    flags, tokens, literals = [], [], []
    for first in range(0, rows, LZ_BLOCK_ROWS):
        stop, row = min(first + LZ_BLOCK_ROWS, rows), first
        last: dict[bytes, int] = {}
        while row < stop:
            found = last.get(as_bytes[row], -LZ_WINDOW)
            length = 0
            if row - found <= LZ_WINDOW and found >= 0:
                while (
                    length < LZ_LONGEST
                    and row + length < stop
                    and as_bytes[row + length] == as_bytes[found + length]
                ):
                    length += 1
                tokens += [row - found, length]
            else:
                literals.append(row)
            flags.append(length > 0)
            for _ in range(max(length, 1)):
                last[as_bytes[row]] = row
                row += 1
    parts = [
        np.array([len(flags)], "<u4").view(np.uint8),
        np.packbits(np.array(flags, np.uint8), bitorder="little"),
        np.array(tokens, np.uint8),
        pack(each[literals], bits),
    ]
    return None if sum(map(len, parts)) >= below else np.concatenate(parts)


def vector_lz_decode(content: Bytes, rows: int, dim: int, bits: int) -> NDArray[np.uint16]:
    if len(content) < 4:
        raise BadCodes
    items = int(content[:4].view("<u4")[0])
    flag_bytes = (items + 7) // 8
    if items > rows or flag_bytes > len(content) - 4:
        raise BadCodes
    flags = np.unpackbits(content[4 : 4 + flag_bytes], bitorder="little")
    tokens = int(flags.sum())
    literals, at = items - tokens, 4 + flag_bytes
    size = at + 2 * tokens + packed_bytes(literals * dim, bits)
    if flags[items:].any() or literals < 0 or size != len(content):
        raise BadCodes
    token = iter(content[at : at + 2 * tokens].reshape(-1, 2).tolist())
    literal = iter(unpack(content[at + 2 * tokens :], literals * dim, bits).reshape(literals, dim))
    codes, row = np.zeros((rows, dim), np.uint16), 0
    for flag in flags[:items].tolist():
        if row >= rows:
            raise BadCodes
        if not flag:
            codes[row] = next(literal)
            row += 1
            continue
        back, length = next(token)
        inside = row % LZ_BLOCK_ROWS
        if not (1 <= back <= inside and 1 <= length <= min(LZ_BLOCK_ROWS - inside, rows - row)):
            raise BadCodes
        for row in range(row, row + length):  # noqa: B020
            codes[row] = codes[row - back]
        row += 1
    if row != rows:
        raise BadCodes
    return codes.reshape(-1)
