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

from planaria.dense import sum_in_rank_order
from planaria.errors import StateError
from planaria.torch.averaging import DenseGradients
from planaria.torch.frozen import pack
from planaria.torch.replicas import Replicas
from planaria.trainer.reducing import Reduction

pytestmark = pytest.mark.torch


def agree(ranks: Sequence[nn.Module]) -> None:
    """As a job does it at the end of backward."""
    spread([DenseGradients({"model": own}, len(ranks)) for own in ranks])


def spread(agreed: Sequence[DenseGradients], said: Sequence[bytes] | None = None) -> None:
    said = [b""] * len(agreed) if said is None else said
    total = sum_in_rank_order([own.collect(rank, said[rank]) for rank, own in enumerate(agreed)])
    for own in agreed:
        assert len(total) <= own.size
        assert own.heard(total) == said
        own.spread(total.copy())


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
    own = DenseGradients({"twice": nn.Sequential(shared, shared), "shared": shared}, 2)
    assert [id(p) for p in own.parameters] == [id(p) for p in shared.parameters()]


def test_what_is_no_module_has_no_gradients() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    ranks = [DenseGradients({"optimizer": optimizer}, 2) for _ in range(2)]
    assert ranks[0].parameters == []
    spread(ranks, [b"of six", b"letter"])


def test_means_are_written_into_the_gradients_that_are_there() -> None:
    """Whoever holds on to a gradient, as a clipping hook or a flat buffer does, sees the mean."""
    ranks = [Towers(1) for _ in range(2)]
    for rank, own in enumerate(ranks):
        own(torch.full((1, 3), rank + 1.0), [0]).backward()
    held = [own.towers[0].weight.grad for own in ranks]
    agree(ranks)
    assert all(own.towers[0].weight.grad is grad for own, grad in zip(ranks, held, strict=True))
    assert torch.equal(held[0], held[1])


# ------------------------------------------------------------------ exactly


class Buffers(nn.Module):  # type: ignore[misc]
    """One buffer of each kind that a float32 cannot hold, or that a sum would change."""

    def __init__(self) -> None:
        super().__init__()
        for name, values in {
            "double_precision": torch.tensor([2.0**24 + 1, np.pi, -0.0], dtype=torch.float64),
            "whole": torch.tensor(2**62 + 1),
            "negative": torch.tensor([-1, -(2**63)]),
            "flags": torch.tensor([True, False, True]),
            "signalling": torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32),
            "pairs": torch.tensor([1 + 2j, -0.0j]),
            "half_precision": torch.tensor([-0.0, 65504.0], dtype=torch.float16),
            "empty": torch.zeros(0, 3),
            "turned": torch.arange(6.0).view(2, 3).T,
        }.items():
            self.register_buffer(name, values)


def bits(tensor: torch.Tensor) -> list[int]:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return flat.view(torch.uint8).tolist()  # type: ignore[no-any-return]


def test_buffers_of_every_kind_are_rank_0s_bit_for_bit() -> None:
    ranks = [Buffers() for _ in range(3)]
    wanted = [bits(one) for one in ranks[0].buffers()]
    for own in ranks[1:]:
        for one in own.buffers():
            one.zero_()
    agree(ranks)
    for own in ranks:
        assert [bits(one) for one in own.buffers()] == wanted


def test_a_counter_beyond_2_24_goes_on_counting() -> None:
    ranks = [nn.Module() for _ in range(2)]
    for own in ranks:
        own.register_buffer("count", torch.tensor(2.0**24, dtype=torch.float64))
    agreed = [DenseGradients({"model": own}, 2) for own in ranks]
    for _ in range(3):
        for own in ranks:
            own.count = own.count + 1  # another tensor in its place
        spread(agreed)
    assert [own.count.item() for own in ranks] == [2.0**24 + 3] * 2


def test_buffers_that_are_alike_are_not_written() -> None:
    """A graph that a user holds may have saved them: autograd would refuse its backward."""
    ranks = [nn.BatchNorm1d(3) for _ in range(2)]
    before = [own.running_mean._version for own in ranks]
    agree(ranks)
    assert [own.running_mean._version for own in ranks] == before


def test_a_buffer_of_another_shape_is_refused() -> None:
    own = nn.BatchNorm1d(3)
    agreed = DenseGradients({"model": own}, 2)
    own.running_mean = torch.zeros(4)
    with pytest.raises(StateError, match=r"model\.running_mean: a buffer has another shape"):
        agreed.collect(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_gradients_of_double_and_complex_parameters_keep_all_their_bits(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    ranks = [nn.ParameterList([torch.zeros(2, 3, dtype=dtype), torch.zeros(2)]) for _ in range(3)]
    given = [torch.randn(2, 3, dtype=dtype, generator=draw) for _ in ranks]
    for own, gradient in zip(ranks[1:], given[1:], strict=True):  # rank 0 has none
        own[0].grad = gradient.clone()
        own[1].grad = torch.ones(2)
    agree(ranks)
    real = [torch.view_as_real(one) if one.is_complex() else one for one in given]
    mean = (real[1] + real[2]) / 3
    for own in ranks:
        grad = own[0].grad
        assert grad.dtype == dtype
        assert torch.equal(torch.view_as_real(grad) if grad.is_complex() else grad, mean)
        assert torch.equal(own[1].grad, torch.full((2,), 2.0) / 3)


# ------------------------------------------------------------------ frozen and unfrozen


def test_what_is_unfrozen_in_the_loop_is_averaged_and_its_backward_is_noticed() -> None:
    ranks = [Towers(1) for _ in range(2)]
    agreed = [DenseGradients({"model": own}, 2) for own in ranks]
    noticed: list[int] = []
    for number, own in enumerate(agreed):
        own.on_backward(lambda number=number: noticed.append(number))  # type: ignore[misc]
    assert not any(p.requires_grad for own in ranks for p in own.frozen.parameters())
    spread(agreed)
    for rank, own in enumerate(ranks):
        own.frozen.requires_grad_(True)
        own.frozen(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert set(noticed) == {0, 1}
    spread(agreed)
    assert all(torch.equal(own.frozen.weight.grad, torch.full((2, 2), 1.5)) for own in ranks)


def test_what_is_frozen_costs_nothing_and_its_old_gradient_is_left_alone() -> None:
    own = nn.Linear(50, 50, bias=False)
    agreed = DenseGradients({"model": own}, 2)
    held = own.weight.grad = torch.full((50, 50), 3.0)
    own.requires_grad_(False)
    vector = agreed.collect(0)
    assert len(vector) < 100
    agreed.spread(vector)
    assert torch.equal(held, torch.full((50, 50), 3.0))


@pytest.mark.parametrize("sizes", [(3, 3), (3, 4)])
def test_ranks_that_train_different_parameters_are_refused(sizes: tuple[int, int]) -> None:
    vectors, agreed = [], []
    for rank in range(2):
        own = nn.ParameterList([torch.zeros(size) for size in sizes])
        own[1 - rank].requires_grad_(False)
        agreed.append(DenseGradients({"model": own}, 2))
        vectors.append(agreed[-1].collect(rank))
    if sizes[0] == sizes[1]:
        with pytest.raises(StateError, match="ranks train different parameters"):
            agreed[0].heard(sum_in_rank_order(vectors))
        return
    reduction = Reduction(2)
    for rank, vector in enumerate(vectors):
        reduction.on_gradient(1, rank, vector)
    with pytest.raises(StateError, match="dense gradients of different sizes in step 1"):
        reduction.sum_part(1, 0)
    with pytest.raises(StateError, match="ranks train different parameters"):
        agreed[0].heard(vectors[1])


def test_a_sparse_gradient_is_refused_with_its_name() -> None:
    own = nn.ModuleDict({"words": nn.Embedding(5, 2, sparse=True)})
    own["words"](torch.tensor([1, 1])).sum().backward()
    with pytest.raises(StateError, match=r"the gradient of model\.words\.weight is sparse"):
        DenseGradients({"model": own}, 2).collect(0)


# ------------------------------------------------------------------ the same on all ranks


def test_an_object_that_differs_is_named_with_its_step_and_its_ranks() -> None:
    same = {"model": {"weight": torch.ones(3000), "note": np.arange(7)}, "steps": {"seen": 1}}
    others = [
        ("steps", {**same, "steps": {"seen": 2}}),
        ("model", {**same, "model": {**same["model"], "note": np.arange(7) + 1}}),
    ]
    for place in (0, 1500, 2999):
        weight = torch.ones(3000)
        weight[place] += torch.finfo(torch.float32).eps
        others.append(("model", {**same, "model": {**same["model"], "weight": weight}}))
    for name, state in others:
        ranks = [Replicas() for _ in range(3)]
        for own, held in zip(ranks, (same, same, state), strict=True):
            own.hold(pack(held))
        ranks[0].compare([ranks[0].said, ranks[1].said], 7)
        with pytest.raises(StateError, match=f"^{name} is not the same .* after step 7: .* rank 2"):
            ranks[0].compare([own.said for own in ranks], 7)


def test_tensors_whose_rows_are_exchanged_differ() -> None:
    """Sums alone would not tell."""
    rows = torch.arange(4 * 1024.0).view(4, 1024)
    ranks = [Replicas() for _ in range(2)]
    for own, order in zip(ranks, ([0, 1, 2, 3], [0, 2, 1, 3]), strict=True):
        own.hold(pack({"model": {"weight": rows[order]}}))
    assert ranks[0].said != ranks[1].said
