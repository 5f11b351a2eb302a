"""The codec: any r of k + r shards can be lost, and not one bit changes, at any SIMD level.

What the product is held against: `galois`, a library that knows nothing of ours; the NumPy twin;
and tests/corpus/codes.json, parity as the first release wrote it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations
from math import comb
from typing import Any

import galois
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planaria import kernels
from planaria.codes import COEFFICIENTS, MAX_K, MAX_R, Code
from planaria.kernels import field
from planaria.kernels.types import Bytes

LEVELS = kernels.levels()

# One buffer of 4165 bytes holds a shard of each size: nothing but a tail, no tail, and a tail of
# one byte behind many vectors. The buffers of a stripe lie behind one another, 4165 bytes apart,
# so that shards start at all kinds of odd addresses.
SIZES = (1, 3, 64, 4097)
ENDS = list(accumulate(SIZES))
PIECES = [slice(end - size, end) for size, end in zip(SIZES, ENDS, strict=True)]


@pytest.fixture(autouse=True)
def _level_and_threads_are_put_back() -> Iterator[None]:
    level, threads = kernels.level(), kernels.threads()
    yield
    kernels.select_level(level)
    kernels.set_threads(threads)


@pytest.fixture(scope="module")
def gf() -> Any:
    """GF(2^8) as `galois` has it."""
    return galois.GF(2**8, irreducible_poly=0x11D)


def random_bytes(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def stripe(code: Code, length: int, seed: int = 0) -> list[Bytes]:
    """k random data shards and their parity."""
    data = list(random_bytes(seed, code.k, length))
    return data + code.encode(data)


def all_losses(code: Code) -> Iterator[tuple[int, ...]]:
    for count in range(code.r + 1):
        yield from combinations(range(code.k + code.r), count)


def without(code: Code, lost: Sequence[int]) -> list[int]:
    return [number for number in range(code.k + code.r) if number not in lost]


def generator(gf: Any, code: Code) -> Any:
    """[k + r, k]: shard n is row n times the data."""
    return gf(np.concatenate([np.eye(code.k, dtype=np.uint8), COEFFICIENTS[: code.r, : code.k]]))


# ---------------------------------------------------------------------------- losing shards


def assert_survives(
    code: Code, shards: NDArray[np.uint8], losses: Iterable[tuple[int, ...]]
) -> None:
    """shards: uint8[k + r, 4165]. Every level rebuilds what is lost, at every size."""
    cut = {size: list(shards[:, piece]) for size, piece in zip(SIZES, PIECES, strict=True)}
    cut[ENDS[-1]] = list(shards)
    expected = {size: [shard.tobytes() for shard in parts] for size, parts in cut.items()}
    for lost in losses:
        left = without(code, lost)
        for level in LEVELS:
            kernels.select_level(level)
            # The twin is slow, and takes all sizes at once where there are many patterns; that
            # this is the same, test_the_twin_computes_each_byte_by_itself shows.
            for size in ENDS[-1:] if level == "numpy" and code.k > 4 else SIZES:
                rebuilt = code.reconstruct({number: cut[size][number] for number in left})
                assert tuple(rebuilt) == lost
                for number in lost:
                    assert rebuilt[number].tobytes() == expected[size][number], (
                        f"{code} without {lost}, {size} bytes, {level}: shard {number} differs"
                    )


def assert_decoding_rows(gf: Any, code: Code) -> None:
    """For every loss, what is left times the decoding rows is what is lost, by `galois`.

    What is left is regular (the code is MDS, below), so that no other rows would do.
    """
    rows_of = generator(gf, code)
    for count in range(1, code.r + 1):
        losses = list(combinations(range(code.k + code.r), count))
        have = [without(code, lost)[: code.k] for lost in losses]
        rows = [code.decoding_rows(tuple(h), lost) for h, lost in zip(have, losses, strict=True)]
        products = np.stack(rows).view(gf)[..., None] * rows_of[np.array(have)][:, None]
        assert np.array_equal(np.add.reduce(products, axis=2), rows_of[np.array(losses)])


@pytest.mark.parametrize("k", range(1, 13))
def test_losing_any_r_shards_changes_no_bit_at_any_level_and_size(gf: Any, k: int) -> None:
    for r in range(MAX_R + 1):
        code = Code(k, r)
        shards = random_bytes(100 * k + r, k + r, ENDS[-1])
        shards[k:] = COEFFICIENTS[:r, :k].view(gf) @ shards[:k].view(gf)
        assert_survives(code, shards, all_losses(code))
        assert_decoding_rows(gf, code)


def test_control_wrong_decoding_rows_are_noticed(gf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = Code(4, 2)
    assert_decoding_rows(gf, code)
    rows_of = Code.decoding_rows

    def wrong_for_one_loss(self: Code, have: Any, wanted: Any) -> NDArray[np.uint8]:
        rows = rows_of(self, have, wanted)
        return rows ^ np.uint8(1) if wanted == (2, 5) else rows

    monkeypatch.setattr(Code, "decoding_rows", wrong_for_one_loss)
    with pytest.raises(AssertionError):
        assert_decoding_rows(gf, code)


def test_control_one_wrong_byte_at_the_end_of_a_shard_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = Code(5, 2)
    shards = np.stack(stripe(code, ENDS[-1]))
    assert_survives(code, shards, [(1, 6)])
    combine = kernels.combine

    def wrong_tail(inputs: Any, outputs: Any, coef: Any) -> None:
        combine(inputs, outputs, coef)
        if len(outputs[-1]) == 3:
            outputs[-1][2] ^= 1

    monkeypatch.setattr(kernels, "combine", wrong_tail)
    with pytest.raises(AssertionError, match=r"3 bytes, .* shard 6 differs"):
        assert_survives(code, shards, [(1, 6)])


def test_parity_is_what_an_independent_library_computes(gf: Any, level: str) -> None:
    for k in (*range(1, 13), 31, MAX_K):
        for r in range(1, MAX_R + 1):
            data = random_bytes(k, k, ENDS[-1])
            expected = COEFFICIENTS[:r, :k].view(gf) @ data.view(gf)
            for piece in PIECES:
                parity = Code(k, r).encode([shard[piece] for shard in data])
                assert np.array_equal(np.stack(parity), expected[:, piece])


def test_control_the_independent_library_notices_a_wrong_coefficient(gf: Any) -> None:
    data = random_bytes(0, 12, 3)
    wrong = COEFFICIENTS[:, :12].copy()
    wrong[3, 11] ^= 1
    parity = np.stack(Code(12, 4).encode(list(data)))
    assert not np.array_equal(parity, wrong.view(gf) @ data.view(gf))


def test_an_independent_solver_finds_the_same_lost_shards(gf: Any) -> None:
    rng = np.random.default_rng(7)
    for k in [*range(1, 13), 31]:
        code = Code(k, int(rng.integers(1, MAX_R + 1)))
        shards = np.stack(stripe(code, 64, seed=k))
        lost = sorted(rng.permutation(k + code.r)[: code.r].tolist())
        have = without(code, lost)
        rows_of = generator(gf, code)
        data = np.linalg.solve(rows_of[have], shards[have].view(gf))
        rebuilt = code.reconstruct({number: shards[number] for number in have})
        for number in lost:
            assert np.array_equal(rebuilt[number], rows_of[number] @ data)


def test_the_twin_computes_each_byte_by_itself() -> None:
    kernels.select_level("numpy")
    for k in range(1, 13):
        code = Code(k, MAX_R)
        shards = stripe(code, ENDS[-1], seed=k)
        for piece in PIECES:
            parts = [shard[piece] for shard in shards]
            assert code.verify(parts[:k], parts[k:])
            rebuilt = code.reconstruct(dict(enumerate(parts[MAX_R:], MAX_R)))
            assert all(np.array_equal(rebuilt[number], parts[number]) for number in rebuilt)


# ---------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("wanted", [[], [1], [6, 0], [7], [0, 1, 6, 7], list(range(8))])
def test_only_the_wanted_shards_are_computed(
    monkeypatch: pytest.MonkeyPatch, wanted: list[int]
) -> None:
    computed: list[Bytes] = []
    combine = kernels.combine

    def counting(inputs: Any, outputs: Any, coef: Any) -> None:
        computed.extend(outputs)
        combine(inputs, outputs, coef)

    code = Code(6, 2)
    shards = stripe(code, 40)
    monkeypatch.setattr(kernels, "combine", counting)
    rebuilt = code.reconstruct({number: shards[number] for number in range(2, 8)}, wanted)
    assert list(rebuilt) == wanted
    assert len(computed) == len(wanted)
    assert all(np.array_equal(rebuilt[number], shards[number]) for number in wanted)


def test_without_a_wish_the_absent_shards_are_computed_and_no_others() -> None:
    code = Code(3, 2)
    shards = stripe(code, 8)
    assert list(code.reconstruct({0: shards[0], 2: shards[2], 3: shards[3]})) == [1, 4]
    assert code.reconstruct(dict(enumerate(shards))) == {}


def test_a_present_shard_is_computed_anew_from_the_first_k_and_never_handed_back_itself() -> None:
    code = Code(3, 2)
    shards = stripe(code, 8)
    spoiled = dict(enumerate(shards)) | {4: shards[4] ^ np.uint8(255)}
    again = code.reconstruct(spoiled, wanted=[0, 4])
    assert np.array_equal(again[0], shards[0])
    assert not np.shares_memory(again[0], shards[0])
    assert np.array_equal(again[4], shards[4])  # as it should be, not as it was given


# ---------------------------------------------------------------------------- MDS


def determinants(rows: NDArray[np.uint8], columns: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Of the square matrices rows[:, columns[i]], by expansion along row 0; uint8[len(columns)].

    In characteristic 2 all signs are plus.
    """
    total = np.zeros(len(columns), np.uint8)
    if len(rows) == 1:
        total[:] = rows[0, columns[:, 0]]
        return total
    for place in range(len(rows)):
        minor = determinants(rows[1:], np.delete(columns, place, axis=1))
        total ^= field.PRODUCT[rows[0, columns[:, place]], minor]
    return total


def singular_minors(table: NDArray[np.uint8]) -> dict[int, int]:
    """Order -> how many square submatrices of that order are singular; all are looked at."""
    singular, looked_at = {}, 0
    for order in range(1, MAX_R + 1):
        columns = np.array(list(combinations(range(table.shape[1]), order)))
        singular[order] = 0
        for rows in combinations(range(MAX_R), order):
            found = determinants(table[list(rows)], columns)
            singular[order] += int((found == 0).sum())
            looked_at += len(found)
    assert looked_at == sum(comb(MAX_R, m) * comb(table.shape[1], m) for m in range(1, MAX_R + 1))
    return singular


def test_the_product_table_is_the_field_of_an_independent_library(gf: Any) -> None:
    elements = gf(np.arange(256, dtype=np.uint8))
    assert np.array_equal(field.PRODUCT, np.multiply.outer(elements, elements))
    assert [field.inverse(a) for a in range(1, 256)] == (elements[1:] ** -1).tolist()


def test_every_code_up_to_64_and_4_survives_every_loss_of_r_shards() -> None:
    # A proof for all (k, r) at once. The shards are G times the data, G = [I; C] with k columns
    # and C = COEFFICIENTS[:r, :k]. The k shards that are left determine the data if and only if
    # their rows of G are regular. Say that e data shards are lost, and so e parity rows are
    # among the k (e <= r). Expanding the determinant along the rows of I that are left strikes
    # out their columns, and leaves the minor of C at those e parity rows and the e columns of
    # the lost data. So a code is MDS if and only if every square submatrix of its C is regular,
    # and every square submatrix of any such C is one of the 4 x 64 table: 814,384 of them.
    assert singular_minors(COEFFICIENTS) == {1: 0, 2: 0, 3: 0, 4: 0}


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_control_one_wrong_coefficient_is_caught_as_a_singular_minor(order: int) -> None:
    # The leading minor of this order is linear in its last coefficient: one value makes it zero.
    wrong = COEFFICIENTS[:, :12].copy()
    columns = np.arange(order)[None]
    wrong[order - 1, order - 1] = 0
    rest = int(determinants(wrong[:order], columns)[0])
    factor = int(determinants(wrong[: order - 1], columns[:, :-1])[0]) if order > 1 else 1
    wrong[order - 1, order - 1] = field.multiply(rest, field.inverse(factor))
    assert wrong[order - 1, order - 1] != COEFFICIENTS[order - 1, order - 1]
    assert singular_minors(wrong)[order] > 0
    assert singular_minors(COEFFICIENTS[:, :12])[order] == 0


def test_the_coefficients_are_the_cauchy_matrix_that_the_format_names(gf: Any) -> None:
    x, y = gf(64 + np.arange(MAX_R)), gf(np.arange(MAX_K))
    cauchy = np.reciprocal(np.add.outer(x, y))
    assert np.array_equal(COEFFICIENTS, cauchy / cauchy[0])


def test_the_first_parity_is_the_plain_xor(level: str) -> None:
    for k in range(1, MAX_K + 1):
        data = random_bytes(k, k, 67)
        (parity,) = Code(k, 1).encode(list(data))
        assert np.array_equal(parity, np.bitwise_xor.reduce(data))
    assert (COEFFICIENTS[0] == 1).all()


# ---------------------------------------------------------------------------- update and verify


def test_parity_after_a_million_random_deltas_equals_a_fresh_encode(level: str) -> None:
    code, stripes, rounds, words = Code(10, 4), 8192, 123, 4
    assert stripes * rounds > 1_000_000
    rng = np.random.default_rng(3)
    data = rng.integers(0, 2**32, (code.k, stripes, words), np.uint32)

    def fresh() -> list[Bytes]:
        return code.encode([shard.reshape(-1).view(np.uint8) for shard in data])

    parity = [shard.view(np.uint32).reshape(stripes, words) for shard in fresh()]
    for _ in range(rounds):
        index = rng.permutation(stripes)
        position = rng.integers(0, code.k, stripes)
        delta = rng.integers(0, 2**32, (stripes, words), np.uint32)
        data[position, index] ^= delta
        for j, shard in enumerate(parity):
            kernels.mul_add(shard, index, COEFFICIENTS[j, position], delta)
    assert [shard.tobytes() for shard in parity] == [shard.tobytes() for shard in fresh()]


def test_verify_notices_one_delta_dropped_among_ten_thousand(level: str) -> None:
    code, count, dropped = Code(7, 3), 10_000, 1234
    shards = stripe(code, 16)
    data, parity = shards[:7], shards[7:]
    positions = np.random.default_rng(1).integers(0, code.k, count).tolist()
    deltas = random_bytes(2, count, 16)
    for number, (position, delta) in enumerate(zip(positions, deltas, strict=True)):
        data[position] ^= delta
        if number != dropped:
            code.update(parity, position, delta)
    assert not code.verify(data, parity)
    code.update(parity, positions[dropped], deltas[dropped])
    assert code.verify(data, parity)


def test_verify_says_no_to_any_single_flipped_bit(level: str) -> None:
    for code, length in [(Code(1, 1), 5), (Code(3, 2), 9), (Code(12, 4), 3), (Code(2, 4), 65)]:
        shards = stripe(code, length)
        data, parity = shards[: code.k], shards[code.k :]
        for shard in shards:
            for place in range(length):
                for bit in range(8):
                    shard[place] ^= 1 << bit
                    assert not code.verify(data, parity)
                    shard[place] ^= 1 << bit
        assert code.verify(data, parity)


# ---------------------------------------------------------------------------- any stripe


@st.composite
def codes_and_data(draw: st.DrawFn) -> tuple[Code, list[Bytes]]:
    code = Code(draw(st.integers(1, MAX_K)), draw(st.integers(1, MAX_R)))
    length = draw(st.integers(0, 200))
    return code, list(random_bytes(draw(st.integers(0, 2**32)), code.k, length))


any_level = st.sampled_from(LEVELS)


@settings(max_examples=150, deadline=None)
@given(codes_and_data(), any_level, any_level, st.data())
def test_what_one_level_encoded_any_other_decodes_after_any_loss(
    stripe: tuple[Code, list[Bytes]], writer: str, reader: str, choice: st.DataObject
) -> None:
    code, data = stripe
    kernels.select_level(writer)
    shards = data + code.encode(data)
    numbers = st.integers(0, code.k + code.r - 1)
    lost = choice.draw(st.lists(numbers, max_size=code.r, unique=True))
    wanted = choice.draw(st.lists(numbers, max_size=9, unique=True))
    kernels.select_level(reader)
    rebuilt = code.reconstruct({number: shards[number] for number in without(code, lost)}, wanted)
    assert list(rebuilt) == wanted
    assert all(np.array_equal(rebuilt[number], shards[number]) for number in wanted)


@settings(max_examples=150, deadline=None)
@given(codes_and_data(), any_level, st.integers(0, MAX_K - 1), st.integers(0, 2**32))
def test_an_update_is_a_fresh_encode_and_the_same_update_again_undoes_it(
    stripe: tuple[Code, list[Bytes]], level: str, position: int, seed: int
) -> None:
    kernels.select_level(level)
    code, data = stripe
    position %= code.k
    parity = code.encode(data)
    before = [shard.copy() for shard in parity]
    delta = random_bytes(seed, len(data[0]))
    code.update(parity, position, delta)
    assert code.verify(data, parity) == (not delta.any())
    data[position] ^= delta
    assert code.verify(data, parity)
    code.update(parity, position, delta)
    assert all(np.array_equal(a, b) for a, b in zip(parity, before, strict=True))
