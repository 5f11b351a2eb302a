"""What the models are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from planaria.errors import ArgumentError


class SparseModel(nn.Module):  # type: ignore[misc]
    """A model over dense features [B, dense_in_features] and a collection's pooled embeddings.

    The collection is any module that maps a KeyedJaggedTensor to a KeyedTensor and has
    embedding_bag_configs(): Planaria's, TorchRec's, or one in this process.
    """

    def __init__(self, embedding_bag_collection: nn.Module, dense_in_features: int) -> None:
        super().__init__()
        if dense_in_features < 0:
            raise ArgumentError(f"dense_in_features must be 0 or more, not {dense_in_features}")
        if not hasattr(embedding_bag_collection, "embedding_bag_configs"):
            raise ArgumentError(
                "a model needs a collection with embedding_bag_configs(), such as an "
                f"EmbeddingBagCollection; {type(embedding_bag_collection).__name__} has none"
            )
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_in_features = dense_in_features
        configs = embedding_bag_collection.embedding_bag_configs()
        # By column block of the collection's result: a feature of two tables has two.
        self.feature_dims: list[int] = [
            config.embedding_dim for config in configs for _ in config.feature_names
        ]
        if not self.feature_dims:
            raise ArgumentError("a model needs a collection with one feature or more")

    def pooled(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """The embeddings [B, sum of feature_dims], side by side."""
        embeddings = self.embedding_bag_collection(sparse_features).values()
        expected = (len(embeddings), self.dense_in_features)
        if dense_features.shape != expected:
            raise ArgumentError(
                f"dense_features must have shape {list(expected)}, for as many samples as the "
                f"sparse features and dense_in_features; got {list(dense_features.shape)}"
            )
        return embeddings

    def one_dim(self) -> int:
        """The dim of every table."""
        dims = sorted(set(self.feature_dims))
        if len(dims) > 1:
            raise ArgumentError(
                f"{type(self).__name__} needs tables of one embedding_dim, not {dims}; "
                "DCNv2 and WideAndDeep take tables of several"
            )
        return dims[0]


class LinearModel(SparseModel):
    """A model with a linear part, a weight per id and per dense feature.

    The first column of a table's row is that id's weight, the other columns are its vector: one
    lookup brings both, and no id is looked up in a second set of tables.
    """

    def __init__(self, embedding_bag_collection: nn.Module, dense_in_features: int) -> None:
        super().__init__(embedding_bag_collection, dense_in_features)
        if min(self.feature_dims) < 2:
            raise ArgumentError(
                f"{type(self).__name__} needs tables with an embedding_dim of 2 or more: "
                "one column for the linear part, the others for the vector"
            )
        self.dense_weights = nn.Parameter(torch.zeros(dense_in_features))
        self.bias = nn.Parameter(torch.zeros(()))

    def linear(self, dense_features: torch.Tensor, id_weights: torch.Tensor) -> torch.Tensor:
        """[B] from dense_features [B, dense_in_features] and id_weights [B, features]."""
        return id_weights.sum(1) + dense_features @ self.dense_weights + self.bias


def mlp(sizes: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def mlp_to_logit(name: str, inputs: int, layer_sizes: Sequence[int]) -> nn.Sequential:
    """Layers as TorchRec counts them: the last one is the logit."""
    check_layer_sizes(name, layer_sizes, last=1)
    return mlp([inputs, *layer_sizes], last_relu=False)


def check_layer_sizes(name: str, layer_sizes: Sequence[int], last: int) -> None:
    if not layer_sizes or min(layer_sizes) < 1 or layer_sizes[-1] != last:
        raise ArgumentError(
            f"{name} must be sizes of 1 or more, the last of them {last}; got {list(layer_sizes)}"
        )
