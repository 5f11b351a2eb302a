"""Partial recovery, as a job's supervisor sees it: what each failure cost, and when it is too much.

PLS, the portion of lost samples, is CPR's measure: a server that goes back to a save of S steps ago
has lost S of the job's steps, for one server's share of the model. `pls_updates` weighs the same
loss by what was really lost: the share of the job's row updates that the server had made since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planaria.config import Config


@dataclass(frozen=True)
class Updates:
    """What a server has said of its work: row updates in so many steps, and those in no save."""

    steps: int
    total: int
    unsaved: int


@dataclass
class Losses:
    """The losses of one job so far."""

    config: Config
    pls: float = 0.0
    pls_updates: float = 0.0
    over_budget: bool = False
    reloads: list[dict[str, Any]] = field(default_factory=list)
    _said: dict[int, Updates] = field(default_factory=dict)  # by place, the latest

    def on_updates(self, facts: dict[str, Any]) -> None:
        self._said[facts["place"]] = Updates(facts["steps"], facts["total"], facts["unsaved"])

    def on_reloaded(self, facts: dict[str, Any]) -> str:
        """A place went back to a save; returns what to tell."""
        config, place = self.config, facts["place"]
        lost_steps = facts["step"] - facts["saved"]
        pls = lost_steps / (config.steps * config.servers)
        updates = self._lost_updates(place)
        self.pls += pls
        self.pls_updates += updates
        self.reloads.append(
            {
                "place": place,
                "step": facts["step"],
                "saved_step": facts["saved"],
                "pls": pls,
                "pls_updates": updates,
                "seconds": facts["seconds"],
            }
        )
        source = f"its save of step {facts['saved']}" if facts["saved"] else "its initial values"
        return (
            f"server:{place} goes on from {source}, {lost_steps} steps ago; PLS is "
            f"{self.pls:.4f} of {config.cpr.target_pls:g}, by updates {self.pls_updates:.4f}"
        )

    def passes_budget(self) -> bool:
        """Whether the budget was passed just now."""
        passed = not self.over_budget and self.pls > self.config.cpr.target_pls
        self.over_budget |= passed
        return passed

    def _lost_updates(self, place: int) -> float:
        """As a share of all row updates that the job will make, at the rate of those so far."""
        said = self._said.pop(place, None)
        steps = sum(other.steps for other in self._said.values())
        updates = sum(other.total for other in self._said.values())
        if said is None or not steps or not updates:
            return 0.0
        per_server_step = updates / steps
        return said.unsaved / (per_server_step * self.config.servers * self.config.steps)
