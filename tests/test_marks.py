"""A gzip file is passed once: whoever comes later starts from a mark, at any sample."""

from __future__ import annotations

import gzip
import io
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from planaria.config import Config
from planaria.data import CriteoFile, lines, marks, packed
from planaria.data.lines import Lines
from planaria.data.marks import BEGINNING, Mark, Marks
from planaria.errors import ArgumentError, DataError
from planaria.kernels import native

pytestmark = pytest.mark.skipif(native is None, reason="only native code unpacks from marks")

ROWS = [1000] * 26
SPACING = 20_000


def make_text(count: int, seed: int = 0) -> bytes:
    """Little is repeated, so that its packed form has many blocks."""
    rng = random.Random(seed)
    numbered = (
        [str(n % 2), *[str(n)] * 13, *(f"{rng.getrandbits(32):08x}" for _ in range(26))]
        for n in range(count)
    )
    return "\n".join(map("\t".join, numbered)).encode() + b"\n"


TEXT = make_text(1500)
LINES = TEXT.splitlines(keepends=True)


def members(text: bytes, size: int) -> bytes:
    """As bgzip and concatenation make them."""
    return b"".join(gzip.compress(text[at : at + size]) for at in range(0, len(text), size))


def with_all_fields(text: bytes) -> bytes:
    """A header with an extra field, a name, a comment and a checksum; zeros behind the end."""
    plain = gzip.compress(text)
    head = plain[:3] + bytes([2 | 4 | 8 | 16]) + plain[4:10]
    return head + b"\x03\x00abc" + b"name\0" + b"comment\0" + b"hc" + plain[10:] + bytes(700)


def flushed(text: bytes) -> bytes:
    """With stored, fixed and dynamic blocks, empty ones too."""
    out = io.BytesIO()
    for number, at in enumerate(range(0, len(text), 30_000)):
        level, strategy = [(0, 0), (6, zlib.Z_FIXED), (9, 0), (1, zlib.Z_HUFFMAN_ONLY)][number % 4]
        member = zlib.compressobj(level, wbits=31, strategy=strategy)
        for piece in range(at, min(at + 30_000, len(text)), 7000):
            out.write(member.compress(text[piece : min(piece + 7000, at + 30_000)]))
            out.write(member.flush([zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH][piece % 2]))
        out.write(member.flush())
    return out.getvalue()


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "fast": lambda text: gzip.compress(text, 1),
    "stored": lambda text: gzip.compress(text, 0),
    "members": lambda text: members(text, 9000),
    "fields": with_all_fields,
    "flushed": flushed,
    "plain": lambda text: text,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small file has many chunks, marks and reads."""
    monkeypatch.setattr(marks, "SPACING", SPACING)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(packed, "PACKED_BYTES", 3000)
    monkeypatch.setattr(packed, "TEXT_BYTES", 5000)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=PACKINGS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "day"
    path.write_bytes(PACKINGS[request.param](TEXT))
    return path


@pytest.fixture
def day(tmp_path: Path) -> Path:
    path = tmp_path / "day.gz"
    path.write_bytes(gzip.compress(TEXT))
    return path


class Reader(Lines):
    """Counts the chunks that it passes."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.passed = 0
        super().__init__(str(path), cache, self._count)

    def _count(self) -> None:
        self.passed += 1


def pass_all(path: Path, cache: Path) -> int:
    """Chunks passed by a reader of all lines, which are right."""
    reader = Reader(path, cache)
    assert reader.take(0, 10**6) == TEXT
    reader.close()
    return reader.passed


def marks_of(cache: Path) -> list[Path]:
    return sorted(cache.glob("marks/*/*"))


# ---------------------------------------------------------------------------- reaching a sample


def test_a_later_reader_starts_near_its_sample_whatever_packed_the_file(
    log: Path, cache: Path
) -> None:
    everything = pass_all(log, cache)
    assert everything > 80
    assert len(marks_of(cache)) >= len(TEXT) // 70_000
    for line in (0, 700, 1499, 3):
        later = Reader(log, cache)
        assert later.take(line, 5) == b"".join(LINES[line : line + 5])
        assert later.passed < 30
        later.close()
    without = Reader(log, cache.with_name("empty"))  # control
    assert without.take(1499, 5) == LINES[1499]
    assert without.passed >= everything
    without.close()


def test_every_mark_leads_to_the_text_behind_it(log: Path, cache: Path) -> None:
    pass_all(log, cache)
    for path in marks_of(cache):
        mark = Mark.unpack(path.read_bytes())
        assert mark is not None
        assert TEXT.count(b"\n", 0, mark.offset) == mark.lines
        reader = Reader(log, cache)
        reader._text.seek(mark.offset)
        assert reader._text.read(10**6) == TEXT[mark.offset :]  # and the checksum at the end fits
        reader.close()


def test_any_lines_in_any_order_with_and_without_marks(log: Path, cache: Path) -> None:
    rng = random.Random(1)
    for _ in range(3):
        reader = Reader(log, cache)
        for _ in range(25):
            start, count = rng.randrange(1600), rng.randrange(80)
            assert reader.take(start, count) == b"".join(LINES[start : start + count])
        assert reader.count() == len(LINES)
        reader.close()


def test_going_back_starts_from_a_mark_too(day: Path, cache: Path) -> None:
    reader = Reader(day, cache)
    reader.take(0, 1500)
    reader.passed = 0
    assert reader.take(1000, 1) == LINES[1000]
    assert reader.passed < 15
    reader.close()


def test_samples_are_counted_from_the_last_mark(log: Path, cache: Path) -> None:
    everything = pass_all(log, cache)
    reader = Reader(log, cache)
    assert reader.count() == 1500
    assert reader.passed < everything / 2
    reader.close()


def test_a_long_way_is_told(day: Path, cache: Path) -> None:
    told: list[int] = []
    with CriteoFile(day, ROWS, cache, on_progress=lambda: told.append(1)) as source:
        source.read(1400, 1)
    assert len(told) > 80


@pytest.mark.torch
@pytest.mark.parametrize("long_s", [0.0, 600.0])
def test_a_trainer_that_looks_long_for_its_samples_says_so(
    monkeypatch: pytest.MonkeyPatch, day: Path, cache: Path, long_s: float
) -> None:
    from planaria.trainer import training

    monkeypatch.setattr(training, "LONG_READ_S", long_s)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    overrides = ["data.source=criteo", f"data.path={day}", "model.tables=26", "model.rows=50"]
    line = Mock()
    trainer = training.Training(Config.load(None, overrides), line)
    assert isinstance(trainer.source, CriteoFile)
    with trainer.source:
        assert len(trainer._read(1400, 1)) == 1
    told = [call.args for call in line.working.call_args_list]
    counted = [("finding its samples", n, n + 1) for n in range(1, len(told) + 1)]
    assert told == counted  # always further than before: what does not move on is a stall
    assert (len(told) > 80) == (long_s == 0)


# ---------------------------------------------------------------------------- the cache


def test_marks_are_those_of_the_file_alone(log: Path, cache: Path) -> None:
    """So readers that leave them at once, or start at different places, do not disagree."""
    pass_all(log, cache)
    left = {path.name: path.read_bytes() for path in marks_of(cache)}
    for start in (1499, 400, 0):
        other = Reader(log, cache)
        other.take(start, 2000)
        other.close()
    assert {path.name: path.read_bytes() for path in marks_of(cache)} == left
    for path in marks_of(cache)[1:]:
        path.unlink()
    pass_all(log, cache)
    assert {path.name: path.read_bytes() for path in marks_of(cache)} == left


def test_damaged_marks_are_not_trusted_but_made_again(log: Path, cache: Path) -> None:
    pass_all(log, cache)
    whole = {path: path.read_bytes() for path in marks_of(cache)}
    for number, (path, content) in enumerate(whole.items()):
        broken = bytearray(content)
        broken[number * 7 % len(broken)] ^= 1 << number % 8
        path.write_bytes([bytes(broken), content[: number % len(content)]][number % 2])
    pass_all(log, cache)
    reader = Reader(log, cache)
    assert reader.take(1499, 1) == LINES[1499]
    reader.close()
    pass_all(log, cache)
    assert {path: path.read_bytes() for path in marks_of(cache)} == whole


def test_a_mark_under_the_name_of_another_is_not_trusted(day: Path, cache: Path) -> None:
    pass_all(day, cache)
    first, *_, last = marks_of(cache)
    last.write_bytes(first.read_bytes())
    reader = Reader(day, cache)
    assert reader.take(1499, 1) == LINES[1499]
    reader.close()


def test_a_file_that_was_changed_has_no_marks_and_its_old_ones_go(day: Path, cache: Path) -> None:
    pass_all(day, cache)
    other = make_text(1500, seed=1)
    day.write_bytes(gzip.compress(other))
    os.utime(day, ns=(1, 1))
    reader = Reader(day, cache)
    assert reader.take(1400, 1) == other.splitlines(keepends=True)[1400]
    reader.close()
    assert len(list(cache.glob("marks/*"))) == 1
    assert all(folder.name.endswith("-1") for folder in cache.glob("marks/*"))


def test_marks_of_a_few_files_are_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "FILES_KEPT", 3)
    for number in range(6):
        path = tmp_path / f"day{number}.gz"
        path.write_bytes(gzip.compress(TEXT))
        pass_all(path, cache)
    assert len(list(cache.glob("marks/*"))) == 3
    assert pass_all(path, cache) > 0


def test_without_a_folder_to_write_to_files_are_read_all_the_same(day: Path, cache: Path) -> None:
    cache.write_text("not a folder")
    pass_all(day, cache)
    assert cache.read_text() == "not a folder"


def test_the_users_cache_folder_is_taken_if_no_other_is_given(
    day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    with CriteoFile(day, ROWS) as source:
        assert source.samples == 1500
    assert marks_of(tmp_path / "mine" / "planaria")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    assert marks.default_cache() == Path.home() / ".cache" / "planaria"


def test_a_mark_is_its_bytes() -> None:
    mark = Mark(2**40, 2**31, 2**50, 2**32 - 1, 2**33, os.urandom(2**15))
    assert Mark.unpack(mark.pack()) == mark
    assert Mark.unpack(b"") is None
    assert Mark.unpack(BEGINNING.pack()) == BEGINNING
    assert Marks("nowhere", (0, 0), Path("nowhere")).before_line(5) == BEGINNING


# ---------------------------------------------------------------------------- damaged files


def test_damage_is_named(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "day.gz"
    whole = gzip.compress(TEXT)
    for content, says in (
        (whole[:-9], "ends in the middle"),
        (whole[:-3], "ends in the middle"),
        (whole[:5], "ends in the middle"),
        (whole + b"noise of some kind", "does not begin as one"),
        (whole[:-8] + b"1234" + whole[-4:], "checksum is wrong"),
        (whole[:-1] + b"\x55", "checksum is wrong"),
        (whole[:10] + b"\xff" * 50 + whole[60:], "no deflate stream"),
    ):
        path.write_bytes(content)
        reader = Reader(path, cache)
        with pytest.raises(DataError, match=f"{says}.*restore the file"):
            reader.take(0, 10**6)
        reader.close()


def run(data: bytes, text_bytes: int, feed: int) -> bytes | None:
    """What the decoder makes of a raw stream, given `feed` bytes more at a time; None: damaged."""
    assert native is not None
    decoder = native.Inflater()
    text = np.zeros(text_bytes + 258, np.uint8)
    bit = at = valid = 0
    padded = np.frombuffer(data + bytes(8), np.uint8)
    while True:
        stop, bit, at = decoder.run(padded, valid, bit, text, at, 2**62)
        if stop in (packed._AT_END, packed._DAMAGED):
            return text[:at].tobytes() if stop == packed._AT_END else None
        if valid == len(data) or stop == packed._NEEDS_ROOM:
            return None
        valid = min(valid + feed, len(data))


def test_the_decoder_agrees_with_zlib_on_streams_and_on_damaged_ones() -> None:
    rng = random.Random(2)
    agreed = refused = 0
    for number in range(400):
        size = rng.choice([0, 1, 50, 3000, 40_000])
        text = rng.choice([TEXT[:size], rng.randbytes(size), b"ab" * (size // 2), bytes(size)])
        strategy = rng.choice([zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY])
        coder = zlib.compressobj(rng.randrange(10), wbits=-15, strategy=strategy)
        data = bytearray(coder.compress(text) + coder.flush())
        if number % 2:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        decoder = zlib.decompressobj(-15)
        try:
            wanted = decoder.decompress(bytes(data), 200_000)
            whole = decoder.eof
        except zlib.error:
            whole = False
        found = run(bytes(data), 200_000, feed=rng.choice([1, 7, 10**6]))
        assert found == (wanted if whole else None), number
        agreed, refused = agreed + whole, refused + (not whole)
    assert min(agreed, refused) > 50  # control


def test_wrong_arguments_never_reach_memory() -> None:
    assert native is not None
    data, text = np.zeros(20, np.uint8), np.zeros(300, np.uint8)
    for valid, bit, at in ((13, 0, 0), (12, 97, 0), (12, 0, 301)):
        with pytest.raises(ArgumentError):
            native.Inflater().run(data, valid, bit, text, at, 2**62)
