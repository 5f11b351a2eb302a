"""The step in progress."""

from __future__ import annotations

import torch

from planaria.errors import OutsideJob
from planaria.torch.sparse import SparseStep


class Step:
    """How far it is, and what is told of it."""

    def __init__(self, step: int, sparse: SparseStep) -> None:
        self.step = step
        self.sparse = sparse
        self.backwards = 0
        self.called = False  # the end of a backward is waited for
        self.pushed = False  # its gradients have left
        self.rows: list[int] = []  # of those gradients, by place
        self.figures: tuple[float | None, ...] = (None, None, None)

    def check_backward(self) -> None:
        if self.called:
            raise OutsideJob(
                f"a backward of step {self.step} has raised: what it has left is neither whole nor "
                "gone; let its exception end the script"
            )


def figures_of(*told: float | None) -> tuple[float | None, ...]:
    """As numbers: to make one of a tensor that has gradients is warned of."""
    plain = [one.detach() if isinstance(one, torch.Tensor) else one for one in told]
    return tuple(None if one is None else float(one) for one in plain)
