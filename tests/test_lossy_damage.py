"""Frames that are damaged, cut or made up are refused: nothing crashes, nothing is read or written
outside, nothing large is allocated. `make sanitize` runs these tests, too."""

import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from lossy_cases import CODED, Answer, rows_of

from planaria import kernels
from planaria.errors import WireError
from planaria.kernels import compressors, lossy, twin_lossy
from planaria.kernels.types import Bytes, Floats

CASES = 6500  # of each of eight encoders: 52,000, of which half have their checksum repaired
TWIN_EVERY = 13  # of those, the twin must agree on one in so many
FRAME_BYTES, PIECE_BYTES = 20, 24

Decode = Callable[[Bytes], Floats]


def base_answers(encoder: str) -> list[Answer]:
    """Small and less small ones, of which each reaches other code: one stream or four, codes of
    one byte or two, a block of rows or several, rows that repeat, a piece that is all equal."""
    rng = np.random.default_rng(len(encoder))
    found = []
    shapes = [(1, 1, 0.1), (9, 3, 0.1), (40, 8, 0.3), (40, 8, 1e-4), (300, 16, 0.2), (2100, 2, 0.5)]
    for rows, dim, bound in shapes:
        tables = rng.integers(0, 3, rows).astype(np.int32)
        if rows >= 300:
            tables[:] = 1
        values = rows_of(rng, "normal", rows, dim)
        for own in range(0, rows, 5):
            values[own : own + 3] = values[own]
        if encoder in CODED and rows == 40:
            values[tables == 2] = 7
        bounds = np.full(3, bound, np.float32)
        found.append(Answer(values, tables, bounds, [encoder] * 3))
    return found


def repaired(frame: bytes) -> bytes:
    return frame[:4] + struct.pack("<I", zlib.crc32(frame[8:])) + frame[8:]


def damaged(rng: np.random.Generator, frame: bytes) -> bytes:
    """A frame with something else in it."""
    content, size = bytearray(frame), len(frame)
    headers = min(size, FRAME_BYTES + 3 * PIECE_BYTES)
    near = int(rng.integers(0, headers if rng.random() < 0.5 else size))
    match int(rng.integers(0, 9)):
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
        case 6:  # a word that is an edge
            at = near & ~3
            edges = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, size, size + 1, 255, 256]
            content[at : at + 4] = struct.pack("<I", rng.choice(edges))
        case 7:  # a payload that is made up
            content[headers:] = rng.bytes(size - headers)
        case _:  # another size of a piece, and the bytes for it
            at = FRAME_BYTES + 8
            if size >= FRAME_BYTES + PIECE_BYTES:
                more = int(rng.integers(1, 9))
                was = struct.unpack_from("<I", content, at)[0]
                struct.pack_into("<I", content, at, (was + more) % 2**32)
                content += rng.bytes(more)
    return bytes(content)


class Found(NamedTuple):
    cases: int
    taken: int  # of those with a checksum that is right: where other codes are codes, too
    reasons: set[str]


def outcome(decode: Decode, frame: bytes) -> bytes | str:
    """The rows, or why there are none. The frame's memory ends where it ends."""
    try:
        return decode(np.frombuffer(frame, np.uint8).copy()).tobytes()
    except WireError as error:
        return str(error)


def fuzz(answers: list[Answer], cases: int, decode: Callable[[Answer], Decode], seed: int) -> Found:
    """Raises AssertionError where a damaged frame is taken, or the twin says something else."""
    rng = np.random.default_rng(seed)
    frames = [case.encode().tobytes() for case in answers]
    taken, reasons = 0, set[str]()
    for number in range(cases):
        which = number // 2 % len(answers)
        frame = damaged(rng, frames[which])
        if frame == frames[which]:
            frame = frame[:-1]
        whole = number % 2 == 0
        frame = repaired(frame) if whole else frame
        got = outcome(decode(answers[which]), frame)
        assert whole or isinstance(got, str), f"seed {seed}, case {number}: taken"
        if isinstance(got, bytes):
            taken += 1
            assert len(got) == answers[which].rows.nbytes
        else:
            reasons.add(got.split(": ")[1].split(";")[0])
        if number % TWIN_EVERY == 0 and kernels.level() != "numpy":
            assert same(got, by_twin(answers[which], frame)), f"seed {seed}, case {number}: twin"
    return Found(cases, taken, reasons)


def same(got: bytes | str, expected: bytes | str) -> bool:
    """NaNs of made up scales and floats may differ in their bits."""
    if isinstance(got, str) or isinstance(expected, str):
        return got == expected
    one, other = (np.frombuffer(content, np.float32) for content in (got, expected))
    return np.array_equal(one, other, equal_nan=True)


def by_twin(case: Answer, frame: bytes) -> bytes | str:
    before = kernels.level()
    kernels.select_level("numpy")
    try:
        with np.errstate(all="ignore"):
            return outcome(case.decode, frame)
    finally:
        kernels.select_level(before)


# ---------------------------------------------------------------------------- damage


@pytest.mark.parametrize("encoder", list(lossy.ENCODERS))
def test_damaged_frames_are_refused_and_never_crash(encoder: str) -> None:
    found = fuzz(base_answers(encoder), CASES, lambda case: case.decode, seed=len(encoder))
    assert found.cases == CASES
    # The inner checks are reached, not the checksum alone.
    assert len(found.reasons) >= 8, found.reasons
    assert 0 < found.taken < CASES / 2


def test_there_are_enough_cases() -> None:
    assert CASES * len(lossy.ENCODERS) >= 50_000


def test_every_level_refuses_the_same(level: str) -> None:
    for encoder in lossy.ENCODERS:
        fuzz(base_answers(encoder)[:4], 150, lambda case: case.decode, seed=9)


def test_every_byte_of_a_frame_counts(level: str) -> None:
    for encoder in lossy.ENCODERS:
        case = base_answers(encoder)[1]
        frame = case.encode()
        for at in range(len(frame)):
            wrong = frame.copy()
            wrong[at] ^= 0x10
            with pytest.raises(WireError):
                case.decode(wrong)
            with pytest.raises(WireError):
                case.decode(frame[:at].copy())


def test_the_fuzz_sees_a_checksum_that_is_not_looked_at() -> None:
    """Control: a decoder that takes what has another checksum."""

    def careless(case: Answer) -> Decode:
        return lambda frame: case.decode(np.frombuffer(repaired(frame.tobytes()), np.uint8).copy())

    with pytest.raises(AssertionError, match="taken"):
        fuzz(base_answers("none"), CASES, careless, seed=4)


def test_the_fuzz_sees_a_check_that_only_one_of_two_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a twin that believes what a piece's header says."""
    monkeypatch.setattr(twin_lossy, "_check_piece", lambda *_: None)
    with pytest.raises((AssertionError, ValueError)):
        fuzz(base_answers("none"), CASES, lambda case: case.decode, seed=5)


# ---------------------------------------------------------------------------- claims


def small() -> Answer:
    return Answer(
        rows_of(np.random.default_rng(1), "repeated", 64, 8),
        np.zeros(64, np.int32),
        np.array([0.1], np.float32),
        ["vector-lz"],
    )


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (8, 2**32 - 1, "it has 4294967295 rows of 8"),
        (12, 2**29, "rows of 536870912 in 1 pieces, not 64 of 8 in 1"),
        (16, 2**32 - 1, "in 4294967295 pieces"),
        (20, 7, "is not where it belongs"),
        (24, 2**32 - 1, "or has other rows"),
        (28, 2**32 - 1, "is cut off"),
        (32, 99, "has an encoding that does not exist"),
        (36, 0x7F800000, "has an impossible scale"),
        (36, 0x80000001, "has an impossible scale"),
        (40, 0x7FFF | 9 << 16, "has codes that do not exist"),
        (44, 2**32 - 1, "cannot be decoded"),
    ],
)
def test_a_header_that_claims_more_than_was_asked_for_is_refused(
    level: str, at: int, value: int, says: str
) -> None:
    case = small()
    frame = bytearray(case.encode().tobytes())
    struct.pack_into("<I", frame, at, value)
    with pytest.raises(WireError, match=says):
        case.decode(np.frombuffer(repaired(bytes(frame)), np.uint8))


def with_payload(encoder: str, payload: bytes) -> tuple[Answer, Bytes]:
    """A frame of one piece, its codes those of `payload`."""
    case = small()._replace(encoders=["none"])
    frame = bytearray(case.encode().tobytes()[: FRAME_BYTES + PIECE_BYTES])
    struct.pack_into("<II", frame, FRAME_BYTES + 8, len(payload), lossy.ENCODERS[encoder])
    return case, np.frombuffer(repaired(bytes(frame) + payload), np.uint8)


def test_a_bomb_is_refused_before_it_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))  # a gigabyte in 33 KB
    case, frame = with_payload("zstd", bomb)
    expanded: list[Any] = []
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: expanded.append(1))
    with pytest.raises(WireError, match="a piece has another size than its rows"):
        case.decode(frame)
    assert expanded == []


@pytest.mark.parametrize("level_of_zstd", [1, 19])
def test_a_compressed_piece_of_another_size_is_refused(level_of_zstd: int) -> None:
    zstandard, lz4 = pytest.importorskip("zstandard"), pytest.importorskip("lz4.block")
    compressor = zstandard.ZstdCompressor(level=level_of_zstd)
    right, unsized = bytes(64 * 8), zstandard.ZstdCompressor(write_content_size=False)
    case, frame = with_payload("zstd", compressor.compress(right))
    assert case.decode(frame).shape == (64, 8)
    wrong = [
        ("zstd", compressor.compress(right[1:])),
        ("zstd", compressor.compress(right + b"!")),
        ("zstd", compressor.compress(right) + b"!"),
        ("zstd", compressor.compress(right)[:-1]),
        ("zstd", unsized.compress(right)),
        ("zstd", b""),
        ("zstd", bytes(30)),
        ("lz4", lz4.compress(right + b"!", store_size=False)),
        ("lz4", lz4.compress(right[1:], store_size=False)),
        ("lz4", lz4.compress(right, store_size=False)[:-1]),
        ("lz4", b""),
        ("lz4", b"\xff" * 600),
    ]
    for encoder, payload in wrong:
        case, frame = with_payload(encoder, payload)
        with pytest.raises(WireError):
            case.decode(frame)


def test_other_compressors_are_not_tried() -> None:
    assert set(compressors.PACKAGES) == {twin_lossy.Encoding.ZSTD, twin_lossy.Encoding.LZ4}
    case, frame = with_payload("zstd", b"\x1f\x8b" + bytes(30))
    with pytest.raises(WireError, match="cannot be decompressed"):
        case.decode(frame)
