"""What is kept comes back bit for bit, and training goes on as if nothing had been."""

from __future__ import annotations

import struct
import zlib
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from planaria.errors import StateError
from planaria.torch.frozen import State, _fetch, fingerprint, pack, unpack
from planaria.torch.keeping import Keeper, digest, seed_torch

pytestmark = pytest.mark.torch


class Holder:
    """A user's own object: its state is whatever it was given."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def flat(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.resolve_conj().resolve_neg()
    return values.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Equal in types, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            return False
        return bool(torch.equal(flat(one), flat(other)))
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])
STATES: dict[str, Any] = {
    "plain": {"none": None, "yes": True, "int": 1, "text": "é\n", "bytes": b"\0\xff", "": 0},
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**100, -(10**100)],
    "floats": [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 5e-324, 0.1],
    "nan with a payload": struct.unpack("d", struct.pack("Q", 0x7FF8000000001234))[0],
    "nested": {0: {"a": [(), (1, [None])]}, -5: OrderedDict(b=1, a=2), "c": Counter({3: 2, 1: 1})},
    "kinds": [torch.Size([2, 3]), torch.bfloat16, torch.float64],
    "scalars": [np.float64(0.1), np.int8(-3), np.bool_(True), np.datetime64("2020-01-01")],
    "arrays": [
        np.arange(12.0).reshape(3, 4).T,
        np.empty((0, 3), np.int8),
        np.array(5, np.uint16),
        np.array([1, 2], ">i4"),
        np.array([True, False]),
        np.arange(20)[::3],
    ],
    "dtypes": [
        torch.tensor([0, 1, 3]).to(dtype)
        for dtype in (
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
            *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16),
            *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
        )
    ],
    "shapes": [
        torch.tensor(7.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::3],
        torch.ones(1).expand(5),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        nn.Parameter(torch.ones(2)).detach(),
    ],
    "views": [COMPLEX.conj(), COMPLEX.conj().imag, COMPLEX.conj()[:1].imag, COMPLEX.real],
    "shared": [COMPLEX, COMPLEX, COMPLEX[1:]],
    "nothing": {},
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_packed_comes_back(name: str) -> None:
    packed = pack(STATES[name])
    found = unpack(packed)
    assert same(found, STATES[name])
    assert np.array_equal(pack(found), packed)
    assert len(packed) % 64 == 0
    assert packed.ctypes.data % 64 == 0


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.integers(0, 9)).map(torch.tensor)
    | st.lists(st.floats(width=32)).map(np.array),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**64 - 1), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_whatever_is_packed_comes_back(value: object) -> None:
    packed = pack(value)
    assert same(unpack(packed), value)
    assert np.array_equal(pack(unpack(packed)), packed)


def test_a_module_keeps_the_versions_of_its_formats() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    assert unpack(pack(state))._metadata == state._metadata


def test_what_is_unpacked_shares_no_memory() -> None:
    packed = pack({"a": torch.ones(3), "b": np.ones(3)})
    found = unpack(packed)
    packed[:] = 0
    assert found["a"].tolist() == found["b"].tolist() == [1, 1, 1]


def test_tensors_of_another_device_come_in_one_transfer() -> None:
    """On this device, which is the one that every machine has."""
    tensors = [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(3, dtype=torch.bfloat16)]
    tensors += [COMPLEX.conj(), COMPLEX.conj()[:1].imag, torch.empty(0)]
    pieces = [(64 * i, one.nbytes, one) for i, one in enumerate(tensors)]
    found = _fetch(pieces)
    for start, _, one in pieces:
        assert torch.equal(found[start], flat(one))


class Odd:
    pass


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"state": {0: {"foo": Odd()}}}, r"mine\.state\.0\.foo is a test_keeping\.Odd; a state_"),
        ({"a": [1, (2, {3})]}, r"mine\.a\.1\.1 is a builtins\.set"),
        ({(1, 2): 3}, r"mine is a dictionary with the key \(1, 2\); use text"),
        ({True: 3}, "the key True"),
        ({"a": torch.ones(2).to_sparse()}, r"mine\.a is a tensor without plain bytes"),
        ({"a": torch.ones(2, device="meta")}, r"mine\.a is a tensor without plain bytes"),
        ({"a": nn.LazyLinear(3).weight}, "run lazy modules once"),
        ({"a": np.array([Odd()])}, r"mine\.a is of NumPy's object"),
        ({"a": np.array(["text"])}, "of NumPy's <U4"),
        ({"a": np.longdouble(1)}, r"of NumPy's (longdouble|float128)"),
        ({"a": "\ud800"}, "valid Unicode"),
        ({2**70: 1}, "64 bits as keys"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_path(state: object, says: str) -> None:
    with pytest.raises(StateError, match=says):
        Keeper({"mine": Holder(state)})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(StateError, match="contains itself"):
        pack(state)


def test_a_tensor_without_memory_is_refused() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="memory was released"):
        pack({"a": tensor})


def test_objects_without_state_are_refused() -> None:
    with pytest.raises(StateError, match=r"rate is a float without state_dict\(\); keep objects"):
        Keeper({"rate": 0.1})


# ------------------------------------------------------------------------------------- damage


def test_every_damage_to_the_header_is_noticed() -> None:
    packed = pack({"a": [1, 2.0, "x"], "b": torch.ones(3)})
    header = int(np.flatnonzero(packed.view(np.uint8)[24:] == 0)[0]) + 24
    for place in range(header):
        for bit in range(8):
            damaged = packed.copy()
            damaged[place] ^= 1 << bit
            with pytest.raises(StateError, match=r"copy|version|not a kept state"):
                unpack(damaged)


def test_every_cut_is_noticed() -> None:
    packed = pack({"a": torch.arange(40)})
    for size in range(len(packed)):
        with pytest.raises(StateError):
            unpack(packed[:size])
    with pytest.raises(StateError, match="has come as"):
        unpack(np.append(packed, np.zeros(64, np.uint8)))


def with_header(node: bytes, body: int = 0) -> State:
    """What somebody would send who knows the format and means harm."""
    start = -(-(24 + len(node)) // 64) * 64
    lengths = struct.pack("<QQ", len(node), start + body)
    crc = zlib.crc32(node, zlib.crc32(lengths)).to_bytes(4, "little")
    head = b"PLK\x01" + crc + lengths + node
    return np.frombuffer(head.ljust(start + body, b"\0"), np.uint8)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_no_header_crashes(node: bytes, body: int) -> None:
    try:
        unpack(with_header(node, body))
    except StateError:
        pass


@pytest.mark.parametrize(
    "node",
    [
        [5, "float32", [2**40]],
        [5, "float32", [-1]],
        [5, "float32", [2**62, 2**62]],
        [5, "float32", [0, 2**63]],
        [5, "float32", "ab"],
        [5, "float32", [True]],
        [5, "qint8", [1]],
        [5, "nn", [1]],
        [5, "float32", [1], "nowhere"],
        [6, "O", [1]],
        [6, "|V0", [1]],
        [7, "<f8", b""],
        [7, "O", b"12345678"],
        [9, "nn"],
        [77],
        [],
        ["LIST"],
        [2, [0, 1]],
    ],
)
def test_headers_that_lie_are_refused(node: object) -> None:
    with pytest.raises(StateError, match="damaged"):
        unpack(with_header(msgspec.msgpack.encode(node), 64))


@pytest.mark.parametrize("wrong", [b"bytes", np.zeros(64, np.int8), np.zeros((8, 8), np.uint8)])
def test_only_arrays_of_bytes_are_states(wrong: Any) -> None:
    with pytest.raises(StateError, match="array of uint8"):
        unpack(wrong)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(StateError, match="damaged"):
        unpack(with_header(b"\x92\x00" * 100_000 + b"\xc0"))


# ----------------------------------------------------------------------------------- training


class Job:
    """Everything that a user has: dropout, batch norm, Adam, a scheduler, an average."""

    def __init__(self, width: int = 16, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
        )
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.schedule = lr_scheduler.MultiStepLR(self.adam, [3, 7], 0.5)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.keeper = Keeper(
            {
                "net": self.net,
                "adam": self.adam,
                "schedule": self.schedule,
                "average": self.average,
            }
        )

    def train(self, first: int, last: int) -> State:
        for step in range(first, last + 1):
            data = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            seed_torch(1, step, 0)
            self.adam.zero_grad()
            self.net(data).square().mean().backward()
            self.adam.step()
            self.schedule.step()
            self.average.update_parameters(self.net)
        return self.keeper.freeze()


@pytest.mark.parametrize("killed_after", [0, 1, 5, 9])
def test_training_goes_on_bit_for_bit_after_a_thaw(killed_after: int) -> None:
    undisturbed = Job().train(1, 10)
    frozen = Job().train(1, killed_after)
    replacement = Job(seed=5)
    replacement.train(1, 3)  # whatever it did before
    replacement.keeper.thaw(frozen)
    assert np.array_equal(replacement.keeper.freeze(), frozen)
    frozen[:] = 0
    assert np.array_equal(replacement.train(killed_after + 1, 10), undisturbed)


def test_a_frozen_state_does_not_change_with_training() -> None:
    job = Job()
    frozen = job.train(1, 2)
    before = frozen.copy()
    assert not np.array_equal(job.train(3, 3), before)
    assert np.array_equal(frozen, before)


def test_a_structure_that_changes_is_noticed() -> None:
    job = Job()
    fresh, fingerprinted = job.keeper.freeze(), job.keeper.fingerprint()
    assert len(job.train(1, 1)) > len(fresh)
    job.net[0].weight.data = torch.zeros_like(job.net[0].weight)
    found = unpack(job.keeper.freeze())
    assert found["net"]["0.weight"].eq(0).all()
    assert job.keeper.fingerprint() == fingerprinted
    job.keeper.thaw(fresh)
    assert not unpack(job.keeper.freeze())["adam"]["state"]


def test_fingerprints_are_of_structure() -> None:
    assert Job(seed=1).keeper.fingerprint() == Job(seed=2).keeper.fingerprint()
    assert Job(16).keeper.fingerprint() != Job(8).keeper.fingerprint()
    assert fingerprint({"a": 1}) == fingerprint({"a": 2}) != fingerprint({"b": 1})
    assert fingerprint([torch.ones(2)]) != fingerprint([torch.ones(2, dtype=torch.int32)])
    assert fingerprint([1]) != fingerprint([1.0]) != fingerprint([None])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    job = Job()
    before = job.train(1, 2)
    for other, says in (
        (Job(8).train(1, 1), "net cannot load .*size mismatch"),
        (Keeper({"net": Job().net}).freeze(), "a state of net does not fit net, adam"),
        (pack([1]), "something else"),
    ):
        with pytest.raises(StateError, match=f"(?s){says}"):
            job.keeper.thaw(other)
        assert np.array_equal(job.keeper.freeze(), before)


def test_a_state_that_would_be_rounded_is_refused() -> None:
    """Modules copy float64 into float32 without a word."""
    precise, other = nn.Linear(2, 2).double(), nn.Linear(2, 2)
    with pytest.raises(StateError, match="net, a Linear, has another state after"):
        Keeper({"net": other}).thaw(Keeper({"net": precise}).freeze())


def test_an_object_that_forgets_is_found_out() -> None:
    class Forgetful(Holder):
        def load_state_dict(self, state: object) -> None:
            pass

    keeper = Keeper({"good": Holder(1), "bad": Forgetful(1)})
    frozen = keeper.freeze()
    keeper.thaw(frozen)
    other = Keeper({"good": Holder(2), "bad": Forgetful(2)})
    with pytest.raises(StateError, match="bad, a Forgetful"):
        other.thaw(frozen)


# --------------------------------------------------------------------- digests, random numbers


@pytest.mark.parametrize("size", [0, 1, 63, 4095, 4096, 4097, 10_000])
def test_a_digest_is_of_every_byte(size: int) -> None:
    state = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    found = digest(state)
    shifted = np.concatenate([np.zeros(1, np.uint8), state])[1:]  # not aligned
    assert digest(shifted) == found
    for place in {0, size // 2, size - 1} if size else ():
        changed = state.copy()
        changed[place] ^= 1
        assert digest(changed) != found


def test_random_numbers_are_a_function_of_seed_step_and_rank() -> None:
    def drawn(*arguments: int) -> tuple[float, ...]:
        seed_torch(*arguments)
        return tuple(torch.rand(3).tolist())

    places = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (2**64 - 1, 2**40, 1000)]
    first = [drawn(*place) for place in places]
    assert [drawn(*place) for place in places] == first
    assert len(set(first)) == len(places)
