"""A user's script whose samples have bags of 1 to 19 ids, 10 on average, in every feature.

`benchmarks.own_loop` runs it as the trainers of a job. With `count` as its argument it prints how
many bytes it has sent for the sum of dense gradients.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import torch
from torch import nn

from planaria.cluster.node import Node
from planaria.config import Config
from planaria.data import DENSE_FEATURES, Samples
from planaria.models import DLRM
from planaria.models.building import as_tensors, make_optimizer
from planaria.torch import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType, connect
from planaria.wire.machine import Outbox
from planaria.wire.messages import DenseGradient, DenseSum

BATCHES = 16  # different ones; they come again and again
LONGEST = 19


class MultiHot:
    """Batches that are drawn beforehand, so that to draw them is not measured.

    The logarithm of ids is uniform: few rows are hot, most are rare, as in click data.
    """

    def __init__(self, config: Config) -> None:
        self.samples = config.steps * config.batch
        self.keys = tuple(f"f{number}" for number in range(len(config.model.table_rows)))
        size = config.batch // config.trainers
        self._batches = [self._draw(seed, size, config) for seed in range(BATCHES)]

    def _draw(self, seed: int, size: int, config: Config) -> Samples:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, LONGEST + 1, len(self.keys) * size).astype(np.int32)
        counts = lengths.reshape(len(self.keys), size).sum(1)
        rows = np.repeat(np.array(config.model.table_rows), counts)
        values = np.minimum(rows ** rng.random(len(rows)), rows - 1).astype(np.int64)
        dense = rng.random((size, DENSE_FEATURES), np.float32)
        labels = rng.integers(0, 2, size).astype(np.float32)
        return Samples(labels, dense, self.keys, values, lengths)

    def read(self, start: int, count: int) -> Samples:
        return self._batches[start // count % BATCHES]


def count_dense_bytes() -> Counter[str]:
    """What this process sends for the sum from now on, by kind of message."""
    sent: Counter[str] = Counter()
    post = Node.post

    def counting(node: Node, outbox: Outbox) -> None:
        for _, message in outbox:
            if isinstance(message, DenseGradient | DenseSum):
                frames = node.transport.encode(message)
                sent[type(message).__name__] += sum(memoryview(frame).nbytes for frame in frames)
        post(node, outbox)

    Node.post = counting  # type: ignore[assignment, method-assign]
    return sent


def main() -> None:
    sent = count_dense_bytes() if "count" in sys.argv else None
    job = connect()
    config = job.config
    torch.manual_seed(config.seed)
    source = MultiHot(config)
    rows, dim = config.model.table_rows, config.model.dim
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(count, dim, name=key, feature_names=[key], pooling=PoolingType.MEAN)
            for key, count in zip(source.keys, rows, strict=True)
        ]
    )
    model = DLRM(collection, DENSE_FEATURES, (*config.model.bottom, dim), (*config.model.top, 1))
    optimizer = make_optimizer(config, model.parameters())
    job.keep(model=model, optimizer=optimizer)
    size, steps = config.batch // config.trainers, config.steps
    for dense, features, labels in job.batches(source, size, steps=steps, collate_fn=as_tensors):
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if sent is not None:
        parameters = sum(one.numel() for one in model.parameters())
        print("sent", sum(sent.values()), 4 * parameters * steps)


if __name__ == "__main__":
    main()
