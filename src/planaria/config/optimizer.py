"""The keys of an optimizer, and the optimizer that they mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from planaria.config.kinds import FRACTION, NOT_NEGATIVE, POSITIVE, choice, or_null, whole
from planaria.optimizers import NAMES, Optimizer

MAX_STEPS = 10**9
DEFAULT_EPS = {"adam": 1e-8}  # as torch's; the others' is 1e-10


@dataclass(frozen=True)
class OptimizerConfig:
    name: Annotated[str, choice(*NAMES)] = "adagrad"
    lr: Annotated[float, POSITIVE] = 0.02
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    eps: Annotated[float | None, or_null(POSITIVE)] = None
    momentum: Annotated[float, FRACTION] = 0.9
    beta1: Annotated[float, FRACTION] = 0.9
    beta2: Annotated[float, FRACTION] = 0.999
    initial_accumulator: Annotated[float, NOT_NEGATIVE] = 0.0
    schedule: Annotated[str, choice("constant", "linear", "inverse_sqrt")] = "constant"
    warmup_steps: Annotated[int, whole(0, MAX_STEPS)] = 0

    @property
    def rule(self) -> Optimizer:
        values = asdict(self)
        del values["schedule"], values["warmup_steps"]
        if self.eps is None:
            values["eps"] = DEFAULT_EPS.get(self.name, 1e-10)
        return Optimizer(**values)
