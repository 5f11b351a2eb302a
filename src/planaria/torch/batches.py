"""Which samples a trainer gets in which step, and the batches made of them.

Positions are a function of (seed, epoch, step, rank, world_size) alone (planaria.data.order), so a
replacement goes on at any step. For the batches to be one as well, what a dataset returns for an
index must depend on that index only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from planaria.data.order import Order
from planaria.data.source import sample_range
from planaria.errors import ArgumentError, DataError
from planaria.kernels.types import Index

AHEAD_PER_WORKER = 2
Indices = range | Index


class Batches:
    """Iterates over the batches of one trainer; steps count from 1, over all epochs.

    dataset: map-style (`__len__`, `__getitem__`), or a source with read(start, count); to be
        shuffled, a source needs take(numbers) as well.
    batch_size: of one trainer.
    steps: how many, over as many epochs as that takes, whatever `epochs` says.
    drop_last: leave out the samples at the end of an epoch that make no whole step; otherwise all
        ranks get their part of them, perhaps none (see size).
    collate_fn: makes a batch of a list of samples, or of what a source returned.
    workers: threads that prepare the next batches; 0 means the caller's own, when it asks. A
        dataset is asked by several at once if there are several, a source by one at a time.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = False,
        drop_last: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
        workers: int = 0,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ArgumentError(f"rank must be 0 to world_size - 1 = {world_size - 1}, not {rank}")
        if batch_size < 1 or epochs < 1 or workers < 0 or (steps is not None and steps < 1):
            raise ArgumentError(
                "batch_size, epochs and steps must be 1 or more, workers 0 or more, not "
                f"{batch_size}, {epochs}, {steps} and {workers}"
            )
        reader = _SourceReader if hasattr(dataset, "read") else _MapReader
        self._reader: _SourceReader | _MapReader = reader(dataset, collate_fn)
        self._rank, self._world_size, self._workers = rank, world_size, workers
        self._batch = batch_size * world_size  # of all trainers together
        self._order: Order | None = None
        self.steps = steps
        """Over all epochs, the same for all ranks; None if the samples never end."""
        samples = self._reader.samples
        if samples is None:
            _check_endless(shuffle, epochs)
            return
        order = Order(
            samples,
            self._batch,
            trainers=world_size,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            blocks=self._reader.blocks,
        )
        if shuffle:
            self._reader.check_shuffle()
        if not order.steps:
            raise DataError(
                f"the dataset has {samples} samples, but a step needs "
                f"{self._batch if drop_last else 1}: {world_size} trainers with batches of "
                f"{batch_size}; give more samples, a smaller batch_size, or drop_last=False"
            )
        if steps is None:
            self.steps = order.steps
        else:
            order.epochs = -(-steps // order.steps_per_epoch)
        self._order = order

    def take_seat(self, rank: int, world_size: int) -> None:
        """Another part of the same batches, from the next `from_step` on."""
        self._rank, self._world_size = rank, world_size
        if self._order is not None:
            self._order.trainers = world_size

    def epoch_of(self, step: int) -> int:
        """Epochs count from 0."""
        self._check(step)
        return 0 if self._order is None else self._order.epoch(step)

    def indices(self, step: int) -> Indices:
        """Numbers of the samples that this rank gets, in order."""
        self._check(step)
        if self._order is not None:
            return self._order.indices(step, self._rank)
        start, count = sample_range(step, self._rank, self._world_size, self._batch)
        return range(start, start + count)

    def size(self, step: int) -> int:
        """How many samples this rank gets: batch_size, fewer or none in a short last step; other
        numbers once there are more ranks or fewer.
        """
        return len(self.indices(step))

    def batch(self, step: int) -> Any:
        """Made anew each time, whatever was asked for before."""
        return self._reader.batch(self.indices(step))

    def __iter__(self) -> Iterator[Any]:
        return self.from_step(1)

    def from_step(self, step: int) -> Generator[Any, None, None]:
        """The batches of this step and of all later ones; `close` it to end its threads early.

        The step behind the last one is allowed: nothing is left then. What fails while a batch is
        made is raised when that batch is asked for.
        """
        if self.steps is None or step != self.steps + 1:
            self._check(step)
        return self._iterate(step) if self._workers else self._iterate_here(step)

    def _iterate_here(self, step: int) -> Generator[Any, None, None]:
        while self.steps is None or step <= self.steps:
            yield self.batch(step)
            step += 1

    def _iterate(self, step: int) -> Generator[Any, None, None]:
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="preparing batches")
        waiting: deque[Future[Any]] = deque()
        try:
            while True:
                while len(waiting) < AHEAD_PER_WORKER * self._workers:
                    if self.steps is not None and step > self.steps:
                        break
                    waiting.append(pool.submit(self.batch, step))
                    step += 1
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            # Waits for the batches that are being made, so that no thread outlives its iterator.
            pool.shutdown(wait=True, cancel_futures=True)

    def _check(self, step: int) -> None:
        if step < 1 or (self.steps is not None and step > self.steps):
            last = "" if self.steps is None else f" to {self.steps}"
            raise ArgumentError(f"there is no step {step}: they are 1{last}")


class _MapReader:
    """Samples by index, collated as a DataLoader does it."""

    # As one block, all samples are mixed with all: to read any of them costs the same.
    blocks: Index | None = np.zeros(1, np.int64)

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None) -> None:
        has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not has_items:
            raise ArgumentError(
                f"a {type(dataset).__name__} cannot be read from any place on, as a replacement of "
                "a trainer must; give a dataset with __len__ and __getitem__, or a source with "
                "read(start, count)"
            )
        self._dataset, self._collate = dataset, collate_fn
        self.samples: int | None = len(dataset)

    def check_shuffle(self) -> None:
        pass

    def batch(self, indices: Indices) -> Any:
        if not len(indices):
            return self._nothing()
        return (self._collate or default_collate)(self._fetch([int(i) for i in indices]))

    def _fetch(self, indices: list[int]) -> Sequence[Any]:
        """Several at once where a dataset can, as DataLoader's workers do."""
        if getattr(self._dataset, "__getitems__", None):
            samples: Sequence[Any] = self._dataset.__getitems__(indices)
            return samples
        return [self._dataset[i] for i in indices]

    def _nothing(self) -> Any:
        """A batch of no samples: with the shapes and types of one sample's, where we collate."""
        if self._collate is None:
            return _emptied(default_collate(self._fetch([0])))
        try:
            return self._collate([])
        # It is the user's code, which raises what it likes.
        except Exception as error:
            raise DataError(
                "this rank has no samples in the last step of an epoch, and collate_fn cannot make "
                f"a batch of none ({error!r}); let it, or use drop_last=True"
            ) from error


class _SourceReader:
    """Samples by number, as planaria.data's sources have them."""

    def __init__(self, source: Any, collate_fn: Callable[[Any], Any] | None) -> None:
        self._source, self._collate = source, collate_fn
        self._lock = threading.Lock()  # sources keep what they read last, and are for one thread
        length = len(source) if hasattr(source, "__len__") else None
        self.samples: int | None = getattr(source, "samples", length)
        self.blocks: Index | None = getattr(source, "blocks", None)

    def check_shuffle(self) -> None:
        if not hasattr(self._source, "take"):
            raise ArgumentError(
                f"a {type(self._source).__name__} is read in order; for shuffle=True it needs "
                "take(numbers), as Parquet and CSV sources have it"
            )

    def batch(self, indices: Indices) -> Any:
        with self._lock:
            if isinstance(indices, range):
                samples = self._source.read(indices.start, len(indices))
            else:
                samples = self._source.take(indices)
        if len(samples) != len(indices):
            raise DataError(
                f"{len(indices)} samples were asked for, the first being {indices[0]}, and "
                f"{len(samples)} came; do not change data while it is trained on, and let a source "
                "that ends say so by `samples`"
            )
        return samples if self._collate is None else self._collate(samples)


def _check_endless(shuffle: bool, epochs: int) -> None:
    if shuffle or epochs > 1:
        raise ArgumentError(
            "samples that never end have no epochs and cannot be shuffled; "
            "use epochs=1 and shuffle=False, or a source that says how many `samples` it has"
        )


def _emptied(batch: Any) -> Any:
    """What default_collate makes, without its samples."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, dict):
        return {key: _emptied(one) for key, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_emptied, batch))
    if isinstance(batch, list | tuple):
        # Texts are collated into a list of them: one per sample.
        texts = batch and all(isinstance(one, str | bytes) for one in batch)
        return [] if texts else [_emptied(one) for one in batch]
    return batch
