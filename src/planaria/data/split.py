"""Which samples are held out for validation: arithmetic on sample numbers, no lists.

Samples are cut into stretches of 1 / share, and one of each, drawn by (seed, stretch), is held out.
So the share holds everywhere in the data, both kinds of samples can be counted off in order, and
whether a sample is held out does not depend on how many follow: only a last stretch that is not
whole, of fewer than 1 / share samples, trains as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from planaria.data.samples import Samples
from planaria.errors import ArgumentError
from planaria.kernels.twin_numbers import GOLDEN, mix
from planaria.kernels.types import Index

PARTS = 10**6  # shares are whole numbers of these, so that all arithmetic is exact
MAX_SHARE = 0.5
MAX_SAMPLES = 2**42  # times PARTS still fits int64


class Split:
    """`training` samples and `held_out` ones, of `samples`."""

    def __init__(self, samples: int, share: float, seed: int) -> None:
        if not 0 <= samples <= MAX_SAMPLES:
            raise ArgumentError(f"samples must be 0 to 2^42, not {samples}")
        if not 0 <= share <= MAX_SHARE:
            raise ArgumentError(f"the share for validation must be 0 to {MAX_SHARE}, not {share}")
        self.samples = samples
        self._held = round(share * PARTS)  # of PARTS samples
        self._key = mix(np.array([seed], np.uint64) + GOLDEN)
        # Stretch i has samples i * PARTS // held to (i + 1) * PARTS // held - 1.
        self.held_out = ((samples + 1) * self._held - 1) // PARTS if self._held else 0
        self.training = samples - self.held_out

    def training_sample(self, numbers: Index) -> Index:
        """Samples of the training ones 0, 1, 2 ..., in the order of the data."""
        if not self.held_out:
            return numbers
        kept = PARTS - self._held
        stretch = np.minimum(((numbers + 1) * self._held - 1) // kept, self.held_out)
        within = numbers - stretch * kept // self._held
        start, drawn = self._drawn(stretch)
        passed = (within >= drawn) & (stretch < self.held_out)
        found: Index = start + within + passed
        return found

    def held_out_sample(self, numbers: Index) -> Index:
        """Samples of the held-out ones 0, 1, 2 ..., in the order of the data."""
        start, drawn = self._drawn(numbers)
        return start + drawn

    def training_before(self, samples: Index) -> Index:
        """How many training samples come before each sample."""
        if not self.held_out:
            return samples
        stretch = np.minimum(((samples + 1) * self._held - 1) // PARTS, self.held_out)
        start, drawn = self._drawn(stretch)
        passed = (samples - start > drawn) & (stretch < self.held_out)
        return samples - stretch - passed

    def _drawn(self, stretch: Index) -> tuple[Index, Index]:
        """(the first sample of a stretch, which of its samples is held out)."""
        start = stretch * PARTS // self._held
        length = (stretch + 1) * PARTS // self._held - start
        draws = mix(mix(stretch.astype(np.uint64) * GOLDEN) ^ self._key)
        return start, (draws % length.astype(np.uint64)).astype(np.int64)


class Taken(Protocol):
    """A source that gives its samples in any order."""

    @property
    def samples(self) -> int: ...

    @property
    def blocks(self) -> Index: ...

    def take(self, numbers: Index) -> Samples: ...


class Part:
    """Some samples of a source, in its order, as a source of their own."""

    def __init__(
        self, source: Taken, samples: int, blocks: Index, numbered: Callable[[Index], Index]
    ) -> None:
        self.samples = samples
        self.blocks = blocks
        self._source, self._numbered = source, numbered

    def read(self, start: int, count: int) -> Samples:
        """Samples start to start + count - 1, fewer at the end."""
        return self.take(np.arange(start, max(start, min(start + count, self.samples))))

    def take(self, numbers: Index) -> Samples:
        return self._source.take(self._numbered(numbers))


def split_source(source: Taken, share: float, seed: int) -> tuple[Part, Part]:
    """(the samples to train on, the held-out ones)."""
    split = Split(source.samples, share, seed)
    blocks = split.training_before(source.blocks)
    training = Part(source, split.training, blocks, split.training_sample)
    return training, Part(source, split.held_out, np.zeros(1, np.int64), split.held_out_sample)
