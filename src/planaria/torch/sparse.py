"""One training step as the tables see it: rows that are asked for, gradients that come back.

A job makes a SparseStep for each step and hands it to the collections by `Steps`; where rows come
from is behind `Rows`. Nothing here knows of sockets, of torch modules or of other trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from planaria import kernels
from planaria.errors import OutsideJob
from planaria.kernels import NumberedBags
from planaria.kernels.types import Floats, Index


class Rows(Protocol):
    """Where the rows of a step come from."""

    def lookup(self, rows: Sequence[Index]) -> list[Floats]:
        """Per arena of the job: the weights, float32[n, dim], of distinct arena rows, int64[n]."""
        ...


class Steps(Protocol):
    """What a bound collection asks for the step in progress."""

    def current_step(self) -> SparseStep: ...


class ArenaBags(NamedTuple):
    """What a batch names in one arena."""

    arena: int
    numbered: NumberedBags


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that can be known of a forward before its rows are there; compared by identity.

    It holds for calls of one collection with the very features that it was made from, or with
    tensors in the same memory, as long as nobody has written to them; so it keeps them, and a copy
    of their ids. How often torch knows of a write would not do: it does not know of NumPy's.
    """

    collection: object
    sources: tuple[Any, ...]
    ids: Index
    offsets: Index
    samples: int
    bags: list[ArenaBags]  # of the arenas that the collection has tables in
    rows: list[Index]  # per arena of the job: the distinct arena rows


class SparseStep:
    """What happens to the tables in one step of one trainer.

    Forwards are numbered; what their backwards contribute is summed in that order, whatever the
    order of the backwards, so that the sum's bits depend on the model alone.
    """

    def __init__(self, rows: Rows, dims: Sequence[int], recording: bool = True) -> None:
        """dims: of the job's arenas. recording: False in evaluation, where nothing learns."""
        self.recording = recording
        self._rows = rows
        self._dims = list(dims)
        self._expected: dict[tuple[Any, ...], Prepared] = {}
        self._values: dict[Prepared, list[Floats]] = {}
        self._forwards: list[Prepared] = []
        self._contributions: dict[int, list[Floats | None]] = {}  # by forward; per `bags` entry
        self.wanted: set[Prepared] = set()  # by a forward
        self.unforeseen: list[Prepared] = []  # their rows were looked up when they were wanted
        self._ended = False
        self.on_backward: Callable[[], None] = _nothing  # called in every backward

    # ------------------------------------------------------------------------------ forward

    def expect(self, prepared: Prepared, values: list[Floats] | None = None) -> None:
        """Takes what was prepared, and perhaps looked up as of this step, before it began.

        Where nothing learns, a collection's batch is forgotten with its next one: there may be any
        number of them.
        """
        if not self.recording:
            self._forget(prepared.collection)
        self._expected[_key(prepared.collection, prepared.sources)] = prepared
        if values is not None:
            self._values[prepared] = values

    def _forget(self, collection: object) -> None:
        for key in [key for key in self._expected if key[0] == id(collection)]:
            self._values.pop(self._expected.pop(key), None)

    def expected(
        self, collection: object, sources: tuple[Any, ...], ids: Index, offsets: Index
    ) -> Prepared | None:
        prepared = self._expected.get(_key(collection, sources))
        if prepared is None or not np.array_equal(prepared.ids, ids):
            return None
        return prepared if np.array_equal(prepared.offsets, offsets) else None

    def values_for(self, prepared: Prepared) -> list[Floats]:
        """Per arena of the job; asked for once in a step, however many forwards need them."""
        self.wanted.add(prepared)
        values = self._values.get(prepared)
        if values is None:
            self._check_open("forward")
            self.unforeseen.append(prepared)
            values = self._values[prepared] = self._rows.lookup(prepared.rows)
        return values

    def begin(self, prepared: Prepared) -> int:
        """The number of a forward whose backward may come."""
        self._check_open("forward")
        self._forwards.append(prepared)
        return len(self._forwards) - 1

    # ------------------------------------------------------------------------------ backward

    def add(self, forward: int, gradients: Sequence[Floats | None]) -> None:
        """One backward of a forward: per `bags` entry the gradients of its distinct rows, which
        the step may keep and change. A second backward of the same forward is added to the first.
        """
        self._check_open("backward")
        self.on_backward()
        before = self._contributions.get(forward)
        if before is None:
            self._contributions[forward] = list(gradients)
            return
        for at, more in enumerate(gradients):
            earlier = before[at]
            if earlier is None:
                before[at] = more
            elif more is not None:
                np.add(earlier, more, out=earlier)

    def gradients(self) -> list[tuple[Index, Floats]]:
        """Ends the step. Per arena of the job: distinct rows, and the gradient of each."""
        self._ended = True
        parts: list[list[tuple[Index, Floats]]] = [[] for _ in self._dims]
        for forward in sorted(self._contributions):
            bags = self._forwards[forward].bags
            for (arena, numbered), own in zip(bags, self._contributions[forward], strict=True):
                if own is not None:
                    parts[arena].append((numbered.rows, own))
        return [_summed(own, dim) for own, dim in zip(parts, self._dims, strict=True)]

    def _check_open(self, what: str) -> None:
        if self._ended:
            raise OutsideJob(
                f"a {what} came after its step had ended: the gradients of a batch leave with its "
                "backward; do several of them within job.accumulate(), and predict within "
                "job.evaluate()"
            )


def _nothing() -> None:
    pass


def _key(collection: object, sources: tuple[Any, ...]) -> tuple[Any, ...]:
    return id(collection), *map(_place, sources)


def _place(source: Any) -> Any:
    """Of a tensor its memory, because a view such as ids[:, 3] is another object each time."""
    if not isinstance(source, torch.Tensor):
        return id(source)
    return source.data_ptr(), source.shape, source.stride(), source.dtype, source.device


def _summed(parts: Sequence[tuple[Index, Floats]], dim: int) -> tuple[Index, Floats]:
    if not parts:
        return np.empty(0, np.int64), np.empty((0, dim), np.float32)
    if len(parts) == 1:
        return parts[0]
    rows, inverse = kernels.dedup(np.concatenate([rows for rows, _ in parts]))
    terms = np.concatenate([gradients for _, gradients in parts])
    return rows, kernels.gradient_sum(terms, inverse, np.empty((len(rows), dim), np.float32))
