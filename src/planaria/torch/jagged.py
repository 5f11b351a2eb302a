"""Values in slices of different lengths: one feature of a batch, or its embeddings.

A slice is one sample's. Lengths [B] and offsets [B + 1] say the same; whichever was not given is
computed when it is first asked for. What a user passes in is checked; what is cut out of something
that was checked is not checked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from planaria.errors import ArgumentError


class Slices:
    """What JaggedTensor and KeyedJaggedTensor have in common."""

    _values: torch.Tensor  # [N, ...]
    _weights: torch.Tensor | None  # [N, ...]
    _lengths: torch.Tensor | None  # [slices]
    _offsets: torch.Tensor | None  # [slices + 1], from 0 to N

    def values(self) -> torch.Tensor:
        return self._values

    def weights(self) -> torch.Tensor:
        if self._weights is None:
            raise ArgumentError(
                f"this {type(self).__name__} has no weights; make it with weights=..., "
                "or ask weights_or_none()"
            )
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def lengths(self) -> torch.Tensor:
        if self._lengths is None:
            self._lengths = torch.diff(self.offsets())
        return self._lengths

    def lengths_or_none(self) -> torch.Tensor | None:
        """The lengths if they were given or computed before."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        if self._offsets is None:
            lengths = self.lengths()
            self._offsets = lengths.new_zeros(len(lengths) + 1)
            torch.cumsum(lengths, 0, dtype=lengths.dtype, out=self._offsets[1:])
        return self._offsets

    def offsets_or_none(self) -> torch.Tensor | None:
        """The offsets if they were given or computed before."""
        return self._offsets

    def device(self) -> torch.device:
        return self._values.device

    def size_in_bytes(self) -> int:
        return sum(part.nbytes for part in self._held())

    def record_stream(self, stream: Any) -> None:
        """Its memory is in use on a device's stream; what is on the CPU is on none."""
        for part in self._held():
            if not part.is_cpu:
                part.record_stream(stream)

    def _held(self) -> list[torch.Tensor]:
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return [part for part in parts if part is not None]

    def _room(self, device: torch.device) -> list[torch.Tensor | None]:
        """Memory for another's values, weights, lengths and offsets, with anything in it."""
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return [None if one is None else torch.empty_like(one, device=device) for one in parts]


def nothing_like(
    slices: Slices,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """No values, weights and lengths, of the same types and on the same device."""
    weights = slices.weights_or_none()
    return (
        slices.values().new_empty(0),
        None if weights is None else weights.new_empty(0),
        slices.lengths().new_empty(0),
    )


class JaggedTensor(Slices):
    """TorchRec's JaggedTensor: values [N] or [N, dim] in B slices, perhaps with weights [N]."""

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        check_slices(values, weights, lengths, offsets)
        self._values, self._weights = values, weights
        self._lengths, self._offsets = lengths, offsets

    @classmethod
    def _cut(
        cls,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor | None,
        offsets: torch.Tensor | None = None,
    ) -> Self:
        """Of parts that are known to fit together."""
        cut = cls.__new__(cls)
        cut._values, cut._weights = values, weights
        cut._lengths, cut._offsets = lengths, offsets
        return cut

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        return JaggedTensor._cut(
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | None = None) -> JaggedTensor:
        """Without slices; or, on a device that is named, room for as many, to be copied into."""
        if device is not None:
            values, *others = jt._room(device)
            assert values is not None
            return JaggedTensor._cut(values, *others)
        return JaggedTensor._cut(*nothing_like(jt))

    @staticmethod
    def from_dense(
        values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None
    ) -> JaggedTensor:
        """One tensor per slice."""
        if not values:
            raise ArgumentError("from_dense needs a tensor or more; JaggedTensor.empty() has none")
        lengths = [len(one) for one in values]
        if weights is not None and [len(one) for one in weights] != lengths:
            raise ArgumentError(
                f"weights must be as long as the values, slice by slice: expected {lengths}, "
                f"got {[len(one) for one in weights]}"
            )
        return JaggedTensor._cut(
            torch.cat(list(values)),
            None if weights is None else torch.cat(list(weights)),
            torch.tensor(lengths, dtype=torch.int32, device=values[0].device),
        )

    @staticmethod
    def from_dense_lengths(
        values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> JaggedTensor:
        """The first lengths[i] columns of row i of values [B, longest]."""
        check_integers("lengths", lengths)
        if values.ndim < 2 or len(lengths) != len(values):
            raise ArgumentError(
                f"values must be [B, longest] and lengths [B], not {list(values.shape)} "
                f"and {list(lengths.shape)}"
            )
        if weights is not None and weights.shape[:2] != values.shape[:2]:
            raise ArgumentError(
                f"weights must have the shape of values, {list(values.shape)}, "
                f"not {list(weights.shape)}"
            )
        longest = values.shape[1]
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= longest:
            raise ArgumentError(
                f"lengths must be from 0 to {longest}, the columns of values; "
                f"got {int(lengths.min())} to {int(lengths.max())}"
            )
        taken = torch.arange(longest, device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor._cut(
            values[taken], None if weights is None else weights[taken], lengths
        )

    def to_dense(self) -> list[torch.Tensor]:
        """One tensor per slice."""
        return self._sliced(self._values)

    def to_dense_weights(self) -> list[torch.Tensor] | None:
        return None if self._weights is None else self._sliced(self._weights)

    def _sliced(self, content: torch.Tensor) -> list[torch.Tensor]:
        return list(content.split(self.lengths().tolist()))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor:
        """[B, desired_length, ...]: slices are cut off there, or filled up with padding_value.
        Without desired_length, the longest slice says it. Gradients flow back to the values."""
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor | None:
        if self._weights is None:
            return None
        return self._padded(self._weights, desired_length, padding_value)

    def _padded(
        self, content: torch.Tensor, desired_length: int | None, padding_value: float
    ) -> torch.Tensor:
        lengths = self.lengths()
        if desired_length is None:
            desired_length = int(lengths.max()) if len(lengths) else 0
        column = torch.arange(desired_length, device=content.device)
        taken = column < lengths.unsqueeze(1)  # [B, desired_length]
        source = self.offsets()[:-1].unsqueeze(1) + column
        shape = (len(lengths), desired_length, *content.shape[1:])
        padded = content.new_full(shape, padding_value)
        return padded.index_put((taken,), content[source[taken]])

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        return JaggedTensor._cut(
            *(
                None if part is None else part.to(device, non_blocking=non_blocking)
                for part in (self._values, self._weights, self._lengths, self._offsets)
            )
        )

    def __str__(self) -> str:
        return "JaggedTensor({\n    " + ",\n    ".join(described(self)) + "\n})\n"


def described(jagged: JaggedTensor) -> list[str]:
    """The slices as nested lists; one line, or with weights two."""
    values = [one.tolist() for one in jagged.to_dense()]
    weights = jagged.to_dense_weights()
    if weights is None:
        return [str(values)]
    return [f'"values": {values}', f'"weights": {[one.tolist() for one in weights]}']


# ----------------------------------------------------------------------- what is refused


def check_slices(
    values: Any, weights: Any, lengths: Any, offsets: Any, of: str = "a jagged tensor"
) -> int:
    """How many slices there are, if they cover the values in order and without a gap."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0:
        raise ArgumentError(f"values must be a tensor of one dimension or more, not {values!r}")
    if lengths is None and offsets is None:
        raise ArgumentError(f"{of} needs lengths or offsets; pass one of them")
    if weights is not None and (not isinstance(weights, torch.Tensor) or weights.ndim == 0):
        raise ArgumentError(f"weights must be a tensor of one dimension or more, not {weights!r}")
    if weights is not None and len(weights) != len(values):
        raise ArgumentError(f"{len(values)} values need as many weights; got {len(weights)}")
    if lengths is not None:
        _check_lengths(lengths, len(values))
    if offsets is not None:
        _check_offsets(offsets, len(values))
    if lengths is not None and offsets is not None:
        if len(offsets) != len(lengths) + 1 or not bool((torch.diff(offsets) == lengths).all()):
            raise ArgumentError("lengths and offsets say different things; pass one of them")
    return len(offsets) - 1 if lengths is None else len(lengths)


def check_integers(name: str, given: Any) -> None:
    if not isinstance(given, torch.Tensor) or given.ndim != 1:
        shape = list(given.shape) if isinstance(given, torch.Tensor) else repr(given)
        raise ArgumentError(f"{name} must be a tensor of one dimension, not {shape}")
    if given.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"{name} must be int32 or int64, not {given.dtype}")


def _check_lengths(lengths: Any, count: int) -> None:
    check_integers("lengths", lengths)
    here = lengths.detach().to("cpu").numpy()
    least, total = here.min(initial=0), here.sum()
    if least < 0:
        at = int(torch.nonzero(lengths < 0)[0])
        raise ArgumentError(f"lengths[{at}] is {int(lengths[at])}; a length is 0 or more")
    if total != count:
        raise ArgumentError(
            f"lengths sum to {total}, but there are {count} values; they must be equal"
        )


def _check_offsets(offsets: Any, count: int) -> None:
    check_integers("offsets", offsets)
    if not len(offsets):
        raise ArgumentError("offsets must begin with 0; they are empty")
    steps = torch.diff(offsets, prepend=offsets[:1])
    first, last, least = torch.stack([offsets[0], offsets[-1], steps.min()]).tolist()
    if least < 0:
        at = int(torch.nonzero(steps < 0)[0])
        raise ArgumentError(
            f"offsets[{at}] is {int(offsets[at])}, less than {int(offsets[at - 1])} before it; "
            "offsets never fall"
        )
    if (first, last) != (0, count):
        raise ArgumentError(
            f"offsets must go from 0 to {count}, the number of values, not from {first} to {last}"
        )
