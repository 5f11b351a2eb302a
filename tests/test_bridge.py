"""TorchRec's objects come in and go out, and TorchRec is never imported for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planaria.errors import ArgumentError
from planaria.torch import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from planaria.torch.bridge import THEIRS, as_keyed, like

pytestmark = pytest.mark.torch


class TheirKeyedJagged:
    """As much of TorchRec's class as is asked for, and not one of ours."""

    def __init__(self, keys: list[str], lengths: list[int], stride: int | None) -> None:
        self._keys, self._stride = keys, stride
        self._lengths = torch.tensor(lengths)
        self._values = torch.arange(sum(lengths))

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def weights_or_none(self) -> None:
        return None

    def lengths(self) -> torch.Tensor:
        return self._lengths

    def stride(self) -> int | None:
        return self._stride

    def stride_per_key(self) -> list[int]:
        return [2, 1]

    def variable_stride_per_key(self) -> bool:
        return self._stride is None


class Called:
    """Remembers what it was made of."""

    def __init__(self, *given: Any) -> None:
        self.given = given


@pytest.fixture
def torchrec(monkeypatch: pytest.MonkeyPatch) -> Any:
    theirs = SimpleNamespace(
        KeyedJaggedTensor=TheirKeyedJagged,
        KeyedTensor=type("TheirKeyed", (Called,), {}),
        JaggedTensor=type("TheirJagged", (Called,), {}),
    )
    monkeypatch.setitem(sys.modules, THEIRS, theirs)
    return theirs


def test_ours_come_in_as_they_are() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    assert as_keyed(kjt) == (kjt, False)
    result = KeyedTensor(["a"], [2], torch.zeros(2, 2))
    assert like(result, False) is result


def test_theirs_come_in_and_go_out(torchrec: Any) -> None:
    theirs = TheirKeyedJagged(["a", "b"], [1, 2, 0, 3], stride=2)
    keyed, came_from_torchrec = as_keyed(theirs)
    assert came_from_torchrec
    assert keyed.values() is theirs.values()
    assert keyed["b"].lengths().tolist() == [0, 3]
    out = like(KeyedTensor(["a"], [2], torch.zeros(2, 2)), came_from_torchrec)
    assert type(out) is torchrec.KeyedTensor
    assert out.given[:2] == (["a"], [2])
    jagged = JaggedTensor(torch.zeros(3, 2), lengths=torch.tensor([1, 2]))
    (one,) = like({"a": jagged}, came_from_torchrec).values()
    assert type(one) is torchrec.JaggedTensor
    assert one.given == (jagged.values(), None, jagged.lengths(), None)


@pytest.mark.usefixtures("torchrec")
def test_theirs_are_checked_too() -> None:
    with pytest.raises(ArgumentError, match=r"different numbers of samples, \[2, 1\]"):
        as_keyed(TheirKeyedJagged(["a", "b"], [1, 2, 3], stride=None))
    with pytest.raises(ArgumentError, match="'a' stands there twice"):
        as_keyed(TheirKeyedJagged(["a", "a"], [1, 2], stride=1))


@pytest.mark.parametrize("features", [{"a": torch.arange(3)}, torch.arange(3), None])
def test_anything_else_gets_a_sentence(features: Any) -> None:
    with pytest.raises(ArgumentError, match="must be a KeyedJaggedTensor"):
        as_keyed(features)


def test_torchrec_is_not_imported_unless_the_user_has() -> None:
    script = """
import sys, torch
from planaria.models import DLRM
from planaria.torch import KeyedJaggedTensor
from planaria.torch.bridge import as_keyed
as_keyed(KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([3])))
assert not any(name.partition(".")[0] == "torchrec" for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
