"""A server that answers early in every other block of steps.

Bits do not depend on it, so one job measures both, and what else happens on the machine meanwhile
happens to both. `benchmarks.slow_link` starts this in the place of servers.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from typing import Any

from planaria.cluster.server_node import PAUSE_SHARE, ServerNode
from planaria.server.early import EarlyRows, LookupKey
from planaria.wire.machine import Outbox
from planaria.wire.messages import View

BLOCK_STEPS = 6


def is_on(step: int) -> bool:
    return step // BLOCK_STEPS % 2 == 1


def alternate() -> None:
    take, protect = EarlyRows.take, ServerNode._protect

    def take_some(self: EarlyRows, lookups: Mapping[LookupKey, Any], view: View) -> Outbox:
        return take(self, {key: held for key, held in lookups.items() if is_on(key[0])}, view)

    def protect_in_time(self: ServerNode) -> int:
        self._pause_share = 0.0 if is_on(self.server.step + 1) else PAUSE_SHARE
        return protect(self)

    EarlyRows.take = take_some  # type: ignore[method-assign]
    ServerNode._protect = protect_in_time  # type: ignore[method-assign]


if __name__ == "__main__":
    alternate()
    runpy.run_module("planaria.cluster", run_name="__main__", alter_sys=True)
