"""The kernels of saving, checked: records in fewer bits, which rows to save first, what rows were
before a step, and checksums. What planaria.kernels promises of its functions holds for these.

A save under way reads an arena chunk by chunk while steps go on. After each step `preserve` keeps
what the rows not yet read were when the save began; `overlay` lays that over the copy of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.kernels import twin_saves
from planaria.kernels.checks import array, require, require_apart
from planaria.kernels.types import Bytes, Floats, Index, Keys, Records

Counters: TypeAlias = NDArray[np.uint32]
"""One number per row: uint32[rows]."""
Segments: TypeAlias = Sequence[tuple[int, int]]
"""(first word, width) of the runs of floats in a record that may lose bits; ascending, apart."""

BITS = (8, 4, 3, 2)
HEADER_BYTES = 8  # float32 low, float32 scale


def _backend() -> Any:
    return twin_saves if kernels.level() == "numpy" else kernels.native


# ---------------------------------------------------------------------------- fewer bits


def _checked(segments: Segments, words: int, bits: int) -> NDArray[np.int64]:
    require(bits in BITS, f"bits must be one of {BITS}, not {bits!r}")
    try:
        table = np.array(list(segments), np.int64).reshape(-1, 2)
    except (OverflowError, TypeError, ValueError):
        table = np.array([[-1, -1]])
    next_word = 0
    for first, width in table.tolist():
        require(
            next_word <= first and 1 <= width <= words - first,
            f"segments must be pairs (first word, width) that ascend, are apart and lie inside "
            f"{words} words, not {segments!r}",
        )
        next_word = first + width
    return table


def packed_bytes(words: int, segments: Segments, bits: int) -> int:
    """Size of a quantised record of so many words."""
    widths: list[int] = _checked(segments, words, bits)[:, 1].tolist()
    packed = sum(HEADER_BYTES + -(-width * bits // 8) for width in widths)
    return packed + 4 * (words - sum(widths))


def quantise(records: Records, segments: Segments, bits: int, out: Bytes | None = None) -> Bytes:
    """Records with each segment in 8, 4, 3 or 2 bits per float: uint8[n, packed_bytes].

    A packed record is the record, little-endian, with each segment replaced by

        low: float32 | scale: float32 | code 0, code 1, ... of `bits` bits, padded to a byte

    where a code c stands for low + c * scale, and bit 0 of code 0 is bit 0 of the first byte. Words
    outside the segments are copied. With 8 bits the codes span the least to the greatest value, so
    that no value is off by more than half a scale; with fewer, either end moves in greedily where
    that lessens the squared error. A segment of equal values comes back exactly (-0.0 as 0.0).

    A segment with a NaN, an infinity or a number of 2^126 or more is refused: it has no such form,
    a form of another size would make records of a save unequally long, and a model that diverged
    should be looked at before it overwrites a good save.
    """
    array("records", records, np.uint32, 2)
    table = _checked(segments, records.shape[1], bits)
    shape = (len(records), packed_bytes(records.shape[1], segments, bits))
    if out is None:
        out = np.empty(shape, np.uint8)
    array("out", out, np.uint8, 2, shape=shape, writable=True)
    require_apart([out], [records])
    _backend().quantise(records, table, bits, out)
    return out


def dequantise(
    packed: Bytes, words: int, segments: Segments, bits: int, out: Records | None = None
) -> Records:
    """The records of `words` words that `quantise` packed, as near as its bits tell them."""
    array("packed", packed, np.uint8, 2)
    table = _checked(segments, words, bits)
    size = packed_bytes(words, segments, bits)
    array("packed", packed, np.uint8, 2, shape=(len(packed), size))
    if out is None:
        out = np.empty((len(packed), words), np.uint32)
    array("out", out, np.uint32, 2, shape=(len(packed), words), writable=True)
    require_apart([out], [packed])
    _backend().dequantise(packed, table, bits, out)
    return out


# ---------------------------------------------------------------------------- rows worth saving


def row_distances(records: Records, saved: Records, dim: int, out: Floats | None = None) -> Floats:
    """out[i] = squared L2 distance of the weights of records[i] from saved[i]: SCAR's measure.

    `saved` holds the weights, or whole records. Where a NaN is involved the distance is NaN.
    """
    array("records", records, np.uint32, 2)
    array("saved", saved, np.uint32, 2)
    array("saved", saved, np.uint32, 2, shape=(len(records), saved.shape[1]))
    require(
        1 <= dim <= min(records.shape[1], saved.shape[1]),
        f"dim must be between 1 and the words of records and saved, not {dim}",
    )
    if out is None:
        out = np.empty(len(records), np.float32)
    array("out", out, np.float32, 1, shape=(len(records),), writable=True)
    require_apart([out], [records, saved])
    _backend().row_distances(records, saved, dim, out)
    return out


def count_accesses(counters: Counters, index: Index) -> None:
    """counters[index[i]] += 1, up to 2^32 - 1: MFU's counters. A row may stand several times."""
    array("counters", counters, np.uint32, 1, writable=True)
    array("index", index, np.int64, 1)
    require_apart([counters], [index])
    _backend().count_accesses(counters, index)


def reset_counters(counters: Counters, index: Index) -> None:
    """counters[index[i]] = 0, once those rows are saved."""
    array("counters", counters, np.uint32, 1, writable=True)
    array("index", index, np.int64, 1)
    require_apart([counters], [index])
    _backend().reset_counters(counters, index)


def top_rows(scores: Counters | Floats, count: int) -> Index:
    """The `count` rows with the highest scores, ascending; among equals the lower row is taken.

    scores: counters, or distances as row_distances gives them. NaN is the highest distance.
    """
    distances = isinstance(scores, np.ndarray) and scores.dtype == np.float32
    array("scores", scores, np.float32 if distances else np.uint32, 1)
    if distances:  # floats without a sign are in the order of their bits
        require(not np.signbit(scores).any(), "a distance is 0 or more; scores has a sign")
    require(0 <= count <= len(scores), f"there are {len(scores)} rows; {count} is too many or few")
    out = np.empty(count, np.int64)
    _backend().top_rows(scores.view(np.uint32), out)
    return out


class Sample(NamedTuple):
    """SSU's sample of rows that were used lately, in arrays that the caller may save and restore.

    A row stands in it once. A list with repetitions fills up with a few rows under skewed accesses:
    of 500 entries over 4000 Zipf rows 269 were distinct, and 31 % of MFU's choice among them; here
    all are, and 43 %. The bitmap that tells costs a quarter of the entries where those have room
    for an eighth of the rows.
    """

    entries: Counters  # uint32[capacity]: the rows in the sample, in no order
    bitmap: Bytes  # uint8[rows / 8]: is the row in the sample?
    progress: Keys  # uint64[3]: accesses seen, rows put in so far, rows in the sample


def new_sample(rows: int, capacity: int) -> Sample:
    """An empty sample of at most `capacity` of so many rows."""
    require(1 <= rows <= 2**32, f"a sample chooses from 1 to 2^32 rows, not {rows}")
    require(1 <= capacity < 2**32, f"a sample has room for 1 to 2^32 - 1 rows, not {capacity}")
    return Sample(
        np.zeros(capacity, np.uint32), np.zeros(-(-rows // 8), np.uint8), np.zeros(3, np.uint64)
    )


def _check_sample(sample: Sample) -> None:
    array("entries", sample.entries, np.uint32, 1, writable=True)
    array("bitmap", sample.bitmap, np.uint8, 1, writable=True)
    array("progress", sample.progress, np.uint64, 1, shape=(3,), writable=True)
    require(
        len(sample.entries) >= 1 and len(sample.bitmap) <= 2**29,
        "a sample has room for 1 row or more and chooses from at most 2^32",
    )
    require(
        int(sample.progress[2]) <= len(sample.entries),
        f"progress says {sample.progress[2]} rows, entries has room for {len(sample.entries)}",
    )


def sample_accesses(sample: Sample, seed: int, index: Index) -> None:
    """Puts the row of every second access into the sample, for a random other one when it is full.

    Accesses are counted over all calls, so how they are split into calls makes no difference.
    Which row goes depends on the seed and on how many were put in before.
    """
    _check_sample(sample)
    require(0 <= seed < 2**64, f"seed must be between 0 and 2^64 - 1, not {seed}")
    array("index", index, np.int64, 1)
    require_apart(sample, [index])
    _backend().sample_accesses(*sample, seed, index)


def sampled_rows(sample: Sample) -> Index:
    """The rows in the sample, ascending."""
    return marked(sample.bitmap, 0, 8 * len(sample.bitmap))


def clear_sample(sample: Sample) -> None:
    """Empties the sample, once its rows are saved. What is random goes on, it does not repeat."""
    _check_sample(sample)
    sample.bitmap[:] = 0
    sample.progress[2] = 0


# ---------------------------------------------------------------------------- bitmaps, pre-images


def _check_bits(bitmap: Bytes, first: int, stop: int) -> None:
    array("bitmap", bitmap, np.uint8, 1)
    require(
        0 <= first <= stop <= 8 * len(bitmap),
        f"[{first}, {stop}) is not a range of the bitmap's {8 * len(bitmap)} bits",
    )


def count_marked(bitmap: Bytes, first: int, stop: int) -> int:
    """How many bits of [first, stop) are set."""
    _check_bits(bitmap, first, stop)
    return int(_backend().count_marked(bitmap, first, stop))


def marked(bitmap: Bytes, first: int, stop: int) -> Index:
    """Which bits of [first, stop) are set, ascending."""
    out = np.empty(count_marked(bitmap, first, stop), np.int64)
    _backend().marked(bitmap, first, stop, out)
    return out


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
    """Keeps what the rows of a step in [first, stop) were before it, unless that is kept already.

    index and delta are what kernels.apply returned for `records`. A row whose bit is not set gets
    it, and its number and its record without the delta are written to the outputs, which have room
    for the whole step. Returns how many there were.
    """
    _check_bits(bitmap, first, stop)
    array("bitmap", bitmap, np.uint8, 1, writable=True)
    array("index", index, np.int64, 1)
    array("records", records, np.uint32, 2)
    require(stop <= len(records), f"stop {stop} is above the {len(records)} records")
    array("delta", delta, np.uint32, 2, shape=(len(index), records.shape[1]))
    array("out_index", out_index, np.int64, 1, writable=True)
    array("out_records", out_records, np.uint32, 2, writable=True)
    require(
        len(out_index) >= len(index) and len(out_records) >= len(index)
        and out_records.shape[1] == records.shape[1],
        f"the outputs have no room for {len(index)} records of {records.shape[1]} words",
    )  # fmt: skip
    require_apart([bitmap, out_index, out_records], [index, records, delta])
    return int(
        _backend().preserve(bitmap, first, stop, index, records, delta, out_index, out_records)
    )


def overlay(chunk: Records, first: int, index: Index, values: Records) -> None:
    """chunk[index[i] - first] = values[i], where that is a row of the chunk; the last one wins."""
    array("chunk", chunk, np.uint32, 2, writable=True)
    array("index", index, np.int64, 1)
    array("values", values, np.uint32, 2, shape=(len(index), chunk.shape[1]))
    require(0 <= first < 2**60, f"first must be a record number, not {first}")
    require_apart([chunk], [index, values])
    _backend().overlay(chunk, first, index, values)


def crc32(content: Bytes, before: int = 0) -> int:
    """zlib's CRC-32 of uint8[n], four times as fast. before: the checksum of what comes before."""
    array("content", content, np.uint8, 1)
    require(0 <= before < 2**32, f"before must be a checksum of 32 bits, not {before}")
    return int(_backend().crc32(content, before))
