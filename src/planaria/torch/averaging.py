"""What trainers agree on in a step, as one vector: the mean of their gradients, rank 0's buffers.

Behind the gradients stands one number for each parameter: whether there is a gradient at all. So a
parameter that no trainer has used keeps having none, and torch's optimizers pass it over. Buffers
that forward changes, such as the running means of a BatchNorm, are rank 0's everywhere, as under
torch's DistributedDataParallel: the others add zeros to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from planaria.kernels.types import Floats


class DenseGradients:
    """The parameters and buffers of the modules that are kept, each once, in order of names."""

    def __init__(self, kept: Iterable[object]) -> None:
        modules = [one for one in kept if isinstance(one, nn.Module)]
        self.parameters = _once(p for module in modules for p in module.parameters())
        self.parameters = [p for p in self.parameters if p.requires_grad]
        self.buffers = _once(b for module in modules for b in module.buffers())
        self.buffers = [b for b in self.buffers if b.is_floating_point()]
        self._flags = sum(p.numel() for p in self.parameters)
        self._buffers = self._flags + len(self.parameters)
        self.size = self._buffers + sum(b.numel() for b in self.buffers)

    def collect(self, rank: int) -> Floats:
        """What this trainer contributes: a new float32[size]."""
        vector = np.zeros(self.size, np.float32)
        flat = torch.from_numpy(vector)
        for number, (parameter, part) in enumerate(_parts(self.parameters, flat)):
            if parameter.grad is not None:
                part.copy_(parameter.grad.detach())
                vector[self._flags + number] = 1
        if rank == 0:
            for buffer, part in _parts(self.buffers, flat[self._buffers :]):
                part.copy_(buffer)
        return vector

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def spread(self, total: Floats, trainers: int) -> None:
        """The sum over all trainers, made everybody's."""
        mean = torch.from_numpy(total[: self._flags] / np.float32(trainers))
        present = (total[self._flags : self._buffers] > 0).tolist()
        for anybody, (parameter, part) in zip(present, _parts(self.parameters, mean), strict=True):
            if anybody and parameter.grad is None:
                parameter.grad = part.to(parameter, copy=True)
            elif anybody:
                parameter.grad.copy_(part)
        rest = torch.from_numpy(total[self._buffers :].copy())
        for buffer, part in _parts(self.buffers, rest):
            buffer.copy_(part)


def _once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(one): one for one in tensors}.values())


def _parts(
    tensors: Sequence[torch.Tensor], flat: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each with its part of the vector, in its own shape."""
    first = 0
    for one in tensors:
        yield one, flat[first : first + one.numel()].view(one.shape)
        first += one.numel()
