"""Which samples a trainer reads in a step: a function of (seed, epoch, step, rank), by arithmetic.

Shuffling is by blocks, because a file gives samples in blocks, and to read one is to decode its
block (planaria.data.blocks). In each epoch the blocks are put in an order drawn by (seed, epoch),
some of them in a row make a window of about WINDOW samples, and the samples of a window are put in
an order drawn by (seed, epoch, window). So every block is decoded once per epoch, while a batch has
samples from all over its window. Both orders are keyed permutations: a Feistel network over the
next power of four, walked until it is back in range. What is remembered is a few numbers per block;
nothing grows with the samples.

A step takes the same samples whatever the number of trainers: each reads its part of the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planaria.data.source import sample_range
from planaria.data.split import Split
from planaria.errors import ArgumentError
from planaria.kernels.twin_numbers import GOLDEN, mix
from planaria.kernels.types import Index, Keys

WINDOW = 2**18  # samples that are mixed with each other, about
BLOCK = 2**13  # samples, where the source has no blocks of its own
ROUNDS = 4


class Order:
    """Steps count from 1, over all epochs; an epoch begins with a step."""

    def __init__(
        self,
        samples: int,
        batch: int,
        *,
        trainers: int = 1,
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        validation_share: float = 0.0,
        drop_last: bool = True,
        blocks: Index | None = None,
    ) -> None:
        """batch: of all trainers together.

        drop_last: leave out samples at the end of an epoch that make no whole batch.
        blocks: the first sample of each block, as a source of blocks has them.
        """
        if batch < 1 or trainers < 1 or epochs < 1:
            raise ArgumentError(
                "batch, trainers and epochs must be 1 or more, "
                f"not {batch}, {trainers} and {epochs}"
            )
        if not 0 <= seed < 2**64:
            raise ArgumentError(f"seed must be between 0 and 2^64 - 1, not {seed}")
        self.batch, self.trainers, self.epochs = batch, trainers, epochs
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.split = Split(samples, validation_share, seed)
        if blocks is None:
            blocks = np.arange(0, max(samples, 1), BLOCK)
        self._block_starts = self.split.training_before(np.append(blocks, samples))
        self._shuffled = lru_cache(2)(self._shuffle_blocks)

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.split.training, self.batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def epoch(self, step: int) -> int:
        """Epochs count from 0."""
        if not 1 <= step <= self.steps:
            raise ArgumentError(f"there is no step {step}: they are 1 to {self.steps}")
        return (step - 1) // self.steps_per_epoch

    def indices(self, step: int, rank: int) -> range | Index:
        """Numbers of the samples that `rank` reads in `step`, in order; a range if they are one."""
        epoch = self.epoch(step)
        first = (step - 1 - epoch * self.steps_per_epoch) * self.batch
        batch = min(self.batch, self.split.training - first)
        offset, count = sample_range(1, rank, self.trainers, batch)
        start = first + offset
        if not self.shuffle and not self.split.held_out:
            return range(start, start + count)
        places = np.arange(start, start + count)
        if self.shuffle:
            places = self._shuffle(places, epoch)
        return self.split.training_sample(places)

    def held_out(self, start: int, count: int) -> Index:
        """Numbers of the held-out samples start to start + count - 1, fewer at the end."""
        stop = min(start + count, self.split.held_out)
        return self.split.held_out_sample(np.arange(start, max(start, stop)))

    def _shuffle(self, places: Index, epoch: int) -> Index:
        """From places in an epoch to training samples, in the order of the data."""
        blocks = self._shuffled(epoch)
        mixed = np.empty_like(places)
        windows = np.searchsorted(blocks.window_ends, places, side="right")
        for window in np.unique(windows):
            here = windows == window
            first = blocks.window_ends[window - 1] if window else 0
            key = _key(self.seed, epoch, int(window) + 1)
            size = int(blocks.window_ends[window] - first)
            mixed[here] = first + permuted(places[here] - first, size, key)
        place = np.searchsorted(blocks.ends, mixed, side="right")
        return blocks.starts[place] + mixed - (blocks.ends[place] - blocks.sizes[place])

    def _shuffle_blocks(self, epoch: int) -> _Shuffled:
        sizes = np.diff(self._block_starts)
        count = len(sizes)
        order = permuted(np.arange(count), count, _key(self.seed, epoch, 0))
        ends = np.cumsum(sizes[order])
        # At least two blocks are mixed, however large they are.
        per_window = max(2, WINDOW * count // max(self.split.training, 1))
        last = np.minimum(np.arange(per_window, count + per_window, per_window), count) - 1
        return _Shuffled(self._block_starts[order], sizes[order], ends, ends[last])


class _Shuffled(NamedTuple):
    """The blocks of an epoch in its order: int64[blocks] each, and int64[windows]."""

    starts: Index  # the block's first training sample
    sizes: Index
    ends: Index  # where it ends in the epoch
    window_ends: Index


def _key(seed: int, epoch: int, window: int) -> Keys:
    key = np.zeros(1, np.uint64)
    for number in (seed, epoch, window):
        key = mix(key + np.array([number], np.uint64) + GOLDEN)
    return key


def permuted(numbers: Index, size: int, key: Keys) -> Index:
    """Where a permutation of 0 to size - 1, chosen by the key, takes these numbers."""
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = mix(key + np.arange(1, ROUNDS + 1, dtype=np.uint64) * GOLDEN)
    found = numbers.astype(np.uint64)
    walking = np.arange(len(found))
    # Each walk is a part of a cycle that its start, in range, lies on: it ends.
    while len(walking):
        values = found[walking]
        left, right = values >> half, values & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right + round_key) & mask)
        found[walking] = (left << half) | right
        walking = walking[found[walking] >= size]
    return found.astype(np.int64)
