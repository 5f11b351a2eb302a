"""The twin of a distributed collection: the same tables in this process, on nn.EmbeddingBag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from planaria.torch import KeyedTensor
from planaria.torch.bridge import as_keyed, like


class PlainTable(NamedTuple):
    """A table, and its own configuration by the names that models ask for."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str]
    pooling: str = "sum"


class PlainEmbeddingBagCollection(nn.Module):  # type: ignore[misc]
    """Tables are (name, rows, dim, feature names) and, if not sum, the pooling.

    Parameters are named as TorchRec names them, embedding_bags.TABLE.weight.
    """

    def __init__(self, tables: Sequence[Sequence[Any]], is_weighted: bool = False) -> None:
        super().__init__()
        self._tables = [PlainTable(*table) for table in tables]
        self._is_weighted = is_weighted
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode=table.pooling,
                    include_last_offset=True,
                )
                for table in self._tables
            }
        )
        tables_of = Counter(name for table in self._tables for name in table.feature_names)
        # A feature of several tables has a result from each; the name says from which.
        self._result_names = [
            name if tables_of[name] == 1 else f"{name}@{table.name}"
            for table in self._tables
            for name in table.feature_names
        ]

    def embedding_bag_configs(self) -> list[PlainTable]:
        return self._tables

    def is_weighted(self) -> bool:
        return self._is_weighted

    def forward(self, features: Any) -> Any:
        keyed, came_from_torchrec = as_keyed(features)
        by_name = keyed.to_dict()
        pooled = []
        for table in self._tables:
            for name in table.feature_names:
                ids = by_name[name]
                weights = ids.weights() if self._is_weighted else None
                bag = self.embedding_bags[table.name]
                pooled.append(bag(ids.values(), ids.offsets(), per_sample_weights=weights))
        return like(KeyedTensor.from_tensor_list(self._result_names, pooled), came_from_torchrec)
