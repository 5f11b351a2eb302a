"""What a script kept, for whoever has no Planaria: states of torch's own kinds, and leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from planaria.torch.frozen import State, unpack


def kept_states(state: State) -> dict[str, Any]:
    """By name, what each object's state_dict was, on the CPU, as torch.load takes it with
    weights_only: arrays and numbers of NumPy are torch's and Python's, a Counter is a dict.
    """
    found: dict[str, Any] = _plain(unpack(state, on_cpu=True))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _plain(one) for key, one in value.items()}
        if not isinstance(value, OrderedDict):
            return items
        ordered = OrderedDict(items)
        if hasattr(value, "_metadata"):  # the versions that modules look for
            ordered._metadata = _plain(value._metadata)  # type: ignore[attr-defined]
        return ordered
    if type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    if isinstance(value, np.ndarray):
        own = np.array(value, value.dtype.newbyteorder("="))
        return torch.from_numpy(own.view(np.int64) if own.dtype.kind in "mM" else own)
    if isinstance(value, np.generic):
        return value.view(np.int64).item() if value.dtype.kind in "mM" else value.item()
    return value


def leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """What is no container, with its dotted key: a tensor, or anything else."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from leaves(one, f"{key}.{name}")
    elif type(value) in (list, tuple):
        for number, one in enumerate(value):
            yield from leaves(one, f"{key}.{number}")
    else:
        yield key, value
