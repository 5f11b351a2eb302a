"""Rows within an error bound: no number is off by more, every level gives the twin's bytes, and
what a number becomes depends on nothing but itself and its table."""

import inspect
import struct
import sys
import zlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_cases import CODED, DENORMAL, KINDS, Answer, answer, rows_of
from numpy.typing import NDArray
from small_arrays import floats, raw
from test_arguments import Kernel, refused, wrong_kinds
from test_kernels import everywhere

from planaria.errors import ArgumentError, RowError, WireError
from planaria.kernels import lossy
from planaria.kernels.lossy import Measured
from planaria.kernels.types import Floats

properties = settings(max_examples=150, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def there_and_back(given_rows: Answer) -> tuple[NDArray[np.uint8], Floats]:
    """The frame and the rows, of which all levels have the same."""

    def run() -> tuple[NDArray[np.uint8], Floats]:
        frame = given_rows.encode()
        return frame, given_rows.decode(frame)

    frame, rows = everywhere(run)
    return frame, rows


def one_table(rows: Floats, encoder: str, bound: float = 0.01) -> Answer:
    return Answer(rows, np.zeros(len(rows), np.int32), np.array([bound], np.float32), [encoder])


def test_all_encoders_are_tested() -> None:
    assert lossy.available() == list(lossy.ENCODERS)
    assert set(lossy.available()) == {"exact", "fp16", "bf16", *CODED}


# ---------------------------------------------------------------------------- the bound


@given(seeds, st.sampled_from(CODED), st.sampled_from(KINDS))
@properties
def test_no_number_is_off_by_more_than_the_bound(seed: int, encoder: str, kind: str) -> None:
    case = answer(seed, encoder, kind)
    _, back = there_and_back(case)
    off = np.abs(case.rows.astype(np.float64) - back.astype(np.float64))  # exact, or nearly
    assert (off <= case.bounds[case.tables][:, None].astype(np.float64)).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(1e-45, 2.0**126))
@settings(max_examples=500, deadline=None)
def test_the_bound_holds_in_exact_arithmetic(number: float, bound: float) -> None:
    single = max(np.float32(bound), DENORMAL)
    _, back = there_and_back(one_table(np.array([[number]], np.float32), "none", float(single)))
    assert abs(Fraction(number) - Fraction(float(back[0, 0]))) <= Fraction(float(single))


def test_numbers_on_the_edge_between_two_codes_go_to_either() -> None:
    """A quotient that is a half exactly is the only one that the product may round elsewhere."""
    for parts in range(1, 512):
        scale = np.float32(parts / 64)
        edges = (np.arange(-40, 40) + 0.5) * float(scale)
        _, back = there_and_back(
            one_table(edges.astype(np.float32)[:, None], "none", float(scale) / 2)
        )
        assert (np.abs(back[:, 0].astype(np.float64) - edges) == float(scale) / 2).all()


@given(seeds, st.sampled_from(["fp16", "bf16"]), st.sampled_from(KINDS))
@properties
def test_floats_of_16_bits_are_the_nearest(seed: int, encoder: str, kind: str) -> None:
    case = answer(seed, encoder, kind)
    _, back = there_and_back(case)
    if encoder == "fp16":
        with np.errstate(over="ignore"):
            nearest = case.rows.astype(np.float16).astype(np.float32)
    else:
        below = case.rows.view(np.uint32) & 0xFFFF0000
        above = below + 0x10000
        part, even = case.rows.view(np.uint32) & 0xFFFF, below >> 16 & 1 == 0
        up = (part > 0x8000) | ((part == 0x8000) & ~even)
        nearest = np.where(up, above, below).astype(np.uint32).view(np.float32)
    expected = np.where(np.isfinite(nearest), nearest, case.rows)
    assert back.tobytes() == expected.tobytes()


@given(seeds)
@properties
def test_exact_rows_come_back_with_every_bit(seed: int) -> None:
    case = answer(seed, "exact")
    rows = np.random.default_rng(seed).integers(0, 2**32, case.rows.shape, np.uint32)
    case = case._replace(rows=rows.view(np.float32))  # NaNs, too
    assert there_and_back(case)[1].tobytes() == rows.tobytes()
    unbounded = case._replace(bounds=np.zeros_like(case.bounds), encoders=["huffman"] * 5)
    unbounded = unbounded._replace(encoders=unbounded.encoders[: len(case.bounds)])
    assert there_and_back(unbounded)[1].tobytes() == rows.tobytes()


# ---------------------------------------------------------------------------- every encoder


@pytest.mark.parametrize("kind", KINDS)
def test_every_encoder_of_codes_gives_the_same_rows(kind: str) -> None:
    for seed in range(20):
        case = answer(seed, "none", kind, most_rows=300)
        _, expected = there_and_back(case)
        for encoder in CODED[1:]:
            other = case._replace(encoders=[encoder] * len(case.encoders))
            assert there_and_back(other)[1].tobytes() == expected.tobytes(), (seed, encoder)


@pytest.mark.parametrize("encoder", ["huffman", "vector-lz"])
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_answers_of_several_streams_and_blocks(encoder: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    for rows in (2047, 2048, 2049, 4096, 6001):
        values = rng.standard_normal((rows, dim)).astype(np.float32)
        if encoder == "vector-lz":
            values = values[np.sort(rng.integers(0, 60, rows))]
        for bound in (0.4, 0.02):
            case = one_table(values, encoder, bound)
            frame, back = there_and_back(case)
            assert len(frame) < len(one_table(values, "none", bound).encode())
            assert np.abs(back.astype(np.float64) - values).max() <= np.float32(bound)


def test_skewed_codes_as_deep_as_a_tree_can_be() -> None:
    """Counts that grow as Fibonacci's would make codes of more than eleven bits."""
    counts = [1, 1]
    while len(counts) < 20:
        counts.append(counts[-1] + counts[-2])
    codes = np.repeat(np.arange(20), counts).astype(np.float32)
    rows = np.random.default_rng(1).permutation(codes)[:, None] * np.float32(2)
    case = one_table(rows, "huffman", 1)
    frame, back = there_and_back(case)
    assert back.tobytes() == rows.tobytes()
    assert len(frame) < len(one_table(rows, "none", 1).encode()) * 0.6


@pytest.mark.parametrize("bits", range(17))
def test_codes_of_every_width(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, min(2**bits, 65535), 77) - 2**bits // 2
    codes[:2] = -(2**bits // 2), 2**bits - 1 - 2**bits // 2  # all of its width
    rows = np.clip(codes, -32767, 32767).astype(np.float32)[:, None]
    frame, back = there_and_back(one_table(rows, "none", 0.5))
    assert back.tobytes() == rows.tobytes()
    assert len(frame) == 20 + 24 + (77 * bits + 7) // 8


@pytest.mark.parametrize("encoder", list(lossy.ENCODERS))
def test_one_row_and_no_rows(encoder: str) -> None:
    for rows in (0, 1):
        case = one_table(floats(rows, 5), encoder)
        frame, back = there_and_back(case)
        assert back.shape == (rows, 5)
        assert len(frame) <= lossy.frame_bound(rows, 5, 1)
    none = np.empty((0, 3), np.float32)
    frame, back = there_and_back(Answer(none, np.empty(0, np.int32), np.empty(0, np.float32), []))
    assert (len(frame), back.shape) == (20, (0, 3))


def test_a_frame_is_as_the_page_draws_it() -> None:
    rows = np.array([[4, 5], [0.25, 2], [6, 4], [-1, 3]], np.float32)
    tables = np.array([2, 0, 2, 0], np.int32)
    bounds = np.array([0, 0, 0.5], np.float32)
    frame = lossy.encode(rows, tables, bounds, ["fp16", "none", "none"]).tobytes()
    content = struct.pack("<III", 4, 2, 2)
    content += struct.pack("<iIIIfhH", 0, 2, 8, 1, 0, 0, 0)
    content += struct.pack("<iIIIfhH", 2, 2, 1, 4, 1, 4, 2)
    content += np.array([0.25, 2, -1, 3], np.float16).tobytes()
    content += bytes([0b00_10_01_00])  # 4, 5, 6, 4 above 4, two bits each
    assert frame == b"PLQ1" + struct.pack("<I", zlib.crc32(content)) + content


# ---------------------------------------------------------------------------- the split


def message_rows(case: Answer, rng: np.random.Generator) -> Floats:
    """What arrives where the rows come in several messages, in any order."""
    arrived = np.empty_like(case.rows)
    order = rng.permutation(len(case.rows))
    for chosen in np.array_split(order, rng.integers(1, max(2, len(order) + 1))):
        part = case.of(chosen)
        arrived[chosen] = part.decode(part.encode())
    return arrived


@given(seeds, st.sampled_from([*KINDS, None]), st.sampled_from([*lossy.ENCODERS, None]))
@settings(max_examples=400, deadline=None)
def test_rows_come_back_the_same_however_they_are_split_into_messages(
    seed: int, kind: str | None, encoder: str | None
) -> None:
    """A piece with one number too large for its codes was sent exactly, so that the other rows in
    it came back with other bits than from a message without it."""
    case = answer(seed, encoder, kind)
    whole = case.decode(case.encode())
    assert message_rows(case, np.random.default_rng(seed)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("encoder", [*CODED, "fp16", "bf16"])
def test_a_number_that_does_not_fit_leaves_its_neighbours_as_they_are(encoder: str) -> None:
    rows = rows_of(np.random.default_rng(3), "normal", 50, 8)
    _, alone = there_and_back(one_table(rows, encoder, 1e-3))
    beside = np.concatenate([rows, np.full((1, 8), 3.3999e38, np.float32)])
    frame, together = there_and_back(one_table(beside, encoder, 1e-3))
    assert struct.unpack_from("<I", frame.tobytes(), 32)[0] == lossy.ENCODERS["exact"]
    assert together[:50].tobytes() == alone.tobytes() != rows.tobytes()
    assert together[50:].tobytes() == beside[50:].tobytes()


def test_rounding_twice_changes_nothing() -> None:
    for seed in range(200):
        case = answer(seed)
        once = case.decode(case.encode())
        again = case._replace(rows=once)
        assert again.decode(again.encode()).tobytes() == once.tobytes()


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("encoder", [name for name in lossy.ENCODERS if name != "exact"])
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_the_name_of_its_table(
    level: str, encoder: str, wrong: float
) -> None:
    for row, column in ((0, 0), (6, 18), (9, 2)):
        rows, tables = floats(10, 19), np.array([1, 0] * 5, np.int32)
        rows[row, column] = wrong
        bounds, encoders = np.array([0.1, 0.1], np.float32), [encoder] * 2
        name = ["user", "item"][tables[row]]
        with pytest.raises(ArgumentError, match=f"^table '{name}' has a NaN or an infinity"):
            lossy.encode(rows, tables, bounds, encoders, ["user", "item"])
        with pytest.raises(ArgumentError, match=f"^table {tables[row]} has a NaN"):
            lossy.encode(rows, tables, bounds, encoders)
        encoders[tables[row]] = "exact"
        case = Answer(rows, tables, bounds, encoders)
        assert case.decode(case.encode())[row].tobytes() == rows[row].tobytes()


def encode(rows: Floats, tables: NDArray[np.int32], bounds: Floats, out: object) -> object:
    return lossy.encode(rows, tables, bounds, ["none", "fp16"], out=out)  # type: ignore[arg-type]


def arguments_of_encode() -> dict[str, NDArray[np.generic]]:
    return {
        "rows": floats(3, 4),
        "tables": np.array([1, 0, 1], np.int32),
        "bounds": np.array([0.1, 0.2], np.float32),
        "out": raw(lossy.frame_bound(3, 4, 2)),
    }


def arguments_of_decode() -> dict[str, NDArray[np.generic]]:
    given = arguments_of_encode()
    return {"frame": encode(**given).copy(), "tables": given["tables"], "out": floats(3, 4)}  # type: ignore


def decode(frame: object, tables: object, out: object) -> object:
    return lossy.decode(frame, tables, 4, out)  # type: ignore[arg-type]


# fmt: off
KERNELS = {
    "encode": Kernel(
        encode, arguments_of_encode, written=("out",), may_be_longer=("out",), may_be_none=("out",),
    ),
    "decode": Kernel(decode, arguments_of_decode, written=("out",), may_be_none=("out",)),
}
# fmt: on


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_that_do_not_fit_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    kernel.call(**kernel.arrays())
    for which, value in kernel.arrays().items():
        for change, wrong, says in wrong_kinds(value, which in kernel.written):
            if wrong is not None or which not in kernel.may_be_none:
                arguments = {**kernel.arrays(), which: wrong}
                refused(kernel, arguments, ArgumentError, says, f"{which} with {change}")
        if which not in kernel.may_be_longer:
            arguments = {**kernel.arrays(), which: np.concatenate([value, value[-1:]])}
            errors = (ArgumentError, WireError) if name == "decode" else (ArgumentError,)
            with pytest.raises(errors):
                kernel.call(**arguments)


def test_tables_that_do_not_exist_are_refused(level: str) -> None:
    for wrong in (-1, 2, 2**31 - 1, -(2**31)):
        tables = np.array([0, wrong, 1], np.int32)
        with pytest.raises(RowError, match=rf"tables\[1\] is {wrong}, outside 0 to 1"):
            encode(floats(3, 4), tables, np.array([1, 1], np.float32), None)
        if wrong < 0:
            with pytest.raises(RowError, match=rf"tables\[1\] is {wrong}, outside 0 to 1"):
                lossy.decode(raw(100), tables, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bounds": np.array([-1], np.float32)}, "bounds must be from 0 to"),
        ({"bounds": np.array([np.nan], np.float32)}, "bounds must be from 0 to"),
        ({"bounds": np.array([2.0**127], np.float32)}, "bounds must be from 0 to"),
        ({"encoders": ["gzip"]}, "encoder 'gzip' is not one of exact, fp16, .*, lz4"),
        ({"encoders": []}, "an encoder for each of the 1 bounds"),
        ({"rows": np.empty((2, 0), np.float32)}, "rows of one float or more"),
    ],
)
def test_what_cannot_be_encoded_is_refused(change: dict[str, object], says: str) -> None:
    given = {**one_table(floats(2, 3), "none")._asdict(), **change}
    with pytest.raises(ArgumentError, match=says):
        lossy.encode(**given)


def test_memory_that_overlaps_is_refused() -> None:
    rows = floats(40, 4)
    with pytest.raises(ArgumentError):
        encode(rows[:3], np.zeros(3, np.int32), np.ones(2, np.float32), rows.view(np.uint8)[0])


def test_a_compressor_that_is_not_installed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_table(np.zeros((500, 4), np.float32) + floats(1, 4), "zstd")
    frame = case.encode()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "zstd" not in lossy.available()
    with pytest.raises(ArgumentError, match="encoder 'zstd' is not one of"):
        case.encode()
    with pytest.raises(WireError, match="needs the package zstandard, which is not installed"):
        case.decode(frame)


def test_every_public_function_is_held_to_this() -> None:
    functions = inspect.getmembers(lossy, inspect.isfunction)
    own = {name for name, function in functions if function.__module__ == lossy.__name__}
    others = {"available", "scales", "frame_bound", "gain", "choose", "rows_bytes", "refuse_rows"}
    assert {name for name in own if not name.startswith("_")} == set(KERNELS) | others


# ---------------------------------------------------------------------------- the choice


def test_the_encoder_is_chosen_by_what_it_saves_and_what_it_costs() -> None:
    measured = {
        "none": Measured(4, 2e9, 2e9),
        "huffman": Measured(8, 5e8, 5e8),
        "zstd": Measured(9, 1e8, 3e8),
    }
    assert lossy.gain(measured["huffman"], 1e8) == pytest.approx(1 / (1 / 8 + 0.2 + 0.2))
    assert lossy.choose(measured, 1e6) == "zstd"
    assert lossy.choose(measured, 2e7) == "huffman"
    assert lossy.choose(measured, 1e8) == "none"
    assert lossy.choose(measured, 1e10) == "exact"
    assert lossy.choose({}, 1e6) == "exact"
