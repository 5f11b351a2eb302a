"""Planaria for PyTorch users, with TorchRec's names."""

from planaria.torch.batches import Batches
from planaria.torch.jagged import JaggedTensor
from planaria.torch.keeping import Keeper
from planaria.torch.keyed import KeyedTensor
from planaria.torch.keyed_jagged import KeyedJaggedTensor
from planaria.torch.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batches",
    "JaggedTensor",
    "Keeper",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "RowwiseAdagrad",
]
