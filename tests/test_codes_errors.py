"""The codec and its arguments: any address will do, nothing beside a shard is touched, and what it
cannot do is refused by name before anything is written."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from planaria import kernels
from planaria.codes import Code
from planaria.errors import ArgumentError, CodeError
from planaria.kernels.types import Bytes

LEVELS = kernels.levels()


@pytest.fixture(autouse=True)
def _level_and_threads_are_put_back() -> Iterator[None]:
    level, threads = kernels.level(), kernels.threads()
    yield
    kernels.select_level(level)
    kernels.set_threads(threads)


def random_bytes(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def stripe(code: Code, length: int, seed: int = 0) -> list[Bytes]:
    """k random data shards and their parity."""
    data = list(random_bytes(seed, code.k, length))
    return data + code.encode(data)


def shifted(shards: Sequence[Bytes], first: int) -> tuple[list[Bytes], list[Bytes]]:
    """(copies at addresses first, first + 1, ... behind a cache line; the buffers they lie in).

    64 bytes of 0xA5 stand before each copy and behind it: memory that nobody may touch.
    """
    copies, buffers = [], []
    for number, shard in enumerate(shards):
        room = np.full(len(shard) + 256, 0xA5, np.uint8)
        start = 64 + (-room.ctypes.data - 64) % 64 + (first + number) % 64
        room[start : start + len(shard)] = shard
        copies.append(room[start : start + len(shard)])
        buffers.append(room)
    return copies, buffers


def assert_nothing_beside(copies: Sequence[Bytes], buffers: Sequence[Bytes]) -> None:
    for copy, buffer in zip(copies, buffers, strict=True):
        start = copy.ctypes.data - buffer.ctypes.data
        assert (buffer[:start] == 0xA5).all(), "written before the shard"
        assert (buffer[start + len(copy) :] == 0xA5).all(), "written behind the shard"


@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 31, 33, 63, 64, 65, 127, 129, 4097])
def test_shards_at_any_address_give_the_same_bits_and_nothing_beside_them_is_written(
    level: str, length: int
) -> None:
    code = Code(5, 4)
    kernels.select_level("numpy")
    expected = stripe(code, length)
    delta = random_bytes(9, length)
    updated = [shard.copy() for shard in expected[5:]]
    code.update(updated, 3, delta)
    kernels.select_level(level)
    for first in (0, 1, 3, 29, 63):
        shards, _ = shifted(expected, first)
        parity, buffers = shifted([np.zeros(length, np.uint8)] * 4, first + 17)
        assert code.encode(shards[:5], out=parity)[0] is parity[0]
        assert all(np.array_equal(a, b) for a, b in zip(parity, expected[5:], strict=True))
        rebuilt = code.reconstruct({number: shards[number] for number in (1, 3, 5, 6, 8)})
        assert all(np.array_equal(rebuilt[number], expected[number]) for number in (0, 2, 4, 7))
        code.update(parity, 3, shifted([delta], first + 5)[0][0])
        assert all(np.array_equal(a, b) for a, b in zip(parity, updated, strict=True))
        assert_nothing_beside(parity, buffers)


@pytest.mark.parametrize(("place", "complaint"), [(-1, "written before"), (10, "written behind")])
def test_control_one_byte_written_beside_a_shard_is_noticed(place: int, complaint: str) -> None:
    (copy,), (buffer,) = shifted([np.zeros(10, np.uint8)], 1)
    buffer[copy.ctypes.data - buffer.ctypes.data + place] = 0
    with pytest.raises(AssertionError, match=complaint):
        assert_nothing_beside([copy], [buffer])


def test_shards_of_no_bytes_have_parity_of_no_bytes(level: str) -> None:
    code = Code(3, 2)
    empty = [np.empty(0, np.uint8) for _ in range(5)]
    assert [len(shard) for shard in code.encode(empty[:3])] == [0, 0]
    assert code.verify(empty[:3], empty[3:])
    code.update(empty[3:], 0, np.empty(0, np.uint8))
    rebuilt = code.reconstruct({0: empty[0], 3: empty[3], 4: empty[4]})
    assert {number: shard.shape for number, shard in rebuilt.items()} == {1: (0,), 2: (0,)}


def test_a_code_without_parity_encodes_to_nothing_and_survives_nothing() -> None:
    code = Code(2, 0)
    data = list(random_bytes(0, 2, 4))
    assert code.encode(data) == []
    assert code.verify(data, [])
    code.update([], 1, data[0])
    assert code.reconstruct(dict(enumerate(data))) == {}
    with pytest.raises(CodeError, match="1 of 2 shards are left"):
        code.reconstruct({0: data[0]})


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "numpy"])
@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads_compute_what_one_does(level: str, threads: int) -> None:
    kernels.select_level(level)
    code, length = Code(3, 4), (3 << 20) + 7
    results = []
    for count in (1, threads):
        kernels.set_threads(count)
        assert kernels.threads() == count
        shards = stripe(code, length)
        parity = [shard.copy() for shard in shards[3:]]
        code.update(parity, 2, shards[0])
        left = {number: shards[number] for number in (1, 4, 6)}
        rebuilt = code.reconstruct(left)
        assert all(np.array_equal(rebuilt[number], shards[number]) for number in (0, 2, 3, 5))
        results.append([*shards, *parity])
    one, several = results
    assert all(np.array_equal(a, b) for a, b in zip(one, several, strict=True))


def parity_with(spoil: Callable[[Bytes], Any]) -> list[Any]:
    """Three parity shards of 8 zeros, the last one spoiled."""
    parity: list[Any] = [np.zeros(8, np.uint8) for _ in range(3)]
    parity[2] = spoil(parity[2])
    return parity


def read_only(shard: Bytes) -> Bytes:
    shard.flags.writeable = False
    return shard


ZEROS = read_only(np.zeros(8, np.uint8))
FOUR = [ZEROS] * 4
CODE = Code(4, 3)


@pytest.mark.parametrize(("k", "r"), [(0, 1), (-1, 1), (65, 1), (4, -1), (4, 5), (0, 0), (65, 5)])
def test_a_code_out_of_range_is_refused(k: int, r: int) -> None:
    with pytest.raises(CodeError, match=r"between"):
        Code(k, r)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (lambda: CODE.encode(FOUR[:3]), "takes 4 data shards, not 3"),
        (lambda: CODE.encode([]), "takes 4 data shards, not 0"),
        (lambda: CODE.encode(FOUR, out=[np.zeros(8, np.uint8)]), "takes 3 parity buffers, not 1"),
        (lambda: CODE.verify(FOUR, FOUR), "takes 3 parity shards, not 4"),
        (lambda: CODE.verify([*FOUR, ZEROS], FOUR[:3]), "takes 4 data shards, not 5"),
        (lambda: CODE.update([], 0, ZEROS), "takes 3 parity shards, not 0"),
        (lambda: CODE.update(FOUR[:3], 4, ZEROS), "there is no 4"),
        (lambda: CODE.update(FOUR[:3], -1, ZEROS), "there is no -1"),
        (lambda: CODE.reconstruct({}), "0 of 7 shards are left and 4"),
        (lambda: CODE.reconstruct(dict(enumerate(FOUR[:3]))), "survives the loss of 3"),
        (lambda: CODE.reconstruct(dict(enumerate(FOUR)), wanted=[7]), "there is no 7"),
        (lambda: CODE.reconstruct(dict(enumerate(FOUR)), wanted=[-1]), "there is no -1"),
        (lambda: CODE.reconstruct(dict(enumerate(FOUR, 5))), "there is no 7"),
        (lambda: CODE.reconstruct(dict(enumerate(FOUR, -1))), "there is no -1"),
        (lambda: CODE.decoding_rows((0, 1, 2, 2), (3,)), "4 different ones are needed"),
    ],
)
def test_what_a_code_cannot_do_is_a_code_error(asked: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(CodeError, match=complaint):
        asked()


NOT_SHARDS = [
    pytest.param(lambda shard: shard[:7], "must have shape", id="shorter"),
    pytest.param(lambda shard: np.zeros(9, np.uint8), "must have shape", id="longer"),
    pytest.param(lambda shard: shard.astype(np.int8), "must be uint8", id="int8"),
    pytest.param(lambda shard: shard.view(np.float64), "must be uint8", id="float64"),
    pytest.param(lambda shard: shard.reshape(2, 4), "must have 1 dimensions", id="2-D"),
    pytest.param(lambda shard: np.zeros(16, np.uint8)[::2], "contiguous", id="strided"),
    pytest.param(lambda shard: shard.tolist(), "must be a NumPy array, not list", id="list"),
    pytest.param(lambda shard: shard.tobytes(), "must be a NumPy array, not bytes", id="bytes"),
    pytest.param(lambda shard: None, "must be a NumPy array, not NoneType", id="None"),
]


@pytest.mark.parametrize(("spoil", "complaint"), NOT_SHARDS)
def test_what_is_no_shard_is_an_argument_error(
    level: str, spoil: Callable[[Bytes], Any], complaint: str
) -> None:
    data = [ZEROS, ZEROS, ZEROS, spoil(ZEROS)]
    with pytest.raises(ArgumentError, match=complaint):
        CODE.encode(data)
    with pytest.raises(ArgumentError, match=complaint):
        CODE.verify(data, FOUR[:3])
    with pytest.raises(ArgumentError, match=complaint):
        CODE.reconstruct(dict(enumerate(data)))
    with pytest.raises(ArgumentError, match=complaint):
        CODE.encode(FOUR, out=parity_with(spoil))


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (lambda: CODE.encode([None, *FOUR[1:]]), ArgumentError),  # type: ignore[list-item]
        (lambda: CODE.update(FOUR[:3], 0, None), ArgumentError),  # type: ignore[arg-type]
        (lambda: CODE.verify(FOUR, [*FOUR[:2], ZEROS.astype(np.int64)]), ArgumentError),
        (lambda: CODE.verify(FOUR, [*FOUR[:2], ZEROS[:7]]), ArgumentError),
        (lambda: CODE.reconstruct(dict(enumerate(FOUR)) | {99: ZEROS}), CodeError),
        (lambda: CODE.update([np.zeros(8, np.uint8)] * 3, 0, ZEROS), ArgumentError),
        (lambda: Code(4, 0).encode([None] * 4), ArgumentError),  # type: ignore[list-item]
        (lambda: Code(2.5, 1), CodeError),  # type: ignore[arg-type]
        (lambda: Code("2", 1), CodeError),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused_wherever_they_stand(
    asked: Callable[[], Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        asked()


@pytest.mark.parametrize(
    ("spoil", "complaint"), [*NOT_SHARDS, pytest.param(read_only, "read-only", id="read-only")]
)
def test_an_update_that_is_refused_has_written_nothing(
    level: str, spoil: Callable[[Bytes], Any], complaint: str
) -> None:
    parity = parity_with(spoil)
    with pytest.raises(ArgumentError, match=complaint):
        CODE.update(parity, 1, np.full(8, 255, np.uint8))
    assert not parity[0].any()
    assert not parity[1].any()
    good = parity_with(lambda shard: shard)
    CODE.update(good, 1, np.full(8, 255, np.uint8))  # the control: this delta does write
    assert all(shard.all() for shard in good)


def test_parity_is_never_written_over_what_is_still_read_or_to_read_only_memory(level: str) -> None:
    data = list(random_bytes(0, 4, 8))
    before = [shard.copy() for shard in data]
    fresh = np.zeros(8, np.uint8)
    for out, complaint in [
        ([fresh, fresh.copy(), data[2]], "shares memory"),
        ([fresh, fresh.copy(), fresh], "shares memory"),
        ([fresh, fresh.copy(), ZEROS], "read-only"),
    ]:
        with pytest.raises(ArgumentError, match=complaint):
            CODE.encode(data, out=out)
    assert not fresh.any()
    assert all(np.array_equal(a, b) for a, b in zip(data, before, strict=True))
