"""Optimizers that change what nobody keeps are refused when they step; others are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planaria.torch
from planaria.errors import StateError
from planaria.torch.watching import OptimizerWatch

pytestmark = pytest.mark.torch


class Wrapper:
    """What has an optimizer inside, and its state in its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer


def test_whoever_steps_must_be_kept() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameters = list(model.parameters())

    OptimizerWatch({"model": model, "optimizer": optimizer}, parameters).before_step(optimizer)
    OptimizerWatch({"model": model, "own": Wrapper(optimizer)}, parameters).before_step(optimizer)
    OptimizerWatch({}, []).before_step(planaria.torch.Adagrad(lr=0.1))
    # A model beside, which is nobody else's business.
    OptimizerWatch({"model": model, "optimizer": optimizer}, parameters).before_step(beside)

    for kept, averaged in (
        ({}, []),
        ({"tables": planaria.torch.Adagrad(lr=0.1)}, []),
        ({"model": model}, parameters),
        ({"model": model, "schedule": schedule}, parameters),
    ):
        with pytest.raises(StateError, match=r"Adam steps in the loop, but is not kept.*job.keep"):
            OptimizerWatch(kept, averaged).before_step(optimizer)
    with pytest.raises(StateError, match="keep the model as well"):
        OptimizerWatch({"optimizer": optimizer}, [])
