"""Kernels: each level and number of threads gives the twin's bits, and the twin gives the truth."""

import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planaria import kernels
from planaria.kernels.field import PRODUCT
from planaria.kernels.types import (
    NO_ROW,
    Distribution,
    Floats,
    Index,
    InitTables,
    PooledFeatures,
    Pooling,
    Records,
)
from planaria.layout import Layout
from planaria.optimizers import Optimizer

Arrays: TypeAlias = tuple[NDArray[Any], ...]

DIMS = (1, 3, 15, 16, 17, 32, 64, 65, 128)
THREADS = (1, 2, 5)
ROWS = 5 * 1024 + 77  # a thread takes 1024 rows or more: five threads all get some
BYTES = 5 * (128 << 10) + 77  # and 128 KiB or more
SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, np.inf, -np.inf], np.float32)

properties = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    kernels.set_threads(1)


def everywhere(run: Callable[[], Arrays], threads: tuple[int, ...] = (1,)) -> Arrays:
    """Runs at every level and number of threads, holds all to the twin's bits, and returns them."""
    before = kernels.level()
    try:
        kernels.select_level("numpy")
        with np.errstate(all="ignore"):  # infinities are among the arguments
            expected = run()
        for name in kernels.levels()[:-1]:
            kernels.select_level(name)
            for count in threads:
                kernels.set_threads(count)
                for got, want in zip(run(), expected, strict=True):
                    assert (got.dtype, got.shape) == (want.dtype, want.shape)
                    assert got.tobytes() == want.tobytes(), f"{name}, {count} threads"
    finally:
        kernels.select_level(before)
    return expected


def bits(rng: np.random.Generator, *shape: int) -> Records:
    return rng.integers(0, 2**32, shape, np.uint32)


def numbers(rng: np.random.Generator, *shape: int) -> Floats:
    """Normal numbers, and one in fifty that is zero, tiny, huge or infinite."""
    values = rng.standard_normal(shape).astype(np.float32)
    some = rng.random(shape) < 0.02
    values[some] = rng.choice(SPECIAL, int(some.sum()))
    return values


def some_of(rng: np.random.Generator, rows: int, count: int) -> Index:
    """Distinct numbers below rows."""
    return rng.permutation(rows)[:count].astype(np.int64)


def bag_offsets(rng: np.random.Generator, bags: int, ids: int) -> Index:
    """Offsets of bags, some of them empty."""
    cuts = np.sort(rng.integers(0, ids + 1, bags - 1))
    return np.concatenate([[0], cuts, [ids]]).astype(np.int64)


# ---------------------------------------------------------------------------- native equals twin

# A case is a list of calls: a kernel and its arguments. All arguments are compared after the call
# as well as what it returns, so kernels that write need nothing more.
Case: TypeAlias = list[tuple[Any, ...]]


def flat(value: object) -> Iterator[NDArray[Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from flat(part)
    elif isinstance(value, int):
        yield np.array(value, np.uint64)


def run_case(case: Case) -> Arrays:
    outcome: list[NDArray[Any]] = []
    for function, *arguments in case:
        arguments = copy.deepcopy(arguments)
        outcome += flat(function(*arguments))
        outcome += flat(arguments)
    return tuple(outcome)


def record_cases(rng: np.random.Generator, dim: int) -> dict[str, Case]:
    """What a server does with records of dim words."""
    records, index, delta = bits(rng, 6000, dim), some_of(rng, 6000, ROWS), bits(rng, ROWS, dim)
    query, values = rng.integers(0, 6000, ROWS), bits(rng, ROWS, dim)
    part = np.empty((ROWS, (dim + 1) // 2), np.uint32)
    coefs = (None, rng.integers(0, 256, ROWS, np.uint8))
    target, source = inputs = [rng.integers(0, 256, BYTES + dim, np.uint8) for _ in range(2)]
    outputs, matrix = (
        [np.empty_like(target) for _ in range(4)],
        rng.integers(0, 256, (4, 2), np.uint8),
    )
    trained = np.abs(numbers(rng, 6000, 2 * dim)).view(np.uint32)
    ranks = [(some_of(rng, 6000, ROWS), numbers(rng, ROWS, dim)) for _ in range(3)]
    rule = Optimizer("adagrad", lr=0.1).rule()
    keys = rng.integers(0, 2**64, 6000, np.uint64)
    keys[::7] = NO_ROW
    bitmap, near = rng.integers(0, 256, 40 * dim, np.uint8), rng.integers(0, 320 * dim, 20 * dim)
    return {
        "gather": [(kernels.gather, records, query), (kernels.gather, records, query, part)],
        "scatter": [(kernels.scatter, records, index, delta)],
        "mul_add": [(kernels.mul_add, records, index, coef, delta) for coef in coefs],
        "mul_add_bytes": [(kernels.mul_add_bytes, target, c, source) for c in (0, 1, dim)],
        "undo": [(kernels.undo, values, query, index, coef, delta) for coef in coefs],
        "combine": [(kernels.combine, inputs, outputs[:n], matrix[:n]) for n in range(1, 5)],
        "apply": [
            (kernels.apply, rule, trained, 6000, dim, some) for some in (ranks, ranks[1:2], [])
        ],
        "digest": [(kernels.digest, records, keys)],
        "check_distinct": [(kernels.check_distinct, index, len(records))],
        "missing": [(kernels.missing, bitmap, near)],
        "mark": [(kernels.mark, bitmap, near)],
    }


def trainer_cases(rng: np.random.Generator, dim: int) -> dict[str, Case]:
    """What a trainer does with ids, rows and gradients, and what both do: initial records."""
    tables = InitTables(
        table_ids=np.array([4, 0, 7]),
        first_rows=np.array([0, 100, 5000]),
        distributions=np.array([Distribution.UNIFORM, Distribution.NORMAL, Distribution.ZEROS]),
        parameters=np.array([[-0.5, 0.25], [0.1, 2.0], [0, 0]], np.float32),
    )
    row, out = rng.integers(-3, 5300, ROWS), np.full((ROWS, dim + 2), 7, np.uint32)
    place, region = (rng.integers(0, 9, (dim, 3), np.int32) for _ in range(2))
    ids = rng.integers(0, ROWS, 5 * ROWS)
    unique, inverse = kernels.dedup(ids)
    terms, sums = numbers(rng, 5 * ROWS, dim), np.empty((len(unique), dim), np.float32)
    bags, weights = bag_offsets(rng, ROWS, 5 * ROWS), numbers(rng, 5 * ROWS)
    values, grads = numbers(rng, ROWS, dim), numbers(rng, ROWS, dim)
    pooled = [(None, Pooling.SUM), (None, Pooling.MEAN), (weights, Pooling.WEIGHTED)]
    # Three features of 1,700 samples, in rows that have other columns as well.
    samples, columns = 1700, np.array([1, dim + 1, 2 * dim + 4])
    several = bag_offsets(rng, 3 * samples, 5 * ROWS)
    mixed = PooledFeatures(np.array([Pooling.MEAN, Pooling.SUM, Pooling.MEAN]), columns)
    weighted = PooledFeatures(np.full(3, Pooling.WEIGHTED), columns)
    rows, wide = np.full((samples, 3 * dim + 5), 7, np.float32), numbers(rng, samples, 3 * dim + 5)
    return {
        "init_records": [(kernels.init_records, 11, tables, 5200, row, bits(rng, 2), out)],
        "dedup": [(kernels.dedup, (ids - 999) << shift) for shift in (0, 40)],
        "partition": [(kernels.partition, ids, ROWS, place, region, ROWS, 9)],
        "gradient_sum": [(kernels.gradient_sum, terms, inverse, sums)],
        "number_bags": number_bags_cases(rng, dim),
        "pool": [
            *((kernels.pool, values, ids, bags, *how) for how in pooled),
            (kernels.pool, values, ids, several, None, mixed, rows),
            (kernels.pool, values, ids, several, weights, weighted, rows),
        ],
        "pool_backward": [
            *((kernels.pool_backward, grads, inverse, bags, sums, *how) for how in pooled),
            (kernels.pool_backward, wide, inverse, several, sums, None, mixed),
            (kernels.pool_backward, wide, inverse, several, sums, weights, weighted),
        ],
        "weight_backward": [
            (kernels.weight_backward, grads, values, ids, bags),
            (kernels.weight_backward, wide, values, ids, several, mixed),
        ],
    }


def number_bags_cases(rng: np.random.Generator, dim: int) -> Case:
    """Features in another order than the keys, two of one table, one key in two tables; tables of
    few rows and of many."""
    keys = np.array([3, 0, 2, 2, 1])
    limits = np.array([50, 50, 10**9, 40, 40 + dim])
    first_rows = np.array([0, 0, 70, 10**9 + 70, 10**9 + 200])
    cases: Case = []
    for samples in (0, 1, 300):
        offsets = bag_offsets(rng, 4 * samples, 1000) if samples else np.zeros(1, np.int64)
        ids = rng.integers(0, 40, offsets[-1])
        cases.append((kernels.number_bags, ids, offsets, samples, keys, limits, first_rows))
    none = np.empty(0, np.int64)
    return [*cases, (kernels.number_bags, none, np.zeros(7, np.int64), 3, none, none, none)]


@cache
def cases(dim: int) -> dict[str, Case]:
    rng = np.random.default_rng(dim)
    return {**record_cases(rng, dim), **trainer_cases(rng, dim)}


CASES = list(cases(1))


def test_every_kernel_has_a_case() -> None:
    functions = {
        name
        for name, function in inspect.getmembers(kernels, inspect.isfunction)
        if function.__module__ == kernels.__name__ and not name.startswith("_")
    }
    machinery = {"level", "levels", "select_level", "threads", "set_threads", "allocate"}
    assert functions - machinery == set(CASES)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kernel", CASES)
def test_every_level_and_number_of_threads_gives_the_twins_bits(kernel: str, dim: int) -> None:
    everywhere(lambda: run_case(cases(dim)[kernel]), THREADS)


def test_allocated_records_are_zero_and_writable(level: str) -> None:
    for rows, words in ((0, 3), (1, 1), (1000, 7), (3 << 18, 1)):  # the last takes huge pages
        for huge_pages in (True, False):
            records = kernels.allocate(rows, words, huge_pages)
            assert records.shape == (rows, words)
            assert records.dtype == np.uint32
            assert not records.any()
            records[:] = 5
            assert records.sum() == 5 * rows * words


# ---------------------------------------------------------------------------- the field


def carryless(a: int, b: int) -> int:
    """a * b in GF(2^8): the product of two polynomials, divided by x^8 + x^4 + x^3 + x^2 + 1."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


FIELD = np.array([[carryless(a, b) for b in range(256)] for a in range(256)], np.uint8)


def test_every_product_of_two_bytes_is_right(level: str) -> None:
    assert np.array_equal(PRODUCT, FIELD)
    for c in range(256):
        product = np.zeros(256, np.uint8)
        kernels.mul_add_bytes(product, c, np.arange(256, dtype=np.uint8))
        assert np.array_equal(product, FIELD[c])


def test_combine_is_the_matrix_product_over_the_field(level: str) -> None:
    rng = np.random.default_rng(1)
    for length in (0, 1, 7, 8, 31, 33, 63, 64, 65, 200):
        inputs = [rng.integers(0, 256, length, np.uint8) for _ in range(5)]
        coef = rng.integers(0, 256, (3, 5), np.uint8)
        outputs = [np.empty(length, np.uint8) for _ in range(3)]
        kernels.combine(inputs, outputs, coef)
        for j, output in enumerate(outputs):
            for at in range(length):
                expected = 0
                for i, source in enumerate(inputs):
                    expected ^= carryless(int(coef[j, i]), int(source[at]))
                assert output[at] == expected


def affine_matrix(c: int) -> list[int]:
    """The bytes of native/field.hpp's matrix: the row of result bit i is byte 7 - i."""
    rows = [sum((carryless(c, 1 << j) >> i & 1) << j for j in range(8)) for i in range(8)]
    return [rows[7 - byte] for byte in range(8)]


def gf2p8affineqb(x: NDArray[np.uint8], matrix: list[int]) -> NDArray[np.uint8]:
    """The instruction as Intel defines it: result bit i = parity(matrix byte [7 - i] AND x)."""
    result = np.zeros_like(x)
    for i in range(8):
        result |= (np.bitwise_count(x & np.uint8(matrix[7 - i])) & 1) << np.uint8(i)
    return result


def test_the_gfni_matrices_multiply_every_pair_where_no_cpu_can_say_so() -> None:
    x = np.arange(256, dtype=np.uint8)
    for c in range(256):
        assert np.array_equal(gf2p8affineqb(x, affine_matrix(c)), FIELD[c])


@pytest.mark.parametrize("name", kernels.LEVELS)
def test_every_level_is_tested_or_said_to_be_missing(name: str) -> None:
    if name not in kernels.levels():
        pytest.skip(f"this CPU has no {name}: its kernels were compiled but not run")


# ---------------------------------------------------------------------------- small oracles


@properties
@given(st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=60))
def test_dedup_numbers_ids_in_first_seen_order(ids: list[int]) -> None:
    expected: dict[int, int] = {}
    for i in ids:
        expected.setdefault(i, len(expected))
    unique, inverse = everywhere(lambda: kernels.dedup(np.array(ids, np.int64)))
    assert (unique.tolist(), inverse.tolist()) == (list(expected), [expected[i] for i in ids])


@properties
@given(st.lists(st.tuples(st.integers(0, 6), st.floats(width=32, allow_nan=False)), max_size=40))
def test_gradients_of_a_row_are_added_one_by_one_in_order(terms: list[tuple[int, float]]) -> None:
    unique, inverse = kernels.dedup(np.array([row for row, _ in terms], np.int64))
    grads = np.array([[value] for _, value in terms], np.float32).reshape(-1, 1)
    out = np.empty((len(unique), 1), np.float32)
    (sums,) = everywhere(lambda: (kernels.gradient_sum(grads, inverse, out).copy(),))
    expected: dict[int, np.float32] = {}
    with np.errstate(all="ignore"):
        for row, value in terms:
            term = np.float32(value)
            expected[row] = expected[row] + term if row in expected else term
    assert sums.tobytes() == np.array(list(expected.values()), np.float32).tobytes()


def test_the_order_of_additions_shows_in_the_bits(level: str) -> None:
    inverse, out = np.zeros(3, np.int64), np.empty((1, 1), np.float32)
    for terms, expected in (((1e8, 1, -1e8), 0), ((1e8, -1e8, 1), 1), ((-0.0, -0.0, -0.0), -0.0)):
        grads = np.array(terms, np.float32)[:, None]
        assert kernels.gradient_sum(grads, inverse, out).tobytes() == np.float32(expected).tobytes()
        bag = np.array([0, 3])
        assert kernels.pool(grads, np.arange(3), bag).tobytes() == np.float32(expected).tobytes()


@properties
@given(st.data())
def test_undo_is_the_inverse_of_mul_add(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, words = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    index = some_of(rng, rows, data.draw(st.integers(0, rows)))
    coef = rng.integers(0, 256, len(index), np.uint8) if data.draw(st.booleans()) else None
    before, delta = bits(rng, rows, words), bits(rng, len(index), words)
    query = rng.integers(0, rows, data.draw(st.integers(0, 30)))

    def run() -> Arrays:
        records = before.copy()
        kernels.mul_add(records, index, coef, delta)
        values = kernels.gather(records, query)
        kernels.undo(values, query, index, coef, delta)
        kernels.mul_add(records, index, coef, delta)
        return values, records

    values, records = everywhere(run)
    assert np.array_equal(values, before[query])
    assert np.array_equal(records, before), "a delta applied twice is not nothing"


@properties
@given(st.integers(1, 9), st.data())
def test_missing_and_mark_read_and_write_single_bits(size: int, data: st.DataObject) -> None:
    some = st.lists(st.integers(0, 8 * size - 1), max_size=30)
    marked, asked = data.draw(some), data.draw(some)

    def run() -> Arrays:
        bitmap = np.zeros(size, np.uint8)
        kernels.mark(bitmap, np.array(marked, np.int64))
        return bitmap, kernels.missing(bitmap, np.array(asked, np.int64))

    bitmap, missing = everywhere(run)
    set_bits = {8 * at + bit for at in range(size) for bit in range(8) if bitmap[at] >> bit & 1}
    assert set_bits == set(marked)
    assert missing.tolist() == [i for i in asked if i not in set_bits]


@pytest.mark.parametrize(("servers", "k", "r"), [(3, 1, 1), (5, 3, 2), (8, 4, 1)])
def test_partition_finds_rows_where_the_layout_puts_them(servers: int, k: int, r: int) -> None:
    arena = Layout.fresh(servers, r, k).arena(5000)
    rows = np.random.default_rng(servers).integers(0, 5000, 3000)
    place, region = (
        np.ascontiguousarray(table[:, :k])
        for table in (arena.layout.groups, arena.layout.region_of)
    )
    order, index, counts = everywhere(
        lambda: tuple(kernels.partition(rows, 5000, place, region, arena.slots, servers))
    )
    places, indices = arena.locate(rows)
    by_place: list[list[int]] = [[] for _ in range(servers)]
    for position, holder in enumerate(places.tolist()):
        by_place[holder].append(position)
    assert counts.tolist() == [len(positions) for positions in by_place]
    assert order.tolist() == [position for positions in by_place for position in positions]
    assert np.array_equal(index, indices[order])


# ---------------------------------------------------------------------------- processes, threads


def test_calls_from_several_threads_at_once_do_not_disturb_each_other(level: str) -> None:
    kernels.set_threads(3)

    def work(dim: int) -> list[bytes]:
        with np.errstate(all="ignore"):
            return [
                result.tobytes()
                for kernel in ("gather", "mul_add", "apply", "pool_backward", "digest", "dedup")
                for result in run_case(cases(dim)[kernel])
            ]

    alone = [work(dim) for dim in DIMS[:5]]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(work, DIMS[:5] * 2)) == alone * 2


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )


# With `busy`, another thread is inside a kernel, and holds its locks, at the moment of the fork.
FORK = """
import os, signal, threading
import numpy as np
from planaria import kernels

records = np.arange(50_000, dtype=np.uint32).reshape(10_000, 5)
index = np.random.default_rng(0).permutation(10_000)
busy = {busy}

def works():
    kernels.set_threads(4)
    return kernels.threads() == 4 and np.array_equal(kernels.gather(records, index), records[index])

def keep_the_pool_busy():
    while True:
        kernels.gather(records, index)

assert works()
if busy:
    threading.Thread(target=keep_the_pool_busy, daemon=True).start()
for _ in range(20 if busy else 2):
    child = os.fork()
    if child == 0:
        signal.alarm(3)
        os._exit(0 if works() else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {{status}}"
assert works()
os._exit(0)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_computes_with_threads_of_its_own(busy: bool) -> None:
    done = python(FORK.format(busy=busy))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", kernels.levels())
def test_the_environment_chooses_the_level(name: str) -> None:
    done = python("from planaria import kernels; print(kernels.level())", PLANARIA_SIMD=name)
    assert done.stdout == f"{name}\n"


def test_an_unknown_level_is_refused_with_the_levels_that_exist() -> None:
    done = python("import planaria.kernels", PLANARIA_SIMD="sse9")
    assert done.returncode != 0
    assert (
        "ArgumentError: SIMD level 'sse9' is not to be had here; this machine runs" in done.stderr
    )
    assert ", ".join(kernels.levels()) in done.stderr


def test_importing_planaria_imports_neither_torch_nor_ray() -> None:
    script = """
import sys, planaria, planaria.kernels, planaria.codes, planaria.layout, planaria.optimizers
print({"torch", "ray"} & set(sys.modules))
"""
    assert python(script).stdout == "set()\n"
