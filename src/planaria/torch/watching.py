"""Optimizers that change what nobody keeps: ranks would go different ways in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from planaria.errors import StateError
from planaria.torch.optimizers import SparseOptimizer


class OptimizerWatch:
    """Those that are kept are looked at when this is made, all others when they step."""

    def __init__(self, kept: Mapping[str, object], averaged: Iterable[torch.nn.Parameter]) -> None:
        """averaged: the parameters of all modules that are kept."""
        self._averaged = {id(one) for one in averaged}
        # Schedulers do not keep their optimizers; whatever else has one inside may well do.
        keep = [one for one in kept.values() if not isinstance(one, LRScheduler)]
        inside = [found for one in keep for found in getattr(one, "__dict__", {}).values()]
        self._kept = {id(one) for one in (*keep, *inside)}
        torchs = [one for one in (*keep, *inside) if isinstance(one, torch.optim.Optimizer)]
        self._keeps_one = any(not isinstance(one, SparseOptimizer) for one in torchs)
        for name, one in kept.items():
            if isinstance(one, torch.optim.Optimizer) and not self._changes_what_is_kept(one):
                raise StateError(
                    f"keep: {name} changes parameters of no module that is kept; keep the model as "
                    "well"
                )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One that changes nothing that is kept may be of a model beside, if another is kept."""
        if id(optimizer) in self._kept or isinstance(optimizer, SparseOptimizer):
            return
        if self._keeps_one and not self._averaged & self._changed_by(optimizer):
            return
        raise StateError(
            f"{type(optimizer).__name__} steps in the loop, but is not kept: ranks would go "
            "different ways, and nothing would be exact after a failure; call "
            "job.keep(model=model, optimizer=optimizer) before the loop"
        )

    def _changes_what_is_kept(self, optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, SparseOptimizer) or (
            self._changed_by(optimizer) <= self._averaged
        )

    def _changed_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        changed = [one for group in optimizer.param_groups for one in group["params"]]
        return {id(one) for one in changed if one.requires_grad}
