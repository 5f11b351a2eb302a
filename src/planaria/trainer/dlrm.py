"""The deep-learning recommendation model (arXiv 1906.00091), over a flat vector of parameters.

    dense features -> bottom MLP -> x [dim]
    x and the embeddings, pairwise dot products -> z [(tables + 1) * tables / 2]
    x, z -> top MLP -> logit

The parameters are torch views of memory that a DenseState owns and steps; this module computes
gradients and nothing else. Same weights and same batch give the same bits on one kind of CPU with
one number of torch threads. The number matters (batches of 1 and 7 samples differed in the last
bits between 1, 2 and 4 threads; batches of 128 to 8192 did not), so it is part of a job's
configuration: call torch.set_num_threads before the first step. Where arrays start within a cache
line matters too; hence `bind` asks for alignment and `forward` copies to torch's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from planaria.data import DENSE_FEATURES
from planaria.errors import ArgumentError
from planaria.kernels.checks import array, require
from planaria.kernels.types import Floats
from planaria.trainer.dense import ALIGNMENT_BYTES, dlrm_layers, initial_weights

Parameters: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer: weights [outputs, inputs], biases [outputs]."""


class Gradients(NamedTuple):
    """What a trainer's samples say about a step. The arrays are new; the caller owns them."""

    loss_sum: float  # over these samples, not divided
    logits: Floats  # [n]
    embeddings: Floats  # [n, tables, dim]
    dense: Floats  # [P]


class DLRM:
    """`bottom` and `top` name the hidden layers; the bottom MLP ends in dim, the top one in 1."""

    def __init__(
        self,
        tables: int,
        dim: int,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
    ) -> None:
        sizes = [tables, dim, *bottom, *top]
        require(min(sizes) >= 1, "tables, dim and all layers must be 1 or more")
        self.tables = tables
        self.dim = dim
        self.layers = dlrm_layers(tables, dim, bottom, top)
        self.parameters = sum(layer.parameters for layer in self.layers)
        self._bottom_layers = len(bottom) + 1
        self._bound: Parameters = []
        vectors = tables + 1
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self._lower_triangle = row * vectors + column

    def initial_weights(self, seed: int) -> Floats:
        return initial_weights(self.layers, seed)

    def bind(self, flat: Floats) -> None:
        """Uses float32[P] in place as the parameters: who changes it changes the model.

        It must not change during `step`, nor between `forward` and a backward of one's own.
        """
        array("flat", flat, np.float32, 1, shape=(self.parameters,), writable=True)
        require(
            flat.ctypes.data % ALIGNMENT_BYTES == 0,
            f"flat must start at a multiple of {ALIGNMENT_BYTES} bytes; bind DenseState.weights",
        )
        rest = torch.from_numpy(flat)
        self._bound = []
        for layer in self.layers:
            weights, biases, rest = rest.split(
                [layer.inputs * layer.outputs, layer.outputs, len(rest) - layer.parameters]
            )
            weights = weights.view(layer.outputs, layer.inputs)
            self._bound.append((weights.requires_grad_(), biases.requires_grad_()))

    def forward(
        self, dense: Floats | torch.Tensor, embeddings: Floats | torch.Tensor
    ) -> torch.Tensor:
        """Logits [n] from dense [n, DENSE_FEATURES] and embeddings [n, tables, dim]."""
        if not self._bound:
            raise ArgumentError("the model has no parameters yet; call bind first")
        bottom, top = self._bound[: self._bottom_layers], self._bound[self._bottom_layers :]
        x = torch.as_tensor(dense).clone()
        for weights, biases in bottom:
            x = F.relu(F.linear(x, weights, biases))
        vectors = torch.cat([x.unsqueeze(1), torch.as_tensor(embeddings)], dim=1)  # [n, t + 1, dim]
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        # products[:, row, column] is the same and, backward included, takes nine times as long.
        x = torch.cat([x, products.index_select(1, self._lower_triangle)], dim=1)
        for weights, biases in top[:-1]:
            x = F.relu(F.linear(x, weights, biases))
        return F.linear(x, *top[-1]).squeeze(1)

    def step(
        self, dense: Floats, embeddings: Floats, labels: Floats, global_batch: int
    ) -> Gradients:
        """Gradients of this trainer's part of the loss: binary cross-entropy, divided by the number
        of samples of all trainers, so that the gradients of all trainers add up to the batch's."""
        n = len(labels)
        array("labels", labels, np.float32, 1)
        array("dense", dense, np.float32, 2, shape=(n, DENSE_FEATURES))
        array("embeddings", embeddings, np.float32, 3, shape=(n, self.tables, self.dim))
        require(n > 0, "a trainer without samples has no gradients to compute")
        require(n <= global_batch, f"{n} samples are more than the whole batch of {global_batch}")
        leaf = torch.as_tensor(embeddings).detach().requires_grad_()
        logits = self.forward(dense, leaf)
        loss_sum = F.binary_cross_entropy_with_logits(
            logits, torch.as_tensor(labels), reduction="sum"
        )
        parameters = [part for layer in self._bound for part in layer]
        # Not as an argument of grad: the first time that it is given one, torch imports SymPy.
        share = loss_sum * torch.tensor(1 / global_batch)
        of_embeddings, *of_parameters = torch.autograd.grad(share, [leaf, *parameters])
        return Gradients(
            float(loss_sum.detach()),
            logits.detach().numpy(),
            of_embeddings.contiguous().numpy(),
            torch.cat([gradient.flatten() for gradient in of_parameters]).numpy(),
        )
