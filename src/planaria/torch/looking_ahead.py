"""The next batch, before the loop has it: its features are found, and their rows asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from planaria import kernels
from planaria.kernels.types import Floats, Index
from planaria.torch.bridge import as_keyed, is_keyed
from planaria.torch.features import FeatureTables
from planaria.torch.sparse import Prepared, SparseStep

MOST_DEPTH = 4  # of containers in a batch that are looked into


def find_features(batch: Any, collections: Sequence[FeatureTables]) -> list[Prepared]:
    """What the collections will need of the features in a batch, wherever they are in it."""
    prepared = []
    for features in _keyed_in(batch, MOST_DEPTH):
        keyed = as_keyed(features)[0]
        keys = set(keyed.keys())
        for own in collections:
            if keys.issuperset(name for name, _ in own.features):
                prepared.append(own.prepare(keyed, (features,)))
    return prepared


def _keyed_in(value: Any, depth: int) -> list[Any]:
    if is_keyed(value):
        return [value]
    if depth == 0:
        return []
    inside: Sequence[Any] = ()
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in fields(value)]
    return [found for one in inside for found in _keyed_in(one, depth - 1)]


class Ahead:
    """The batches that were looked at and are still to come, with what was asked for."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches
        self._coming: deque[tuple[Any, list[Prepared], Any]] = deque()
        self.batch: Any = None

    def __bool__(self) -> bool:
        """Whether there is one that can arrive."""
        return bool(self._coming)

    def look(self, collections: Sequence[FeatureTables], ask: Callable[[list[Index]], Any]) -> None:
        """Takes the next batch and asks for its rows."""
        batch = next(self._batches)
        prepared = find_features(batch, collections)
        self._coming.append((batch, prepared, ask(_all_rows(prepared)) if prepared else None))

    def arrive(self, take: Callable[[Any], list[Floats]], step: SparseStep) -> None:
        """The next batch becomes this one, and its rows are given to the step."""
        self.batch, prepared, asked = self._coming.popleft()
        if asked is not None:
            values = take(asked)
            for one, own in zip(prepared, _split(prepared, values), strict=True):
                step.expect(one, own)

    def close(self) -> None:
        self._batches.close()


def _all_rows(prepared: Sequence[Prepared]) -> list[Index]:
    """Per arena, the distinct rows of all of them."""
    if len(prepared) == 1:
        return prepared[0].rows
    return [kernels.dedup(np.concatenate(rows))[0] for rows in _by_arena(prepared)]


def _split(prepared: Sequence[Prepared], values: list[Floats]) -> list[list[Floats]]:
    """The values of each, per arena, out of those of all."""
    if len(prepared) == 1:
        return [values]
    found: list[list[Floats]] = [[] for _ in prepared]
    for rows, own in zip(_by_arena(prepared), values, strict=True):
        inverse = kernels.dedup(np.concatenate(rows))[1]
        ends = np.cumsum([len(some) for some in rows])
        for one, part in zip(found, np.split(inverse, ends[:-1]), strict=True):
            one.append(kernels.gather(own.view(np.uint32), part).view(np.float32))
    return found


def _by_arena(prepared: Sequence[Prepared]) -> list[list[Index]]:
    return [list(rows) for rows in zip(*(one.rows for one in prepared), strict=True)]
