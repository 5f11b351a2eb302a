"""What trainers agree on in a step: several ranks in one process, and their sum in rank order."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planaria.torch.averaging import DenseGradients

pytestmark = pytest.mark.torch


def agree(ranks: Sequence[nn.Module]) -> None:
    """As a job does it at the end of backward."""
    agreed = [DenseGradients([own]) for own in ranks]
    total = np.zeros(agreed[0].size, np.float32)
    for rank, own in enumerate(agreed):
        total += own.collect(rank)
    for own in agreed:
        own.spread(total.copy(), len(ranks))


class Towers(nn.Module):  # type: ignore[misc]
    """A rank uses those of its towers that it is told to."""

    def __init__(self, towers: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(3, 2, dtype=dtype) for _ in range(towers))
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        return sum((self.towers[one](x).pow(2).sum() for one in used), x.sum() * 0)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_rank_has_the_mean_and_what_nobody_used_has_no_gradient(
    used: list[set[int]], dtype: torch.dtype
) -> None:
    first = Towers(3, dtype)
    ranks = [copy.deepcopy(first) for _ in used]
    inputs = [torch.full((2, 3), rank + 1.0, dtype=dtype) for rank in range(len(used))]
    for own, x, towers in zip(ranks, inputs, used, strict=True):
        loss = own(x, sorted(towers))
        if loss.requires_grad:
            loss.backward()
    before = [[p.grad for p in own.towers.parameters()] for own in ranks]
    expected = []
    for grads in zip(*before, strict=True):
        there = [one.float() for one in grads if one is not None]
        total = sum(there[1:], there[0].clone()) / len(used) if there else None
        expected.append(total if total is None else total.to(dtype))
    agree(ranks)
    for own in ranks:
        for parameter, mean in zip(own.towers.parameters(), expected, strict=True):
            if mean is None:
                assert parameter.grad is None
                continue
            assert parameter.grad is not None
            assert parameter.grad.dtype == dtype
            assert torch.equal(parameter.grad, mean)
        assert all(p.grad is None for p in own.frozen.parameters())


def test_optimizers_pass_over_what_nobody_used_so_that_weight_decay_leaves_it_alone() -> None:
    ranks = [Towers(2) for _ in range(2)]
    before = [own.towers[1].weight.clone() for own in ranks]
    for own in ranks:
        own(torch.ones(1, 3), [0]).backward()
    agree(ranks)
    for own, weight in zip(ranks, before, strict=True):
        torch.optim.AdamW(own.towers.parameters(), weight_decay=0.5).step()
        assert torch.equal(own.towers[1].weight, weight)


def test_buffers_that_forward_changes_are_those_of_rank_0() -> None:
    ranks = [nn.BatchNorm1d(3) for _ in range(3)]
    for rank, own in enumerate(ranks):
        own(torch.randn(8, 3) + rank)
    mean, variance = ranks[0].running_mean.clone(), ranks[0].running_var.clone()
    agree(ranks)
    for own in ranks:
        assert torch.equal(own.running_mean, mean)
        assert torch.equal(own.running_var, variance)
        assert int(own.num_batches_tracked) == 1


def test_a_parameter_of_two_modules_is_averaged_once() -> None:
    shared = nn.Linear(2, 2)
    own = DenseGradients([nn.Sequential(shared, shared), shared])
    assert [id(p) for p in own.parameters] == [id(p) for p in shared.parameters()]


def test_what_is_no_module_has_no_gradients() -> None:
    model = nn.Linear(2, 2)
    assert DenseGradients([torch.optim.SGD(model.parameters())]).size == 0


def test_means_are_written_into_the_gradients_that_are_there() -> None:
    """Whoever holds on to a gradient, as a clipping hook or a flat buffer does, sees the mean."""
    ranks = [Towers(1) for _ in range(2)]
    for rank, own in enumerate(ranks):
        own(torch.full((1, 3), rank + 1.0), [0]).backward()
    held = [own.towers[0].weight.grad for own in ranks]
    agree(ranks)
    assert all(own.towers[0].weight.grad is grad for own, grad in zip(ranks, held, strict=True))
    assert torch.equal(held[0], held[1])
