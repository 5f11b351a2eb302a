"""Pooled embeddings of a batch: dense columns by key, in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch

from planaria.errors import ArgumentError
from planaria.torch.keyed_jagged import check_keys, index_of


class KeyedTensor:
    """TorchRec's KeyedTensor: values [B, sum of length_per_key], the keys side by side."""

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: torch.Tensor,
        key_dim: int = 1,
    ) -> None:
        check_keys(keys)
        if len(keys) != len(length_per_key):
            raise ArgumentError(f"{len(keys)} keys need as many lengths; got {len(length_per_key)}")
        if not 0 <= key_dim < values.ndim:
            raise ArgumentError(f"values of shape {list(values.shape)} have no dimension {key_dim}")
        if sum(length_per_key) != values.shape[key_dim] or min(length_per_key, default=0) < 0:
            raise ArgumentError(
                f"length_per_key {list(length_per_key)} must sum to the "
                f"{values.shape[key_dim]} columns that values have"
            )
        self._keys, self._length_per_key = list(keys), list(length_per_key)
        self._offset_per_key = list(accumulate(length_per_key, initial=0))
        self._index_per_key = {key: index for index, key in enumerate(keys)}
        self._values, self._key_dim = values, key_dim

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[torch.Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        if key_dim != cat_dim:
            raise ArgumentError(
                f"key_dim {key_dim} and cat_dim {cat_dim} must be equal: "
                "the keys stand side by side in one dimension"
            )
        if not tensors:
            raise ArgumentError("from_tensor_list needs one tensor or more")
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=key_dim), key_dim)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def key_dim(self) -> int:
        return self._key_dim

    def device(self) -> torch.device:
        return self._values.device

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where the columns of each key begin, and where the last one's end."""
        return self._offset_per_key

    def __getitem__(self, key: str) -> torch.Tensor:
        index = index_of(key, self._index_per_key)
        start, length = self._offset_per_key[index], self._length_per_key[index]
        return self._values.narrow(self._key_dim, start, length)

    def to_dict(self) -> dict[str, torch.Tensor]:
        columns = self._values.split(self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, columns, strict=True))

    @staticmethod
    def regroup(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
    ) -> list[torch.Tensor]:
        """One tensor per group: the columns of its keys, wherever they are, side by side."""
        key_dims = {kt._key_dim for kt in keyed_tensors}
        if len(key_dims) != 1:
            raise ArgumentError(
                "regroup needs one KeyedTensor or more, all with the same key_dim; "
                f"got {sorted(key_dims)}"
            )
        check_keys([key for kt in keyed_tensors for key in kt._keys])
        columns = {key: part for kt in keyed_tensors for key, part in kt.to_dict().items()}
        for key in chain.from_iterable(groups):
            if key not in columns:
                raise ArgumentError(f"there is no key {key!r}; the keys are {', '.join(columns)}")
        if not all(groups):
            raise ArgumentError("a group needs one key or more")
        (dim,) = key_dims
        return [torch.cat([columns[key] for key in group], dim=dim) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        if len(groups) != len(keys):
            raise ArgumentError(f"{len(groups)} groups need as many keys; got {len(keys)}")
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)

    def __str__(self) -> str:
        lines = [f'    "{key}": {part.tolist()}' for key, part in self.to_dict().items()]
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"
