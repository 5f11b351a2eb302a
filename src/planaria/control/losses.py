"""What partial recovery has lost so far, and whether that is too much.

PLS, the portion of lost samples, is CPR's measure: a server that goes back to a save of S steps ago
has lost S of the job's steps, for one server's share of the model. `pls_updates` weighs the same
loss by what was really lost: the share of the job's row updates that the server had made since.
Trainers tell with every step how many rows they update on which server, so that is a count, not
what a server had last said before it died.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planaria.config import Config
from planaria.wire.control import Reloaded, StepDone

STEPS_KEPT = 100_000  # of which the updates are known one by one


@dataclass
class Losses:
    """The losses of one job. before: what it had lost before it was resumed."""

    config: Config
    pls: float = 0.0
    updates_before: float = 0.0
    over_budget: bool = False
    reloads: list[dict[str, Any]] = field(default_factory=list)
    _rows: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # by step and rank
    _total: int = 0
    _counted: int = 0  # pairs of step and rank in the total
    _open: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    """Losses whose steps were not all told yet, and the updates that their save lacks."""

    @property
    def pls_updates(self) -> float:
        return self.updates_before + sum(one["pls_updates"] for one in self.reloads)

    def on_step(self, done: StepDone) -> None:
        by_rank = self._rows.setdefault(done.step, {})
        if done.rank not in by_rank:
            self._total += sum(done.rows)
            self._counted += 1
        by_rank[done.rank] = done.rows
        if len(self._rows) > STEPS_KEPT:
            del self._rows[min(self._rows)]
        self._open = [(entry, lacks) for entry, lacks in self._open if not self._count(entry, lacks)]

    def on_reloaded(self, reloaded: Reloaded, since: int, lacks: int) -> str:
        """A place went back to a save; returns what to tell.

        since: the last step by which every row had its turn to be saved. What priority saves have
        saved after it is not counted as saved, as CPR does not count it. lacks: updates of before
        the save that it does not have.
        """
        config = self.config
        pls = (reloaded.step - since) / (config.steps * config.servers)
        self.pls += pls
        entry = {
            "place": reloaded.place,
            "step": reloaded.step,
            "saved_step": reloaded.saved,
            "since_step": since,
            "pls": pls,
            "pls_updates": 0.0,
            "seconds": reloaded.seconds,
        }
        self.reloads.append(entry)
        if not self._count(entry, lacks):
            self._open.append((entry, lacks))
        source = f"its save of step {reloaded.saved}" if reloaded.saved else "its initial values"
        ago = f"{reloaded.step - reloaded.saved} steps ago"
        if since < reloaded.saved:
            ago += f" (all rows had their turn by step {since})"
        return (
            f"server:{reloaded.place} goes on from {source}, {ago}; PLS is {self.pls:.4f} of "
            f"{config.cpr.target_pls:g}, by updates {self.pls_updates:.4f}"
        )

    def to_save(self) -> dict[str, float]:
        """What a checkpoint remembers, for a job that is resumed."""
        return {"pls": self.pls, "pls_updates": self.pls_updates} if self.pls else {}

    def passes_budget(self) -> bool:
        """Whether the budget was passed just now."""
        passed = not self.over_budget and self.pls > self.config.cpr.target_pls
        self.over_budget |= passed
        return passed

    def _count(self, entry: dict[str, Any], lacks: int) -> bool:
        """Weighs one loss by the updates in it; whether all of its steps were told.

        A trainer that died just when it had computed a step may never have told of it: such a step
        counts as the mean of the others.
        """
        steps = range(entry["saved_step"] + 1, entry["step"] + 1)
        ranks, place = range(self.config.trainers), entry["place"]
        found = [
            self._rows[step][rank][place]
            for step in steps
            for rank in ranks
            if rank in self._rows.get(step, ())
        ]
        wanted = len(steps) * len(ranks)
        if self._counted and self._total:
            lost = sum(found) * (wanted / len(found)) if found else 0.0
            job = self._total / self._counted * len(ranks) * self.config.steps
            entry["pls_updates"] = (lost + lacks) / job
        return len(found) == wanted
