"""What one would write without Planaria: the same model in one process, in plain PyTorch.

Sparse gradients, torch.optim.Adagrad, the same samples, one thread. Tables are 26 EmbeddingBags, as
everybody has them, or one that holds the rows of all: one call instead of 26, which is the least
that torch can do with.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import Any

import torch
from torch import nn

from benchmarks.scripts.multi_hot import MultiHot
from benchmarks.speed import Speed
from planaria.config import Config
from planaria.data import Samples
from planaria.models.building import as_tensors, open_data
from planaria.torch import KeyedJaggedTensor


class Tables(nn.Module):  # type: ignore[misc]
    """An EmbeddingBag for each feature."""

    def __init__(self, config: Config, mode: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                count, config.model.dim, mode=mode, sparse=True, include_last_offset=True
            )
            for count in config.model.table_rows
        )

    def forward(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """[samples, dim] of each feature."""
        offsets, ends = features.offsets(), features.offset_per_key()
        samples, found = features.stride(), []
        for number, bag in enumerate(self.bags):
            own = offsets[number * samples : (number + 1) * samples + 1] - ends[number]
            found.append(bag(features.values()[ends[number] : ends[number + 1]], own))
        return found


class OneTable(nn.Module):  # type: ignore[misc]
    """One EmbeddingBag for all features, whose ids are counted on."""

    def __init__(self, config: Config, mode: str) -> None:
        super().__init__()
        rows = config.model.table_rows
        self.bag = nn.EmbeddingBag(
            sum(rows), config.model.dim, mode=mode, sparse=True, include_last_offset=True
        )
        self.first_rows = torch.tensor([0, *itertools.accumulate(rows)][:-1])

    def forward(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        counts = torch.tensor(features.length_per_key())
        ids = features.values() + self.first_rows.repeat_interleave(counts)
        return list(self.bag(ids, features.offsets()).chunk(len(self.first_rows)))


class PlainDLRM(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        dim, vectors = config.model.dim, len(config.model.table_rows) + 1
        self.bottom = mlp([13, *config.model.bottom, dim], last_relu=True)
        self.top = mlp([dim + vectors * (vectors - 1) // 2, *config.model.top, 1], last_relu=False)
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.lower = row * vectors + column

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *self.tables(features)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.lower)], dim=1)).squeeze(1)


def mlp(sizes: list[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def measure(config: Config, steps: int, one_table: bool, multi_hot: bool) -> Speed:
    """Steady state: the first tenth of the steps is not counted."""
    torch.set_num_threads(config.threads.trainer)
    mode = "mean" if multi_hot else "sum"
    model = PlainDLRM(config, (OneTable if one_table else Tables)(config, mode))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.optimizer.lr)
    source: Any = MultiHot(config) if multi_hot else open_data(config).training
    started = (0.0, 0.0)
    for step in range(steps):
        if step == steps // 10:
            started = time.perf_counter(), time.process_time()
        samples: Samples = source.read(step * config.batch, config.batch)
        dense, features, labels = as_tensors(samples)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, features), labels)
        loss.backward()
        optimizer.step()
    counted = steps - steps // 10
    wall_s = time.perf_counter() - started[0]
    cpu_ms = (time.process_time() - started[1]) / counted * 1e3
    return Speed(counted * config.batch / wall_s, cpu_ms, cpu_ms)


def _tell(answer: Any, *given: Any) -> None:
    answer.put(measure(*given))


def plain_speed(
    config: Config, steps: int, *, one_table: bool = False, multi_hot: bool = False
) -> Speed:
    """In a process of its own, so that its memory is gone afterwards."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_tell, args=(answer, config, steps, one_table, multi_hot))
    process.start()
    found: Speed = answer.get(timeout=1200)
    process.join()
    return found
