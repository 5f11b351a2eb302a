"""Bad arguments for the kernels of saving: each is refused, and not one byte is written."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from small_arrays import floats, ints, raw, words
from test_arguments import OUT_OF_RANGE, SHARED, Kernel, never_crashes, refused, wrong_kinds
from test_saves_kernels import public_functions

from planaria.errors import ArgumentError, RowError
from planaria.kernels import saves
from planaria.kernels.types import Bytes


def sample(entries: Any, bitmap: Any, progress: Any, index: Any) -> None:
    saves.sample_accesses(saves.Sample(entries, bitmap, progress), 1, index)


# fmt: off
KERNELS = {
    "crc32": Kernel(saves.crc32, lambda: {"content": raw(100)}, may_be_longer=("content",)),
    "quantise": Kernel(
        lambda records, out: saves.quantise(records, [(0, 2)], 3, out),
        lambda: {"records": floats(4, 3).view(np.uint32), "out": raw(4, 13)},
        written=("out",), may_be_none=("out",),
    ),
    "dequantise": Kernel(
        lambda packed, out: saves.dequantise(packed, 3, [(0, 2)], 3, out),
        lambda: {"packed": raw(4, 13), "out": words(4, 3)},
        written=("out",), may_be_none=("out",),
    ),
    "row_distances": Kernel(
        lambda **arrays: saves.row_distances(dim=2, **arrays),
        lambda: {"records": words(4, 3), "saved": words(4, 2), "out": floats(4)},
        written=("out",), may_be_none=("out",), may_be_wider=("records", "saved"),
    ),
    "count_accesses": Kernel(
        saves.count_accesses,
        lambda: {"counters": words(8), "index": ints(7, 0, 7)},
        written=("counters",), may_be_longer=("counters", "index"),
    ),
    "reset_counters": Kernel(
        saves.reset_counters,
        lambda: {"counters": words(8), "index": ints(7, 0, 7)},
        written=("counters",), may_be_longer=("counters", "index"),
    ),
    "top_rows": Kernel(
        lambda scores: saves.top_rows(scores, 3), lambda: {"scores": words(8)},
        may_be_longer=("scores",),
    ),
    "sample_accesses": Kernel(
        sample,
        lambda: {
            "entries": words(2), "bitmap": raw(2), "progress": np.zeros(3, np.uint64),
            "index": ints(7, 0, 3),
        },
        written=("entries", "bitmap", "progress"),
        may_be_longer=("entries", "bitmap", "index"),
    ),
    "count_marked": Kernel(
        lambda bitmap: saves.count_marked(bitmap, 3, 20), lambda: {"bitmap": raw(3)},
        may_be_longer=("bitmap",),
    ),
    "marked": Kernel(
        lambda bitmap: saves.marked(bitmap, 3, 20), lambda: {"bitmap": raw(3)},
        may_be_longer=("bitmap",),
    ),
    "preserve": Kernel(
        lambda **arrays: saves.preserve(first=2, stop=8, **arrays),
        lambda: {
            "bitmap": np.zeros(2, np.uint8), "index": ints(7, 1, 5), "records": words(8, 3),
            "delta": words(3, 3), "out_index": ints(9, 9, 9), "out_records": words(3, 3),
        },
        written=("bitmap", "out_index", "out_records"),
        may_be_longer=("bitmap", "records", "out_index", "out_records"),
    ),
    "overlay": Kernel(
        lambda **arrays: saves.overlay(first=4, **arrays),
        lambda: {"chunk": words(3, 2), "index": ints(5, 99), "values": words(2, 2)},
        written=("chunk",), may_be_longer=("chunk",),
    ),
}
# fmt: on


def test_every_public_kernel_is_held_to_this() -> None:
    of_samples = {"new_sample", "sampled_rows", "clear_sample", "packed_bytes"}
    assert public_functions() - of_samples == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_of_the_wrong_kind_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    kernel.call(**kernel.arrays())
    for which, value in kernel.arrays().items():
        for change, wrong, says in wrong_kinds(value, which in kernel.written):
            if wrong is None and which in kernel.may_be_none:
                continue
            arguments = {**kernel.arrays(), which: wrong}
            refused(kernel, arguments, ArgumentError, says, f"{which} with {change}")


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_that_do_not_fit_or_share_memory_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    for which, value in kernel.arrays().items():
        if which not in kernel.may_be_longer:
            arguments = {**kernel.arrays(), which: np.concatenate([value, value[-1:]])}
            refused(kernel, arguments, ArgumentError, "", f"{which} with a row more")
        if value.ndim == 2 and which not in kernel.may_be_wider:
            wider = np.concatenate([value, value[:, -1:]], axis=1)
            arguments = {**kernel.arrays(), which: wider}
            refused(kernel, arguments, ArgumentError, "", f"{which} with a column more")
    for written in kernel.written:
        arguments = kernel.arrays()
        memory = np.zeros(4096, np.uint8)
        for which in arguments:
            if which == written or which not in kernel.written:
                value = arguments[which]
                shared = memory[: value.nbytes].view(value.dtype).reshape(value.shape)
                arguments[which] = shared
        refused(kernel, arguments, ArgumentError, SHARED, f"{written} is shared")


BELOW = {"count_accesses": 8, "reset_counters": 8, "sample_accesses": 16, "preserve": 8}


@pytest.mark.parametrize("name", BELOW)
def test_rows_out_of_range_are_refused_before_anything_is_written(level: str, name: str) -> None:
    kernel, limit = KERNELS[name], BELOW[name]
    for bad in (-1, limit, 2**32, 2**63 - 1, -(2**63)):
        arguments = {**kernel.arrays(), "index": ints(3, 4, bad)}
        refused(kernel, arguments, RowError, OUT_OF_RANGE, f"{bad}")


def quantised(segments: Any, count: Any = 8) -> None:
    saves.quantise(words(2, 6) & np.uint32(0x3FFFFFFF), segments, count)


def preserved(first: int, stop: int, bitmap: Bytes) -> None:
    nothing = ints(), words(8, 3), words(0, 3), ints(), words(0, 3)
    saves.preserve(bitmap, first, stop, *nothing)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quantised([(0, 6)], 5), "bits must be one of (8, 4, 3, 2), not 5"),
        (lambda: quantised([(0, 6)], "8"), "bits must be one of (8, 4, 3, 2), not '8'"),
        (lambda: quantised([(0, 7)]), "lie inside 6 words, not [(0, 7)]"),
        (lambda: quantised([(0, 0)]), "segments must be pairs"),
        (lambda: quantised([(-1, 2)]), "segments must be pairs"),
        (lambda: quantised([(7, 1)]), "segments must be pairs"),
        (lambda: quantised([(3, 2), (0, 2)]), "that ascend"),
        (lambda: quantised([(0, 3), (2, 2)]), "are apart"),
        (lambda: quantised([(1, 2**63 - 1)]), "segments must be pairs"),
        (lambda: quantised([(1, 2**70)]), "segments must be pairs"),
        (lambda: quantised([(1,)]), "segments must be pairs"),
        (lambda: quantised(["banana"]), "segments must be pairs"),
        (lambda: saves.packed_bytes(3, [(0, 4)], 8), "inside 3 words"),
        (lambda: saves.row_distances(words(2, 3), words(2, 2), 3), "dim must be between 1 and"),
        (lambda: saves.row_distances(words(2, 3), words(2, 2), 0), "dim must be between 1 and"),
        (lambda: saves.top_rows(words(3), 4), "there are 3 rows; 4 is too many"),
        (lambda: saves.top_rows(words(3), -1), "there are 3 rows; -1"),
        (lambda: saves.new_sample(0, 1), "chooses from 1 to 2^32 rows, not 0"),
        (lambda: saves.new_sample(5, 0), "room for 1 to 2^32 - 1 rows, not 0"),
        (lambda: saves.sample_accesses(saves.new_sample(5, 1), -1, ints()), "seed must be"),
        (lambda: saves.marked(raw(2), 0, 17), "[0, 17) is not a range of the bitmap's 16 bits"),
        (lambda: saves.count_marked(raw(2), 5, 4), "[5, 4) is not a range"),
        (lambda: saves.marked(raw(2), -1, 4), "[-1, 4) is not a range"),
        (lambda: preserved(0, 9, raw(2)), "stop 9 is above the 8 records"),
        (lambda: preserved(0, 8, raw(0)), "[0, 8) is not a range"),
        (lambda: saves.crc32(raw(3), -1), "not -1"),
        (lambda: saves.crc32(raw(3), 2**32), "not 4294967296"),
        (lambda: saves.overlay(words(2, 2), -1, ints(), words(0, 2)), "not -1"),
    ],
)
def test_wrong_numbers_are_refused(level: str, call: Callable[[], object], says: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(says)):
        call()


def test_a_sample_that_claims_more_rows_than_it_has_room_for_is_refused(level: str) -> None:
    kernel = KERNELS["sample_accesses"]
    arguments = {**kernel.arrays(), "progress": np.array([0, 0, 3], np.uint64)}
    refused(kernel, arguments, ArgumentError, "progress says 3 rows, entries has room for 2", "")


@pytest.mark.parametrize("name", KERNELS)
def test_the_native_module_never_crashes_on_wrong_shapes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spy = Mock(wraps=pytest.importorskip("planaria._native"))
    monkeypatch.setattr(saves, "_backend", lambda: spy)
    never_crashes(KERNELS[name], name, spy)
