"""The kernels of saving: every level gives the twin's bits, and they choose and keep what they
should."""

import inspect
import re
import zlib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_arrays import ints
from test_kernels import THREADS, Arrays, Case, bits, everywhere, properties, run_case, some_of

from planaria import kernels
from planaria.errors import ArgumentError
from planaria.kernels import saves
from planaria.kernels.types import Floats, Index, Records
from planaria.optimizers import Optimizer

ROWS = 2 * 1024 + 77  # a thread takes 1024 rows or more
SEGMENTS: list[list[tuple[int, int]]] = [[], [(0, 16)], [(0, 5), (6, 9)], [(1, 7), (8, 33)]]


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    kernels.set_threads(1)


def weights(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """Rows of every size: skewed, equal, nearly equal, tiny, denormal, large, with both zeros."""
    values = rng.standard_normal((rows, width)) ** 3
    values *= 10.0 ** rng.integers(-44, 37, (rows, 1))
    values[::5] = values[::5, :1]
    values[1::5] = 1 + 1e-7 * rng.integers(0, 3, values[1::5].shape)
    values[2::5] *= rng.random(values[2::5].shape) < 0.5
    return np.clip(values, -8e37, 8e37).astype(np.float32)


def quantisable(rng: np.random.Generator, rows: int, size: int) -> Records:
    return weights(rng, rows, size).view(np.uint32)


# ---------------------------------------------------------------------------- native equals twin


def packing_cases(rng: np.random.Generator, size: int) -> dict[str, Case]:
    records = quantisable(rng, ROWS, size)
    kinds = [[s for s in some if sum(s) <= size] for some in SEGMENTS] + [[(0, size)]]
    each = [(some, count) for some in kinds for count in saves.BITS]
    return {
        "quantise": [(saves.quantise, records, *how) for how in each],
        "dequantise": [
            (saves.dequantise, saves.quantise(records, *how), size, *how) for how in each
        ],
        "row_distances": [
            (saves.row_distances, records, quantisable(rng, ROWS, size + extra), dim)
            for extra in (0, 1)
            for dim in {size, (size + 1) // 2}
        ],
    }


def tracking_cases(rng: np.random.Generator, size: int) -> dict[str, Case]:
    counters = (2.0 ** (rng.random(ROWS) * 33)).clip(0, 2**32 - 1).astype(np.uint32)
    counters[::3] = 2**32 - 2
    distances = rng.standard_normal(ROWS).astype(np.float32) ** 2
    distances[::9] = np.nan
    some = rng.zipf(1.2, 3 * ROWS).astype(np.int64) % ROWS
    samples = [saves.new_sample(ROWS, capacity) for capacity in (1, size, ROWS)]
    bitmap = (bits(rng, 300) & bits(rng, 300)).astype(np.uint8)
    spans = [(0, 2400), (0, 0), (2400, 2400), (63, 65), (size, 2300), (64, 128), (7, 9)]
    index = some_of(rng, 2400, ROWS)
    out = np.zeros(ROWS, np.int64), np.zeros((ROWS, size), np.uint32)
    change = index, bits(rng, 2400, size), bits(rng, ROWS, size), *out
    content = rng.integers(0, 256, 70_000 + size, np.uint8)
    return {
        "crc32": [
            (saves.crc32, content[first : first + count], before)
            for count in [*range(200), 511, 4096 + size, 70_000]
            for first, before in ((0, 0), (size % 32, 0), (3, 0xDEADBEEF))
        ],
        "count_accesses": [(saves.count_accesses, counters, some)],
        "reset_counters": [(saves.reset_counters, counters, some[:100])],
        "top_rows": [
            (saves.top_rows, scores, count)
            for scores in (counters, distances, counters % np.uint32(3))
            for count in (0, 1, size, 1500, ROWS)
        ],
        "sample_accesses": [
            (saves.sample_accesses, sample, seed, some) for sample in samples for seed in (0, 9)
        ],
        "sampled_rows": [(saves.sampled_rows, sample) for sample in samples],
        "count_marked": [(saves.count_marked, bitmap, *span) for span in spans],
        "marked": [(saves.marked, bitmap, *span) for span in spans],
        "preserve": [(saves.preserve, bitmap, *span, *change) for span in spans],
        "overlay": [
            (saves.overlay, bits(rng, rows, size), first, index, bits(rng, ROWS, size))
            for rows, first in ((0, 5), (500, 0), (500, 77), (1, 10**9))
        ],
    }


@cache
def cases(size: int) -> dict[str, Case]:
    rng = np.random.default_rng(size)
    return {**packing_cases(rng, size), **tracking_cases(rng, size)}


def public_functions() -> set[str]:
    return {
        name
        for name, function in inspect.getmembers(saves, inspect.isfunction)
        if function.__module__ == saves.__name__ and not name.startswith("_")
    }


def test_every_kernel_has_a_case() -> None:
    in_python_alone = {"packed_bytes", "new_sample", "clear_sample"}
    assert public_functions() - in_python_alone == set(cases(1))


@pytest.mark.parametrize("size", [1, 7, 16, 17, 41, 64])
@pytest.mark.parametrize("kernel", list(cases(1)))
def test_every_level_and_number_of_threads_gives_the_twins_bits(kernel: str, size: int) -> None:
    everywhere(lambda: run_case(cases(size)[kernel]), THREADS[:2])


def test_a_checksum_is_zlibs_and_that_of_parts_is_that_of_the_whole() -> None:
    content = np.random.default_rng(1).integers(0, 256, 3000, np.uint8)
    for at in (0, 1, 63, 64, 1000, 3000):
        (found,) = everywhere(
            lambda at=at: (np.array(saves.crc32(content[at:], saves.crc32(content[:at]))),)  # type: ignore[misc]
        )
        assert int(found) == zlib.crc32(content.tobytes())


@properties
@given(st.data())
def test_any_numbers_are_quantised_alike_and_within_the_grid(data: st.DataObject) -> None:
    limit = float(np.nextafter(np.float32(2.0**126), np.float32(0)))
    number = st.floats(-limit, limit, width=32) | st.sampled_from([0.0, -0.0, 1e-45, 1.0])
    width = data.draw(st.integers(1, 20))
    values = np.array(data.draw(st.lists(number, min_size=width, max_size=width)), np.float32)
    count = data.draw(st.sampled_from(saves.BITS))

    def run() -> Arrays:
        packed = saves.quantise(values.view(np.uint32)[None], [(0, width)], count)
        return packed, saves.dequantise(packed, width, [(0, width)], count)

    packed, back = everywhere(run)
    low, scale = packed[0, :8].view(np.float32).astype(np.float64)
    assert scale >= 2.0**-126
    assert np.isfinite(back.view(np.float32)).all()
    if count == 8:
        off = np.abs(back.view(np.float32)[0].astype(np.float64) - values)
        assert (off <= 0.5001 * scale + np.spacing(np.abs(values)).astype(np.float64)).all()
        assert low == values.min()


# ---------------------------------------------------------------------------- fewer bits


def restored(values: Floats, count: int) -> Floats:
    width = values.shape[1]
    packed = saves.quantise(values.view(np.uint32), [(0, width)], count)
    return saves.dequantise(packed, width, [(0, width)], count).view(np.float32)


def squared_errors(values: Floats, back: Floats) -> NDArray[np.float64]:
    errors: NDArray[np.float64] = ((values.astype(np.float64) - back) ** 2).sum(axis=1)
    return errors


@pytest.mark.parametrize("width", [1, 16, 50])
def test_eight_bits_are_off_by_half_a_scale_at_most(level: str, width: int) -> None:
    values = weights(np.random.default_rng(width), 500, width)
    span = (values.max(1) - values.min(1)).astype(np.float64)
    scale = np.maximum(span / 255, 2.0**-126)[:, None]
    off = np.abs(values.astype(np.float64) - restored(values, 8))
    assert (off <= 0.5001 * scale + np.spacing(np.abs(values)).astype(np.float64)).all()


@pytest.mark.parametrize("count", [4, 3, 2])
def test_narrowing_never_adds_to_the_squared_error_and_mostly_lessens_it(
    level: str, count: int
) -> None:
    rng = np.random.default_rng(count)
    values = rng.standard_normal((500, 64)).astype(np.float32)
    low, high = values.min(1, keepdims=True), values.max(1, keepdims=True)
    scale = (high - low).astype(np.float64) / (2**count - 1)
    plain = squared_errors(values, (low + np.rint((values - low) / scale) * scale).astype("f"))
    narrowed = squared_errors(values, restored(values, count))
    assert (narrowed <= plain * (1 + 1e-5)).all()
    assert narrowed.mean() < {4: 0.95, 3: 0.85, 2: 0.6}[count] * plain.mean()


def test_the_greedy_search_is_the_published_one() -> None:
    """Check-N-Run's search, number by number: 25 bins, either end moves in, 0.4 remains."""
    rng = np.random.default_rng(5)
    for row in rng.standard_normal((20, 24)).astype(np.float32):

        def error(low: float, high: float, row: Floats = row) -> float:
            scale = (high - low) / 3
            codes = np.clip(np.rint((row - low) / scale), 0, 3)
            return float(((row - (low + codes * scale)) ** 2).sum())

        low, high = float(row.min()), float(row.max())
        step, best = (high - low) / 25, error(low, high)
        span = high - low
        while high - low > 0.4 * span + step / 2:
            up, down = error(low + step, high), error(low, high - step)
            if up < down:
                low += step
            else:
                high -= step
            best = min(best, up, down)
        (got,) = squared_errors(row[None], restored(row[None], 2))
        assert got == pytest.approx(best, rel=1e-4)


def test_equal_values_come_back_exactly(level: str) -> None:
    values = np.array([0.1, -7e37, 1e-45, 0.0, 3.0], np.float32).repeat(11).reshape(5, 11)
    for count in saves.BITS:
        assert restored(values, count).tobytes() == values.tobytes()
    assert restored(np.full((1, 3), -0.0, np.float32), 8).tobytes() == bytes(12)


def test_words_outside_the_segments_keep_their_bits(level: str) -> None:
    rng = np.random.default_rng(3)
    adam = quantisable(rng, 100, 3 * 16 + 1)
    adam[:, 48] = bits(rng, 100)  # the step, an integer
    for count in saves.BITS:
        segments = [(0, 16), (16, 16), (32, 16)]
        packed = saves.quantise(adam, segments, count)
        assert packed.shape == (100, 3 * (8 + 2 * count) + 4)
        assert np.array_equal(saves.dequantise(packed, 49, segments, count)[:, 48], adam[:, 48])
    assert np.array_equal(saves.quantise(adam, [], 2).view(np.uint32), adam)


def test_codes_are_packed_from_the_lowest_bit_on(level: str) -> None:
    values = np.array([[0, 7, 1, 6, 2, 5, 3, 4, 7, 0]], np.float32)
    packed = saves.quantise(values.view(np.uint32), [(0, 10)], 3)
    assert packed[0, :8].view(np.float32).tolist() == [0.0, 1.0]
    stream = sum(int(code) << 3 * at for at, code in enumerate(values[0]))
    assert packed[0, 8:].tobytes() == stream.to_bytes(4, "little")
    assert np.array_equal(saves.dequantise(packed, 10, [(0, 10)], 3), values.view(np.uint32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**126, -3e38])
def test_what_has_no_quantised_form_is_refused(level: str, bad: float) -> None:
    kernels.set_threads(2)
    values = np.ones((ROWS, 6), np.float32)
    values[[1500, 1999], 4] = bad
    out = np.full((ROWS, saves.packed_bytes(6, [(0, 5)], 4)), 7, np.uint8)
    with pytest.raises(ArgumentError, match=re.escape("records[1500] holds a NaN, an infinity")):
        saves.quantise(values.view(np.uint32), [(0, 5)], 4, out)
    assert (out == 7).all()
    saves.quantise(values.view(np.uint32), [(0, 4)], 4)  # outside the segments anything goes


# ---------------------------------------------------------------------------- rows worth saving


@properties
@given(st.lists(st.integers(0, 5) | st.integers(0, 2**32 - 1), max_size=50), st.data())
def test_the_top_rows_are_the_true_ones(scores: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(scores)))
    (got,) = everywhere(lambda: (saves.top_rows(np.array(scores, np.uint32), count),))
    ranked = sorted(range(len(scores)), key=lambda row: (-scores[row], row))
    assert got.tolist() == sorted(ranked[:count])


def test_distances_rank_like_numbers_and_nan_above_all(level: str) -> None:
    distances = np.array([0.5, np.nan, 1e-45, np.inf, 0.0, 2.0], np.float32)
    tops = [saves.top_rows(distances, count).tolist() for count in range(7)]
    assert tops == [[], [1], [1, 3], [1, 3, 5], [0, 1, 3, 5], [0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 5]]
    with pytest.raises(ArgumentError, match="a distance is 0 or more"):
        saves.top_rows(-distances, 2)


def test_rows_that_moved_furthest_are_found(level: str) -> None:
    rng = np.random.default_rng(2)
    now = rng.standard_normal((300, 20)).astype(np.float32)
    saved = now + rng.standard_normal((300, 20)).astype(np.float32) * rng.random((300, 1)).astype(
        np.float32
    )
    distances = saves.row_distances(now.view(np.uint32), saved.view(np.uint32), 17)
    exact = squared_errors(now[:, :17], saved[:, :17])
    np.testing.assert_allclose(distances, exact, rtol=1e-5)
    top = set(saves.top_rows(distances, 40).tolist())
    assert top == set(np.argsort(-exact)[:40].tolist())


def test_counters_count_up_to_their_limit_and_are_zeroed(level: str) -> None:
    counters = np.array([0, 2**32 - 2, 5, 0], np.uint32)
    saves.count_accesses(counters, ints(1, 0, 1, 1, 3, 0))
    assert counters.tolist() == [2, 2**32 - 1, 5, 1]
    saves.reset_counters(counters, ints(3, 1, 1))
    assert counters.tolist() == [2, 0, 5, 0]


def zipf_accesses(rows: int, accesses: int, seed: int) -> tuple[NDArray[np.float64], Index]:
    share = 1.0 / np.arange(1, rows + 1)
    share /= share.sum()
    rng = np.random.default_rng(seed)
    return share, rng.choice(rows, accesses, p=share)


def test_a_sample_holds_the_hot_rows_as_often_as_random_eviction_predicts() -> None:
    """A row that is put in at rate p and thrown out at rate 1/T is there p*T / (1 + p*T) of the
    time; T is such that the sample is full. MFU holds the rows with the highest p."""
    rows, capacity = 4000, 500
    share, index = zipf_accesses(rows, 400_000, seed=1)
    counters, sample = np.zeros(rows, np.uint32), saves.new_sample(rows, capacity)
    saves.count_accesses(counters, index)
    hottest = saves.top_rows(counters, capacity)
    low, high = 1.0, 1e9
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        full = (share * middle / (1 + share * middle)).sum() > capacity
        low, high = (low, middle) if full else (middle, high)
    predicted = (share * low / (1 + share * low))[hottest].sum() / capacity
    overlaps = []
    for part in np.array_split(index, 40):
        saves.sample_accesses(sample, 7, part)
        assert len(saves.sampled_rows(sample)) == sample.progress[2]
        overlaps.append(len(np.intersect1d(saves.sampled_rows(sample), hottest)) / capacity)
    assert sample.progress[2] == capacity
    assert 0.4 < predicted < 0.5  # neither chance (0.125) nor certainty
    assert np.mean(overlaps[5:]) == pytest.approx(predicted, abs=0.02)


@properties
@given(st.lists(st.integers(0, 15), max_size=60), st.integers(1, 18), st.data())
def test_a_sample_is_a_set_of_every_second_row_however_calls_are_split(
    accesses: list[int], capacity: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(accesses)))
    index = np.array(accesses, np.int64)

    def run(*parts: Index) -> Arrays:
        sample = saves.new_sample(16, capacity)
        for part in parts:
            saves.sample_accesses(sample, 3, part)
        return *sample, saves.sampled_rows(sample)

    whole = everywhere(lambda: run(index))
    split = everywhere(lambda: run(index[:cut], index[cut:]))
    assert [part.tobytes() for part in whole] == [part.tobytes() for part in split]
    entries, _, progress, rows = whole
    assert progress[0] == len(accesses)
    assert sorted(entries[: int(progress[2])].tolist()) == rows.tolist()
    assert len(rows) == min(capacity, len(set(accesses[1::2])))
    assert set(rows.tolist()) <= set(accesses[1::2])


def test_a_cleared_sample_starts_empty_and_draws_other_numbers(level: str) -> None:
    sample = saves.new_sample(800, 10)
    index = np.arange(800)
    saves.sample_accesses(sample, 1, index)
    first = saves.sampled_rows(sample)
    saves.clear_sample(sample)
    assert len(saves.sampled_rows(sample)) == 0
    saves.sample_accesses(sample, 1, index)
    second = saves.sampled_rows(sample)
    assert len(first) == len(second) == 10
    assert not np.array_equal(first, second)
    assert sample.progress.tolist() == [1600, 800, 10]


def test_entries_that_the_caller_spoilt_are_not_followed_out_of_the_bitmap(level: str) -> None:
    sample = saves.new_sample(8, 2)
    sample.progress[2] = 2
    sample.entries[:] = 2**32 - 1
    saves.sample_accesses(sample, 0, np.arange(8))
    assert sample.bitmap[0]


# ---------------------------------------------------------------------------- bitmaps, pre-images


@properties
@given(st.binary(max_size=30), st.data())
def test_the_marked_rows_are_the_bits_that_are_set(given_bits: bytes, data: st.DataObject) -> None:
    bitmap = np.frombuffer(given_bits, np.uint8)
    stop = data.draw(st.integers(0, 8 * len(bitmap)))
    first = data.draw(st.integers(0, stop))
    (got,) = everywhere(lambda: (saves.marked(bitmap, first, stop),))
    assert got.tolist() == [i for i in range(first, stop) if given_bits[i // 8] >> i % 8 & 1]
    assert saves.count_marked(bitmap, first, stop) == len(got)


@properties
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_save_taken_while_steps_go_on_shows_the_records_of_its_beginning(
    seed: int, chunks: int
) -> None:
    rng = np.random.default_rng(seed)
    start = np.abs(rng.standard_normal((40, 6))).astype(np.float32).view(np.uint32)
    steps = [(some_of(rng, 40, 15), rng.standard_normal((15, 3)).astype("f")) for _ in range(6)]
    edges = np.linspace(0, 40, chunks + 1).astype(int).tolist()
    rule = Optimizer("adagrad", lr=0.1).rule()

    def run() -> Arrays:
        records, bitmap = start.copy(), np.zeros(5, np.uint8)
        kept_rows, kept = np.empty(200, np.int64), np.empty((200, 6), np.uint32)
        count, parts, rest = 0, [], iter(steps)

        def step() -> None:
            nonlocal count
            applied = kernels.apply(rule, records, 40, 3, [next(rest)])
            room = kept_rows[count:], kept[count:]
            count += saves.preserve(
                bitmap, first, 40, applied.indices, records, applied.delta, *room
            )

        for first, stop in pairwise(edges):
            step()
            chunk = records[first:stop].copy()
            saves.overlay(chunk, first, kept_rows[:count], kept[:count])
            parts.append(chunk)
        return np.concatenate(parts), kept_rows[:count]

    saved, rows = everywhere(run)
    assert np.array_equal(saved, start)
    assert len(np.unique(rows)) == len(rows)
