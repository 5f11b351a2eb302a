"""Processes of a job that do something in every other block of steps alone.

So one job measures both, and what else happens on the machine meanwhile happens to both.
`benchmarks.slow_link` starts this in the place of servers, or of trainers, with what is to take
turns as its first argument:

    early      servers answer early; bits do not depend on it
    lossy      trainers ask for rows as the job is configured, else for exact ones
    gradients  trainers send gradients as the job is configured, else as they are
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from typing import Any

from planaria.cluster.server_node import PAUSE_SHARE, ServerNode
from planaria.cluster.transport import Transport
from planaria.server.early import EarlyRows, LookupKey
from planaria.trainer.machine import TrainerMachine
from planaria.wire.codec import Frames
from planaria.wire.machine import Outbox
from planaria.wire.messages import Push, View
from planaria.wire.rounding import EXACT

BLOCK_STEPS = 6


def is_on(step: int) -> bool:
    return step // BLOCK_STEPS % 2 == 1


def answer_early() -> None:
    take, protect = EarlyRows.take, ServerNode._protect

    def take_some(self: EarlyRows, lookups: Mapping[LookupKey, Any], view: View) -> Outbox:
        return take(self, {key: held for key, held in lookups.items() if is_on(key[0])}, view)

    def protect_in_time(self: ServerNode) -> int:
        self._pause_share = 0.0 if is_on(self.server.step + 1) else PAUSE_SHARE
        return protect(self)

    EarlyRows.take = take_some  # type: ignore[method-assign]
    ServerNode._protect = protect_in_time  # type: ignore[method-assign]


def ask_lossily() -> None:
    ask = TrainerMachine.ask

    def ask_some(self: TrainerMachine, step: int, *arguments: Any, **more: Any) -> None:
        more["exact"] = more.get("exact", False) or not is_on(step)
        ask(self, step, *arguments, **more)

    TrainerMachine.ask = ask_some  # type: ignore[method-assign]


def send_rounded() -> None:
    """Those that are sent as they are were rounded all the same, which takes no time to speak of
    on such links.
    """
    encode_all = Transport.encode

    def encode_some(self: Transport, message: Any) -> Frames:
        if not isinstance(message, Push) or is_on(message.step):
            return encode_all(self, message)
        kind, self.gradients = self.gradients, EXACT
        try:
            return encode_all(self, message)
        finally:
            self.gradients = kind

    Transport.encode = encode_some  # type: ignore[method-assign]


if __name__ == "__main__":
    {"early": answer_early, "lossy": ask_lossily, "gradients": send_rounded}[sys.argv.pop(1)]()
    runpy.run_module("planaria.cluster", run_name="__main__", alter_sys=True)
