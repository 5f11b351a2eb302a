"""Tables and their optimizers, as a script declares them to its job."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from planaria.optimizers import Optimizer
from planaria.torch.features import FeatureTables
from planaria.torch.optimizers import SparseOptimizer


def numbered_optimizers(collections: list[FeatureTables]) -> list[SparseOptimizer]:
    """Each once, in the order of the collections. Tables of different ones, however alike, lie in
    different arenas: their learning rates may go different ways.
    """
    found: list[SparseOptimizer] = []
    for own in collections:
        if own.optimizer is None:
            continue
        if not any(own.optimizer is one for one in found):
            found.append(own.optimizer)
        number = next(n for n, one in enumerate(found) if one is own.optimizer)
        rule = replace(own.optimizer.rule(), group=number + 1)
        own.tables = [replace(table, optimizer=rule) for table in own.tables]
    return found


def as_declared(table: Any) -> dict[str, Any]:
    """A table as the configuration has it."""
    optimizer: Optimizer | None = table.optimizer
    return {
        "name": table.name,
        "rows": table.rows,
        "dim": table.dim,
        "optimizer": optimizer and asdict(optimizer),
        "initial": table.initial and asdict(table.initial),
    }
