"""Optimizers of embedding tables, as objects like torch's: the names and defaults of torch.optim.

The servers take the steps, so these hold no state of rows: only the numbers of a step. What can
change from step to step is the learning rate; torch's schedulers set it as they set any other. For
them these are torch optimizers, over one parameter without elements, whose step does nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from planaria.errors import ArgumentError
from planaria.optimizers import Optimizer


class SparseOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """What they have in common; use one of those below."""

    def __init__(self, rule: Optimizer, **hyperparameters: Any) -> None:
        self._rule = rule  # which has checked the numbers
        self._fixed = hyperparameters
        super().__init__(
            [torch.nn.Parameter(torch.empty(0, device="cpu"))], {"lr": rule.lr, **hyperparameters}
        )

    @property
    def lr(self) -> float:
        """The learning rate of now."""
        return float(self._group()["lr"])

    def rule(self) -> Optimizer:
        """What stays the same for the whole job, with the learning rate that it began with."""
        group = self._group()
        for name, value in self._fixed.items():
            if group.get(name) != value:
                raise ArgumentError(
                    f"{name} of {type(self).__name__} was {value} and has become "
                    f"{group.get(name)}, but only lr can change while tables are trained; "
                    "give schedulers that cycle it as well cycle_momentum=False"
                )
        return self._rule

    def step(self, closure: Any = None) -> Any:
        """Nothing but what schedulers look for: the servers take the steps."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ArgumentError(
                f"{type(self).__name__} has one group, for all tables of its collection; "
                "give another collection another optimizer"
            )
        super().add_param_group(param_group)

    def _group(self) -> dict[str, Any]:
        if len(self.param_groups) != 1:
            raise ArgumentError(
                f"{type(self).__name__} must have one group of parameters, "
                f"not {len(self.param_groups)}; leave param_groups as they are but for lr"
            )
        group: dict[str, Any] = self.param_groups[0]
        return group


class SGD(SparseOptimizer):
    """torch.optim.SGD for tables; with momentum, rows keep a buffer beside their weights."""

    def __init__(
        self, lr: float = 1e-3, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        name = "momentum" if momentum else "sgd"
        rule = Optimizer(name, lr=float(lr), momentum=momentum, weight_decay=weight_decay)
        super().__init__(rule, momentum=momentum, weight_decay=weight_decay)


class Adagrad(SparseOptimizer):
    """torch.optim.Adagrad for tables."""

    rule_name = "adagrad"

    def __init__(
        self,
        lr: float = 1e-2,
        *,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        rule = Optimizer(
            self.rule_name,
            lr=float(lr),
            weight_decay=weight_decay,
            eps=eps,
            initial_accumulator=initial_accumulator_value,
        )
        super().__init__(
            rule,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum per row, of the mean squared gradient, as FBGEMM has it."""

    rule_name = "rowwise_adagrad"


class Adam(SparseOptimizer):
    """torch.optim.Adam for tables; each row counts the steps in which it had a gradient."""

    def __init__(
        self,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        beta1, beta2 = betas
        rule = Optimizer(
            "adam", lr=float(lr), beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay
        )
        super().__init__(rule, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
