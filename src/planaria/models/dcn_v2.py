"""DCN-v2, the deep and cross network (arXiv 2008.13535), with cross layers of low rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from planaria.errors import ArgumentError
from planaria.models.parts import SparseModel, mlp_to_logit


class LowRankCross(nn.Module):  # type: ignore[misc]
    """One cross layer: x0 * (U V x + b) + x, with U [width, rank] and V [rank, width]."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.up(self.down(x)) + x


class DCNv2(SparseModel):
    """Dense features and embeddings side by side, cross layers over them, then an MLP.

    Tables may have several dims.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        over_arch_layer_sizes: Sequence[int] = (512, 256, 1),
        cross_layers: int = 3,
        cross_rank: int = 64,
    ) -> None:
        super().__init__(embedding_bag_collection, dense_in_features)
        if cross_layers < 1 or cross_rank < 1:
            raise ArgumentError(
                f"cross_layers and cross_rank must be 1 or more, not {cross_layers} "
                f"and {cross_rank}"
            )
        width = dense_in_features + sum(self.feature_dims)
        self.cross = nn.ModuleList(LowRankCross(width, cross_rank) for _ in range(cross_layers))
        self.over_arch = mlp_to_logit("over_arch_layer_sizes", width, over_arch_layer_sizes)

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Logits [B]."""
        pooled = self.pooled(dense_features, sparse_features)
        x0 = torch.cat([dense_features, pooled], dim=1)  # [B, width]
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return self.over_arch(x).squeeze(1)
