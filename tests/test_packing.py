"""Packed arrays come back bit for bit, as the same bytes at every SIMD level; frames that are
damaged, cut or made up are refused: nothing crashes, nothing is read or written outside, nothing
large is allocated. `make sanitize` runs these tests, too."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria import kernels
from planaria.errors import ArgumentError, WireError
from planaria.kernels import packing, twin_packing
from planaria.kernels.types import Bytes, Index, Records

CASES = 26_000  # of words, and of numbers: 52,000, of which half have their checksum repaired
TWIN_EVERY = 3  # of those, the twin must agree on one in so many
NATIVE = [level for level in kernels.levels() if level != "numpy"]


def at_level(name: str, call: Callable[[], bytes | None]) -> bytes | None:
    before = kernels.level()
    kernels.select_level(name)
    try:
        return call()
    finally:
        kernels.select_level(before)


def packed(array: Records | Index) -> bytes | None:
    pack: Callable[[Any], Bytes | None] = (
        packing.pack_index if array.ndim == 1 else packing.pack_records
    )
    frame = pack(array)
    return None if frame is None else frame.tobytes()


def unpacked(frame: bytes, shape: tuple[int, ...]) -> Records | Index:
    """The frame's memory ends where it ends."""
    content = np.frombuffer(frame, np.uint8).copy()
    if len(shape) == 1:
        return packing.unpack_index(content, shape[0])
    return packing.unpack_records(content, shape[0], shape[1])


def check_round_trip(array: Records | Index) -> bytes | None:
    """At every level, with the bytes of the twin."""
    frame = at_level("numpy", lambda: packed(array))
    for level in kernels.levels():
        assert at_level(level, lambda: packed(array)) == frame, level
        if frame is not None:
            back = at_level(level, lambda: unpacked(frame, array.shape).tobytes())
            assert back == array.tobytes(), level
    return frame


def words_of_lengths(seed: int, rows: int, words: int, shortest: int, longest: int) -> Records:
    """Random words, each of its own length in bits."""
    rng = np.random.default_rng(seed)
    drop = 32 - rng.integers(min(shortest, longest), max(shortest, longest) + 1, (rows, words))
    drawn = rng.integers(2**31, 2**32, (rows, words), np.uint64)
    return (drawn >> drop.astype(np.uint64)).astype(np.uint32)


def changes(rows: int, words: int, moved: float = 1e-4, seed: int = 0) -> Records:
    """As a step makes them: old XOR new of floats that have moved a little."""
    rng = np.random.default_rng(seed)
    old = rng.normal(0, 0.1, (rows, words)).astype(np.float32)
    new = (old + rng.normal(0, moved, old.shape)).astype(np.float32)
    return old.view(np.uint32) ^ new.view(np.uint32)


# ---------------------------------------------------------------------------- there and back


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(0, 40),
    words=st.integers(0, 40),
    shortest=st.integers(0, 32),
    longest=st.integers(0, 32),
)
def test_words_of_any_lengths_come_back(
    seed: int, rows: int, words: int, shortest: int, longest: int
) -> None:
    check_round_trip(words_of_lengths(seed, rows, words, shortest, longest))


@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=70))
def test_any_words_come_back(words: list[int]) -> None:
    check_round_trip(np.array(words, np.uint32).reshape(-1, 1))


@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
def test_any_numbers_come_back_or_lie_too_far_apart(numbers: list[int]) -> None:
    frame = check_round_trip(np.array(numbers, np.int64))
    too_far = bool(numbers) and max(numbers) - min(numbers) >= 2**56
    assert (frame is None) == too_far


@given(
    base=st.integers(-(2**63), 2**63 - 2**56),
    width=st.integers(0, 56),
    seed=st.integers(0, 2**32),
    count=st.integers(0, 70),
)
def test_numbers_of_every_width_come_back(base: int, width: int, seed: int, count: int) -> None:
    above = np.random.default_rng(seed).integers(0, 2**width, count)
    frame = check_round_trip(above + base)
    assert frame is not None
    assert len(frame) <= 13 + -(-count * max(width, 1) // 8) + 8


FLOATS = {
    "zeros": [0.0],
    "minus zeros": [-0.0],
    "denormals": [1e-45, -1e-45, 1e-40, 1.17e-38],
    "not a number": [np.nan, -np.nan],
    "infinities": [np.inf, -np.inf],
    "ordinary": [1.0, -1.0, 0.1, 3.4e38],
}


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257])
@pytest.mark.parametrize("kind", [*FLOATS, "ones", "payloads", "one long word"])
def test_edges_come_back(kind: str, count: int) -> None:
    if kind == "ones":
        words = np.full(count, 2**32 - 1, np.uint32)
    elif kind == "payloads":  # of signalling NaNs
        words = 0x7F800001 + np.arange(count, dtype=np.uint32)
    elif kind == "one long word":
        words = np.zeros(count, np.uint32)
        words[count // 2 : count // 2 + 1] = 2**31
    else:
        words = np.resize(np.array(FLOATS[kind], np.float32), count).view(np.uint32)
    check_round_trip(words.reshape(1, count))
    check_round_trip(words.reshape(count, 1))
    check_round_trip(words.astype(np.int64))


@pytest.mark.parametrize("shape", [(0, 0), (0, 16), (5, 0), (0,)])
def test_nothing_is_a_frame_as_well(shape: tuple[int, ...]) -> None:
    if len(shape) == 1:
        assert len(check_round_trip(np.zeros(shape, np.int64)) or b"") == 21
    else:
        assert len(check_round_trip(np.zeros(shape, np.uint32)) or b"") == 12


@pytest.mark.parametrize("longest", range(33))
def test_every_length_and_class_comes_back(longest: int) -> None:
    """In turn one word of each length, so that a block has each class that there is."""
    lengths = np.arange(longest + 1).repeat(2)
    words = np.where(lengths > 0, 2.0 ** (lengths - 1), 0).astype(np.uint64)
    words += np.where(lengths > 1, words - 1, 0) * (np.arange(len(words), dtype=np.uint64) % 2)
    check_round_trip(words.astype(np.uint32).reshape(1, -1))
    mostly_short = np.zeros((20, 16), np.uint32)
    mostly_short[:, 3] = words[-1]
    check_round_trip(mostly_short)


def test_every_kind_of_block_is_made() -> None:
    records = np.concatenate(
        [words_of_lengths(seed, 16, 16, seed, 32) for seed in range(33)], axis=0
    )
    blocks = records.size // 16
    kinds = np.frombuffer(check_round_trip(records) or b"", np.uint8)[4 : 4 + blocks] & 3
    assert set(kinds.tolist()) == {0, 1, 2, 3}


def test_changes_of_floats_take_fewer_bytes_and_noise_hardly_more() -> None:
    records = changes(300, 32)
    assert len(check_round_trip(records) or b"") < 0.75 * records.nbytes
    noise = np.random.default_rng(1).integers(2**31, 2**32, (300, 32), np.uint32)
    assert len(check_round_trip(noise) or b"") == noise.nbytes + noise.size // 16 + 12


def test_no_frame_is_larger_than_its_bound(level: str) -> None:
    for words in range(100):
        for lengths in ((0, 32), (32, 32), (16, 32)):
            records = words_of_lengths(words, 1, words, *lengths)
            assert len(packing.pack_records(records)) <= 12 + -(-words // 16) + 4 * words
    for numbers in range(40):
        index = np.arange(numbers) * (2**56 // max(numbers, 1) - 1)
        assert len(packing.pack_index(index)) <= 21 + 7 * numbers  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- damage


def sealed(frame: bytes, count: int) -> bytes:
    """With the checksum that it should have."""
    return (
        struct.pack("<I", zlib.crc32(frame[4:], zlib.crc32(struct.pack("<Q", count)))) + frame[4:]
    )


def damaged(rng: np.random.Generator, frame: bytes, header: int) -> bytes:
    """A frame with something else in it. header: bytes before its bits."""
    content, size = bytearray(frame), len(frame)
    near = int(rng.integers(0, min(header, size) if rng.random() < 0.5 else size))
    match int(rng.integers(0, 10)):
        case 0:  # a bit
            content[near] ^= 1 << int(rng.integers(0, 8))
        case 1:  # a byte
            content[near] = int(rng.integers(0, 256))
        case 2:  # several bytes
            for at in rng.integers(0, size, rng.integers(2, 9)):
                content[at] = int(rng.integers(0, 256))
        case 3:  # cut
            del content[near:]
        case 4:  # cut inside
            del content[near : near + int(rng.integers(1, 9))]
        case 5:  # longer
            at = near if rng.random() < 0.5 else size
            content[at:at] = rng.bytes(int(rng.integers(1, 30)))
        case 6:  # a byte that is an edge
            content[near] = int(rng.choice([0, 1, 3, 56, 57, 127, 128, 131, 132, 255]))
        case 7:  # longer words, and bytes for them
            at, longer = int(rng.integers(4, header)), int(rng.integers(1, 5))
            if at < size:
                content[at] = (content[at] + (4 * longer if header != 13 else longer)) % 256
                content[-8:-8] = rng.bytes(2 * longer if header != 13 else 4 * longer)
        case 8:  # all made up but the header
            content[header:] = rng.bytes(max(0, size - header))
        case _:  # all made up
            content[:] = rng.bytes(int(rng.integers(0, 2 * size)))
    return bytes(content)


class Damage(NamedTuple):
    taken: int  # of those with a checksum that is right: where other bits are words, too
    refused_whole: int  # of those, by an inner check


def outcome(frame: bytes, shape: tuple[int, ...]) -> bytes | None:
    try:
        return unpacked(frame, shape).tobytes()
    except WireError:
        return None


Unpack = Callable[[bytes, tuple[int, ...]], bytes | None]


def fuzz(
    arrays: list[Records] | list[Index], cases: int, seed: int, unpack: Unpack = outcome
) -> Damage:
    """Raises AssertionError where a damaged frame is taken, or the twin says something else."""
    rng = np.random.default_rng(seed)
    frames = [packed(array) or b"" for array in arrays]
    taken = refused_whole = 0
    for number in range(cases):
        which = number // 2 % len(arrays)
        array, frame = arrays[which], frames[which]
        blocks = -(-array.size // 16)
        wrong = damaged(rng, frame, 13 if array.ndim == 1 else 4 + 3 * blocks)
        if wrong == frame:
            wrong = wrong[:-1]
        whole = number % 2 == 0
        wrong = sealed(wrong, array.size) if whole else wrong
        got = unpack(wrong, array.shape)
        assert whole or got is None, f"seed {seed}, case {number}: taken"
        taken += got is not None
        refused_whole += whole and got is None
        assert got is None or len(got) == array.nbytes
        if number % TWIN_EVERY == 0:
            expected = at_level("numpy", lambda: outcome(wrong, array.shape))  # noqa: B023
            assert got == expected, f"seed {seed}, case {number}: twin"
    return Damage(taken, refused_whole)


def some_records() -> list[Records]:
    shapes = [(1, 1), (1, 15), (1, 16), (1, 17), (3, 7), (9, 16), (20, 33)]
    return [
        *(changes(*shape) for shape in shapes),
        *(words_of_lengths(seed, 4, 20, seed, 32) for seed in (0, 20, 32)),
        np.zeros((8, 16), np.uint32),
    ]


def some_numbers() -> list[Index]:
    rng = np.random.default_rng(2)
    return [
        rng.integers(0, 2**width, count)
        for width, count in zip((1, 5, 8, 13, 20, 33, 56), (1, 9, 16, 40, 100, 7, 30), strict=True)
    ]


def test_damaged_records_are_refused_and_never_crash() -> None:
    found = fuzz(some_records(), CASES, seed=1)
    # The inner checks are reached, not the checksum alone; and past them frames are taken.
    assert found.taken > CASES / 50
    assert found.refused_whole > CASES / 10


def test_damaged_numbers_are_refused_and_never_crash() -> None:
    found = fuzz(some_numbers(), CASES, seed=2)
    assert found.taken > CASES / 50
    assert found.refused_whole > CASES / 10


def test_there_are_enough_cases() -> None:
    assert 2 * CASES >= 50_000


def test_every_level_refuses_the_same(level: str) -> None:
    fuzz(some_records(), 2_000, seed=3)
    fuzz(some_numbers(), 2_000, seed=4)


def test_every_byte_of_a_frame_counts(level: str) -> None:
    arrays: list[Records | Index] = [changes(4, 9), np.arange(30) * 7]
    for array in arrays:
        frame = packed(array) or b""
        for at in range(len(frame)):
            wrong = bytearray(frame)
            wrong[at] ^= 0x10
            assert outcome(bytes(wrong), array.shape) is None
            assert outcome(frame[:at], array.shape) is None


def test_a_frame_is_of_just_so_many(level: str) -> None:
    records, index = changes(4, 8), np.arange(40)
    for rows in (0, 3, 5, 2**30):
        assert outcome(packed(records) or b"", (rows, 8)) is None
    for n in (0, 39, 41, 2**40):
        assert outcome(packed(index) or b"", (n,)) is None


def test_what_a_frame_cannot_hold_is_refused_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A terabyte that is said to be in a few bytes; with a right checksum, too."""
    monkeypatch.setattr(np, "empty", pytest.fail)
    for frame in (bytes(100), sealed(bytes(100), 2**38)):
        assert outcome(frame, (2**30, 2**8)) is None
        assert outcome(frame, (2**38,)) is None


def test_equal_numbers_take_a_bit_each(level: str) -> None:
    """As 0 bits each, 21 bytes could claim any number of them."""
    frame = packed(np.full(800, 5)) or b""
    assert len(frame) == 21 + 100
    without = bytearray(frame[:13] + bytes(8))
    without[12] = 0
    assert outcome(sealed(bytes(without), 800), (800,)) is None


@pytest.mark.parametrize("kind", [132, 133, 255])
def test_words_of_more_than_32_bits_are_refused(level: str, kind: int) -> None:
    frame = bytearray(packed(np.full((1, 16), 2**32 - 1, np.uint32)) or b"")
    assert frame[4] == 32 * 4
    frame[4] = kind
    assert outcome(sealed(bytes(frame) + bytes(600), 16), (1, 16)) is None


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_words_shorter_than_nothing_are_refused(level: str, kind: int) -> None:
    """Classes that say so, of a block whose longest word has one bit."""
    width = (0, 2, 3, 4)[kind]
    frame = bytes(4) + bytes([1 * 4 + kind]) + b"\xff" * (2 * width)
    for bits in range(8):
        assert outcome(sealed(frame + bytes(bits + 8), 16), (1, 16)) is None


@pytest.mark.parametrize("level", NATIVE)
def test_native_code_does_not_rely_on_the_door(level: str) -> None:
    assert kernels.native is not None
    records, index = changes(4, 8), np.arange(40)
    for room in (0, 20, twin_packing.words_bound(32) - 1):
        with pytest.raises(ArgumentError, match="too small"):
            kernels.native.pack_words(records, np.empty(room, np.uint8))
    with pytest.raises(ArgumentError, match="too small"):
        kernels.native.pack_numbers(index, np.empty(twin_packing.numbers_bound(40) - 1, np.uint8))
    for size in range(30):
        frame = np.zeros(size, np.uint8)
        assert not kernels.native.unpack_words(frame, np.empty((300, 16), np.uint32))
        assert not kernels.native.unpack_numbers(frame, np.empty(3000, np.int64))


def test_other_arrays_are_refused(level: str) -> None:
    with pytest.raises(ArgumentError, match="uint32"):
        packing.pack_records(np.zeros((2, 2), np.float32))
    with pytest.raises(ArgumentError, match="contiguous"):
        packing.pack_records(np.zeros((4, 4), np.uint32)[:, ::2])
    with pytest.raises(ArgumentError, match="int64"):
        packing.pack_index(np.zeros(2, np.int32))
    with pytest.raises(ArgumentError, match="no -1 rows"):
        packing.unpack_records(np.zeros(20, np.uint8), -1, 4)
    with pytest.raises(ArgumentError, match="no -1 numbers"):
        packing.unpack_index(np.zeros(40, np.uint8), -1)


# ---------------------------------------------------------------------------- controls


def test_the_fuzz_sees_a_checksum_that_is_not_looked_at() -> None:
    """Control: a decoder that takes what has another checksum."""

    def careless(frame: bytes, shape: tuple[int, ...]) -> bytes | None:
        return outcome(sealed(frame, int(np.prod(shape))), shape)

    with pytest.raises(AssertionError, match="taken"):
        fuzz(some_records(), CASES, seed=1, unpack=careless)


def test_the_fuzz_sees_a_check_that_only_one_of_two_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a twin that takes words of any length, and one that takes numbers of any width."""
    monkeypatch.setattr(twin_packing, "HIGHEST_KIND", 255)
    monkeypatch.setattr(twin_packing, "WIDEST_NUMBER", 63)
    with pytest.raises(AssertionError, match="twin"):
        fuzz(some_records(), CASES, seed=1)
    with pytest.raises(AssertionError, match="twin"):
        fuzz(some_numbers(), CASES, seed=2)


def test_the_comparison_sees_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a twin that takes the words of a record in another order."""

    def swapped(records: Records, out: Bytes) -> int:
        return original(records[:, ::-1].copy(), out)

    original = twin_packing.pack_words
    monkeypatch.setattr(twin_packing, "pack_words", swapped)
    with pytest.raises(AssertionError):
        check_round_trip(changes(3, 17))
