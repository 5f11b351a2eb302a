"""The sparse features of a batch: for each key, one slice of ids per sample.

keys      ["film", "genre"]
lengths   [2, 0, 1, 1, 1, 3]         "film" of samples 0, 1, 2, then "genre" of them
values    [v0 v1 | | v2 | v3 | v4 | v5 v6 v7]
stride    3                          samples of the batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch

from planaria.errors import ArgumentError
from planaria.torch.jagged import (
    JaggedTensor,
    Slices,
    check_slices,
    described,
    nothing_like,
)


class KeyedJaggedTensor(Slices):
    """TorchRec's KeyedJaggedTensor, with the same number of samples for every key."""

    _keys: list[str]
    _index_per_key: dict[str, int]
    _stride: int
    _offset_per_key: list[int] | None

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        check_keys(keys)
        slices = check_slices(values, weights, lengths, offsets, "a keyed jagged tensor")
        stride = _stride_of(len(keys), slices, stride)
        self._set(keys, values, weights, lengths, offsets, stride)

    def _set(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor | None,
        offsets: torch.Tensor | None,
        stride: int,
    ) -> None:
        self._keys, self._stride, self._offset_per_key = list(keys), stride, None
        self._index_per_key = {key: index for index, key in enumerate(keys)}
        self._values, self._weights = values, weights
        self._lengths, self._offsets = lengths, offsets

    @classmethod
    def _cut(cls, *parts: Any) -> Self:
        """Of parts that are known to fit together: those of `_set`."""
        cut = cls.__new__(cls)
        cut._set(*parts)
        return cut

    # ------------------------------------------------------------------- other ways to make one

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One JaggedTensor per key, all of the same number of samples."""
        if not jt_dict:
            return KeyedJaggedTensor.empty()
        check_keys(list(jt_dict))
        samples = {key: len(jt.lengths()) for key, jt in jt_dict.items()}
        stride = _one_stride(samples)
        weights = [jt.weights_or_none() for jt in jt_dict.values()]
        return KeyedJaggedTensor._cut(
            list(jt_dict),
            torch.cat([jt.values() for jt in jt_dict.values()]),
            _joined_weights(list(jt_dict), weights),
            torch.cat([jt.lengths() for jt in jt_dict.values()]),
            None,
            stride,
        ).sync()

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all, side by side, for the same samples."""
        if not kjt_list:
            raise ArgumentError("concat needs one KeyedJaggedTensor or more")
        keys = [key for kjt in kjt_list for key in kjt._keys]
        check_keys(keys)
        stride = _one_stride({", ".join(kjt._keys): kjt._stride for kjt in kjt_list})
        weights = [kjt._weights for kjt in kjt_list]
        return KeyedJaggedTensor._cut(
            keys,
            torch.cat([kjt._values for kjt in kjt_list]),
            _joined_weights([", ".join(kjt._keys) for kjt in kjt_list], weights),
            torch.cat([kjt.lengths() for kjt in kjt_list]),
            None,
            stride,
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        nothing = JaggedTensor.empty(
            is_weighted, device, values_dtype, weights_dtype, lengths_dtype
        )
        return KeyedJaggedTensor._cut(
            [], nothing.values(), nothing.weights_or_none(), nothing.lengths(), None, 0
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensor:
        """Without keys; or, on a device that is named, room for the same, to be copied into."""
        if device is None:
            return KeyedJaggedTensor._cut([], *nothing_like(kjt), None, kjt._stride)
        values, weights, lengths, offsets = kjt._room(device)
        assert values is not None
        return kjt._with(weights, values, lengths, offsets)

    # ------------------------------------------------------------------------------ what it holds

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        """The number of samples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """Never: a sample may have no values of a key, but it is there."""
        return False

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """What only keys with strides of their own have."""
        return []

    def inverse_indices_or_none(self) -> tuple[list[str], torch.Tensor] | None:
        """Likewise."""
        return None

    def index_per_key(self) -> dict[str, int]:
        return self._index_per_key

    def offset_per_key(self) -> list[int]:
        """Where the values of each key begin, and where the last one's end."""
        if self._offset_per_key is None:
            if self._stride:
                self._offset_per_key = self.offsets()[:: self._stride].tolist()
            else:
                self._offset_per_key = [0] * (len(self._keys) + 1)
        return self._offset_per_key

    def length_per_key(self) -> list[int]:
        """The number of values of each key."""
        return [end - start for start, end in pairwise(self.offset_per_key())]

    def sync(self) -> Self:
        """Brings offset_per_key to the host, so that later calls need not wait for the device."""
        self.offset_per_key()
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        return self._jagged(index_of(key, self._index_per_key))

    def to_dict(self) -> dict[str, JaggedTensor]:
        return {key: self._jagged(index) for index, key in enumerate(self._keys)}

    def _jagged(self, index: int) -> JaggedTensor:
        start, end = self.offset_per_key()[index : index + 2]
        samples = slice(index * self._stride, (index + 1) * self._stride)
        weights = None if self._weights is None else self._weights[start:end]
        return JaggedTensor._cut(self._values[start:end], weights, self.lengths()[samples])

    # ------------------------------------------------------------------------- others made of it

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """The first segments[0] keys, then the next segments[1], ..."""
        if any(segment < 0 for segment in segments) or sum(segments) > len(self._keys):
            raise ArgumentError(
                f"segments must be 0 or more and sum to {len(self._keys)} keys at most, "
                f"not {list(segments)}"
            )
        return [
            self._range(first, first + segment)
            for first, segment in zip(accumulate(segments, initial=0), segments, strict=False)
        ]

    def _range(self, first: int, last: int) -> KeyedJaggedTensor:
        start, end = self.offset_per_key()[first], self.offset_per_key()[last]
        return KeyedJaggedTensor._cut(
            self._keys[first:last],
            self._values[start:end],
            None if self._weights is None else self._weights[start:end],
            self.lengths()[first * self._stride : last * self._stride],
            None,
            self._stride,
        )

    def permute(
        self, indices: Sequence[int], indices_tensor: torch.Tensor | None = None
    ) -> KeyedJaggedTensor:
        """The keys at these indices, in this order. TorchRec's callers may hand over the same
        indices as a tensor, to spare a GPU the transfer; the list says all."""
        wrong = [index for index in indices if not 0 <= index < len(self._keys)]
        if wrong:
            raise ArgumentError(f"there is no key number {wrong[0]} among {len(self._keys)} keys")
        check_keys([self._keys[index] for index in indices])
        if not indices:
            return self._range(0, 0)
        parts = [self._jagged(index) for index in indices]
        weights = [part.weights_or_none() for part in parts]
        return KeyedJaggedTensor._cut(
            [self._keys[index] for index in indices],
            torch.cat([part.values() for part in parts]),
            None if self._weights is None else torch.cat(weights),
            torch.cat([part.lengths() for part in parts]),
            None,
            self._stride,
        )

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Lengths have one dimension in any case."""
        return self._with(self._weights, self._values, self.lengths(), None)

    def to(
        self,
        device: torch.device,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        """On another device; dtype is that of the weights, for ids stay ids."""
        weights = self._weights
        if weights is not None:
            weights = weights.to(device, dtype or weights.dtype, non_blocking=non_blocking)
        return self._with(
            weights,
            *(
                None if part is None else part.to(device, non_blocking=non_blocking)
                for part in (self._values, self._lengths, self._offsets)
            ),
        )

    def pin_memory(self) -> KeyedJaggedTensor:
        return self._with(
            *(
                None if part is None else part.pin_memory()
                for part in (self._weights, self._values, self._lengths, self._offsets)
            )
        )

    def _with(
        self,
        weights: torch.Tensor | None,
        values: torch.Tensor,
        lengths: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> KeyedJaggedTensor:
        other = KeyedJaggedTensor._cut(self._keys, values, weights, lengths, offsets, self._stride)
        other._offset_per_key = self._offset_per_key
        return other

    def __str__(self) -> str:
        keys = []
        for key, jt in self.to_dict().items():
            content = ",\n        ".join(described(jt))
            if self._weights is not None:
                content = f"{{\n        {content}\n    }}"
            keys.append(f'    "{key}": {content}')
        return "KeyedJaggedTensor({\n" + ",\n".join(keys) + "\n})\n"


# ----------------------------------------------------------------------- what is refused


def check_keys(keys: Sequence[str]) -> None:
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise ArgumentError(f"keys must be a list of names, not {keys!r}")
    if len(set(keys)) < len(keys):
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise ArgumentError(f"the key {twice!r} stands there twice; keys must differ")


def index_of(key: str, index_per_key: Mapping[str, int]) -> int:
    if key not in index_per_key:
        raise ArgumentError(f"there is no key {key!r}; the keys are {', '.join(index_per_key)}")
    return index_per_key[key]


def _stride_of(keys: int, slices: int, stride: int | None) -> int:
    if stride is None:
        if keys == 0:
            stride = 0
        elif slices % keys:
            raise ArgumentError(
                f"there are {slices} lengths for {keys} keys; each key needs as many as the others"
            )
        else:
            stride = slices // keys
    if slices != keys * stride:
        raise ArgumentError(
            f"{keys} keys with {stride} samples each need {keys * stride} lengths; got {slices}"
        )
    return stride


def _one_stride(samples: Mapping[str, int]) -> int:
    if len(set(samples.values())) > 1:
        each = "; ".join(f"{key}: {count}" for key, count in samples.items())
        raise ArgumentError(f"all keys need the same number of samples, with empty slices; {each}")
    return next(iter(samples.values()))


def _joined_weights(
    keys: Sequence[str], weights: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    without = [key for key, one in zip(keys, weights, strict=True) if one is None]
    if len(without) == len(keys):
        return None
    if without:
        raise ArgumentError(f"all keys have weights or none has; {without[0]!r} has none")
    return torch.cat(list(weights))
