"""Dense gradients as one vector: what a trainer's parameters say, and what all of them say.

Behind the gradients stands one number for each parameter: whether there is a gradient at all. So a
parameter that no trainer has used keeps having none, and torch's optimizers pass it over.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from planaria.kernels.types import Floats


class DenseGradients:
    """The parameters of the modules that are kept, each once, in the order of their names."""

    def __init__(self, kept: Iterable[object]) -> None:
        modules = [one for one in kept if isinstance(one, nn.Module)]
        found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
        self.parameters = list(found.values())
        self.size = sum(p.numel() for p in self.parameters) + len(self.parameters)

    def collect(self) -> Floats:
        """A new float32[size]."""
        vector = np.zeros(self.size, np.float32)
        flat, first = torch.from_numpy(vector), 0
        for number, parameter in enumerate(self.parameters):
            last = first + parameter.numel()
            if parameter.grad is not None:
                flat[first:last].copy_(parameter.grad.detach().reshape(-1))
                vector[number - len(self.parameters)] = 1
            first = last
        return vector

    def spread(self, total: Floats, trainers: int) -> None:
        """The mean over all trainers becomes everybody's gradient."""
        mean, first = torch.from_numpy(total / np.float32(trainers)), 0
        present = total[len(total) - len(self.parameters) :] > 0
        for parameter, anybody in zip(self.parameters, present.tolist(), strict=True):
            last = first + parameter.numel()
            if anybody:
                part = mean[first:last].view_as(parameter)
                if parameter.grad is None:
                    parameter.grad = part.to(parameter)
                else:
                    parameter.grad.copy_(part)
            first = last
