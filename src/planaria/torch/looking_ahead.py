"""The next batch, before the loop has it: its features are found, and their rows asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from planaria import kernels
from planaria.errors import ArgumentError, RowError
from planaria.kernels.types import Floats, Index
from planaria.torch.bridge import as_keyed, is_keyed
from planaria.torch.features import FeatureTables
from planaria.torch.habits import Guess, Habits, Path, Tensors
from planaria.torch.sparse import Prepared, SparseStep

MOST_DEPTH = 4  # of containers in a batch that are looked into


def find_features(batch: Any, collections: Sequence[FeatureTables]) -> list[Prepared]:
    """What the collections will need of the features in a batch, wherever they are in it."""
    prepared = []
    for features in filter(is_keyed, (found for _, found in _inside(batch))):
        keyed = as_keyed(features)[0]
        keys = set(keyed.keys())
        for own in collections:
            if keys.issuperset(name for name, _ in own.features):
                # The loop may map these ids to rows first. If it does not, forward will say so.
                with suppress(ArgumentError, RowError):
                    prepared.append(own.prepare(keyed, (features,)))
    return prepared


def find_tensors(batch: Any) -> Tensors:
    return {
        path: found
        for path, found in _inside(batch)
        if isinstance(found, torch.Tensor) and found.layout == torch.strided
    }


def _inside(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What a batch consists of, and where that is in it."""
    parts: Mapping[Any, Any] | None = None
    if not is_keyed(value) and len(path) < MOST_DEPTH:
        if isinstance(value, Mapping):
            parts = value
        elif isinstance(value, list | tuple):
            parts = dict(enumerate(value))
        elif is_dataclass(value) and not isinstance(value, type):
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
    if parts is None:
        yield path, value
        return
    for key, part in parts.items():
        yield from _inside(part, (*path, key))


@dataclass(frozen=True)
class _Coming:
    """A batch that was looked at."""

    batch: Any
    tensors: Tensors
    guesses: list[Guess]
    prepared: list[Prepared]
    merged: _Merged
    asked: Any


class Ahead:
    """The batches that were looked at and are still to come, with what was asked for."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches
        self._habits = Habits()
        self._coming: deque[_Coming] = deque()
        self._now: tuple[_Coming, SparseStep] | None = None
        self.batch: Any = None

    def __bool__(self) -> bool:
        """Whether there is one that can arrive."""
        return bool(self._coming)

    def look(self, collections: Sequence[FeatureTables], ask: Callable[[list[Index]], Any]) -> None:
        """Takes the next batch and asks for its rows, between two steps."""
        if self._now is not None:
            coming, step = self._now
            self._habits.learn(step, coming.tensors, coming.guesses)
            self._now = None
        batch = next(self._batches)
        tensors = find_tensors(batch)
        guesses = self._habits.guess(tensors)
        prepared = find_features(batch, collections) + [guess.prepared for guess in guesses]
        merged = _Merged(prepared)
        asked = ask(merged.rows) if prepared else None
        self._coming.append(_Coming(batch, tensors, guesses, prepared, merged, asked))

    def arrive(self, take: Callable[[Any], list[Floats]], step: SparseStep) -> None:
        """The next batch becomes this one, and its rows are given to the step."""
        coming = self._coming.popleft()
        self.batch, self._now = coming.batch, (coming, step)
        if coming.prepared:
            values = coming.merged.split(take(coming.asked))
            for one, own in zip(coming.prepared, values, strict=True):
                step.expect(one, own)

    def close(self) -> None:
        self._batches.close()


class _Merged:
    """The rows of several lookups, which are made in one."""

    def __init__(self, prepared: Sequence[Prepared]) -> None:
        self.rows: list[Index] = prepared[0].rows if prepared else []
        """Per arena, each once."""
        self._single = len(prepared) == 1
        if self._single:
            return
        by_arena = list(zip(*(one.rows for one in prepared), strict=True))
        numbered = [kernels.dedup(np.concatenate(rows)) for rows in by_arena]
        self.rows = [unique for unique, _ in numbered]
        self._inverses = [
            np.split(inverse, np.cumsum([len(some) for some in rows])[:-1])
            for rows, (_, inverse) in zip(by_arena, numbered, strict=True)
        ]

    def split(self, values: list[Floats]) -> list[list[Floats]]:
        """For each of them, per arena, its values."""
        if self._single:
            return [values]
        by_arena = [
            [kernels.gather(own.view(np.uint32), one).view(np.float32) for one in inverses]
            for own, inverses in zip(values, self._inverses, strict=True)
        ]
        return [list(of_one) for of_one in zip(*by_arena, strict=True)]
