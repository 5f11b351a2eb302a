"""Planaria for PyTorch users, with TorchRec's names."""

from planaria.torch.configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from planaria.torch.embeddings import EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection
from planaria.torch.jagged import JaggedTensor
from planaria.torch.keyed import KeyedTensor
from planaria.torch.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
]
