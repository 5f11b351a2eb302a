"""The NumPy twin of the kernels of saving: the same functions with the same arguments and, bit for
bit, the same results as planaria._native's.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError
from planaria.kernels.twin import check_range
from planaria.kernels.twin_numbers import GOLDEN, fold, mix
from planaria.kernels.types import Bytes, Floats, Index, Keys, Records

BINS = np.float32(25)
NARROWINGS = 15  # 25 bins times the ratio 0.6: at least 0.4 of the span remains
SMALLEST_SCALE = np.float32(2.0**-126)
UNQUANTISABLE = np.uint32(0x7E800000)  # the bits of 2^126


class Grid(NamedTuple):
    """One per row, float32[n, 1]: code c stands for low + c * scale."""

    low: Floats
    scale: Floats

    @classmethod
    def between(cls, low: Floats, high: Floats, bits: int) -> Grid:
        return cls(low, np.maximum((high - low) / np.float32(2**bits - 1), SMALLEST_SCALE))

    def codes(self, values: Floats, bits: int) -> NDArray[np.int32]:
        with np.errstate(over="ignore"):  # far beyond the grid is beyond the grid
            at = (values - self.low) * (np.float32(1) / self.scale)
        at = np.clip(at, np.float32(0), np.float32(2**bits - 1))
        return (at + np.float32(0.5)).astype(np.int32)

    def values(self, codes: NDArray[np.int32]) -> Floats:
        back: Floats = self.low + codes.astype(np.float32) * self.scale
        return back

    def squared_error(self, values: Floats, bits: int) -> Floats:
        errors = values - self.values(self.codes(values, bits))
        with np.errstate(over="ignore"):
            return fold(errors * errors)[:, None]

    def where(self, chosen: NDArray[np.bool_], other: Grid) -> Grid:
        """This grid for the chosen rows, the other's for the rest."""
        return Grid(
            np.where(chosen, self.low, other.low), np.where(chosen, self.scale, other.scale)
        )


def narrowed_grid(values: Floats, low: Floats, high: Floats, bits: int) -> Grid:
    """Either end moves in by a bin, whichever leaves the smaller error; the best on the way."""
    width = (high - low) / BINS
    best = Grid.between(low, high, bits)
    least = best.squared_error(values, bits)
    raised, lowered = np.zeros_like(low), np.zeros_like(low)
    one = np.float32(1)
    for _ in range(NARROWINGS):
        above = Grid.between(low + (raised + one) * width, high - lowered * width, bits)
        below = Grid.between(low + raised * width, high - (lowered + one) * width, bits)
        above_error, below_error = (g.squared_error(values, bits) for g in (above, below))
        up = above_error < below_error
        error = np.where(up, above_error, below_error)
        raised += up
        lowered += ~up
        better = error < least
        least = np.where(better, error, least)
        best = above.where(up, below).where(better, best)
    return best


def _parts(words: int, segments: Index) -> list[tuple[int, int, bool]]:
    """(first word, width, is it a segment?) of all parts of a record, in order."""
    parts, word = [], 0
    for first, width in segments.tolist():
        parts += [(word, first - word, False), (first, width, True)]
        word = first + width
    return [*parts, (word, words - word, False)]


def _as_bytes(values: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _check_quantisable(records: Records, segments: Index) -> None:
    wrong = np.zeros(len(records), bool)
    for first, width in segments.tolist():
        magnitude = records[:, first : first + width] & np.uint32(0x7FFFFFFF)
        wrong |= (magnitude >= UNQUANTISABLE).any(axis=1)
    if wrong.any():
        raise ArgumentError(
            f"records[{int(np.argmax(wrong))}] holds a NaN, an infinity or a number of 2^126 or "
            "more, which has no quantised form; save it as it is"
        )


def quantise(records: Records, segments: Index, bits: int, out: Bytes) -> None:
    _check_quantisable(records, segments)
    packed = []
    for first, width, is_segment in _parts(records.shape[1], segments):
        words = records[:, first : first + width]
        if not is_segment:
            packed.append(_as_bytes(words))
            continue
        values = np.ascontiguousarray(words).view(np.float32)
        zero = np.float32(0)  # turns -0.0 into 0.0
        low, high = values.min(1, keepdims=True) + zero, values.max(1, keepdims=True) + zero
        if bits == 8:
            grid = Grid.between(low, high, bits)
        else:
            grid = narrowed_grid(values, low, high, bits)
        codes = grid.codes(values, bits).astype(np.uint8)
        each_bit = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
        stream = np.packbits(each_bit.reshape(len(codes), -1), axis=1, bitorder="little")
        packed += [_as_bytes(grid.low), _as_bytes(grid.scale), stream]
    out[:] = np.concatenate(packed, axis=1)


def dequantise(packed: Bytes, segments: Index, bits: int, out: Records) -> None:
    at = 0

    def take(size: int) -> Bytes:
        nonlocal at
        at += size
        return np.ascontiguousarray(packed[:, at - size : at])

    for first, width, is_segment in _parts(out.shape[1], segments):
        if not is_segment:
            out[:, first : first + width] = take(4 * width).view(np.uint32)
            continue
        grid = Grid(take(4).view(np.float32), take(4).view(np.float32))
        stream = np.unpackbits(take(-(-width * bits // 8)), axis=1, bitorder="little")
        each_bit = stream[:, : width * bits].reshape(len(packed), width, bits)
        codes = np.packbits(each_bit, axis=2, bitorder="little")[:, :, 0].astype(np.int32)
        out[:, first : first + width] = grid.values(codes).view(np.uint32)


def row_distances(records: Records, saved: Records, dim: int, out: Floats) -> None:
    now, then = (np.ascontiguousarray(part[:, :dim]).view(np.float32) for part in (records, saved))
    moved = now - then
    distances = fold(moved * moved)
    out[:] = np.where(np.isnan(distances), np.float32(np.nan), distances)


def count_accesses(counters: Records, index: Index) -> None:
    check_range(index, len(counters), "index")
    rows, counts = np.unique(index, return_counts=True)
    counters[rows] = np.minimum(counters[rows] + counts.astype(np.uint64), 2**32 - 1)


def reset_counters(counters: Records, index: Index) -> None:
    check_range(index, len(counters), "index")
    counters[index] = 0


def top_rows(scores: Records, out: Index) -> None:
    out[:] = np.sort(np.argsort(~scores, kind="stable")[: len(out)])


def sample_accesses(
    entries: Records, bitmap: Bytes, progress: Keys, seed: int, index: Index
) -> None:
    """Row by row: whether a row goes in depends on what went out before it."""
    check_range(index, 8 * len(bitmap), "index")
    accesses, insertions, filled = progress.tolist()
    sampled = index[(accesses + 1) % 2 :: 2].tolist()
    key = mix(np.array([seed], np.uint64) + GOLDEN)
    numbers = np.arange(1, 1 + len(sampled), dtype=np.uint64) + progress[1]
    random = mix(key + numbers * GOLDEN) >> np.uint64(32)
    slots = (random * np.uint64(len(entries)) >> np.uint64(32)).tolist()
    inserted = 0
    for row in sampled:
        if bitmap[row // 8] >> row % 8 & 1:
            continue
        slot = slots[inserted]
        inserted += 1
        if filled < len(entries):
            slot = filled
            filled += 1
        elif (evicted := int(entries[slot])) < 8 * len(bitmap):
            bitmap[evicted // 8] &= 255 ^ 1 << evicted % 8
        entries[slot] = row
        bitmap[row // 8] |= 1 << row % 8
    progress[:] = (accesses + len(index)) % 2**64, insertions + inserted, filled


def count_marked(bitmap: Bytes, first: int, stop: int) -> int:
    return len(_marked(bitmap, first, stop))


def marked(bitmap: Bytes, first: int, stop: int, out: Index) -> None:
    out[:] = _marked(bitmap, first, stop)


def _marked(bitmap: Bytes, first: int, stop: int) -> Index:
    start = first // 8
    each_bit = np.unpackbits(bitmap[start : -(-stop // 8)], bitorder="little")
    return np.flatnonzero(each_bit[first - 8 * start : stop - 8 * start]) + first


def preserve(
    bitmap: Bytes,
    first: int,
    stop: int,
    index: Index,
    records: Records,
    delta: Records,
    out_index: Index,
    out_records: Records,
) -> int:
    check_range(index, len(records), "index")
    inside = np.flatnonzero((index >= first) & (index < stop))
    rows = index[inside]
    new = inside[bitmap[rows // 8] >> (rows % 8).astype(np.uint8) & 1 == 0]
    new = new[np.sort(np.unique(index[new], return_index=True)[1])]
    rows = index[new]
    np.bitwise_or.at(bitmap, rows // 8, np.uint8(1) << (rows % 8).astype(np.uint8))
    out_index[: len(new)] = rows
    out_records[: len(new)] = records[rows] ^ delta[new]
    return len(new)


def overlay(chunk: Records, first: int, index: Index, values: Records) -> None:
    inside = np.flatnonzero((index >= first) & (index < first + len(chunk)))
    chunk[index[inside] - first] = values[inside]


def crc32(content: Bytes, before: int) -> int:
    return zlib.crc32(content.data, before)
