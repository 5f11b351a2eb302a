"""Wide & Deep: a linear model that remembers and a network that generalises (arXiv 1606.07792)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from planaria.models.parts import LinearModel, mlp_to_logit


class WideAndDeep(LinearModel):
    """Tables may have several dims: a column for the wide part, the rest is the deep part's.

    A crossed feature is a feature of its own: hash the pair of ids and give it a table.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        deep_layer_sizes: Sequence[int] = (512, 256, 1),
    ) -> None:
        super().__init__(embedding_bag_collection, dense_in_features)
        ends = torch.tensor(self.feature_dims).cumsum(0)
        is_wide = torch.zeros(sum(self.feature_dims), dtype=torch.bool)
        is_wide[ends - torch.tensor(self.feature_dims)] = True
        self.register_buffer("wide_columns", is_wide.nonzero().squeeze(1), persistent=False)
        self.register_buffer("deep_columns", (~is_wide).nonzero().squeeze(1), persistent=False)
        inputs = dense_in_features + len(self.deep_columns)
        self.deep = mlp_to_logit("deep_layer_sizes", inputs, deep_layer_sizes)

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Logits [B]."""
        pooled = self.pooled(dense_features, sparse_features)
        wide = pooled.index_select(1, self.wide_columns)  # [B, features]
        deep = pooled.index_select(1, self.deep_columns)  # [B, sum of dims - features]
        logits = self.deep(torch.cat([dense_features, deep], dim=1)).squeeze(1)
        return self.linear(dense_features, wide) + logits
