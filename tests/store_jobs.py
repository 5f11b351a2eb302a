"""A job in this process: the collections of a model over a real store, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from planaria.kernels.types import Floats, Index
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server.store import Store
from planaria.torch.features import FeatureTables, bind_all
from planaria.torch.sparse import SparseStep


class StoreJob:
    """The only trainer of a job and its only server, in one object."""

    def __init__(self, optimizer: Optimizer, *modules: nn.Module, seed: int = 1) -> None:
        found = [own.tables for one in modules for own in one.modules() if hasattr(own, "tables")]
        self.collections: list[FeatureTables] = list(dict.fromkeys(found))
        self.tables, self.arenas = bind_all(self.collections, optimizer, self)
        layout = Layout(np.zeros((1, 1), np.int32), 1)
        self.store = Store(self.arenas, layout, 0, seed=seed)
        self.lookups: list[list[int]] = []  # rows asked for, by arena
        self.step = self.new_step()

    def new_step(self, recording: bool = True) -> SparseStep:
        self.step = SparseStep(self, [arena.dim for arena in self.arenas], recording)
        return self.step

    def current_step(self) -> SparseStep:
        return self.step

    def lookup(self, rows: Sequence[Index]) -> list[Floats]:
        self.lookups.append([len(index) for index in rows])
        return [self.store.lookup(arena, index) for arena, index in enumerate(rows)]

    def finish(self) -> list[tuple[Index, Floats]]:
        """The end of a step: the store learns, and the next step begins."""
        gradients = self.step.gradients()
        self.store.apply(self.store.step + 1, [[one] for one in gradients])
        self.new_step()
        return gradients

    def weights(self, name: str) -> torch.Tensor:
        """A copy of a table, [rows, dim]."""
        number = [table.name for table in self.tables].index(name)
        for arena, content in enumerate(self.arenas):
            if number in content.table_ids:
                at = content.table_ids.tolist().index(number)
                first = int(content.first_rows[at])
                rows = np.arange(first, first + self.tables[number].rows)
                return torch.from_numpy(self.store.lookup(arena, rows))
        raise AssertionError(name)


def copy_weights(job: StoreJob, bags: Any) -> None:
    """Gives nn.EmbeddingBag or nn.Embedding modules, by table name, the job's weights."""
    with torch.no_grad():
        for name, bag in bags.items():
            bag.weight.copy_(job.weights(name))
