"""Optimizers and what they keep beside the weights of a row.

A record is the row's float32 weights and then the optimizer's state:

    sgd              weights[dim]
    momentum         weights[dim]  buffer[dim]
    adagrad          weights[dim]  sum of squared gradients[dim]
    rowwise_adagrad  weights[dim]  sum of mean squared gradients[1]
    adam             weights[dim]  mean[dim]  square[dim]  step[1], an unsigned integer

The formulas are torch.optim's, weight decay (L2) included; row-wise Adagrad is FBGEMM's. Adam
counts the steps of each row apart, so that rarely seen rows get the bias correction that their
own history asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError
from planaria.kernels.types import OptimizerKind, OptimizerRule, record_words

NAMES = tuple(kind.name.lower() for kind in OptimizerKind)


class StatePart(NamedTuple):
    """Something that an optimizer keeps for each row: a vector, or with shape () one number."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Optimizer:
    """How the rows of a table learn. Fields that its rule does not use are ignored.

    lr: what a step takes that brings no learning rate of its own.
    group: tells optimizers apart that are alike and whose learning rates go different ways.
    """

    name: str = "adagrad"
    lr: float = 0.01
    weight_decay: float = 0.0
    eps: float = 1e-10
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    initial_accumulator: float = 0.0
    group: int = 0

    def __post_init__(self) -> None:
        _require(self.name in NAMES, f"unknown optimizer {self.name!r}; use {', '.join(NAMES)}")
        for field in ("lr", "weight_decay", "eps", "initial_accumulator"):
            value = getattr(self, field)
            _require(0 <= value < float("inf"), f"optimizer {field} must be 0 or more, not {value}")
        for field in ("momentum", "beta1", "beta2"):
            value = getattr(self, field)
            _require(0 <= value < 1, f"optimizer {field} must be in [0, 1), not {value}")

    @property
    def kind(self) -> OptimizerKind:
        return OptimizerKind[self.name.upper()]

    def rule(self, lr: float | None = None) -> OptimizerRule:
        """The numbers of one step; `lr` is this step's learning rate, where a schedule sets it."""
        beta1 = self.momentum if self.kind == OptimizerKind.MOMENTUM else self.beta1
        step_lr = self.lr if lr is None else lr
        _require(0 <= step_lr < float("inf"), f"the learning rate must be 0 or more, not {lr}")
        return OptimizerRule(self.kind, step_lr, self.weight_decay, self.eps, beta1, self.beta2)

    def record_words(self, dim: int) -> int:
        """Size of a record in 4-byte words."""
        return record_words(self.kind, dim)

    def state_parts(self, dim: int) -> list[StatePart]:
        """What follows the weights in a record, in order, by torch's names."""
        floats = {
            OptimizerKind.SGD: (),
            OptimizerKind.MOMENTUM: ("momentum_buffer",),
            OptimizerKind.ADAGRAD: ("sum",),
            OptimizerKind.ROWWISE_ADAGRAD: (),
            OptimizerKind.ADAM: ("exp_avg", "exp_avg_sq"),
        }[self.kind]
        parts = [StatePart(name, (dim,)) for name in floats]
        if self.kind == OptimizerKind.ROWWISE_ADAGRAD:
            parts.append(StatePart("sum", ()))
        if self.kind == OptimizerKind.ADAM:
            parts.append(StatePart("step", (), "int32"))
        return parts

    def initial_state(self, dim: int) -> NDArray[np.uint32]:
        state = np.zeros(self.record_words(dim) - dim, np.float32)
        if self.kind in (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD):
            state[:] = self.initial_accumulator
        return state.view(np.uint32)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ArgumentError(otherwise)
