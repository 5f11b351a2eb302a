"""The NumPy twin of packed arrays. native/packed_words.hpp says what the bytes are."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from planaria.kernels.types import Bytes, Index, Records

BLOCK_WORDS = 16
CLASS_BITS = np.array([0, 2, 3, 4])
CHECKSUM_BYTES, NUMBERS_HEADER_BYTES, ZEROS_BYTES = 4, 13, 8
WIDEST_NUMBER = 56
HIGHEST_KIND = 32 * 4 + 3


def blocks_of(words: int) -> int:
    return -(-words // BLOCK_WORDS)


def words_bound(words: int) -> int:
    return 4 + 9 * blocks_of(words) + 4 * words + 16


def numbers_bound(numbers: int) -> int:
    return 13 + 7 * numbers + 16


def least_words_frame(words: int) -> int:
    return CHECKSUM_BYTES + blocks_of(words) + ZEROS_BYTES


def least_numbers_frame(numbers: int) -> int:
    return NUMBERS_HEADER_BYTES + -(-numbers // 8) + ZEROS_BYTES


# ---------------------------------------------------------------------------- bits


def _write(values: NDArray[np.uint64], widths: Index) -> Bytes:
    """values[i] in widths[i] bits, one behind the other, lowest bit first."""
    ends = np.cumsum(widths)
    offsets = np.arange(widths.sum()) - np.repeat(ends - widths, widths)
    bits = np.repeat(values, widths) >> offsets.astype(np.uint64) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def _read(content: Bytes, widths: Index) -> NDArray[np.uint64]:
    """What `_write` wrote; content has all the bits."""
    total = int(widths.sum())
    bits = np.unpackbits(content, count=total, bitorder="little").astype(np.uint64)
    ends = np.cumsum(widths)
    offsets = np.arange(total) - np.repeat(ends - widths, widths)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(bits << offsets.astype(np.uint64))])
    found: NDArray[np.uint64] = sums[ends] - sums[ends - widths]  # modulo 2^64, like the sums
    return found


def _checksum(behind: Bytes, count: int) -> int:
    return zlib.crc32(behind.tobytes(), zlib.crc32(count.to_bytes(8, "little")))


def _seal(parts: list[Bytes], count: int, out: Bytes) -> int:
    content = np.concatenate([*parts, np.zeros(ZEROS_BYTES, np.uint8)])
    size = CHECKSUM_BYTES + len(content)
    out[:CHECKSUM_BYTES] = np.array([_checksum(content, count)], "<u4").view(np.uint8)
    out[CHECKSUM_BYTES:size] = content
    return size


def _is_sealed(frame: Bytes, count: int) -> bool:
    told = int.from_bytes(frame[:CHECKSUM_BYTES].tobytes(), "little")
    return told == _checksum(frame[CHECKSUM_BYTES:], count)


# ---------------------------------------------------------------------------- words


def _bits_behind(longest: Index, lengths: Index, rest: int) -> Index:
    """Of each word, behind its class."""
    follow = np.maximum(lengths - 1, 0)
    return np.where(longest - lengths < rest, follow, longest - rest)


def pack_words(records: Records, out: Bytes) -> int:
    count, blocks = records.size, blocks_of(records.size)
    words = np.zeros((blocks, BLOCK_WORDS), np.uint64)
    words.reshape(-1)[:count] = records.reshape(-1)
    is_word = (np.arange(words.size) < count).reshape(words.shape)
    lengths = np.frexp(words.astype(np.float64))[1].astype(np.int64)
    longest = lengths.max(axis=1, keepdims=True, initial=0)
    plain = np.broadcast_to(longest, lengths.shape)
    classed = [_bits_behind(longest, lengths, 2**bits - 1) for bits in CLASS_BITS[1:].tolist()]
    behind = np.where(is_word, np.stack([plain, *classed]), 0)  # [kind, block, word]
    costs = behind.sum(axis=2) + BLOCK_WORDS * CLASS_BITS[:, None]
    kinds = costs.argmin(axis=0)[:, None]
    width = CLASS_BITS[kinds]
    rest = (1 << width) - 1
    classes = np.where(is_word, np.minimum(longest - lengths, rest), 0)
    follow = np.take_along_axis(behind, kinds[None], axis=0)[0]
    parts = [
        (longest * 4 + kinds).astype(np.uint8).reshape(-1),
        _write(classes.reshape(-1).astype(np.uint64), np.repeat(width, BLOCK_WORDS)),
        _write(words.reshape(-1), follow.reshape(-1)),
    ]
    return _seal(parts, count, out)


def unpack_words(frame: Bytes, out: Records) -> bool:
    count, blocks = out.size, blocks_of(out.size)
    if len(frame) < least_words_frame(count) or not _is_sealed(frame, count):
        return False
    kinds = frame[CHECKSUM_BYTES:][:blocks].astype(np.int64)[:, None]
    width = CLASS_BITS[kinds & 3]
    begin = CHECKSUM_BYTES + blocks
    end = begin + 2 * int(width.sum())
    room = len(frame) - end - ZEROS_BYTES
    if (kinds > HIGHEST_KIND).any() or room < 0:
        return False
    is_word = (np.arange(blocks * BLOCK_WORDS) < count).reshape(blocks, BLOCK_WORDS)
    shorter = _read(frame[begin:end], np.repeat(width, BLOCK_WORDS)).astype(np.int64)
    shorter = np.where(is_word, shorter.reshape(blocks, BLOCK_WORDS), 0)
    lengths = (kinds >> 2) - shorter
    if (lengths < 0).any():
        return False
    has_first = (shorter < (1 << width) - 1) & (lengths > 0)  # never in a block without classes
    follow = np.where(is_word, lengths - has_first, 0).reshape(-1)
    if (int(follow.sum()) + 7) // 8 != room:
        return False
    words = _read(frame[end : len(frame) - ZEROS_BYTES], follow)
    words |= has_first.reshape(-1).astype(np.uint64) << follow.astype(np.uint64)
    out.reshape(-1)[:] = words[:count]
    return True


# ---------------------------------------------------------------------------- numbers


def pack_numbers(numbers: Index, out: Bytes) -> int:
    base = int(numbers.min()) if len(numbers) else 0
    span = int(numbers.max()) - base if len(numbers) else 0
    width = (span | 1).bit_length()
    if width > WIDEST_NUMBER:
        return 0
    above = numbers.view(np.uint64) - np.array(base).view(np.uint64)
    parts = [
        np.array([base], "<i8").view(np.uint8),
        np.array([width], np.uint8),
        _write(above, np.full(len(numbers), width)),
    ]
    return _seal(parts, len(numbers), out)


def unpack_numbers(frame: Bytes, out: Index) -> bool:
    count = len(out)
    if len(frame) < NUMBERS_HEADER_BYTES + ZEROS_BYTES or not _is_sealed(frame, count):
        return False
    base = frame[CHECKSUM_BYTES:][:8].copy().view(np.uint64)
    width = int(frame[NUMBERS_HEADER_BYTES - 1])
    room = len(frame) - NUMBERS_HEADER_BYTES - ZEROS_BYTES
    if not 1 <= width <= WIDEST_NUMBER or (count * width + 7) // 8 != room:
        return False
    above = _read(frame[NUMBERS_HEADER_BYTES:][:room], np.full(count, width))
    out[:] = (base + above).view(np.int64)
    return True
