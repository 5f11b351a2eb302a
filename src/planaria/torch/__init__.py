"""Planaria for PyTorch users, with TorchRec's names."""

from planaria.torch.jagged import JaggedTensor
from planaria.torch.keyed import KeyedTensor
from planaria.torch.keyed_jagged import KeyedJaggedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
