"""Planaria for PyTorch users, with TorchRec's names."""

from planaria.torch.configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from planaria.torch.connecting import connect
from planaria.torch.embeddings import EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection
from planaria.torch.jagged import JaggedTensor
from planaria.torch.job import Job
from planaria.torch.keyed import KeyedTensor
from planaria.torch.keyed_jagged import KeyedJaggedTensor
from planaria.torch.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "Job",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "RowwiseAdagrad",
    "connect",
]
