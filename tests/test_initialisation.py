"""Initial records are a pure function of (seed, table, row), and the digest of contents alone."""

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from planaria import Initial, Layout, Store, Table, kernels
from planaria.kernels.twin_numbers import log_exact, normal_quantile
from planaria.kernels.types import NO_ROW, Distribution, Floats, Index, InitTables, Records
from planaria.optimizers import Optimizer
from planaria.server import initialising
from planaria.tables import make_arenas

NO_STATE = np.empty(0, np.uint32)
FROZEN = "921a4555dcfb7c700a68e775a450b41f0425c726ed1fb0be7973601ecb9f694a"


def tables(*entries: tuple[int, int, Distribution, float, float]) -> InitTables:
    """Each entry: table id, first row, distribution and its two parameters."""
    ids, first_rows, distributions, first, second = zip(*entries, strict=True)
    return InitTables(
        np.array(ids, np.int64),
        np.array(first_rows, np.int64),
        np.array(distributions, np.int64),
        np.array([first, second], np.float32).T.copy(),
    )


def one_table(distribution: Distribution, first: float, second: float) -> InitTables:
    return tables((0, 0, distribution, first, second))


MIXED = tables(
    (3, 0, Distribution.UNIFORM, -0.5, 0.5),
    (1, 400, Distribution.NORMAL, 0.0, 0.1),
    (2, 900, Distribution.ZEROS, 0.0, 0.0),
    (9, 1000, Distribution.UNIFORM, 0.0, 3.0),
)
MIXED_ROWS = 5500


def initial(
    given: InitTables,
    rows: Index,
    dim: int = 9,
    seed: int = 42,
    state: NDArray[np.uint32] = NO_STATE,
    arena_rows: int = MIXED_ROWS,
) -> Records:
    out = np.full((len(rows), dim + len(state)), 0xDEADBEEF, np.uint32)
    kernels.init_records(seed, given, arena_rows, rows, state, out)
    return out


def weights(distribution: Distribution, first: float, second: float, count: int) -> Floats:
    table = one_table(distribution, first, second)
    return initial(table, np.arange(count // 64), 64, arena_rows=count).view(np.float32).ravel()


# ---------------------------------------------------------------------------- a pure function


def test_a_record_does_not_depend_on_what_else_is_asked_for(level: str) -> None:
    rows = np.arange(MIXED_ROWS)
    whole = initial(MIXED, rows)
    order = np.random.default_rng(0).permutation(MIXED_ROWS)
    assert np.array_equal(initial(MIXED, order), whole[order])
    chunks = [initial(MIXED, chunk) for chunk in np.array_split(rows, 7)]
    assert np.array_equal(np.concatenate(chunks), whole)
    assert np.array_equal(initial(MIXED, np.array([7, 7, 5000, 7])), whole[[7, 7, 5000, 7]])
    try:
        for threads in (2, 5):
            kernels.set_threads(threads)
            assert np.array_equal(initial(MIXED, rows), whole)
            assert np.array_equal(initial(MIXED, order), whole[order])
    finally:
        kernels.set_threads(1)


def test_a_table_keeps_its_numbers_wherever_it_lies_in_the_arena(level: str) -> None:
    alone = initial(tables((9, 0, Distribution.UNIFORM, 0.0, 3.0)), np.arange(50))
    assert np.array_equal(initial(MIXED, np.arange(1000, 1050)), alone)


def test_a_wider_row_begins_with_the_weights_of_a_narrower_one(level: str) -> None:
    narrow, wide = (initial(MIXED, np.arange(1100), dim) for dim in (7, 16))
    assert np.array_equal(wide[:, :7], narrow)


def test_seeds_tables_and_rows_all_give_other_numbers(level: str) -> None:
    rows = np.arange(100)
    seen: set[bytes] = set()
    for seed in (0, 1, 2**64 - 1):
        for table in (0, 1, 2**40):
            given = tables((table, 0, Distribution.UNIFORM, 0.0, 1.0))
            seen.update(record.tobytes() for record in initial(given, rows, 4, seed))
    assert len(seen) == 3 * 3 * 100


def test_these_numbers_never_change(level: str) -> None:
    state = np.array([1, 0xFFFFFFFF], np.uint32)
    records = initial(MIXED, np.arange(-1, 1201), dim=17, seed=2**63 + 5, state=state)
    assert hashlib.sha256(records.tobytes()).hexdigest() == FROZEN


def mixed(x: int) -> int:
    """The finalizer of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_uniform_weights_are_the_bits_of_a_counter_hashed_with_seed_table_and_row(
    level: str,
) -> None:
    golden = 0x9E3779B97F4A7C15
    given = tables((2**63 - 1, 0, Distribution.UNIFORM, 0.0, 1.0))
    records = initial(given, np.array([123]), dim=5, seed=2**64 - 1).view(np.float32)
    start = mixed((2**64 - 1 + golden) % 2**64)
    key = mixed((mixed((start + 2**63 - 1) % 2**64) + 123) % 2**64)
    words = [mixed((key + (pair + 1) * golden) % 2**64) for pair in range(3)]
    halves = [half for word in words for half in (word % 2**32, word >> 32)][:5]
    assert records[0].tolist() == [(half >> 8) / 2**24 for half in halves]


def test_rows_outside_the_arena_are_padding_and_zero_state_included(level: str) -> None:
    rows = np.array([-1, 1299, 1300, 2**62, -(2**63)])
    state = np.array([7, 8], np.uint32)
    records = initial(MIXED, rows, state=state, arena_rows=1300)
    assert records[1].any()
    assert not np.delete(records, 1, 0).any()


def test_the_zeros_distribution_gives_zero_weights(level: str) -> None:
    assert not initial(MIXED, np.arange(900, 1000)).any()


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam"])
def test_optimizer_state_follows_the_weights(level: str, name: str) -> None:
    optimizer = Optimizer(name, initial_accumulator=0.5)
    records = initial(MIXED, np.arange(3), dim=4, state=optimizer.initial_state(4))
    assert records.shape == (3, optimizer.record_words(4))
    assert np.array_equal(records[:, :4], initial(MIXED, np.arange(3), dim=4))
    expected = 0.5 if "adagrad" in name else 0.0
    assert (records[:, 4:].copy().view(np.float32) == expected).all()


# ---------------------------------------------------------------------------- distributions


@pytest.mark.parametrize(("low", "high"), [(-0.05, 0.05), (-1 / 7, 1 / 7), (0.0, 1.0)])
def test_uniform_weights_fill_the_interval_evenly(low: float, high: float) -> None:
    values = np.sort(weights(Distribution.UNIFORM, low, high, 1 << 18)).astype(np.float64)
    n, width = len(values), high - low
    assert np.float32(low) <= values[0]
    assert values[-1] < np.float32(high)
    assert abs(values.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * n)
    assert values.var() == pytest.approx(width**2 / 12, rel=0.01)
    apart = np.abs((values - low) / width - (np.arange(n) + 0.5) / n).max()
    assert apart < 2 / math.sqrt(n)  # Kolmogorov and Smirnov: by chance once in 1,500 times


def test_an_interval_away_from_zero_may_round_to_its_upper_end() -> None:
    values = weights(Distribution.UNIFORM, 1.0, 2.0, 1 << 18)
    assert values.min() >= 1
    assert values.max() <= 2


def test_normal_weights_have_the_moments_and_tails_of_the_normal_distribution() -> None:
    n, mean, std = 1 << 19, 0.25, 2.0
    values = weights(Distribution.NORMAL, mean, std, n).astype(np.float64)
    z = np.sort((values - mean) / std)
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert z.std() == pytest.approx(1, abs=5 / math.sqrt(2 * n))
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / n)
    assert (z**4).mean() == pytest.approx(3, abs=5 * math.sqrt(96 / n))
    for limit in (1.0, 2.0, 3.0, 4.0):
        beyond, expected = int((np.abs(z) > limit).sum()), n * math.erfc(limit / math.sqrt(2))
        assert abs(beyond - expected) < 5 * math.sqrt(expected) + 1
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / 100) for i in range(100)])
    found = z[((np.arange(100) + 0.5) / 100 * n).astype(int)]
    np.testing.assert_allclose(found, quantiles, atol=0.03)


def test_neighbouring_weights_rows_and_tables_are_not_correlated() -> None:
    first = weights(Distribution.NORMAL, 0, 1, 1 << 18).reshape(-1, 64).astype(np.float64)
    other = tables((1, 0, Distribution.NORMAL, 0, 1))
    second = initial(other, np.arange(len(first)), 64).view(np.float32)
    limit = 5 / math.sqrt(first.size)
    assert abs((first[:, 1:] * first[:, :-1]).mean()) < limit
    assert abs((first[1:] * first[:-1]).mean()) < limit
    assert abs((first * second).mean()) < limit


# The probabilities that 32 random bits can name, the ends and the seams of the approximation.
SEAMS = np.array([0.075, 0.925, math.exp(-25), 0.5])
PROBABILITIES = np.unique(
    np.concatenate(
        [
            (np.random.default_rng(1).integers(0, 2**32, 3000) + 0.5) * 2.0**-32,
            (np.arange(200) + 0.5) * 2.0**-32,
            1 - (np.arange(200) + 0.5) * 2.0**-32,
            *(SEAMS * (1 + shift) for shift in (-1e-9, 0, 1e-9)),
        ]
    )
)


def test_the_normal_quantile_is_right_to_1e12() -> None:
    quantile = normal_quantile(PROBABILITIES)
    library = np.array([NormalDist().inv_cdf(p) for p in PROBABILITIES.tolist()])
    np.testing.assert_allclose(quantile, library, rtol=1e-12, atol=1e-12)
    # The library uses the same approximation; the error function does not.
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in quantile.tolist()])
    np.testing.assert_allclose(below, PROBABILITIES, rtol=1e-12)


def test_the_logarithm_is_right_to_1e15() -> None:
    near_one = 1 + np.linspace(-1e-6, 1e-6, 101)
    x = np.concatenate([PROBABILITIES, near_one, np.geomspace(1e-300, 1e300, 1001)])
    expected = np.array([math.log(value) for value in x.tolist()])
    np.testing.assert_allclose(log_exact(x), expected, rtol=4e-15, atol=1e-22)


# ---------------------------------------------------------------------------- the digest


@pytest.fixture(scope="module")
def digested() -> tuple[Records, NDArray[np.uint64]]:
    rng = np.random.default_rng(9)
    return rng.integers(0, 2**32, (40, 5), np.uint32), rng.integers(0, 1000, 40).astype(np.uint64)


def test_the_digest_depends_on_contents_not_on_order_or_padding(
    level: str, digested: tuple[Records, NDArray[np.uint64]]
) -> None:
    records, keys = digested
    expected = kernels.digest(records, keys)
    order = np.random.default_rng(0).permutation(40)
    assert kernels.digest(records[order], keys[order]) == expected
    parts = [kernels.digest(records[a:b], keys[a:b]) for a, b in ((0, 13), (13, 40))]
    assert tuple(sum(half) % 2**64 for half in zip(*parts, strict=True)) == expected
    padded = np.concatenate([records, np.ones((3, 5), np.uint32)])
    assert kernels.digest(padded, np.append(keys, [NO_ROW] * 3)) == expected


def test_both_halves_of_the_digest_notice_every_flipped_bit(
    level: str, digested: tuple[Records, NDArray[np.uint64]]
) -> None:
    records, keys = digested
    seen = {kernels.digest(records[:3], keys[:3])}
    for row in range(3):
        for word in range(5):
            for bit in range(32):
                changed = records[:3].copy()
                changed[row, word] ^= np.uint32(1 << bit)
                seen.add(kernels.digest(changed, keys[:3]))
    assert len({first for first, _ in seen}) == len({second for _, second in seen}) == 3 * 160 + 1


def test_both_halves_of_the_digest_notice_keys_and_swapped_rows(
    level: str, digested: tuple[Records, NDArray[np.uint64]]
) -> None:
    records, keys = digested
    expected = kernels.digest(records, keys)
    other_key, swapped = keys.copy(), records.copy()
    other_key[3] += 1
    swapped[[3, 4]] = swapped[[4, 3]]
    assert keys[3] != keys[4]
    words_swapped = np.ascontiguousarray(records[:, [1, 0, 2, 3, 4]])
    for other in ((records, other_key), (swapped, keys), (words_swapped, keys)):
        assert all(a != b for a, b in zip(kernels.digest(*other), expected, strict=True))


# ---------------------------------------------------------------------------- whole stores

ADAM = Optimizer("adam", lr=0.1)
LAYOUT = Layout.fresh(5, 2, 3)
PIECE = 2**14


def make_store(told: list[int] | None = None) -> Store:
    arenas = make_arenas(
        [Table("a", 30_000, 5, Initial("normal", 0.0, 0.1)), Table("b", 11, 4)], ADAM
    )
    calls: list[int] = [] if told is None else told
    return Store(arenas, LAYOUT, 1, seed=9, on_progress=lambda: calls.append(kernels.threads()))


def contents(store: Store) -> list[bytes]:
    return [arena.records.copy().tobytes() for arena in store.arenas]


def with_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(count)))


def test_a_store_is_the_same_whatever_cores_and_pieces_it_was_made_with(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch, 1)
    wanted = contents(make_store())
    monkeypatch.setattr(initialising, "PIECE_BYTES", 2**17)
    for cores in (2, 5):
        with_cores(monkeypatch, cores)
        assert contents(make_store()) == wanted
    monkeypatch.setattr(initialising, "PIECE_BYTES", PIECE)
    assert contents(make_store()) == wanted


def test_initialisation_takes_all_cores_and_gives_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_cores(monkeypatch, 3)
    told: list[int] = []
    make_store(told)
    assert set(told) == ({1} if kernels.native is None else {3})
    assert kernels.threads() == 1

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), initialising.all_cores():
        fail()
    assert kernels.threads() == 1


def test_initialisation_tells_its_progress_after_pieces_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(initialising, "PIECE_BYTES", PIECE)
    sizes: list[int] = []
    made = kernels.init_records

    def spied(*arguments: object) -> None:
        sizes.append(arguments[-1].nbytes)  # type: ignore[attr-defined]
        made(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "init_records", spied)
    told: list[int] = []
    store = make_store(told)
    assert max(sizes) <= PIECE
    assert len(told) == len(sizes) > sum(len(content) for content in contents(store)) // PIECE
    blank = Store([a.arena for a in store.arenas], LAYOUT, 1, seed=9, blank_at=0)
    again: list[int] = []
    blank.initialise(lambda: again.append(1))
    assert contents(blank) == contents(store)
    assert len(again) == len(told)
