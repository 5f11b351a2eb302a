"""Save coordination: a checkpoint counts when every process has told of its part.

Each process writes its parts in the order of their steps. So when a later checkpoint is whole, one
before it that still lacks a part will never get it. What touches the disk (publishing, removing) is
work that the driver takes, does elsewhere, and tells the outcome of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from planaria.checkpoints import DENSE, PartSummary, Saved, plan_next
from planaria.config import Config
from planaria.control.pace import Ahead, Pace
from planaria.errors import CheckpointError
from planaria.layout.resizing import Resize
from planaria.wire.control import Base, PartFailed, PartSaved, SavedRows

LONGEST_CHAIN = 64  # checkpoints that one may need
PRIORITY_CHAIN = 4.0  # priority saves write so many times the model before all of it is saved again
TRIES = 3  # to save the current step before the job is left, or because somebody wants it
FURTHER = 4  # times as far ahead with each of them
BEST_FIRST: tuple[SavedRows, ...] = ("all", "changed", "interval", "priority")


@dataclass(frozen=True)
class Publish:
    """Work: make a checkpoint count."""

    step: int
    parts: tuple[PartSummary, ...]
    base: tuple[int, ...]
    rows: SavedRows
    extra: dict[str, Any]
    resizes: tuple[Resize, ...] = ()  # since the job began: its layout follows from them


@dataclass(frozen=True)
class Discard:
    """Work: remove what there is of a checkpoint that was given up."""

    step: int
    files: tuple[str, ...] = ()  # its parts, as far as they were told


@dataclass(frozen=True)
class Prune:
    """Work: remove checkpoints that are not needed any more."""

    up_to: int


Work: TypeAlias = Publish | Discard | Prune


@dataclass
class Pending:
    """A checkpoint in the making, by place: what is durable, and what went wrong."""

    began: float
    blocked_s: float = 0.0  # the longest of any process
    rested_s: float = 0.0  # likewise
    parts: dict[int, PartSaved] = field(default_factory=dict)
    resizes: int = 0  # so often had the layout changed: parts of another are of no use
    problems: dict[int, str] = field(default_factory=dict)
    late: bool = False  # whether somebody was told too late
    base: tuple[int, ...] = ()  # once it is being published

    @property
    def bytes(self) -> int:
        return sum(saved.part.bytes for saved in self.parts.values())


class SaveMachine:
    """The checkpoints of one run. `published` is what the report says of them."""

    def __init__(
        self,
        config: Config,
        start: int,
        now: float,
        *,
        published: Sequence[dict[str, Any]] = (),
        pace: Pace | None = None,
    ) -> None:
        """start: the step that the job starts from. published, pace: as they were before all
        rolled back.
        """
        self.config = config
        self.start = start
        self.published = list(published)
        self.extra: dict[str, Any] = {}  # what else a checkpoint should remember
        self.notes: list[str] = []  # for whoever shows them
        self.save_at = 0
        self.save_all = False
        self.base = Base()
        self.pace = pace
        if pace is None and config.checkpoint.every_s is not None:
            self.pace = Pace(config, self.notes.append)
        elif pace is not None:
            pace.tell = self.notes.append
        self._tries = 0  # left, to save the current step before the job is left
        self._wanted = 0  # tries left of a save that somebody wants
        self._wanted_at: int | None = None  # the step of the last of them
        self._ahead = Ahead()
        self._resizes: list[Resize] = []
        self._pending: dict[int, Pending] = {}
        self._complete: dict[int, Pending] = {}  # all parts are there; published one at a time
        self._publishing: tuple[int, Pending] | None = None
        self._closed: set[int] = set()
        self._work: list[Work] = []
        # The last full checkpoint and the differences after it, all of this run: servers count
        # changes since no other.
        self._history: list[Saved] = []
        self._all_rows: dict[int, list[int]] = {}  # by place: steps by which each had its turn
        self._lacks: dict[tuple[int, int], int] = {}  # by place and step of a save
        if config.saves_last_step and start < config.steps:
            self._pending[config.steps] = Pending(now)  # until it is saved, it is missing

    # ------------------------------------------------------------------ what is told

    def on_part(self, saved: PartSaved, now: float) -> None:
        step = saved.step
        if self._is_settled(step):
            return
        pending = self._pending.setdefault(step, Pending(now - saved.seconds))
        if saved.place != DENSE and not self._fits(pending, saved.resizes):
            return
        if not pending.parts:
            pending.began = now - saved.seconds
        pending.began = min(pending.began, now - saved.seconds)
        pending.blocked_s = max(pending.blocked_s, saved.blocked_s)
        pending.rested_s = max(pending.rested_s, saved.rested_s)
        pending.parts[saved.place] = saved
        self._lacks[saved.place, step] = saved.lacks
        self._close_if_all_have_spoken(step, pending, now)

    def on_part_failed(self, failed: PartFailed, now: float) -> None:
        step, place = failed.step, failed.place
        if self._is_settled(step):
            return
        pending = self._pending.setdefault(step, Pending(now))
        if place not in pending.parts:  # else its predecessor was done with it
            pending.late |= failed.late
            pending.problems.setdefault(place, failed.why)
            self.notes.append(f"no part of {named(place)} for step {step}: {failed.why}")
        self._close_if_all_have_spoken(step, pending, now)

    def on_view(self, resizes: Sequence[Resize]) -> None:
        """The layout may have changed."""
        self._resizes = list(resizes)

    def _fits(self, pending: Pending, resizes: int) -> bool:
        """Whether a part of that layout belongs to it. When the layout changes, the steps that are
        not committed come again, and so do their parts: those of before are dropped.
        """
        if resizes > pending.resizes:
            pending.resizes = resizes
            dense = [DENSE] if DENSE in pending.parts else []
            pending.parts = {place: pending.parts[place] for place in dense}
            pending.problems = {p: why for p, why in pending.problems.items() if p == DENSE}
        return resizes == pending.resizes

    def _places(self, pending: Pending) -> set[int]:
        """Whose parts it needs."""
        done = self._resizes[: pending.resizes]
        return {DENSE, *range(done[-1].servers if done else self.config.servers)}

    def on_step(self, step: int, now: float) -> None:
        self._ahead.on_step(step, now)
        if self.pace:
            self.pace.on_step(step, now)

    def on_lost(self, processes: int, now: float) -> None:
        """So many have failed and were replaced."""
        if self.pace and processes:
            self.pace.on_lost(processes, now)

    def tick(self, now: float) -> None:
        if self._tries > 1 and self.saved_now is False:  # somebody was told too late, say
            self._tries -= 1
            self.save_all = False
        if self.save_all:
            return
        if self._tries and self._ahead.last >= self.config.steps:  # saved in any case
            self.save_at, self.save_all = self.config.steps, True
        elif self._tries:
            margin = FURTHER ** (TRIES - self._tries)
            if (step := self._ahead.next(now, margin)) is not None:
                self.save_at = min(step, self.config.steps)
                self.save_all = True
        elif self._wants_a_step() and (step := self._wanted_step(now)) is not None:
            self.save_at = self._wanted_at = min(step, self.config.steps)
        elif self.pace and (wanted := self.pace.next(now)) is not None:
            self.save_at = wanted

    # ------------------------------------------------------------------ saving on demand

    def save_now(self, step: int | None = None) -> None:
        """Before the job is left: as soon as can be, or `step`, at which everybody stands."""
        self._tries = TRIES if step is None else 1
        if step is not None:
            self.save_at, self.save_all = step, True

    def save_soon(self) -> None:
        """Somebody wants a checkpoint: of the first step that all can be told of in time."""
        self._wanted, self._wanted_at = TRIES, None

    def _wants_a_step(self) -> bool:
        """Whether what somebody wants is to be told: for the first time, or after a failure."""
        if self._wanted and self._wanted_at is not None:
            if self.newest() >= self._wanted_at:
                self._wanted = 0
            elif self._wanted_at in self._closed:  # somebody was told too late, say
                self._wanted, self._wanted_at = self._wanted - 1, None
        return self._wanted > 0 and self._wanted_at is None

    def _wanted_step(self, now: float) -> int | None:
        return self._ahead.next(now, FURTHER ** (TRIES - self._wanted))

    def end_at(self, step: int, now: float) -> None:
        """The job ends with this step, before the one that its configuration names."""
        if step < self.config.steps:
            self._pending.pop(self.config.steps, None)
            self.config = replace(self.config, steps=step)
            if self.config.saves_last_step and not self._is_settled(step):
                self._pending.setdefault(step, Pending(now))

    @property
    def saved_now(self) -> bool | None:
        """Whether what was wanted is saved; None while that is open."""
        if not self.save_all:
            return None
        if self.newest() >= self.save_at:
            return True
        return False if self.save_at in self._closed else None

    # ------------------------------------------------------------------ work and its outcome

    def take_work(self) -> list[Work]:
        work, self._work = self._work, []
        return work

    @property
    def busy(self) -> bool:
        """Whether something is being published."""
        return bool(self._publishing or self._complete or self._work)

    def on_published(self, step: int, now: float) -> None:
        pending = self._take_published(step)
        if pending is None:
            return
        self._closed.add(step)
        rows = _best(pending)
        for place, saved in pending.parts.items():
            if saved.rows != "priority":
                self._all_rows.setdefault(place, []).append(step)
        seconds, size, base = now - pending.began, pending.bytes, pending.base
        self.published.append(
            {
                "step": step,
                "base": list(base),
                "rows": rows,
                "seconds": seconds,
                "blocked_s": pending.blocked_s,
                "bytes": size,
            }
        )
        self.notes.append(
            f"checkpoint of step {step}{f', since step {base[-1]}' if base else ''}: "
            f"{size / 1e6:,.1f} MB in {seconds:.2f} s, nobody held up for more than "
            f"{pending.blocked_s * 1000:.1f} ms"
        )
        if self.pace:
            # A writer rests for longer the rarer saves are; that is no cost of a save.
            self.pace.on_published(seconds - pending.rested_s, now)
        if not base:
            self._history.clear()
        self._history.append(Saved(step, size, base))
        self._plan()
        for older in [other for other in sorted(self._pending) if other < step]:
            self._give_up(older, now)
        self._work.append(Prune(step))
        self._publish_next(now)

    def on_publish_failed(self, step: int, why: str, now: float) -> None:
        pending = self._take_published(step)
        if pending is None:
            return
        pending.problems[DENSE] = why
        if pending.base:  # it may be the base that is amiss
            self._history.clear()
        self._pending[step] = pending
        self._give_up(step, now)
        self._publish_next(now)

    # ------------------------------------------------------------------ questions

    def lacks(self, place: int, step: int) -> int:
        """Row updates up to the save of `step` that it does not have."""
        return self._lacks.get((place, step), 0)

    def last_of_all_rows(self, place: int, up_to: int) -> int:
        """The last step by which every row of a place had its turn to be saved; 0 if none."""
        steps = self._all_rows.get(place, [])
        return max((step for step in steps if step <= up_to), default=0)

    def newest(self) -> int:
        """The step of the newest checkpoint that can be gone on from; 0 if there is none."""
        whole = [int(one["step"]) for one in self.published if "failed" not in one]
        return max([self.start, *whole])

    def waits_for(self) -> dict[int, list[int]]:
        """By step: the places whose parts are still to come, where some are there."""
        return {
            step: sorted(self._places(pending) - pending.parts.keys() - pending.problems.keys())
            for step, pending in self._pending.items()
            if pending.parts
        }

    # ------------------------------------------------------------------ the end

    def close(self, now: float, *, goes_on: bool = False) -> None:
        """The processes have ended: what is not whole now never will be.

        goes_on: others take their place, and will come to steps that nobody has begun to save.
        """
        for step in sorted(self._pending):
            pending = self._pending[step]
            if goes_on and not pending.parts and not pending.problems:
                del self._pending[step]
            else:
                self._give_up(step, now, over=True)

    def give_up_publishing(self, why: str) -> None:
        """The disk does not answer: what is still to be published does not count."""
        if self._publishing:
            self._complete[self._publishing[0]] = self._publishing[1]
        for step in sorted(self._complete):
            self._closed.add(step)
            self.published.append({"step": step, "failed": why})
            self.notes.append(f"no checkpoint of step {step}: {why}")
        self._publishing = None
        self._complete.clear()
        self._work.clear()

    def after_rollback(self, config: Config, start: int, now: float) -> SaveMachine:
        """The saves of the processes that go on from `start`."""
        if self.pace:
            self.pace.restart(now)
        # Of the last step the new processes will tell, unless it is what they start from.
        kept = [one for one in self.published if one["step"] != config.steps or "failed" not in one]
        if start == config.steps and start not in [one["step"] for one in kept]:
            # It was published while all rolled back: nobody will tell of it, and it is there.
            whole = {"step": start, "base": [], "rows": "all", "seconds": 0.0, "blocked_s": 0.0}
            kept.append({**whole, "bytes": 0})
        saves = type(self)(config, start, now, published=kept, pace=self.pace)
        saves.extra = self.extra
        return saves

    # ------------------------------------------------------------------ inside

    def _is_settled(self, step: int) -> bool:
        """What the job starts from is whole, whatever a replacement that starts there says."""
        publishing = self._publishing is not None and self._publishing[0] == step
        return step in self._closed or step <= self.start or step in self._complete or publishing

    def _close_if_all_have_spoken(self, step: int, pending: Pending, now: float) -> None:
        if pending.parts.keys() >= self._places(pending):
            self._complete[step] = self._pending.pop(step)
            self._publish_next(now)
        elif pending.parts.keys() | pending.problems.keys() >= self._places(pending):
            self._give_up(step, now)

    def _publish_next(self, now: float) -> None:
        """One at a time: what a difference is based on must have been published by then."""
        while self._publishing is None and self._complete:
            step = min(self._complete)
            pending = self._complete.pop(step)
            try:
                pending.base = self._chain(pending)
            except CheckpointError as error:
                pending.problems[DENSE] = str(error)
                self._history.clear()
                self._pending[step] = pending
                self._give_up(step, now)
                continue
            self._publishing = (step, pending)
            parts = tuple(saved.part for saved in pending.parts.values())
            rows = _best(pending)
            resizes = tuple(self._resizes[: pending.resizes])
            self._work.append(Publish(step, parts, pending.base, rows, dict(self.extra), resizes))

    def _take_published(self, step: int) -> Pending | None:
        """None if this machine knows nothing of it: all have rolled back since."""
        if self._publishing is None or self._publishing[0] != step:
            return None
        pending, self._publishing = self._publishing[1], None
        return pending

    def _chain(self, pending: Pending) -> tuple[int, ...]:
        """What a checkpoint with these parts needs, oldest first.

        Servers that were told late have what changed since an earlier step than the others, and
        replacements have everything: more than what changed since the newest base of them all. If
        that one has been superseded, any checkpoint after it is as good.
        """
        bases = {saved.base for saved in pending.parts.values() if saved.base is not None}
        if not bases:
            return ()
        if self.config.saves_priorities and self._history:  # each adds to all before it
            return (*self._history[-1].base, self._history[-1].step)
        for saved in self._history:
            if saved.step >= max(bases):
                return (*saved.base, saved.step)
        raise CheckpointError(
            f"it has what changed since step {max(bases)}, which cannot be used; the next one is "
            "full"
        )

    def _plan(self) -> None:
        """Servers are told what the next save is to be a difference from."""
        policy, longest = self.config.checkpoint.policy, 1.0
        if self.config.saves_priorities:
            policy, longest = "consecutive", PRIORITY_CHAIN
        if policy == "full":
            return
        since = plan_next(policy, self._history, longest).since
        if len(self._history) >= LONGEST_CHAIN:
            since = None
        keep_from = max(self._closed) + 1 if since is None else since
        self.base = Base(step=since, keep_from=keep_from)

    def _give_up(self, step: int, now: float, over: bool = False) -> None:
        """over: it is not the save that has failed, but the processes."""
        pending = self._pending.pop(step)
        self._closed.add(step)
        if self.config.saves_priorities:  # its rows are in no save: the next one has all
            self._history.clear()
        self._plan()
        if self.pace and not over:
            self.pace.on_given_up(pending.late, now)
        lacking = sorted(self._places(pending) - pending.parts.keys() - pending.problems.keys())
        reasons = [*dict.fromkeys(pending.problems.values())]
        if lacking:
            reasons.append(f"{', '.join(map(named, lacking))} ended before it was saved")
        self.published.append({"step": step, "failed": "; ".join(reasons)})
        self.notes.append(f"no checkpoint of step {step}: {reasons[0]}")
        if pending.parts or pending.problems:
            files = tuple(saved.part.file for saved in pending.parts.values())
            self._work.append(Discard(step, files))  # room for the next one


def _best(pending: Pending) -> SavedRows:
    """What all parts together have at least."""
    return max((saved.rows for saved in pending.parts.values()), key=BEST_FIRST.index)


def named(place: int) -> str:
    return "the trainers" if place == DENSE else f"server:{place}"
