"""TorchRec's objects, accepted and returned, without importing TorchRec.

Whoever passes an object of TorchRec in has imported it; otherwise there is nothing to recognise.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from planaria.errors import ArgumentError
from planaria.torch.jagged import JaggedTensor
from planaria.torch.keyed import KeyedTensor
from planaria.torch.keyed_jagged import KeyedJaggedTensor

THEIRS = "torchrec.sparse.jagged_tensor"


def is_keyed(value: Any) -> bool:
    """Whether it is a KeyedJaggedTensor, ours or TorchRec's."""
    if isinstance(value, KeyedJaggedTensor):
        return True
    theirs = sys.modules.get("torchrec.sparse.jagged_tensor")
    return theirs is not None and isinstance(value, theirs.KeyedJaggedTensor)


def as_keyed(features: Any) -> tuple[KeyedJaggedTensor, bool]:
    """The features as ours, and whether they came from TorchRec. The tensors are shared."""
    if isinstance(features, KeyedJaggedTensor):
        return features, False
    theirs = sys.modules.get(THEIRS)
    if theirs is None or not isinstance(features, theirs.KeyedJaggedTensor):
        raise ArgumentError(
            "sparse features must be a KeyedJaggedTensor, of planaria.torch or of torchrec, "
            f"not {type(features).__name__}"
        )
    if features.variable_stride_per_key():
        raise ArgumentError(
            f"the keys have different numbers of samples, {features.stride_per_key()}; "
            "pass the batch before samples are deduplicated, with one number of samples"
        )
    # Lengths alone: where there are no keys, TorchRec's offsets are empty and lack the 0.
    keyed = KeyedJaggedTensor(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        features.lengths(),
        stride=features.stride(),
    )
    return keyed, True


def like(result: KeyedTensor | Mapping[str, JaggedTensor], came_from_torchrec: bool) -> Any:
    """What a collection returns: TorchRec's classes to whoever passed those in, else ours."""
    if not came_from_torchrec:
        return result
    theirs = sys.modules[THEIRS]
    if isinstance(result, KeyedTensor):
        return theirs.KeyedTensor(
            result.keys(), result.length_per_key(), result.values(), result.key_dim()
        )
    return {key: _their_jagged(theirs, jagged) for key, jagged in result.items()}


def _their_jagged(theirs: ModuleType, jagged: JaggedTensor) -> Any:
    return theirs.JaggedTensor(
        jagged.values(),
        jagged.weights_or_none(),
        jagged.lengths_or_none(),
        jagged.offsets_or_none(),
    )
