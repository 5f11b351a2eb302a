"""Records that others read where they lie.

Whoever rebuilds needs k bytes for each that was lost. On one machine it reads them out of its
mates' memory itself, without a message that carries them, a copy, or a mate that works for it. A
mate says once for a whole range where it lies, what is to be taken out of it to have it as of the
step that was asked for, and how often its records have changed so far. It counts that before and
after each change: who finds the same number after reading has read what the mate meant, and
whoever does not asks again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from planaria.kernels.peeking import COUNTER_WORDS, Source, address_of, count_change, peek
from planaria.kernels.types import Bytes
from planaria.wire.messages import MatePeek

if TYPE_CHECKING:
    from planaria.server.store import Store

DATA, OTHERS = 0, 1  # records of its own data; parity and mirrors, which change at other times


class Changes:
    """Counts what is done to records; odd while something is."""

    def __init__(self, key: int = 0) -> None:
        self.counters = np.zeros((2, COUNTER_WORDS), np.uint64)
        self.counters[:, 0] = key
        self._within = [0, 0]  # so many of `to`

    @contextmanager
    def to(self, *kinds: int) -> Iterator[None]:
        """Whatever happens to records of these kinds happens in here."""
        for kind in kinds:
            if not self._within[kind]:
                count_change(self.counters[kind])
            self._within[kind] += 1
        try:
            yield
        finally:
            for kind in kinds:
                self._within[kind] -= 1
                if not self._within[kind]:
                    count_change(self.counters[kind])


class Peeks(ABC):
    """How one process reads the memory of others, and what it tells them of its own. key: whoever
    finds it there has found this process, and no other of the same number.
    """

    def __init__(self, process: int, key: int) -> None:
        self.process = process
        self.key = key
        self.changes = Changes(key)

    @abstractmethod
    def address(self, store: Store, arena: int, first: int) -> int:
        """Where a record lies."""

    @abstractmethod
    def counter(self, kind: int) -> int:
        """Where its changes are counted."""

    @abstractmethod
    def read(self, sources: Sequence[Source], out: Bytes) -> int:
        """As planaria.kernels.peeking.peek does."""


def source_of(told: MatePeek, coef: int) -> Source:
    return Source(told.process, told.at, told.counter, told.key, told.count, coef)


class LocalPeeks(Peeks):
    """Between processes of one user on one machine, as far as the system permits."""

    def address(self, store: Store, arena: int, first: int) -> int:
        there = store.arenas[arena].records.memory(first, first + 1)
        assert there is not None  # no server of a job with two tiers is given any peeks
        return address_of(there)

    def counter(self, kind: int) -> int:
        return address_of(self.changes.counters[kind])

    def read(self, sources: Sequence[Source], out: Bytes) -> int:
        return peek(sources, out)
