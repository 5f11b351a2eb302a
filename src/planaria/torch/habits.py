"""Which tensors of a batch an EmbeddingBag is called with: seen in one step, expected in the next.

A KeyedJaggedTensor says by its keys what it is for; a tensor of ids does not. But a loop does the
same with every batch. So where a call's tensors come from a batch, whole or as a view such as
ids[:, 3], the same parts of the next batch are prepared ahead. A guess that is wrong costs a lookup
and nothing else: what forward is called with decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch

from planaria.errors import ArgumentError, RowError
from planaria.torch.features import FeatureTables
from planaria.torch.sparse import Prepared, SparseStep

MOST_MISSES = 3  # after which a habit is none

Path: TypeAlias = tuple[Any, ...]
"""Where something is in a batch: keys, numbers and names of fields."""
Tensors: TypeAlias = Mapping[Path, torch.Tensor]
"""Those of a batch."""


class Shape(NamedTuple):
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        return cls(tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def extent(self) -> int:
        """Elements from the first to the last of them, and what lies between."""
        if 0 in self.sizes:
            return 0
        steps = zip(self.sizes, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)


class Part(NamedTuple):
    """A tensor of a batch, or a view of one."""

    path: Path
    whole: Shape
    part: Shape
    offset: int  # where the view begins in it, in elements

    @classmethod
    def find(cls, tensor: torch.Tensor, batch: Tensors) -> Part | None:
        """It must lie within the other one: tensors of a batch may share memory by chance."""
        storage, part = tensor.untyped_storage().data_ptr(), Shape.of(tensor)
        for path, own in batch.items():
            if own.dtype == tensor.dtype and own.untyped_storage().data_ptr() == storage:
                offset, whole = tensor.storage_offset() - own.storage_offset(), Shape.of(own)
                if 0 <= offset <= offset + part.extent <= whole.extent:
                    return cls(path, whole, part, offset)
        return None

    def of(self, batch: Tensors) -> torch.Tensor | None:
        """The same of another batch; of a view only if its tensor has the same shape."""
        own = batch.get(self.path)
        if own is None or (self.part == self.whole and not self.offset):
            return own
        if Shape.of(own) != self.whole:
            return None
        return own.as_strided(*self.part, own.storage_offset() + self.offset)


class Call(NamedTuple):
    tables: FeatureTables
    arguments: tuple[Part | None, ...]


class Guess(NamedTuple):
    call: Call
    prepared: Prepared


class Habits:
    """The calls of one loop."""

    def __init__(self) -> None:
        self._calls: dict[Call, None] = {}  # in the order in which they were first seen
        self._misses: Counter[Call] = Counter()

    def guess(self, batch: Tensors) -> list[Guess]:
        """What the calls will need of this batch, if they are like those of before."""
        found = []
        for call in self._calls:
            sources = [None if part is None else part.of(batch) for part in call.arguments]
            if any(part and one is None for part, one in zip(call.arguments, sources, strict=True)):
                continue
            # Where ids are wrong, and forward is called with them, it will say so.
            with suppress(ArgumentError, RowError):
                found.append(Guess(call, call.tables.prepare_from(*sources)))
        return found

    def learn(self, step: SparseStep, batch: Tensors, guesses: Sequence[Guess]) -> None:
        """Takes note of the calls of a step that is over, and of what it was guessed to need."""
        for call, prepared in guesses:
            if prepared not in step.wanted:
                self._misses[call] += 1
                self._calls.pop(call, None)
        seen = [_call_of(prepared, batch) for prepared in step.unforeseen]
        for own in seen:
            if own is not None and self._misses[own] < MOST_MISSES:
                self._calls[own] = None


def _call_of(prepared: Prepared, batch: Tensors) -> Call | None:
    """None if an argument is not of the batch."""
    arguments: list[Part | None] = []
    for source in prepared.sources:
        part = Part.find(source, batch) if isinstance(source, torch.Tensor) else None
        if part is None and source is not None:
            return None
        arguments.append(part)
    assert isinstance(prepared.collection, FeatureTables)
    return Call(prepared.collection, tuple(arguments))
