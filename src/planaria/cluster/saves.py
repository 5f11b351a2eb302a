"""The supervisor's side of a save: a checkpoint counts when every process has told of its part.

Each process writes its parts in the order of their steps. So when a later checkpoint is whole, one
before it that still lacks a part will never get it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planaria.checkpoints import (
    DENSE,
    Facts,
    PartSummary,
    Saved,
    discard,
    plan_next,
    prune,
    publish,
)
from planaria.cluster.pace import Pace
from planaria.cluster.saving import summary_of
from planaria.config import Config
from planaria.errors import CheckpointError, PlanariaError

LONGEST_CHAIN = 64  # checkpoints that one may need
PRIORITY_CHAIN = 4.0  # priority saves write so many times the model before all of it is saved again
ROWS = ("all", "changed", "interval", "priority")  # from what is best to have


@dataclass
class Pending:
    """A checkpoint in the making, by place: what is durable, and what went wrong."""

    began: float
    blocked_s: float = 0.0  # the longest of any process
    rested_s: float = 0.0  # likewise
    parts: dict[int, PartSummary] = field(default_factory=dict)
    bases: set[int] = field(default_factory=set)  # since which parts have what changed
    rows: dict[int, str] = field(default_factory=dict)  # what parts have: see cluster.saving
    problems: dict[int, str] = field(default_factory=dict)
    late: bool = False  # whether somebody was told too late


class Saves:
    """The checkpoints of one run. `found` is what the report says of them."""

    def __init__(
        self,
        config: Config,
        observe: Callable[[str], None],
        start: int = 0,
        found: Sequence[dict[str, Any]] = (),
        pace: Pace | None = None,
    ) -> None:
        """start: the step that the job starts from. found, pace: as they were before all rolled
        back.
        """
        self.config = config
        self.found = list(found)
        self.extra: dict[str, Any] = {}  # what else a checkpoint should remember
        self.start = start
        self.pace = pace
        if pace is None and config.checkpoint.every_s is not None:
            self.pace = Pace(config, observe)
        self._observe = observe
        self._wanted = {DENSE, *config.layout.places}
        self._pending: dict[int, Pending] = {}
        self._closed: set[int] = set()
        # The last full checkpoint and the differences after it, all of this run: servers count
        # changes since no other.
        self._history: list[Saved] = []
        self._had_their_turn: dict[int, list[int]] = {}  # by place: steps that all rows are of
        self._order: dict[str, Any] = {}

    def on_saved(self, facts: dict[str, Any]) -> None:
        step, place = facts["step"], facts["place"]
        if step in self._closed or step <= self.start:
            return
        pending = self._pending.setdefault(step, Pending(facts["began"]))
        pending.began = min(pending.began, facts["began"])
        pending.blocked_s = max(pending.blocked_s, facts["blocked_s"])
        pending.rested_s = max(pending.rested_s, facts["rested_s"])
        pending.parts[place] = summary_of(facts["part"])
        pending.rows[place] = facts["rows"]
        if facts["base"] is not None:
            pending.bases.add(facts["base"])
        self._close_if_all_have_spoken(step, pending)

    def on_failed(self, facts: dict[str, Any]) -> None:
        step, place = facts["step"], facts["place"]
        # What the job starts from is whole, whatever a replacement that starts there says.
        if step in self._closed or step <= self.start:
            return
        pending = self._pending.setdefault(step, Pending(time.monotonic()))
        if place not in pending.parts:  # its predecessor was done with it
            pending.late |= facts["late"]
            pending.problems.setdefault(place, facts["why"])
            self._observe(f"no part of {_name(place)} for step {step}: {facts['why']}")
        self._close_if_all_have_spoken(step, pending)

    def close(self) -> None:
        """The job is over: what is not whole now never will be."""
        for step in sorted(self._pending):
            self._give_up(step, over=True)

    def after_rollback(self, config: Config, start: int) -> Saves:
        """The saves of the processes that go on from `start`."""
        if self.pace:
            self.pace.restart()
        saves = Saves(config, self._observe, start, self.found, self.pace)
        saves.extra = self.extra
        return saves

    def on_step(self, step: int, at: float) -> None:
        if self.pace:
            self.pace.on_step(step, at)

    def on_lost(self, processes: int) -> None:
        """So many have failed and were replaced."""
        if self.pace and processes:
            self.pace.on_lost(processes)

    def take_order(self) -> dict[str, Any]:
        """What all processes must be told now, if anything."""
        if self.pace and (step := self.pace.next(time.monotonic())) is not None:
            self._order["save_at"] = step
        order, self._order = self._order, {}
        return order

    def last_of_all_rows(self, place: int, up_to: int) -> int:
        """The last step by which every row of a place had its turn to be saved; 0 if none."""
        steps = self._had_their_turn.get(place, [])
        return max((step for step in steps if step <= up_to), default=0)

    def way_back(self, start: int) -> str:
        """The end of a sentence that says what was lost; start: where this run was resumed."""
        newest = max([start, *(one["step"] for one in self.found if "failed" not in one)])
        return f"; go on from the checkpoint of step {newest} with --resume" if newest else ""

    def _close_if_all_have_spoken(self, step: int, pending: Pending) -> None:
        if pending.parts.keys() >= self._wanted:
            self._publish(step, pending)
        elif pending.parts.keys() | pending.problems.keys() >= self._wanted:
            self._give_up(step)

    def _publish(self, step: int, pending: Pending) -> None:
        config, folder = self.config, self.config.checkpoint.path
        assert folder is not None
        try:
            base = self._chain(pending)
            rows = max(pending.rows.values(), key=ROWS.index)
            facts = Facts(
                config.tables,
                config.optimizer_rule,
                config.layout,
                samples=step * config.batch,
                base=base,
                config=config.to_dict(),
                extra={"rows": rows, **self.extra},
            )
            publish(folder, step, list(pending.parts.values()), facts)
        except (PlanariaError, OSError) as error:
            pending.problems[DENSE] = str(error)
            if pending.bases:  # it may be the base that is amiss
                self._history.clear()
            self._give_up(step)
            return
        self._close(step)
        for place, of_place in pending.rows.items():
            if of_place != "priority":
                self._had_their_turn.setdefault(place, []).append(step)
        size = sum(part.bytes for part in pending.parts.values())
        seconds = time.monotonic() - pending.began
        blocked_s = pending.blocked_s
        self.found.append(
            {
                "step": step,
                "base": list(base),
                "rows": rows,
                "seconds": seconds,
                "blocked_s": blocked_s,
                "bytes": size,
            }
        )
        self._observe(
            f"checkpoint of step {step}{f', since step {base[-1]}' if base else ''}: "
            f"{size / 1e6:,.1f} MB in {seconds:.2f} s, nobody held up for more than "
            f"{blocked_s * 1000:.1f} ms"
        )
        if self.pace:
            # A writer rests for longer the rarer saves are; that is no cost of a save.
            self.pace.on_published(seconds - pending.rested_s)
        if not base:
            self._history.clear()
        self._history.append(Saved(step, size, base))
        self._plan()
        for older in [other for other in sorted(self._pending) if other < step]:
            self._give_up(older)
        try:
            prune(folder, config.checkpoint.keep_last, up_to=step)
        except (PlanariaError, OSError) as error:
            self._observe(f"old checkpoints could not be removed: {error}")

    def _chain(self, pending: Pending) -> tuple[int, ...]:
        """What a checkpoint with these parts needs, oldest first.

        Servers that were told late have what changed since an earlier step than the others, and
        replacements have everything: more than what changed since the newest base of them all. If
        that one has been superseded, any checkpoint after it is as good.
        """
        if not pending.bases:
            return ()
        if self.config.saves_priorities and self._history:  # each adds to all before it
            return (*self._history[-1].base, self._history[-1].step)
        for saved in self._history:
            if saved.step >= max(pending.bases):
                return (*saved.base, saved.step)
        raise CheckpointError(
            f"it has what changed since step {max(pending.bases)}, which cannot be used; the next "
            "one is full"
        )

    def _plan(self) -> None:
        """Servers are told what the next save is to be a difference from."""
        policy, longest = self.config.checkpoint.policy, 1.0
        if self.config.saves_priorities:
            policy, longest = "consecutive", PRIORITY_CHAIN
        if policy != "full":
            since = plan_next(policy, self._history, longest).since
            if len(self._history) >= LONGEST_CHAIN:
                since = None
            keep_from = max(self._closed) + 1 if since is None else since
            self._order["base"] = {"step": since, "keep_from": keep_from}

    def _give_up(self, step: int, over: bool = False) -> None:
        """over: it is not the save that has failed, but the processes."""
        assert self.config.checkpoint.path is not None
        pending = self._close(step)
        if self.config.saves_priorities:  # its rows are in no save: the next one has all
            self._history.clear()
        self._plan()
        if self.pace and not over:
            self.pace.on_given_up(pending.late)
        lacking = sorted(self._wanted - pending.parts.keys() - pending.problems.keys())
        named = ", ".join(map(_name, lacking))
        reasons = [*dict.fromkeys(pending.problems.values())]
        reasons += [f"{named} ended before it was saved"] if lacking else []
        self.found.append({"step": step, "failed": "; ".join(reasons)})
        self._observe(f"no checkpoint of step {step}: {reasons[0]}")
        try:  # room for the next one
            discard(self.config.checkpoint.path, step)
        except (PlanariaError, OSError) as error:
            self._observe(f"what there is of step {step} could not be removed: {error}")

    def _close(self, step: int) -> Pending:
        self._closed.add(step)
        return self._pending.pop(step)


def _name(place: int) -> str:
    return "the trainers" if place == DENSE else f"server:{place}"
