"""What one would write without Planaria: the same model in one process, in plain PyTorch.

EmbeddingBag with sparse gradients, torch.optim.Adagrad, the same samples, one thread.
"""

from __future__ import annotations

import itertools
import time

import torch
from torch import nn

from planaria.config import Config
from planaria.data import Synthetic, sample_range


class PlainDLRM(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        super().__init__()
        rows, dim = config.model.table_rows, config.model.dim
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(count, dim, mode="sum", sparse=True) for count in rows
        )
        vectors = len(rows) + 1
        self.bottom = mlp([13, *config.model.bottom, dim], last_relu=True)
        self.top = mlp([dim + vectors * (vectors - 1) // 2, *config.model.top, 1], last_relu=False)
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.lower = row * vectors + column

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        offsets = torch.arange(len(dense))
        pooled = [table(ids[:, t], offsets) for t, table in enumerate(self.tables)]
        vectors = torch.stack([x, *pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.lower)], dim=1)).squeeze(1)


def mlp(sizes: list[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def samples_per_s(config: Config, steps: int) -> float:
    """Steady state: the first tenth of the steps is not counted."""
    torch.set_num_threads(config.threads.trainer)
    model = PlainDLRM(config)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.optimizer.lr)
    source = Synthetic(config.model.table_rows, seed=config.seed, exponent=config.data.zipf)
    start = 0.0
    for step in range(1, steps + 1):
        if step == steps // 10 + 1:
            start = time.perf_counter()
        batch = source.read(*sample_range(step, 0, 1, config.batch))
        optimizer.zero_grad()
        logits = model(torch.from_numpy(batch.dense), torch.from_numpy(batch.ids))
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(batch.labels)
        )
        loss.backward()
        optimizer.step()
    return (steps - steps // 10) * config.batch / (time.perf_counter() - start)
