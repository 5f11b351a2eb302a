"""Forward and backward of lookups, for autograd: our kernels over the rows of a step.

Ids, rows and gradients are on the host; here and nowhere else results go to the device, and
gradients come from it. A result needs a gradient though no tensor that went in has one: an empty
tensor that does goes in with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from planaria import kernels
from planaria.kernels.types import Floats
from planaria.torch.devices import CPU
from planaria.torch.features import ArenaFeatures, host_floats
from planaria.torch.sparse import Prepared, SparseStep

_LEARNS = torch.empty(0, requires_grad=True, device=CPU)
_LEARNS_NOT = torch.empty(0, device=CPU)


@dataclass(frozen=True)
class Call:
    """One forward."""

    step: SparseStep
    prepared: Prepared
    values: list[Floats]  # [distinct rows, dim] of each arena that the collection has
    arenas: list[ArenaFeatures]
    width: int  # columns of the pooled rows
    device: torch.device
    number: int | None  # of this forward in the step; None: nothing is recorded

    @classmethod
    def of(
        cls,
        step: SparseStep,
        prepared: Prepared,
        arenas: list[ArenaFeatures],
        width: int,
        device: torch.device,
    ) -> Call:
        by_arena = step.values_for(prepared)
        recorded = step.recording and torch.is_grad_enabled()
        number = step.begin(prepared) if recorded else None
        values = [by_arena[own.arena] for own in arenas]
        return cls(step, prepared, values, arenas, width, device, number)

    @property
    def anchor(self) -> torch.Tensor:
        return _LEARNS_NOT if self.number is None else _LEARNS

    def add(self, gradients: list[Floats | None]) -> None:
        if self.number is not None:
            self.step.add(self.number, gradients)


def pooled(call: Call, weights: list[torch.Tensor]) -> torch.Tensor:
    """[samples, width]: each feature's bags in its columns. weights: of the ids of each arena, in
    the order of its bags; or none."""
    return _Pooled.apply(call.anchor, call, *weights)


def single(call: Call) -> tuple[torch.Tensor, ...]:
    """Per arena that the collection has, the row of each id: [ids, dim]."""
    rows: tuple[torch.Tensor, ...] = _Single.apply(call.anchor, call)
    return rows


class _Pooled(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, call: Call, *weights: torch.Tensor) -> torch.Tensor:
        result = torch.empty(call.prepared.samples, call.width, device=CPU)
        ctx.call, ctx.on_host = call, [host_floats(one) for one in weights]
        ctx.homes = [one.device for one in weights]
        for at, (_, bags) in enumerate(call.prepared.bags):
            own = call.arenas[at]
            kernels.pool(
                call.values[at],
                bags.inverse,
                bags.offsets,
                ctx.on_host[at] if weights else None,
                own.weighted if weights else own.pooled,
                result.numpy(),
            )
        return result.to(call.device)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, weighted = ctx.call, bool(ctx.on_host)
        gradients = host_floats(gradient)
        of_rows: list[Floats | None] = []
        of_weights: list[torch.Tensor | None] = [None] * len(ctx.on_host)
        for at, (_, bags) in enumerate(call.prepared.bags):
            own = call.arenas[at]
            sums = np.empty((len(bags.rows), own.dim), np.float32)
            weights = ctx.on_host[at] if weighted else None
            how = own.weighted if weighted else own.pooled
            kernels.pool_backward(gradients, bags.inverse, bags.offsets, sums, weights, how)
            of_rows.append(sums)
            if weighted and ctx.needs_input_grad[2 + at]:
                dots = kernels.weight_backward(
                    gradients, call.values[at], bags.inverse, bags.offsets, own.pooled
                )
                of_weights[at] = torch.from_numpy(dots).to(ctx.homes[at])
        call.add(of_rows)
        return None, None, *of_weights


class _Single(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, call: Call) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = []
        for values, (_, bags) in zip(call.values, call.prepared.bags, strict=True):
            rows = kernels.gather(values.view(np.uint32), bags.inverse).view(np.float32)
            results.append(torch.from_numpy(rows).to(call.device))
        return tuple(results)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        of_rows: list[Floats | None] = []
        for gradient, (_, bags) in zip(gradients, ctx.call.prepared.bags, strict=True):
            if gradient is None:
                of_rows.append(None)
                continue
            sums = np.empty((len(bags.rows), gradient.shape[1]), np.float32)
            of_rows.append(kernels.gradient_sum(host_floats(gradient), bags.inverse, sums))
        ctx.call.add(of_rows)
        return None, None
