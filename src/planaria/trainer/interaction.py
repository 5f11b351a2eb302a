"""DLRM's interaction for autograd: on the host by our kernels, elsewhere by torch's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from planaria.kernels.interactions import interact, interact_backward


def interaction(first: torch.Tensor | None, rest: torch.Tensor) -> torch.Tensor:
    """[B, (dim +) pairs]: the first vector, then the products of all pairs of vectors.

    first: [B, dim], where there is one, before the others; rest: [B, count, dim]. Pairs are (1, 0),
    (2, 0), (2, 1) and so on.
    """
    if all(one is None or (one.is_cpu and one.dtype == torch.float32) for one in (first, rest)):
        found: torch.Tensor = _Interaction.apply(first, rest)
        return found
    vectors = rest if first is None else torch.cat([first.unsqueeze(1), rest], dim=1)
    count = vectors.shape[1]
    row, column = torch.tril_indices(count, count, offset=-1, device=rest.device)
    # products[:, row, column] is the same and, backward included, takes nine times as long.
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    pairs = products.index_select(1, row * count + column)
    return pairs if first is None else torch.cat([first, pairs], dim=1)


class _Interaction(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor | None, rest: torch.Tensor) -> torch.Tensor:
        first, rest = None if first is None else first.contiguous(), rest.contiguous()
        ctx.save_for_backward(first, rest)
        count = rest.shape[1] + (first is not None)
        width = count * (count - 1) // 2 + (0 if first is None else rest.shape[2])
        # Torch's own memory, aligned for what comes next.
        result = torch.empty(len(rest), width, dtype=torch.float32, device="cpu")
        interact(None if first is None else first.numpy(), rest.numpy(), result.numpy())
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        first, rest = ctx.saved_tensors
        of_first, of_rest = interact_backward(
            gradient.contiguous().numpy(), None if first is None else first.numpy(), rest.numpy()
        )
        return None if of_first is None else torch.from_numpy(of_first), torch.from_numpy(of_rest)
