"""The trainer's side of the protocol, as a state machine.

The driver reads samples and computes; the machine talks. In turn, for each step:

    while (step := machine.wants_ids()) is not None: machine.give_ids(step, ...)
    rows = machine.ready()            # once all answers and the dense network of step - 1 are here
    machine.give_gradients(...)       # pushes, and the dense gradient to all trainers, as soon as
                                      # all servers have voted for step - 1

A shadow is a trainer without samples: it keeps a replica of the dense network and does all of this
by itself, empty-handed. Nothing of a step is forgotten before it can no longer be needed: pushes
and dense gradients of the last two steps are kept and sent again after a view change (rules 5, 11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planaria.errors import HistoryGone, StepError
from planaria.kernels.types import Floats, Index, Records
from planaria.wire.machine import COORDINATOR, Machine
from planaria.wire.messages import (
    Answer,
    Ask,
    DenseGradient,
    DenseReply,
    DenseRequest,
    Install,
    Installed,
    Lacks,
    Lookup,
    Member,
    Message,
    Promise,
    Push,
    Vote,
)


class Dense(Protocol):
    """The dense network's state: what planaria.trainer.dense.DenseState gives."""

    @property
    def step(self) -> int: ...
    def apply(self, step: int, gradients: Sequence[Floats | None], lr: float) -> None: ...
    def export(self, as_of: int) -> Records: ...
    def restore(self, step: int, state: Records) -> None: ...
    def adopt(self, step: int, state: Records) -> None: ...


@dataclass(frozen=True)
class TrainerJob:
    servers: int
    dims: Sequence[int]  # of the arenas
    trainers: int  # ranks with samples
    ranks: int  # trainers and shadows
    steps: int
    lr: Callable[[int], float]
    lrs: Callable[[int], Sequence[float]]  # of the arenas, as shadows know them
    retry_s: float = 1.0


KEEP = 2  # steps whose pushes and dense gradients are kept

RowsByPlace = Mapping[int, Sequence[Index]]
"""Per place, per arena: record numbers."""
GradientsByPlace = Mapping[int, Sequence[Floats]]
"""Per place, per arena: gradients [n, dim] of those records."""


class TrainerMachine(Machine):
    """One trainer or shadow. A replacement gets its rank from the first install that names it.

    `fresh_rank`: it starts the job with this rank, after the step that `dense` is at.
    """

    def __init__(
        self, member: Member, job: TrainerJob, dense: Dense, *, fresh_rank: int | None = None
    ) -> None:
        super().__init__(member, job.retry_s)
        self.job = job
        self.dense = dense
        self.rank = -1 if fresh_rank is None else fresh_rank
        self.blank = fresh_rank is None
        self.step = dense.step + 1  # the step to be computed next
        self.ids: dict[int, RowsByPlace] = {}
        self.answers: dict[int, dict[int, Answer]] = {}
        self.protected = [0] * job.servers  # by place: the last step that it has voted for
        self.pushed = 0  # the last step whose gradients were sent in this view
        self.pushes: dict[int, GradientsByPlace] = {}
        self.lrs: dict[int, Sequence[float]] = {}  # of the steps that are kept, per arena
        self.own_gradients: dict[int, Floats | None] = {}
        self.gradients: dict[int, dict[int, Floats | None]] = {}  # step -> rank
        self._asked_for = 0  # the dense state of this step, in this view

    @property
    def shadow(self) -> bool:
        return self.rank >= self.job.trainers

    @property
    def done(self) -> bool:
        """Whether this trainer holds all answers, and all that it holds is protected."""
        last = self.job.steps + 1
        return (
            self.step == last
            and self.dense.step == self.job.steps
            and len(self.answers.get(last, {})) == self.job.servers
            and min(self.protected) == self.job.steps
        )

    # ------------------------------------------------------------------ the driver's side

    def wants_ids(self) -> int | None:
        """The step whose ids the driver should give now: the next one, then the one after it.

        The step after the last computes nothing; its rows are what an evaluation wants, or none.
        """
        if self.blank or self.rank < 0 or self.shadow:
            return None
        for step in (self.step, self.step + 1):
            if step not in self.ids and step <= self.job.steps + 1:
                return step
        return None

    def give_ids(self, step: int, ids: RowsByPlace) -> None:
        self.ids[step] = ids
        self._send_lookups(step)

    def ready(self) -> dict[int, list[Floats]] | None:
        """Per place, the rows of the step to compute; None while something is missing."""
        answers = self.answers.get(self.step, {})
        if (
            self.blank
            or self.frozen()
            or self.step > self.job.steps
            or self.dense.step < self.step - 1
            or len(answers) < self.job.servers
        ):
            return None
        return {place: answers[place].weights for place in range(self.job.servers)}

    def final_rows(self) -> dict[int, list[Floats]] | None:
        """Per place, the rows as of the last step, once the job is done."""
        answers = self.answers.get(self.job.steps + 1, {})
        if not self.done or len(answers) < self.job.servers:
            return None
        return {place: answers[place].weights for place in range(self.job.servers)}

    def give_gradients(
        self,
        step: int,
        gradients: GradientsByPlace,
        dense: Floats | None,
        lrs: Sequence[float],
    ) -> None:
        """What the driver computed for the current step; lrs: of each arena, in this step."""
        if step != self.step:
            raise StepError(f"gradients of step {step} came, but step {self.step} is due")
        self.pushes[step] = gradients
        self.lrs[step] = lrs
        self.own_gradients[step] = dense
        self.gradients.setdefault(step, {})[self.rank] = dense
        for old in [s for s in self.pushes if s <= step - KEEP]:
            del self.pushes[old], self.lrs[old], self.own_gradients[old], self.ids[old]
        self.answers.pop(step, None)
        self.step = step + 1
        self._progress()

    # ------------------------------------------------------------------ views

    def held(self) -> Promise:
        return Promise(view=self.promised, held=self.dense.step, blank=self.blank, whole=True)

    def on_install(self, old: Install | None, new: Install) -> None:
        if self.member not in new.trainers:
            return
        self.rank = new.trainers.index(self.member)
        self.answers.clear()
        self.protected = [new.committed] * self.job.servers
        self.pushed = new.committed
        self._asked_for = 0
        # Every dense reduction starts over: forget the others' gradients, send one's own again.
        self.gradients = {
            step: {self.rank: gradient}
            for step, gradient in self.own_gradients.items()
            if step > self.dense.step
        }
        if self.blank:
            self._ask_for_dense(new.committed)
        else:
            self._send_what_is_due()
            for step in sorted(self.ids):
                self._send_lookups(step)
            self.report()
        self._progress()

    def report(self) -> None:
        if not self.blank:
            self.send(COORDINATOR, Installed(view=self.view, whole=True))

    def _ask_for_dense(self, as_of: int) -> None:
        assert self.install
        for peer in self.install.trainers:
            if peer != self.member:
                self.send(peer, DenseRequest(view=self.view, as_of=as_of))

    # ------------------------------------------------------------------ messages

    def on_message(self, sender: Member, message: Message) -> None:
        match message:
            case Answer() if message.step >= self.step and self._fits(message):
                self.answers.setdefault(message.step, {})[message.place] = message
                self._on_vote(message.place, message.protected)
            case Vote() if 0 <= message.place < self.job.servers:
                self._on_vote(message.place, message.protected)
            case Lacks() if 0 <= message.place < self.job.servers and not self.blank:
                self._on_lacks(message)
            case Ask() if message.step in self.own_gradients and message.step <= self.pushed:
                self._send_dense_gradient(message.step, [sender])
            case DenseGradient() if self.blank or message.step > self.dense.step:
                self.gradients.setdefault(message.step, {})[message.rank] = message.gradient
            case DenseRequest() if not self.blank:
                self._on_dense_request(sender, message.as_of)
            case DenseReply() if self.blank:
                self._start_at(message)
            case DenseReply() if self._adopts(message.step):
                self.dense.adopt(message.step, message.state)
                self.gradients.pop(message.step, None)
        self._progress()

    def _adopts(self, step: int) -> bool:
        """Whether this step's dense state is a peer's that has passed it, not a sum (rule 12)."""
        passed = self.install.dense if self.install else 0
        return step == self.dense.step + 1 and step <= min(self.pushed, passed)

    def _on_vote(self, place: int, protected: int) -> None:
        self.protected[place] = max(self.protected[place], protected)

    def _on_lacks(self, lacks: Lacks) -> None:
        """Sends just that, as far as it was due in this view."""
        for step in lacks.pushes:
            if step in self.pushes and step <= self.pushed:
                self._send_pushes(step, [lacks.place])
                self.retries.found()
        for step in lacks.lookups:
            if step in self.ids and lacks.place not in self.answers.get(step, {}):
                self._send_lookups(step, [lacks.place])
                self.retries.found()

    def _on_dense_request(self, sender: Member, as_of: int) -> None:
        if as_of > self.dense.step:
            return
        try:
            state = self.dense.export(as_of)
        except HistoryGone:
            return  # late: all have gone on since, and so has the one that asked
        self.send(sender, DenseReply(view=self.view, step=as_of, state=state))

    def _fits(self, answer: Answer) -> bool:
        """Whether the answer has the rows that were asked for."""
        asked = self.ids.get(answer.step)
        if not 0 <= answer.place < self.job.servers or len(answer.weights) != len(self.job.dims):
            return False
        counts = [0] * len(self.job.dims) if asked is None else map(len, asked[answer.place])
        return all(
            weights.shape == (count, dim)
            for weights, count, dim in zip(answer.weights, counts, self.job.dims, strict=True)
        )

    def _start_at(self, reply: DenseReply) -> None:
        """A replacement begins with the step after the committed one (rule 12)."""
        if self.install is None or reply.step != self.install.committed:
            return
        self.dense.restore(reply.step, reply.state)
        self.blank = False
        self.step = reply.step + 1
        self.report()

    # ------------------------------------------------------------------ progress

    def _progress(self) -> None:
        if self.blank or self.install is None or self.frozen():
            return
        self._send_what_is_due()
        while self._reduce_next():
            pass
        if self.shadow:
            for step in (self.step, self.step + 1):
                if step not in self.ids and step <= self.job.steps + 1:
                    self.give_ids(step, self._nothing())
        if self.shadow and self.ready() is not None:
            self.give_gradients(self.step, self._no_gradients(), None, self.job.lrs(self.step))

    def _reduce_next(self) -> bool:
        """Applies the next dense step when the gradients of all ranks are here, in rank order."""
        step = self.dense.step + 1
        if self._adopts(step):
            if self._asked_for != step:
                self._asked_for = step
                self._ask_for_dense(step)
            return False
        gradients = self.gradients.get(step, {})
        if len(gradients) < self.job.ranks or step > self.pushed:
            return False
        in_rank_order = [gradients[rank] for rank in range(self.job.ranks)]
        self.dense.apply(step, in_rank_order, self.job.lr(step))
        del self.gradients[step]
        return True

    def _nothing(self) -> RowsByPlace:
        empty = [np.zeros(0, np.int64) for _ in self.job.dims]
        return dict.fromkeys(range(self.job.servers), empty)

    def _no_gradients(self) -> GradientsByPlace:
        empty = [np.zeros((0, dim), np.float32) for dim in self.job.dims]
        return dict.fromkeys(range(self.job.servers), empty)

    # ------------------------------------------------------------------ sending

    def _live(self) -> bool:
        return self.install is not None and not self.blank and not self.frozen()

    def _send_lookups(self, step: int, places: Sequence[int] | None = None) -> None:
        """To these places, or to all, unless they have answered."""
        if not self._live() or step < self.step:
            return
        assert self.install
        for place in range(self.job.servers) if places is None else places:
            if place not in self.answers.get(step, {}):
                indices = list(self.ids[step][place])
                lookup = Lookup(view=self.view, rank=self.rank, step=step, indices=indices)
                self.send(self.install.servers[place], lookup)

    def _send_what_is_due(self) -> None:
        """Rule 4: gradients of a step leave when every server has voted for the one before."""
        while self.pushed + 1 in self.pushes and min(self.protected) >= self.pushed:
            if not self._live():
                return
            self.pushed += 1
            self._send_pushes(self.pushed, range(self.job.servers))
            assert self.install
            self._send_dense_gradient(self.pushed, self.install.trainers)

    def _send_pushes(self, step: int, places: Sequence[int]) -> None:
        if not self._live():
            return
        assert self.install
        for place in places:
            push = Push(
                view=self.view,
                rank=self.rank,
                step=step,
                indices=list(self.ids[step][place]),
                gradients=list(self.pushes[step][place]),
                lrs=list(self.lrs[step]),
            )
            self.send(self.install.servers[place], push)

    def _send_dense_gradient(self, step: int, peers: Sequence[Member]) -> None:
        if not self._live():
            return
        message = DenseGradient(
            view=self.view, rank=self.rank, step=step, gradient=self.own_gradients[step]
        )
        for peer in peers:
            if peer != self.member:
                self.send(peer, message)

    def progress(self) -> tuple[int, object]:
        came = (
            len(self.answers.get(self.step, ())),
            len(self.gradients.get(self.dense.step + 1, ())),
            sum(self.protected),
        )
        return self.step, (self.step, self.dense.step, self.pushed, self.blank, came)

    def on_retry(self) -> None:
        if self.member not in (self.install.trainers if self.install else ()):
            return
        if self.blank:
            self._ask_for_dense(self.install.committed if self.install else 0)
            return
        assert self.install
        answered = self.answers.get(self.step, {})
        ask = Ask(view=self.view, rank=self.rank, step=self.step)
        for place, server in enumerate(self.install.servers):
            if place not in answered or self.protected[place] < self.pushed:
                self.send(server, ask)
            if place in answered and self.protected[place] < self.pushed:
                self.retries.spoil()  # its vote was lost, or an acknowledgement
        reducing = self.dense.step + 1
        if self._adopts(reducing):
            self._ask_for_dense(reducing)
        elif reducing <= self.pushed:
            ask = Ask(view=self.view, rank=self.rank, step=reducing)
            for rank, peer in enumerate(self.install.trainers):
                if rank not in self.gradients.get(reducing, {}):
                    self.send(peer, ask)
                    self.retries.spoil()
