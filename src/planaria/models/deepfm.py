"""DeepFM: a factorization machine and a deep network over the same embeddings (arXiv 1703.04247).

    logit = sum of w_i  +  sum over pairs of <v_i, v_j>  +  MLP(dense, v_1, v_2, ...)

A field i is a feature (w_i, v_i: its pooled row) or a dense number x (w_i x, v_i x).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from planaria.models.parts import LinearModel, mlp_to_logit

DENSE_VECTORS_STD = 0.01


class DeepFM(LinearModel):
    """Tables of one embedding_dim: a column for the first-order weight, the rest is the vector."""

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        deep_layer_sizes: Sequence[int] = (512, 256, 1),
    ) -> None:
        super().__init__(embedding_bag_collection, dense_in_features)
        dim = self.one_dim() - 1
        self.dense_vectors = nn.Parameter(torch.randn(dense_in_features, dim) * DENSE_VECTORS_STD)
        inputs = dense_in_features + len(self.feature_dims) * dim
        self.deep = mlp_to_logit("deep_layer_sizes", inputs, deep_layer_sizes)

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Logits [B]."""
        pooled = self.pooled(dense_features, sparse_features)
        rows = pooled.unflatten(1, (len(self.feature_dims), -1))  # [B, features, 1 + dim]
        weights, vectors = rows[:, :, 0], rows[:, :, 1:]
        deep = self.deep(torch.cat([dense_features, vectors.flatten(1)], dim=1)).squeeze(1)
        return self.linear(dense_features, weights) + self._pairs(dense_features, vectors) + deep

    def _pairs(self, dense_features: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """The products of all pairs of fields, summed: [B]. The square of the sum has each pair
        twice, and the squares besides: no pair need be formed."""
        summed = vectors.sum(1) + dense_features @ self.dense_vectors  # [B, dim]
        squares = vectors.square().sum(1) + dense_features.square() @ self.dense_vectors.square()
        return (summed.square() - squares).sum(1) / 2
