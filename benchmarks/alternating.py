"""A server or trainer that answers, or asks, early in every other block of steps.

Bits do not depend on it, so one job measures both, and what else happens on the machine meanwhile
happens to both. `benchmarks.slow_link` starts this in the place of `planaria.cluster`.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from typing import Any

from planaria.server.early import EarlyRows, LookupKey
from planaria.trainer.machine import TrainerMachine
from planaria.wire.machine import Outbox
from planaria.wire.messages import View

BLOCK_STEPS = 6


def is_on(step: int) -> bool:
    return step // BLOCK_STEPS % 2 == 1


def alternate() -> None:
    take = EarlyRows.take

    def take_some(self: EarlyRows, lookups: Mapping[LookupKey, Any], view: View) -> Outbox:
        return take(self, {key: held for key, held in lookups.items() if is_on(key[0])}, view)

    def goes_ahead(self: TrainerMachine, step: int) -> bool:
        return is_on(step) or bool(self.rebuilding)

    EarlyRows.take = take_some  # type: ignore[method-assign]
    TrainerMachine._goes_ahead = goes_ahead  # type: ignore[method-assign]


if __name__ == "__main__":
    alternate()
    runpy.run_module("planaria.cluster", run_name="__main__", alter_sys=True)
