"""Campaigns of the control plane: seeds, and a blow at every message that the supervisor hears."""

from __future__ import annotations

from typing import Any

from planaria.simulator.checks import Failure as Broken
from planaria.simulator.control import ControlWorld
from planaria.simulator.control_faults import KILLED
from planaria.wire.messages import Heartbeat, Member


class StrikesAt(ControlWorld):
    """An undisturbed schedule, but for one blow just before the supervisor hears a message.

    victim: "sender", whoever sent it; "coordinator"; "supervisor", which falls asleep; or "member",
    one of the servers.
    """

    def __init__(self, boundary: int, victim: str, *, distant: bool = False) -> None:
        self.boundary, self.victim = boundary, victim
        self.heard = 0
        super().__init__(0, count=0)
        self.drop, self.distant = 0.0, distant

    def on_delivery(self, member: Member, message: Any) -> None:
        if isinstance(message, Heartbeat):
            return
        self.heard += 1
        if self.heard != self.boundary:
            return
        victim = {"sender": member, "coordinator": self.supervisor.coordinator}.get(self.victim)
        if self.victim == "supervisor":
            self.slept_until = self.now + 50.0
            return
        if victim is None:
            victim = self.supervisor.servers[0] if self.supervisor.servers else "server-0"
        if victim in self.processes:
            self.note(f"kill {victim} at message {self.boundary}")
            self.end(victim, KILLED)


def run_control_seed(seed: int, kind: type[ControlWorld] = ControlWorld, **more: Any) -> str | None:
    """What was broken, if anything."""
    try:
        kind(seed, **more).run()
    except Broken as broken:
        return str(broken)
    return None
