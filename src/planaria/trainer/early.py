"""Rows that came before their time, and what completes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planaria import kernels
from planaria.kernels.types import Floats, Mask
from planaria.wire.messages import Answer, Early

Part = tuple[int, int]
"""A lookup of this trainer: its step, and which one of that step it is."""
Shapes = Sequence[tuple[int, int]]
"""Per arena: of the rows that were asked for."""


@dataclass(frozen=True)
class _Begun:
    """Per arena: which rows are there, and room for all."""

    which: list[Mask]
    weights: list[Floats]


class EarlyParts:
    """By lookup and place, in this view: in another one the rows may be others."""

    def __init__(self) -> None:
        self._begun: dict[Part, dict[int, _Begun]] = {}

    def clear(self) -> None:
        self._begun.clear()

    def forget(self, part: Part) -> None:
        self._begun.pop(part, None)

    def put(self, part: Part, place: int, early: Early, wanted: Shapes) -> None:
        which = _fitting(early, wanted)
        if which is not None:
            weights = [np.empty(shape, np.float32) for shape in wanted]
            _fill(weights, which, early.weights)
            self._begun.setdefault(part, {})[place] = _Begun(which, weights)

    def complete(
        self, part: Part, place: int, answer: Answer, wanted: Shapes
    ) -> list[Floats] | None:
        """All rows; None if some are neither here nor in the answer."""
        begun, which = self._begun.get(part, {}).get(place), _fitting(answer, wanted)
        if begun is None or which is None:
            return None
        if not all((a | b).all() for a, b in zip(begun.which, which, strict=True)):
            return None
        _fill(begun.weights, which, answer.weights)
        return begun.weights


def _fitting(message: Answer | Early, wanted: Shapes) -> list[Mask] | None:
    """Which rows a message has; None unless it has these."""
    if [len(bits) for bits in message.which] != [-(-count // 8) for count, _ in wanted]:
        return None
    which = [
        np.unpackbits(bits, count=count).view(np.bool_)
        for bits, (count, _) in zip(message.which, wanted, strict=True)
    ]
    shapes = [(np.count_nonzero(mask), dim) for mask, (_, dim) in zip(which, wanted, strict=True)]
    return which if [weights.shape for weights in message.weights] == shapes else None


def _fill(
    into: list[Floats],
    which: list[Mask],
    weights: Sequence[Floats],
) -> None:
    for rows, mask, some in zip(into, which, weights, strict=True):
        kernels.scatter(rows.view(np.uint32), np.flatnonzero(mask), some.view(np.uint32))
