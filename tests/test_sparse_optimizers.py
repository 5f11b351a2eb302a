"""Optimizers of tables are torch's to torch's schedulers, and to whoever keeps them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from planaria.errors import ArgumentError
from planaria.optimizers import Optimizer
from planaria.torch.keeping import Keeper
from planaria.torch.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad, SparseOptimizer

pytestmark = pytest.mark.torch

KINDS: list[Callable[..., Any]] = [SGD, Adagrad, RowwiseAdagrad, Adam]
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda one: lr_scheduler.StepLR(one, 3, 0.5),
    "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, [2, 5]),
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
    "ExponentialLR": lambda one: lr_scheduler.ExponentialLR(one, 0.9),
    "LinearLR": lambda one: lr_scheduler.LinearLR(one, 0.1),
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, 10),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 4),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(
        one, 0.5, total_steps=20, cycle_momentum=False
    ),
    "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, 3, cycle_momentum=False),
    "ReduceLROnPlateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=1),
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.ConstantLR(one, 0.1), lr_scheduler.StepLR(one, 2)],
        [4],
    ),
}


def drive(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_them_as_they_drive_torchs(name: str, kind: Any) -> None:
    ours = kind(lr=0.3)
    torchs = torch.optim.SGD([torch.nn.Parameter(torch.empty(1))], lr=0.3)
    rates = drive(ours, SCHEDULERS[name](ours), 12)
    assert rates == drive(torchs, SCHEDULERS[name](torchs), 12)
    assert len(set(rates)) > 1
    assert ours.lr == rates[-1]
    assert ours.rule() == kind(lr=ours.rule().lr).rule()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_they_are_kept_with_their_schedulers(name: str) -> None:
    def made() -> tuple[SparseOptimizer, Any, Keeper]:
        optimizer = Adam(lr=0.3)
        scheduler = SCHEDULERS[name](optimizer)
        return optimizer, scheduler, Keeper({"sparse": optimizer, "scheduler": scheduler})

    optimizer, scheduler, keeper = made()
    drive(optimizer, scheduler, 5)
    frozen = keeper.freeze()
    rates = drive(optimizer, scheduler, 6)
    other, other_scheduler, other_keeper = made()
    assert other_keeper.fingerprint() == made()[2].fingerprint()
    other_keeper.thaw(frozen)
    assert drive(other, other_scheduler, 6) == rates
    assert np.array_equal(other_keeper.freeze(), keeper.freeze())
    assert other.rule() == optimizer.rule()


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_names_and_defaults_are_torchs(name: str) -> None:
    torchs = inspect.signature(getattr(torch.optim, name)).parameters
    ours = inspect.signature({"SGD": SGD, "Adagrad": Adagrad, "Adam": Adam}[name]).parameters
    assert {key: one.default for key, one in ours.items()} == {
        key: torchs[key].default for key in ours
    }


def test_rules_are_those_of_the_engine() -> None:
    assert SGD(0.1).rule().name == "sgd"
    assert SGD(0.1, momentum=0.5, weight_decay=0.01).rule() == Optimizer(
        "momentum", lr=0.1, momentum=0.5, weight_decay=0.01
    )
    assert Adagrad(0.1, eps=1e-6, initial_accumulator_value=0.5).rule() == Optimizer(
        "adagrad", lr=0.1, eps=1e-6, initial_accumulator=0.5
    )
    assert RowwiseAdagrad(0.1).rule() == Optimizer("rowwise_adagrad", lr=0.1)
    assert Adam(0.1, betas=(0.8, 0.99)).rule() == Optimizer(
        "adam", lr=0.1, beta1=0.8, beta2=0.99, eps=1e-8
    )


def test_only_the_learning_rate_can_change() -> None:
    optimizer = Adam(lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert (optimizer.lr, optimizer.rule().lr) == (0.5, 0.1)
    optimizer.param_groups[0]["eps"] = 1.0
    with pytest.raises(ArgumentError, match=r"eps of Adam was 1e-08 and has become 1\.0, but only"):
        optimizer.rule()
    with pytest.raises(ArgumentError, match="has one group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.empty(1))]})


def test_a_cycled_momentum_is_refused() -> None:
    for optimizer in (SGD(lr=0.1, momentum=0.9), Adam(lr=0.1)):
        lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)
        with pytest.raises(ArgumentError, match="cycle_momentum=False"):
            optimizer.rule()


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -1.0}, {"betas": (1.0, 0.9)}],
)
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="optimizer"):
        Adam(**wrong)


def test_a_step_runs_its_closure_and_nothing_else() -> None:
    optimizer = SGD(lr=0.1)
    assert optimizer.step() is None
    assert optimizer.step(lambda: 3) == 3
    optimizer.zero_grad()
    assert optimizer.state_dict()["state"] == {}
