"""DLRM, the deep-learning recommendation model (arXiv 1906.00091)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from planaria.errors import ArgumentError
from planaria.models.parts import SparseModel, check_layer_sizes, mlp, mlp_to_logit
from planaria.trainer.interaction import interaction


class DLRM(SparseModel):
    """Dense features become one more vector; all pairs of vectors are multiplied.

    dense_arch_layer_sizes end in the tables' embedding_dim (left out: 512, 256, embedding_dim).
    Without dense features there is no dense part, and the products are all that the top sees.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int] | None = None,
        over_arch_layer_sizes: Sequence[int] = (512, 256, 1),
    ) -> None:
        super().__init__(embedding_bag_collection, dense_in_features)
        dim = self.one_dim()
        vectors = len(self.feature_dims)
        self.dense_arch: nn.Module | None = None
        if dense_in_features:
            sizes = dense_arch_layer_sizes or (512, 256, dim)
            check_layer_sizes("dense_arch_layer_sizes", sizes, last=dim)
            self.dense_arch = mlp([dense_in_features, *sizes], last_relu=True)
            vectors += 1
        if vectors < 2:
            raise ArgumentError("DLRM multiplies pairs; it needs two features or more, or dense")
        inputs = vectors * (vectors - 1) // 2 + (dim if dense_in_features else 0)
        self.over_arch = mlp_to_logit("over_arch_layer_sizes", inputs, over_arch_layer_sizes)

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Logits [B]."""
        pooled = self.pooled(dense_features, sparse_features)
        vectors = pooled.unflatten(1, (len(self.feature_dims), -1))  # [B, features, dim]
        x = None if self.dense_arch is None else self.dense_arch(dense_features)  # [B, dim]
        return self.over_arch(interaction(x, vectors)).squeeze(1)
