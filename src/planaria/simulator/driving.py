"""The loop of a trainer in a schedule: what a user's thread does, one thing after the other.

It asks for the rows of a step, some steps in two parts, and looks one step ahead; it computes,
waits for the summed dense gradient, makes the next dense state of it, and in the end finishes. Some
steps are looked at between their gradients and their end, as a user does who evaluates there.
Computing takes time, in which views may change as often as they like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planaria.kernels.types import Floats
from planaria.simulator.toy import Batch, next_dense
from planaria.trainer.job import Gradients
from planaria.trainer.machine import TrainerMachine
from planaria.trainer.rerouting import Rerouting, Route, RowsByPlace
from planaria.wire.messages import Member

if TYPE_CHECKING:
    from planaria.simulator.world import World

EVALUATION = 7  # a part that no training step has
TAKES_S = (0.0, 0.0, 0.005, 0.05)  # to compute, or to update the dense state


def parts_of(step: int, rank: int) -> int:
    """In how many parts a trainer asks for the rows of a step."""
    return 2 if (step + rank) % 3 == 0 else 1


def is_evaluated(step: int, rank: int) -> bool:
    """Whether a trainer looks at rows as they are after a step, before it ends that step."""
    return (step + rank) % 4 == 0


class Driver:
    """`advance` is called whenever the machine may have moved."""

    def __init__(self, world: World, member: Member, trainer: TrainerMachine) -> None:
        self.world = world
        self.member = member
        self.trainer = trainer
        self.busy = False
        self.taken: list[dict[int, list[Floats]]] = []  # rows of this step, part by part
        # In half of the schedules rows are named by the layout of the view, in which they were
        # asked for, and not by that of the beginning.
        self.follows = world.seed % 2 == 0
        self.named: dict[tuple[int, int], Route] = {}  # what was asked for so
        self.evaluated = 0  # the last step that was
        self.begun = 0  # the last step that was

    def advance(self) -> None:
        trainer = self.trainer
        if trainer.blank or trainer.last is not None or self.busy:
            return
        step = trainer.step
        if not self._may_begin(step):
            return
        if step in trainer.pushes:
            total = trainer.sum_of(step) if self._has_evaluated(step) else None
            if total is not None:
                self._work(self._updated, step, total)
        elif self._has_rows(step):
            rows, self.taken = self._joined(step), []
            self._work(self._computed, step, rows)

    def _may_begin(self, step: int) -> bool:
        """Once only: whoever is in a step goes on with it. Shifts of a schedule are at its steps:
        until the next is known to all, nobody passes it.
        """
        if self.begun < step:
            next_shift = self.world.next_shift()
            waits = next_shift is not None and step > next_shift.after
            # Who was given up does not know of the next one, and what it computes is nobody's.
            given_up = self.member not in self.world.disk.install.trainers
            waits |= given_up and bool(self.world.job.shifts)
            if waits or not self.trainer.goes_on():
                return False
            self.begun, self.taken = step, []
        return True

    def _work(self, then: object, *arguments: object) -> None:
        self.busy = True
        self.world.after(self.world.random.choice(TAKES_S), self._done, then, *arguments)

    def _done(self, then: object, *arguments: object) -> None:
        """Whatever has happened to the view meanwhile."""
        if self.world.is_up(self.member, self._done, then, *arguments):
            self.busy = False
            then(*arguments)  # type: ignore[operator]
            self.world.finish_call(self.member, self.trainer.take_outbox())

    # ------------------------------------------------------------------ rows

    def _batch(self, step: int) -> Batch:
        return self.world.oracle.reference.batches[step, self.trainer.rank]

    def _rows(self, step: int, part: int) -> RowsByPlace:
        parts = parts_of(step, self.trainer.rank)
        of = step
        if self.world.job.trainers_in(step) != self.world.job.trainers_in(self.trainer.step):
            of = self.trainer.step  # before a shift, a trainer looks ahead at others' samples
        ids = self._batch(of).ids
        return {place: [index[part::parts].copy() for index in ids[place]] for place in ids}

    def _has_rows(self, step: int) -> bool:
        parts = parts_of(step, self.trainer.rank)
        if step % 2 == 0:  # all parts at once, else one after the other
            for part in range(len(self.taken), parts):
                self._ask(step, part)
        while len(self.taken) < parts:
            part = len(self.taken)
            self._ask(step, part)
            if step <= self.world.job.steps:
                self._ask(step + 1, 0)
            rows = self._take(step, part)
            if rows is None:
                return False
            self.taken.append(rows)
        return True

    def _has_evaluated(self, step: int) -> bool:
        """Rows of the next step, asked for once this one's gradients have left."""
        wanted = (step + 1, EVALUATION)
        if self.evaluated == step or not is_evaluated(step, self.trainer.rank):
            return True
        if (step + 1, self.trainer.rank) not in self.world.oracle.reference.batches:
            return True  # it leaves after this step
        if wanted not in self.trainer.asked:
            self._name(*wanted, self._batch(step + 1).ids)
        rows = self._take(*wanted)
        if rows is None:
            return False
        self.world.oracle.check_rows(self.trainer.rank, step + 1, rows)
        self.evaluated = step
        return True

    def _ask(self, step: int, part: int) -> None:
        if (step, part) not in self.trainer.asked:
            self._name(step, part, self._rows(step, part))

    def _name(self, step: int, part: int, rows: RowsByPlace) -> None:
        named = self._renamed(rows)
        self.named[step, part] = named
        self.trainer.ask(step, part, named.rows, self.trainer.layout if self.follows else None)

    def _renamed(self, rows: RowsByPlace) -> Route:
        first = self.world.job.layout
        now = self.trainer.layout if self.follows else first
        arenas = [arena.rows for arena in self.world.job.arenas]
        return Rerouting(now, arenas).route(rows, first)

    def _take(self, step: int, part: int) -> dict[int, list[Floats]] | None:
        rows = self.trainer.rows(step, part)
        return None if rows is None else self.named.pop((step, part)).back(rows)

    def _joined(self, step: int) -> dict[int, list[Floats]]:
        """The parts of a step as one lookup would have given them."""
        joined: dict[int, list[Floats]] = {}
        for place, per_arena in self._batch(step).ids.items():
            joined[place] = []
            for arena, index in enumerate(per_arena):
                parts = [rows[place][arena] for rows in self.taken]
                whole = np.empty((len(index), parts[0].shape[1]), np.float32)
                for part, values in enumerate(parts):
                    whole[part :: len(parts)] = values
                joined[place].append(whole)
        return joined

    # ------------------------------------------------------------------ results

    def _computed(self, step: int, rows: dict[int, list[Floats]]) -> None:
        batch = self.world.oracle.on_compute(self.trainer, step, rows)
        if step > self.world.job.steps:
            self.trainer.finish()
        else:
            lrs = self.world.job.lrs(step)
            named = self._renamed(batch.ids)
            layout = self.trainer.layout if self.follows else None
            sparse = Gradients(named.rows, named.there(batch.pushes), lrs, layout)
            self.trainer.give_gradients(step, sparse, batch.dense_gradient)

    def _updated(self, step: int, total: Floats) -> None:
        before = self.trainer.state_of(step - 1)
        assert before is not None
        state = next_dense(before.view(np.float32), total, self.world.job.lr(step))
        self.trainer.give_state(step, state.view(np.uint8))
