"""What partial recovery has lost so far, and whether that is too much.

PLS, the portion of lost samples, is CPR's measure: a server that goes back to a save of S steps ago
has lost S of the job's steps, for one server's share of the model. `pls_updates` weighs the same
loss by what was really lost: the share of the job's row updates that the server had made since.
Trainers tell with every step how many rows they update on which server, so that is a count, not
what a server had last said before it died.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from planaria.config import Config
from planaria.wire.control import Reloaded, StepDone

STEPS_KEPT = 100_000  # of which the updates are known one by one


@dataclass
class Reload:
    """One server's return to a save. lacks: updates of before the save that it does not have."""

    place: int
    step: int
    saved_step: int
    since_step: int
    pls: float
    seconds: float
    lacks: int
    updates_lost: float = 0.0


@dataclass
class Losses:
    """The losses of one job. updates_before: pls_updates before it was resumed."""

    config: Config
    pls: float = 0.0
    updates_before: float = 0.0
    over_budget: bool = False
    _reloads: list[Reload] = field(default_factory=list)
    _uncounted: list[Reload] = field(default_factory=list)  # whose steps were not all told yet
    _rows: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # by step and rank
    _total: int = 0
    _counted: int = 0  # pairs of step and rank in the total

    @property
    def pls_updates(self) -> float:
        return self.updates_before + sum(map(self._share, self._reloads))

    @property
    def reloads(self) -> list[dict[str, Any]]:
        """For the report."""
        found = [{**asdict(one), "pls_updates": self._share(one)} for one in self._reloads]
        for one in found:
            del one["lacks"]
        return found

    def on_step(self, done: StepDone) -> None:
        by_rank = self._rows.setdefault(done.step, {})
        if done.rank not in by_rank:
            self._total += sum(done.rows)
            self._counted += 1
        by_rank[done.rank] = done.rows
        if len(self._rows) > STEPS_KEPT:
            del self._rows[next(iter(self._rows))]
        self._uncounted = [
            one for one in self._uncounted if done.step > one.step or not self._count(one)
        ]

    def on_reloaded(self, reloaded: Reloaded, since: int, lacks: int) -> str:
        """A place went back to a save; returns what to tell.

        since: the last step by which every row had its turn to be saved. What priority saves have
        saved after it is not counted as saved, as CPR does not count it.
        """
        config = self.config
        pls = (reloaded.step - since) / (config.steps * config.servers)
        self.pls += pls
        one = Reload(
            reloaded.place, reloaded.step, reloaded.saved, since, pls, reloaded.seconds, lacks
        )
        self._reloads.append(one)
        if not self._count(one):
            self._uncounted.append(one)
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

    def _share(self, one: Reload) -> float:
        """Of all row updates that the job will make, at the rate of those so far."""
        if not self._total:
            return 0.0
        in_a_step = self._total / self._counted * self.config.trainers
        return one.updates_lost / (in_a_step * self.config.steps)

    def _count(self, one: Reload) -> bool:
        """The updates of one loss; whether all of its steps were told.

        A trainer that died just when it had computed a step may never have told of it: such a step
        counts as the mean of the others.
        """
        steps, ranks = range(one.saved_step + 1, one.step + 1), range(self.config.trainers)
        found = [
            self._rows[step][rank][one.place]
            for step in steps
            for rank in ranks
            if rank in self._rows.get(step, ())
        ]
        wanted = len(steps) * len(ranks)
        one.updates_lost = one.lacks + (sum(found) * wanted / len(found) if found else 0.0)
        return len(found) == wanted
