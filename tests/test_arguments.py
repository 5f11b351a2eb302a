"""Bad arguments: each is refused with an error that says so, and not one byte is written."""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from small_arrays import HUGE, floats, ints, raw, words

from planaria import kernels
from planaria.errors import ArgumentError, RowError
from planaria.kernels.types import Distribution, InitTables, OptimizerRule, Pooling
from planaria.optimizers import Optimizer

AnyArray: TypeAlias = NDArray[Any]
Arguments: TypeAlias = dict[str, AnyArray]


class Kernel(NamedTuple):
    call: Callable[..., object]  # takes the arrays by name
    arrays: Callable[[], Arguments]  # arguments that fit together
    written: tuple[str, ...] = ()
    may_be_longer: tuple[str, ...] = ()  # one row more is no error
    may_be_wider: tuple[str, ...] = ()  # one column more is no error
    may_be_none: tuple[str, ...] = ()


def combine(in_0: Any, in_1: Any, out_0: Any, out_1: Any, coef: Any) -> None:
    kernels.combine([in_0, in_1], [out_0, out_1], coef)


def apply(
    records: Any, index_0: Any, grads_0: Any, index_1: Any, grads_1: Any, index: Any, delta: Any
) -> None:
    ranks = [(index_0, grads_0), (index_1, grads_1)]
    rule = Optimizer("momentum").rule()
    kernels.apply(rule, records, 6, 3, ranks, kernels.Applied(index, delta))


def init_records(row: Any, state: Any, out: Any, **tables: Any) -> None:
    kernels.init_records(1, InitTables(**tables), 30, row, state, out)


# fmt: off
KERNELS = {
    "gather": Kernel(
        kernels.gather,
        lambda: {"records": words(8, 3), "index": ints(7, 0, 7), "out": words(3, 3)},
        written=("out",), may_be_longer=("records",), may_be_wider=("records",),
        may_be_none=("out",),
    ),
    "scatter": Kernel(
        kernels.scatter,
        lambda: {"records": words(8, 3), "index": ints(7, 0), "values": words(2, 3)},
        written=("records",), may_be_longer=("records",),
    ),
    "mul_add": Kernel(
        kernels.mul_add,
        lambda: {
            "records": words(8, 3), "index": ints(7, 0), "coef": raw(2) + np.uint8(2),
            "delta": words(2, 3) + np.uint32(1),
        },
        written=("records",), may_be_longer=("records",), may_be_none=("coef",),
    ),
    "mul_add_bytes": Kernel(
        lambda target, delta: kernels.mul_add_bytes(target, 3, delta),
        lambda: {"target": raw(70), "delta": raw(70)},
        written=("target",),
    ),
    "undo": Kernel(
        kernels.undo,
        lambda: {
            "values": words(4, 3), "query": ints(5, 1, 5, 2), "index": ints(5, 2),
            "coef": raw(2) + np.uint8(2), "delta": words(2, 3) + np.uint32(1),
        },
        written=("values",), may_be_none=("coef",),
    ),
    "combine": Kernel(
        combine,
        lambda: {
            "in_0": raw(40), "in_1": raw(40), "out_0": raw(40), "out_1": raw(40),
            "coef": raw(2, 2),
        },
        written=("out_0", "out_1"),
    ),
    "apply": Kernel(
        apply,
        lambda: {
            "records": floats(8, 6).view(np.uint32),
            "index_0": ints(5, 0), "grads_0": floats(2, 3),
            "index_1": ints(0, 3), "grads_1": floats(2, 3),
            "index": ints(9, 9, 9, 9), "delta": words(4, 6),
        },
        written=("records", "index", "delta"), may_be_longer=("records", "index", "delta"),
    ),
    "init_records": Kernel(
        init_records,
        lambda: {
            "table_ids": ints(0, 1), "first_rows": ints(0, 10),
            "distributions": ints(Distribution.UNIFORM, Distribution.NORMAL),
            "parameters": floats(2, 2), "row": ints(29, 0, 30), "state": words(2),
            "out": words(3, 5),
        },
        written=("out",), may_be_longer=("state",), may_be_wider=("out",),
    ),
    "digest": Kernel(
        kernels.digest,
        lambda: {"records": words(4, 3), "keys": np.arange(4, dtype=np.uint64)},
        may_be_wider=("records",),
    ),
    "check_distinct": Kernel(
        lambda index: kernels.check_distinct(index, 8),
        lambda: {"index": ints(3, 0)}, may_be_longer=("index",),
    ),
    "missing": Kernel(
        kernels.missing,
        lambda: {"bitmap": raw(3), "index": ints(23, 0, 5)},
        may_be_longer=("bitmap", "index"),
    ),
    "mark": Kernel(
        kernels.mark,
        lambda: {"bitmap": raw(3), "index": ints(23, 0, 5)},
        written=("bitmap",), may_be_longer=("bitmap", "index"),
    ),
    "dedup": Kernel(kernels.dedup, lambda: {"ids": ints(3, -1, 3)}, may_be_longer=("ids",)),
    "partition": Kernel(
        lambda rows, place, region: kernels.partition(rows, 20, place, region, 10, 4),
        lambda: {
            "rows": ints(19, 0, 5), "place": np.array([[0, 1], [2, 3]], np.int32),
            "region": np.array([[0, 0], [0, 1]], np.int32),
        },
        may_be_longer=("rows",),
    ),
    "gradient_sum": Kernel(
        kernels.gradient_sum,
        lambda: {"grads": floats(3, 3), "inverse": ints(0, 1, 0), "out": floats(2, 3)},
        written=("out",),
    ),
    "number_bags": Kernel(
        lambda **arrays: kernels.number_bags(samples=2, **arrays),
        lambda: {
            "ids": ints(4, 0, 4), "offsets": ints(0, 2, 3), "keys": ints(0, 0),
            "limits": ints(5, 6), "first_rows": ints(0, 5),
        },
    ),
    "pool": Kernel(
        lambda **arrays: kernels.pool(pooling=Pooling.WEIGHTED, **arrays),
        lambda: {
            "values": floats(5, 3), "index": ints(4, 0, 4), "offsets": ints(0, 2, 3),
            "weights": floats(3), "out": floats(2, 3),
        },
        written=("out",), may_be_longer=("values",), may_be_none=("out", "weights"),
    ),
    "pool_backward": Kernel(
        lambda **arrays: kernels.pool_backward(pooling=Pooling.WEIGHTED, **arrays),
        lambda: {
            "grads": floats(2, 3), "inverse": ints(0, 1, 0), "offsets": ints(0, 2, 3),
            "out": floats(2, 3), "weights": floats(3),
        },
        written=("out",), may_be_none=("weights",),
    ),
    "weight_backward": Kernel(
        kernels.weight_backward,
        lambda: {
            "grads": floats(2, 3), "values": floats(5, 3), "index": ints(4, 0, 4),
            "offsets": ints(0, 2, 3),
        },
        may_be_longer=("values",),
    ),
}
# fmt: on


def refused(
    kernel: Kernel, arguments: dict[str, Any], error: type[Exception], says: str, why: str
) -> None:
    """The call raises this error, its message has these words, and nothing was written."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    before = {name: value.tobytes() for name, value in arrays.items()}
    raised: Exception | None = None
    try:
        kernel.call(**arguments)
    except Exception as problem:
        raised = problem
    assert isinstance(raised, error), f"{why}: {raised!r}"
    assert re.search(says, str(raised)), f"{why}: {raised}"
    for name, value in arrays.items():
        assert value.tobytes() == before[name], f"{why}: {name} was written"


# ---------------------------------------------------------------------------- kinds of arrays


def read_only(array: AnyArray) -> AnyArray:
    array.flags.writeable = False
    return array


def misaligned(array: AnyArray) -> AnyArray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[:] = array
    assert not moved.flags.aligned
    return moved


def strided(array: AnyArray) -> AnyArray:
    return np.repeat(array, 2, axis=0)[::2]


def wrong_kinds(array: AnyArray, written: bool) -> Iterator[tuple[str, object, str]]:
    """What no kernel takes for this array: the name of the change, the value, the message."""
    yield "a list", array.tolist(), "must be a NumPy array, not list"
    yield "nothing", None, "must be a NumPy array, not NoneType"
    yield "another type", array.astype(np.float64), "must be .*, not float64"
    if array.itemsize > 1:
        yield "other bytes", array.astype(array.dtype.newbyteorder("S")), "must be .*, not >"
        yield "bad alignment", misaligned(array), "must be aligned in memory"
    yield "one dimension more", array[None], "dimension|shape"
    yield "no dimension", array.ravel()[:1].reshape(()), "dimension|shape"
    yield "strides", strided(array), "must be C-contiguous; pass numpy.ascontiguousarray"
    if array.ndim == 2:
        yield "one dimension less", array.ravel(), "dimension|shape"
        yield "Fortran order", np.asfortranarray(array), "must be C-contiguous"
    if written:
        yield "read-only memory", read_only(array.copy()), "is read-only, but would be written"


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_of_the_wrong_kind_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    kernel.call(**kernel.arrays())
    for which, array in kernel.arrays().items():
        for change, value, says in wrong_kinds(array, which in kernel.written):
            if value is None and which in kernel.may_be_none:
                continue
            if (name, which) in UNEXPLAINED and change in ("nothing", "no dimension"):
                continue
            arguments = {**kernel.arrays(), which: value}
            refused(kernel, arguments, ArgumentError, says, f"{which} with {change}")


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_of_the_wrong_length_or_width_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    for which, array in kernel.arrays().items():
        if which not in kernel.may_be_longer:
            longer = np.concatenate([array, array[-1:]])
            arguments = {**kernel.arrays(), which: longer}
            refused(kernel, arguments, ArgumentError, "", f"{which} with a row more")
        if array.ndim == 2 and which not in kernel.may_be_wider:
            wider = np.concatenate([array, array[:, -1:]], axis=1)
            arguments = {**kernel.arrays(), which: wider}
            refused(kernel, arguments, ArgumentError, "", f"{which} with a column more")


# ---------------------------------------------------------------------------- values in arrays

OUT_OF_RANGE = r"must be at least 0 and below \d+"
TWICE = "stands there already; sum what belongs to one row"
NUMBERING = "must number the rows in first-seen order, as dedup gives it"
OFFSETS = "offsets must start with 0, never fall, and end with the number of ids"
SHARED = "shares memory with another argument; give it its own"

BAGS = ("number_bags", "pool", "pool_backward", "weight_backward")
NUMBERED = ("gradient_sum", "pool_backward")
FALLING = [(0, 2, 4), (0, 2, 2), (1, 2, 3), (0, 4, 3), (0, -1, 3), (0, HUGE, 3)]
OTHERWISE_NUMBERED = [(1, 0, 0), (0, 2, 1), (0, 1, 2), (0, -1, 1), (0, 1, HUGE), (0, 1, -HUGE - 1)]
BELOW = {  # an index of so many numbers, all below the limit
    ("gather", "index"): (3, 8),
    ("scatter", "index"): (2, 8),
    ("mul_add", "index"): (2, 8),
    ("apply", "index_0"): (2, 6),
    ("apply", "index_1"): (2, 6),
    ("check_distinct", "index"): (2, 8),
    ("missing", "index"): (2, 24),
    ("mark", "index"): (2, 24),
    ("partition", "rows"): (2, 20),
    ("pool", "index"): (3, 5),
    ("weight_backward", "index"): (3, 5),
}
DISTINCT = [(name, "index") for name in ("scatter", "mul_add", "check_distinct")]
DISTINCT += [("apply", "index_0"), ("apply", "index_1")]


def wrong_values() -> Iterator[tuple[str, str, AnyArray, type[Exception], str]]:
    """Kernel, argument, value, error, message."""
    for (name, argument), (count, limit) in BELOW.items():
        for bad in (-1, limit, limit + 1, 2**32, HUGE, -HUGE - 1):
            yield name, argument, ints(*range(count - 1), bad), RowError, OUT_OF_RANGE
    for name, argument in DISTINCT:
        yield name, argument, ints(4, 4), RowError, TWICE
    for name in NUMBERED:
        for inverse in OTHERWISE_NUMBERED:
            yield name, "inverse", ints(*inverse), RowError, NUMBERING
        yield name, "inverse", ints(0, 0, 0), RowError, "names 1 rows, but the result has 2"
    for name in BAGS:
        for offsets in FALLING:
            yield name, "offsets", ints(*offsets), ArgumentError, OFFSETS
        yield name, "offsets", ints(), ArgumentError, "offsets needs"
    for place in (4, -1):
        groups = np.array([[0, 1], [2, place]], np.int32)
        yield "partition", "place", groups, ArgumentError, "outside 0 to 3"
    for first_rows in ((1, 10), (0, 0), (0, -5)):
        yield "init_records", "first_rows", ints(*first_rows), ArgumentError, "with 0 and rise"


@pytest.mark.parametrize("name", KERNELS)
def test_wrong_values_are_refused_before_anything_is_written(level: str, name: str) -> None:
    kernel = KERNELS[name]
    for _, argument, value, error, says in (row for row in wrong_values() if row[0] == name):
        arguments = {**kernel.arrays(), argument: value}
        refused(kernel, arguments, error, says, f"{argument} = {value.tolist()}")


def test_a_refused_call_leaves_no_trace_in_the_next(level: str) -> None:
    kernel = KERNELS["scatter"]
    for _ in range(3):
        with pytest.raises(RowError):
            kernel.call(**{**kernel.arrays(), "index": ints(4, 4)})
        kernel.call(**kernel.arrays())


def test_combine_refuses_outputs_that_share_memory(level: str) -> None:
    kernel = KERNELS["combine"]
    memory = raw(100)
    for first, second, start in (
        ("in_0", "out_0", 0),
        ("in_1", "out_1", 39),
        ("out_0", "out_1", 1),
    ):
        shared = {first: memory[:40], second: memory[start : start + 40]}
        refused(kernel, {**kernel.arrays(), **shared}, ArgumentError, SHARED, f"{first}, {second}")
    beside = {"in_0": memory[:40], "out_0": memory[40:80]}
    kernel.call(**{**kernel.arrays(), **beside})
    kernel.call(**{**kernel.arrays(), "in_0": memory[:40], "in_1": memory[:40]})


def initialise(seed: int = 0, tables: int = 1) -> None:
    zeros = np.zeros(tables, np.int64)
    table = InitTables(zeros, zeros, zeros, np.zeros((tables, 2), np.float32))
    kernels.init_records(seed, table, 5, ints(0), words(0), words(1, 3))


def combined(inputs: int, outputs: int) -> None:
    parts = [raw(3) for _ in range(inputs + outputs)]
    kernels.combine(parts[:inputs], parts[inputs:], raw(outputs, inputs))


def partitioned(*groups: int, slots: int = 10) -> None:
    place = np.zeros(groups, np.int32)
    kernels.partition(ints(0), 20, place, place, slots, 4)


def pooled(weights: AnyArray | None, pooling: Pooling, prefetch_rows: int = 0) -> None:
    one = ints(1)
    kernels.pool(floats(5, 3), one, ints(0, 1), weights, pooling, prefetch_rows=prefetch_rows)


def applied(kind: int = 0, words_each: int = 3, limit: int = 4) -> None:
    rule = OptimizerRule(kind, 0.1, 0, 0, 0, 0)
    kernels.apply(rule, words(4, words_each), limit, 3, [])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: kernels.set_threads(0), "threads must be between 1 and 1024, not 0"),
        (lambda: kernels.set_threads(1025), "threads must be between 1 and 1024, not 1025"),
        (lambda: kernels.select_level("sse9"), "SIMD level 'sse9' is not to be had here"),
        (lambda: kernels.allocate(-1, 4), "cannot allocate -1 records of 4 words"),
        (lambda: kernels.allocate(1, 0), "cannot allocate 1 records of 0 words"),
        (lambda: combined(0, 1), "at least one input"),
        (lambda: combined(1, 0), "1 to 4 outputs, not 0"),
        (lambda: combined(1, 5), "1 to 4 outputs, not 5"),
        (lambda: applied(limit=5), "limit 5 is above the 4 records"),
        (lambda: applied(limit=-1), "limit -1 is"),
        (lambda: initialise(seed=-1), "seed must be between 0 and"),
        (lambda: initialise(seed=2**64), "seed must be between 0 and"),
        (lambda: initialise(tables=0), "an arena needs at least one table"),
        (lambda: partitioned(0, 2), "there are no groups"),
        (lambda: partitioned(2, 0), "there are no groups"),
        (lambda: pooled(floats(1), Pooling.SUM), "weights go with weighted pooling"),
        (lambda: pooled(None, Pooling.WEIGHTED), "weights go with weighted pooling"),
    ],
)
def test_wrong_numbers_are_refused(level: str, call: Callable[[], object], says: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(says)):
        call()


# ---------------------------------------------------------------------------- gaps of old

# A length was once taken of these before it was known that they have one.
UNEXPLAINED = [
    ("init_records", "first_rows"),
    ("gradient_sum", "out"),
    ("pool_backward", "out"),
    ("weight_backward", "values"),
]


@pytest.mark.parametrize("value", [None, np.float32(0)])
@pytest.mark.parametrize(("name", "which"), UNEXPLAINED)
def test_what_has_no_length_is_refused_with_a_sentence(name: str, which: str, value: Any) -> None:
    arguments = {**KERNELS[name].arrays(), which: value}
    refused(KERNELS[name], arguments, ArgumentError, which, f"{which} = {value}")


WRAPPING = ints(0, HUGE, -HUGE - 1, -1, 3)  # rises, where differences wrap
WRAPPING_TABLES = {
    "table_ids": ints(0, 1, 2),
    "first_rows": WRAPPING[:3],
    "distributions": ints(0, 0, 0),
    "parameters": floats(3, 2),
}


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.mul_add_bytes(raw(4), -1, raw(4)),
        lambda: kernels.mul_add_bytes(raw(4), 256, raw(4)),
        lambda: applied(words_each=5),
        lambda: applied(kind=9, words_each=10),
        lambda: kernels.pool(floats(5, 3), ints(1, 2, 3), WRAPPING),
        lambda: KERNELS["init_records"].call(**KERNELS["init_records"].arrays() | WRAPPING_TABLES),
        lambda: pooled(None, Pooling.SUM, prefetch_rows=-1),
        lambda: partitioned(1, 1, slots=-5),
    ],
    ids=["coef-", "coef+", "words", "optimizer", "offsets", "first_rows", "prefetch", "slots"],
)
def test_numbers_that_native_code_refuses_are_refused_by_the_twin_too(
    call: Callable[[], object],
) -> None:
    before = kernels.level()
    kernels.select_level("numpy")
    try:
        with pytest.raises(ArgumentError):
            call()
    finally:
        kernels.select_level(before)


# ---------------------------------------------------------------------------- the native module


def never_crashes(kernel: Kernel, name: str, spy: Mock) -> None:
    """spy: what stands in the native module's place, and passes on to it."""
    kernel.call(**kernel.arrays())
    function = getattr(spy, name)
    arguments = list(function.call_args.args)
    for at, argument in enumerate(arguments):
        for wrong in wrong_natively(argument):
            changed = copy.deepcopy(arguments)
            changed[at] = wrong
            # Some shapes are no error here, such as more records than before.
            with contextlib.suppress(ArgumentError, TypeError, ValueError):
                function(*changed)


@pytest.mark.parametrize("name", KERNELS)
def test_the_native_module_never_crashes_on_wrong_shapes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spy = Mock(wraps=pytest.importorskip("planaria._native"))
    monkeypatch.setattr(kernels, "_backend", spy)
    never_crashes(KERNELS[name], name, spy)


def wrong_natively(argument: object) -> Iterator[object]:
    yield "nonsense"
    yield from ([], [None], -1, 2**70, float("nan"))
    if isinstance(argument, np.ndarray):
        yield from (argument[:0], argument[:1], np.concatenate([argument, argument]))
        yield from (argument[None], argument[..., :0], argument[..., :1])
        if argument.dtype == np.int64:
            yield from (np.full_like(argument, bad) for bad in (-1, 10**6, HUGE, -HUGE - 1))
    elif isinstance(argument, list):
        yield from (argument[:0], argument * 2, [array[:1] for array in argument])


def test_every_public_kernel_is_held_to_this() -> None:
    functions = {
        name
        for name, function in inspect.getmembers(kernels, inspect.isfunction)
        if function.__module__ == kernels.__name__ and not name.startswith("_")
    }
    machinery = {"level", "levels", "select_level", "threads", "set_threads", "allocate"}
    assert functions - machinery == set(KERNELS)
