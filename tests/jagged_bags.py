"""Random sparse features as nested lists: the plain-Python twin of a KeyedJaggedTensor."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st

Bags: TypeAlias = dict[str, list[list[int]]]
"""By key, then by sample."""


@st.composite
def bags(draw: st.DrawFn, *, min_keys: int = 0, min_samples: int = 0) -> Bags:
    keys = draw(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=min_keys, max_size=4))
    samples = draw(st.integers(min_samples, 4))
    ids = st.lists(st.integers(0, 9), max_size=3)
    return {key: draw(st.lists(ids, min_size=samples, max_size=samples)) for key in keys}


def samples_of(content: Bags) -> int:
    return len(next(iter(content.values()), []))


def parts(content: Bags, *, weighted: bool = False, by_offsets: bool = False) -> dict[str, Any]:
    """The arguments of a KeyedJaggedTensor, ours or TorchRec's."""
    lengths = torch.tensor(
        [len(bag) for slices in content.values() for bag in slices], dtype=torch.int32
    )
    values = torch.tensor(
        [one for slices in content.values() for bag in slices for one in bag], dtype=torch.int64
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
    return {
        "keys": list(content),
        "values": values,
        "weights": weights_of(values) if weighted else None,
        **({"offsets": offsets} if by_offsets else {"lengths": lengths}),
        "stride": samples_of(content),
    }


def weights_of(values: torch.Tensor) -> torch.Tensor:
    """Each value's weight, which tells whose it is."""
    return torch.arange(len(values)) + values / 10
