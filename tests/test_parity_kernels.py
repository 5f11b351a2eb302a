"""The kernels of protection: every level gives the twin's bits, deltas go where the layout says,
and bad arguments are refused before anything is written."""

import inspect
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from small_arrays import HUGE, ints, words
from test_arguments import OUT_OF_RANGE, TWICE, Kernel, never_crashes, refused, wrong_kinds
from test_kernels import DIMS, THREADS, Arrays, bits, everywhere, run_case, some_of

from planaria import kernels
from planaria.codes import COEFFICIENTS
from planaria.errors import ArgumentError, RowError
from planaria.kernels import parity
from planaria.kernels.field import PRODUCT
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server import Store
from planaria.tables import Table, make_arenas

ROWS = 5 * 1024 + 77
# fmt: off
KERNELS = {
    "share_deltas": Kernel(
        lambda **arrays: parity.share_deltas(slots=4, holders=3, **arrays),
        lambda: {
            "index": ints(7, 0, 5), "delta": words(3, 2),
            "holder": np.array([[0, 2], [1, 0]], np.int32),
            "region": np.array([[0, 1], [1, 0]], np.int32),
        },
        may_be_wider=("delta",),
    ),
    "add_delta": Kernel(
        lambda **arrays: parity.add_delta(slots=4, **arrays),
        lambda: {
            "records": words(8, 3), "index": ints(7, 0), "by_region": np.array([2, 1], np.uint8),
            "delta": words(2, 3) + np.uint32(1),
        },
        written=("records",), may_be_longer=("by_region",),
    ),
}
# fmt: on


@pytest.mark.parametrize("r", [1, 2, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_every_level_gives_the_bits_of_the_twin(dim: int, r: int) -> None:
    rng = np.random.default_rng(100 * dim + r)
    slots, regions = 307 + dim, 40
    index, delta = some_of(rng, regions * slots, ROWS), bits(rng, ROWS, dim)
    where = [rng.integers(0, most, (regions, r), np.int32) for most in (7, 90)]
    shared = (parity.share_deltas, index, delta, slots, *where, 7)
    added = [
        (parity.add_delta, bits(rng, regions * slots, dim), index, slots, by_region, delta)
        for by_region in (np.ones(regions, np.uint8), rng.integers(1, 256, regions, np.uint8))
    ]
    everywhere(lambda: run_case([shared, *added]), THREADS)


@pytest.mark.parametrize(("servers", "k", "r"), [(3, 1, 1), (6, 4, 1), (7, 3, 2), (9, 2, 4)])
def test_deltas_reach_the_parity_records_that_protect_them(servers: int, k: int, r: int) -> None:
    layout = Layout.fresh(servers, r, k)
    arenas = make_arenas([Table("a", 3000, 4)], Optimizer("sgd"))
    owner = Store(arenas, layout, 0)
    arena = owner.arenas[0]
    rng = np.random.default_rng(servers)
    index = some_of(rng, arena.data_records, arena.data_records // 2)
    changes = owner.apply(1, [[(index, rng.standard_normal((len(index), 4)).astype(np.float32))]])
    group, slot, position = arena.layout.stripe_at(0, changes[0].indices)
    places, indices = arena.layout.members(group, slot)  # [n, k + r]

    def run() -> Arrays:
        made = owner.parity_deltas(changes)
        return tuple(array for holder in owner.holders for array in made[holder][0])

    found = everywhere(run)
    sent = 0
    for number, holder in enumerate(owner.holders):
        named, delta = found[2 * number : 2 * number + 2]
        mine, which = np.nonzero(places[:, k:] == holder)
        assert named.tolist() == indices[mine, k + which].tolist()
        assert np.array_equal(delta, changes[0].delta[mine])
        sent += len(named)
        store = Store(arenas, layout, holder)
        before = store.arenas[0].records.copy()
        store.apply_parity(0, 1, [*owner.parity_deltas(changes)[holder]])
        coef = COEFFICIENTS[which, position[mine]]
        product = PRODUCT[coef[:, None], delta.view(np.uint8)].view(np.uint32)
        before[named] ^= product
        assert np.array_equal(store.arenas[0].records.copy(), before)
        kept = store.sources[0].after(0)[0][0].coef
        assert np.array_equal(np.ones(len(named)) if kept is None else kept, coef)
    assert sent == r * len(index)


def test_coefficients_that_are_all_one_are_not_kept() -> None:
    records, index, delta = words(8, 3), ints(7, 0), words(2, 3)
    assert parity.add_delta(records, index, 4, np.array([1, 1, 7], np.uint8), delta) is None
    coef = parity.add_delta(records, index, 4, np.array([1, 7], np.uint8), delta)
    assert coef is not None
    assert coef.tolist() == [7, 1]


# ---------------------------------------------------------------------------- bad arguments


def test_every_public_kernel_is_held_to_this() -> None:
    functions = inspect.getmembers(parity, inspect.isfunction)
    own = {name for name, function in functions if function.__module__ == parity.__name__}
    assert own - {"_backend"} == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_that_do_not_fit_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    kernel.call(**kernel.arrays())
    for which, value in kernel.arrays().items():
        for change, wrong, says in wrong_kinds(value, which in kernel.written):
            arguments = {**kernel.arrays(), which: wrong}
            refused(kernel, arguments, ArgumentError, says, f"{which} with {change}")
        if which not in kernel.may_be_longer:
            arguments = {**kernel.arrays(), which: np.concatenate([value, value[-1:]])}
            refused(kernel, arguments, ArgumentError, "", f"{which} with a row more")
        if value.ndim == 2 and which not in kernel.may_be_wider:
            wider = np.concatenate([value, value[:, -1:]], axis=1)
            arguments = {**kernel.arrays(), which: wider}
            refused(kernel, arguments, ArgumentError, "", f"{which} with a column more")


@pytest.mark.parametrize("name", KERNELS)
def test_records_out_of_range_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    for bad in (-1, 8, 9, 2**32, HUGE, -HUGE - 1):
        arguments = kernel.arrays()
        arguments["index"][-1] = bad
        refused(kernel, arguments, RowError, OUT_OF_RANGE, f"{bad}")


def test_a_delta_leaves_records_alone_that_are_not_valid(level: str) -> None:
    random = np.random.default_rng(0)
    for count in (1, 7, 300):
        records = random.integers(0, 2**32, (2 * count, 5), np.uint32)
        index = random.permutation(2 * count)[:count]
        delta = random.integers(0, 2**32, (count, 5), np.uint32)
        valid = random.integers(0, 256, -(-2 * count // 8), np.uint8)
        there = np.unpackbits(valid, bitorder="little")[index].astype(bool)
        by_region, before = np.array([3, 1], np.uint8), records.copy()
        coef = parity.add_delta(records, index, count, by_region, delta, valid)
        assert coef is None or np.array_equal(coef, by_region[index // count])
        assert np.array_equal(records[index[~there]], before[index[~there]])
        parity.add_delta(before, index[there], count, by_region, delta[there])
        assert np.array_equal(records, before)
    with pytest.raises(ArgumentError, match="valid has no bit for each of 600"):
        parity.add_delta(records, index, count, by_region, delta, valid[:-1])


def test_a_delta_of_records_that_do_not_protect_its_owner_changes_nothing(level: str) -> None:
    kernel = KERNELS["add_delta"]
    arguments = {**kernel.arrays(), "by_region": np.array([0, 1], np.uint8)}
    refused(kernel, arguments, RowError, r"index\[1\] is 0, .* whose coefficient is 0", "")
    arguments = {**kernel.arrays(), "index": ints(5, 5)}
    refused(kernel, arguments, RowError, TWICE, "")
    arguments = kernel.arrays()
    arguments["delta"] = arguments["records"][:2]
    refused(kernel, arguments, ArgumentError, "share", "")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda some: parity.share_deltas(**some, slots=0, holders=3), "slots must be 1 or more"),
        (lambda some: parity.share_deltas(**some, slots=4, holders=2), "outside 0 to 1"),
        (
            lambda some: parity.share_deltas(
                **{**some, "holder": np.full((2, 2), -1, np.int32)}, slots=4, holders=3
            ),
            "outside 0 to 2",
        ),
    ],
)
def test_wrong_numbers_are_refused(level: str, call: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        call(KERNELS["share_deltas"].arrays())


@pytest.mark.parametrize("slots", [0, -1, 3])
def test_regions_must_cover_the_records(level: str, slots: int) -> None:
    with pytest.raises(ArgumentError, match=f"2 regions of {slots} slots do not cover 8 records"):
        parity.add_delta(slots=slots, **KERNELS["add_delta"].arrays())


@pytest.mark.parametrize("name", KERNELS)
def test_the_native_module_never_crashes_on_wrong_shapes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spy = Mock(wraps=pytest.importorskip("planaria._native"))
    monkeypatch.setattr(kernels, "native", spy)
    never_crashes(KERNELS[name], name, spy)
