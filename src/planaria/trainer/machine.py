"""The trainer's side of the protocol, as a state machine.

The driver computes; the machine talks. In turn, for each step:

    machine.ask(step, part, ids)      # any number of parts; part 0 may be asked a step ahead
    rows = machine.rows(step, part)   # once all answers are here
    machine.give_gradients(step, ...) # pushes, and the dense gradient to the other trainers, as
                                      # soon as all servers have voted for step - 1
    total = machine.sum_of(step)      # the dense gradient, summed over all trainers
    machine.give_state(step, ...)     # the dense state that the driver has made of it

and `finish` when there is no further step. Nothing of a step is forgotten before it can no longer
be needed: pushes, dense gradients and sums of the last two steps are kept and sent again after a
view change, and so are the dense states (rules 5, 11).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria.dense import KEEP, DenseCopies
from planaria.errors import StepError
from planaria.kernels.types import Bytes, Floats
from planaria.layout import Layout
from planaria.layout.resizing import layout_after
from planaria.trainer.adapting import Adapting
from planaria.trainer.arriving import Arrivals
from planaria.trainer.bounds import split
from planaria.trainer.early import Part
from planaria.trainer.job import Gradients, TrainerJob
from planaria.trainer.reducing import Reduction
from planaria.trainer.rerouting import Rerouting, Route, RowsByPlace
from planaria.wire.machine import COORDINATOR, Machine
from planaria.wire.messages import (
    Answer,
    Ask,
    DenseCopy,
    DenseGradient,
    DenseRequest,
    DenseSum,
    Early,
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

LAST_PART = -1
"""Of the lookup that ends the job. No other has it, so no late answer to another is taken for one
to this, which a server may not have received."""


class TrainerMachine(Machine):
    """One trainer. A replacement gets its rank from the first install that names it, and its dense
    state from whoever has it.

    `fresh_rank`: it starts the job with this rank, with the state that `dense` has.
    """

    def __init__(
        self, member: Member, job: TrainerJob, dense: DenseCopies, *, fresh_rank: int | None = None
    ) -> None:
        super().__init__(member, job.retry_s)
        self.job = job
        self.dense = dense
        self.rank = -1 if fresh_rank is None else fresh_rank
        self.blank = fresh_rank is None
        self.step = dense.step + 1  # the step to be computed next
        self.last: int | None = None  # the last step, once the driver has none after it
        self.servers = len(job.layout.places)  # in this view
        self.layout = job.layout  # of this view: rows that a driver names by it are not moved
        self.rerouting = Rerouting(job.layout, job.rows)
        self.asked: dict[Part, Route] = {}  # whose rows the driver has not taken
        self.arrivals = Arrivals(job)
        self.adapting = Adapting(job)
        self.protected = [0] * self.servers  # by place: the last step that it has voted for
        self.pushed = 0  # the last step whose gradients were sent in this view
        self.pushes: dict[int, Gradients] = {}
        self.rebuilding: set[int] = set()  # places that are not known to be whole again
        self.reduction = Reduction(0)
        self.between_steps = True  # the driver is, and will ask whether it may go on
        self._told_rest = False  # in this view
        for known, state in list(dense.states.items()):
            dense.put(known, self.adapting.start(known, state))

    @property
    def done(self) -> bool:
        """Whether this trainer holds all answers, and all that it holds is protected."""
        return (
            self.last is not None
            and not self.frozen()
            and self.dense.step == self.last
            and len(self.arrivals.of((self.last + 1, LAST_PART))) == self.servers
            and min(self.protected) == self.last
        )

    # ------------------------------------------------------------------ the driver's side

    def ask(
        self,
        step: int,
        part: int,
        rows: RowsByPlace,
        layout: Layout | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """Of the step to be computed, or of the one after it. layout: whose places the rows are
        named by, if not that which the job began with. exact: they are to come bit for bit.
        """
        if not self.step <= step <= self.step + 1:
            raise StepError(f"rows of step {step} are asked for, but step {self.step} is due")
        self.asked[step, part] = self.rerouting.route(rows, layout or self.job.layout, exact=exact)
        if self._is_due((step, part)):
            self._send_lookups((step, part))

    def rows(self, step: int, part: int) -> dict[int, list[Floats]] | None:
        """Per place, what was asked for, once; None while something is missing."""
        if not self.step <= step <= self.step + 1 or self.frozen():
            return None
        if len(self.arrivals.of((step, part))) < self.servers:
            return None
        route, answers = self.asked.pop((step, part)), self.arrivals.take_out((step, part))
        found = route.back({place: answers[place] for place in range(self.servers)})
        self.adapting.received(step, route, found)
        return found

    def give_gradients(self, step: int, gradients: Gradients, dense: Floats) -> None:
        """What the driver computed for the current step."""
        if step != self.step or step in self.pushes:
            raise StepError(f"gradients of step {step} came, but step {self.step} is due")
        self.pushes[step] = gradients
        for old in [other for other in self.pushes if other <= step - KEEP]:
            del self.pushes[old]
        self.reduction.give(step, self.adapting.extended(step, self.rank, gradients, dense))
        self._progress()

    def sum_of(self, step: int) -> Floats | None:
        """Of the dense gradient over all ranks, once it is there."""
        total = self.reduction.sums.get(step)
        return None if total is None else self.adapting.cut(step, total)

    def state_of(self, step: int) -> Bytes | None:
        """The dense state as the driver gave it."""
        state = self.dense.as_of(step)
        return None if state is None else split(state)[0]

    def give_state(self, step: int, state: Bytes) -> None:
        """The dense state after a step: that of its sum, and of nothing else."""
        if step != self.step or step not in self.reduction.sums:
            raise StepError(f"the dense state of step {step} came, but step {self.step} is due")
        self.dense.put(step, self.adapting.end(step, state, self.reduction.sums[step]))
        self.step = step + 1
        self.between_steps = True
        self._send_copies(step)
        self._progress()

    def goes_on(self) -> bool:
        """Whether the driver may begin the next step. It asks before each, and waits until it may:
        shifts are decided while everybody does.
        """
        shift = self.install.shift if self.install else None
        waits = shift is not None and self.dense.step >= shift.after
        self.between_steps = waits or self.blank or self.install is None or self.frozen()
        self._progress()
        return not self.between_steps

    def _rests(self) -> bool:
        """Whether it waits for a shift, and all servers hold the step after which that comes."""
        shift = self.install.shift if self.install else None
        ended = shift is not None and self.between_steps and self.dense.step == shift.after
        return ended and min(self.protected) >= self.dense.step

    def finish(self) -> None:
        """There is no step after the one whose state was given last."""
        if self.last is None:
            self.last = self.dense.step
            self.asked.clear()
            self.arrivals.clear()
            empty = [np.zeros(0, np.int64) for _ in self.job.dims]
            self.ask(self.step, LAST_PART, dict.fromkeys(self.job.layout.places, empty))

    # ------------------------------------------------------------------ views

    def held(self) -> Promise:
        return Promise(
            view=self.promised,
            held=self.dense.step,
            blank=self.blank,
            whole=True,
            dense=not self.blank,
            step_s=self.retries.step_s,
            rests=self.between_steps,
        )

    def on_install(self, old: Install | None, new: Install) -> None:
        if self.member not in new.trainers:
            return
        self.rank = new.trainers.index(self.member)
        if old is None and not self.blank and self.dense.step != new.committed:
            self._start_blank()
        self.arrivals.clear()
        if old is None or new.moves != old.moves:
            self._reroute(new)
        self.protected = [new.committed] * self.servers
        self.pushed = new.committed
        self.rebuilding = set(new.rebuilding)
        self.reduction.start_over()
        self._told_rest = False
        if len(new.trainers) != self.reduction.trainers:
            self.reduction.trainers = len(new.trainers)
            self.asked.clear()  # of samples that are others' now
        if self.blank:
            self._ask_for_dense(new)
        else:
            self._send_due_lookups()
            self._send_copies(new.committed)
            self.report()
        self._progress()

    def _reroute(self, install: Install) -> None:
        """Servers have come or gone, and rows with them."""
        self.servers = len(install.servers)
        self.layout = layout_after(self.job.layout, install.resizes)
        with_mirrors = layout_after(self.job.layout, install.resizes, install.moving)
        self.rerouting = Rerouting(with_mirrors, self.job.rows)
        for part, route in self.asked.items():
            self.asked[part] = self.rerouting.again(route)

    def _start_blank(self) -> None:
        """It was given up before its first view, and is now a replacement like any other."""
        self.blank = True
        self.dense.states.clear()
        self.asked.clear()

    def report(self) -> None:
        if not self.blank:
            self._told_rest = self._rests()
            installed = Installed(view=self.view, whole=True, dense=True, rests=self._told_rest)
            self.send(COORDINATOR, installed)

    def _ask_for_dense(self, install: Install) -> None:
        """A replacement begins with the step after the committed one (rule 12)."""
        for peer in [*install.trainers, *install.keeping()]:
            if peer != self.member:
                self.send(peer, DenseRequest(view=self.view, as_of=install.committed))

    # ------------------------------------------------------------------ messages

    def on_message(self, sender: Member, message: Message) -> None:
        match message:
            case Answer() | Early():
                self._on_rows(message)
            case Vote() if 0 <= message.place < self.servers:
                self._on_vote(message.place, message.protected)
            case Lacks() if 0 <= message.place < self.servers and not self.blank:
                self._on_lacks(message)
            case Ask() if not self.blank:
                self._on_ask(sender, message)
            case DenseGradient() if message.step in self.reduction.sums:
                self._send_sum(message.step, sender)
            case DenseGradient() if self.blank or message.step > self.dense.step:
                self.reduction.on_gradient(message.step, message.rank, message.gradient)
            case DenseSum() if self.blank or message.step > self.dense.step:
                self.reduction.on_sum(message.step, message.part, message.gradient)
            case DenseRequest() if not self.blank:
                self._send_dense(sender, message.as_of)
            case DenseCopy() if self.blank:
                self._start_at(message)
        self._progress()

    def _on_vote(self, place: int, protected: int) -> None:
        self.protected[place] = max(self.protected[place], protected)

    def _on_lacks(self, lacks: Lacks) -> None:
        """Sends just that, as far as it was due in this view."""
        for step in lacks.pushes:
            if step in self.pushes and step <= self.pushed:
                self._send_pushes(step, [lacks.place])
                self.retries.found()
        for part in lacks.lookups:
            waits = part in self.asked and not self.arrivals.has(part, lacks.place)
            if waits and self._is_due(part):
                self._send_lookups(part, [lacks.place])
                self.retries.found()

    def _on_ask(self, sender: Member, ask: Ask) -> None:
        """Another trainer waits for the sum of a step."""
        if ask.step in self.reduction.sums:
            self._send_sum(ask.step, sender)
        elif ask.step in self.reduction.own and ask.step <= self.pushed:
            self._send_contributions(ask.step, [ask.rank])
            part = self.reduction.own_part(ask.step, self.rank)
            if part is not None:
                self._send_part(ask.step, self.rank, part, [sender])

    def _send_dense(self, to: Member, as_of: int) -> None:
        """Who asks for a step that is gone is late: all have gone on since."""
        state = self.dense.as_of(as_of)
        if state is not None:
            self.send(to, DenseCopy(view=self.view, step=as_of, state=state))

    def _on_rows(self, message: Answer | Early) -> None:
        part, place = (message.step, message.part), message.place
        route, layout = self.asked.get(part), self.rerouting.layout
        if route is None or not 0 <= place < self.servers:
            return
        if isinstance(message, Early):
            self.arrivals.take_early(message, route, layout)
            return
        taken = self.arrivals.take(message, route, layout)
        if taken is None:
            return
        if not taken:
            self._send_lookups(part, [place])  # what came early was lost: all of it, please
        elif message.whole:
            self.rebuilding.discard(place)
        self._on_vote(place, message.protected)

    def _start_at(self, copy: DenseCopy) -> None:
        if self.install is None or copy.step != self.install.committed:
            return
        self.dense.put(copy.step, self.adapting.start(copy.step, copy.state))
        self.blank = False
        self.step = copy.step + 1
        self._send_copies(copy.step)
        self.report()

    # ------------------------------------------------------------------ progress

    def _progress(self) -> None:
        if self._live():
            self._send_due()
            self._reduce()
            if self._rests() and not self._told_rest:
                self.report()

    def _reduce(self) -> None:
        step = self.dense.step + 1
        if step > self.pushed or step in self.reduction.sums:
            return
        total = self.reduction.sum_part(step, self.rank)
        if total is not None:
            self._send_part(step, self.rank, total, self._others())
        self.reduction.gather(step)

    # ------------------------------------------------------------------ sending

    def _live(self) -> bool:
        return self.install is not None and not self.blank and not self.frozen()

    def _others(self) -> list[Member]:
        assert self.install
        return [peer for peer in self.install.trainers if peer != self.member]

    def _is_due(self, part: Part) -> bool:
        """Rows of a step are those after the one before. So a lookup leaves with the gradients of
        that, for one message and one awakening; but ahead of them where rows are decoded first.
        """
        return part[0] <= self.pushed + 1 or bool(self.rebuilding)

    def _send_due_lookups(self) -> None:
        for part in sorted(self.asked):
            if self._is_due(part):
                self._send_lookups(part)

    def _send_lookups(self, part: Part, places: Sequence[int] | None = None) -> None:
        """To these places, or to all, unless they have answered."""
        if not self._live():
            return
        assert self.install
        asked, (step, number) = self.asked[part], part
        bounds = self.adapting.of_lookup(step, after=self.dense.step, exact=asked.exact)
        for place in range(self.servers) if places is None else places:
            if not self.arrivals.has(part, place):
                lookup = Lookup(
                    view=self.view,
                    rank=self.rank,
                    step=step,
                    part=number,
                    indices=list(asked.rows[place]),
                    last=self.last is not None,
                    exact=asked.exact,
                    bounds=bounds,
                )
                self.send(self.install.servers[place], lookup)

    def _send_due(self) -> None:
        """Rule 4: gradients of a step leave when every server has voted for the one before. Who has
        the sum already gives that, and never its gradient again: so nobody sums anew (rule 12).
        """
        while self.pushed + 1 in self.pushes and min(self.protected) >= self.pushed:
            if not self._live():
                return
            self.pushed += 1
            # First: then the answer is the vote, too, and some rows may come while gradients leave.
            for part in sorted(self.asked):
                if part[0] == self.pushed + 1 and not self.rebuilding:
                    self._send_lookups(part)
            self._send_pushes(self.pushed, range(self.servers))
            if self.pushed not in self.reduction.sums:
                self._send_contributions(self.pushed, range(self.reduction.trainers))

    def _send_pushes(self, step: int, places: Sequence[int]) -> None:
        assert self.install
        pushed = self.pushes[step]
        route = self.rerouting.route(pushed.rows, pushed.layout or self.job.layout)
        gradients = route.there(pushed.gradients)
        nothing = [np.zeros((0, dim), np.float32) for dim in self.job.dims]
        for place in places:
            push = Push(
                view=self.view,
                rank=self.rank,
                step=step,
                indices=list(route.rows[place]),
                gradients=list(gradients.get(place, nothing)),
                lrs=list(pushed.lrs),
            )
            self.send(self.install.servers[place], push)

    def _send_contributions(self, step: int, ranks: Sequence[int]) -> None:
        assert self.install
        for rank, gradient in self.reduction.contributions(step):
            if rank == self.rank:
                self.reduction.on_gradient(step, rank, gradient)
            elif rank in ranks:
                message = DenseGradient(
                    view=self.view, rank=self.rank, step=step, gradient=gradient
                )
                self.send(self.install.trainers[rank], message)

    def _send_part(self, step: int, part: int, total: Floats, peers: Sequence[Member]) -> None:
        message = DenseSum(view=self.view, part=part, step=step, gradient=total)
        for peer in peers:
            self.send(peer, message)

    def _send_sum(self, step: int, peer: Member) -> None:
        for part, total in self.reduction.parts(step):
            self._send_part(step, part, total, [peer])

    def _send_copies(self, first: int) -> None:
        """To the keepers, of this step and later ones. By one trainer: all have the same bits."""
        if self.rank == 0 and self._live():
            assert self.install
            for keeper in self.install.keeping():
                for step in sorted(step for step in self.dense.states if step >= first):
                    self._send_dense(keeper, step)

    # ------------------------------------------------------------------ timers

    def waits_for(self) -> tuple[str, list[int]]:
        """What is missing, and of which places; of none, if it is the other trainers'."""
        parts = [self.arrivals.of(part) for part in self.asked if part[0] == self.step]
        rows = [p for p in range(self.servers) if any(p not in came for came in parts)]
        if rows:
            return "rows", rows
        # Gradients that are kept back for a vote are in no sum, not even in that of one trainer.
        kept_back = self.pushed + 1 in self.pushes
        votes = [p for p, voted in enumerate(self.protected) if kept_back and voted < self.pushed]
        return ("votes", votes) if votes else ("gradients", [])

    def progress(self) -> tuple[int, object]:
        came = (
            sum(map(len, self.arrivals.answers.values())),
            self.reduction.progress(self.dense.step + 1),
            sum(self.protected),
        )
        return self.step, (self.step, self.dense.step, self.pushed, self.blank, came)

    def on_retry(self) -> None:
        if self.install is None or self.member not in self.install.trainers:
            return
        if self.blank:
            self._ask_for_dense(self.install)
            return
        for place, server in enumerate(self.install.servers):
            waiting = [
                part
                for part in self.asked
                if not self.arrivals.has(part, place) and self._is_due(part)
            ]
            if waiting or self.protected[place] < self.pushed:
                ask = Ask(view=self.view, rank=self.rank, step=self.pushed + 1, lookups=waiting)
                self.send(server, ask)
            if not waiting and self.protected[place] < self.pushed:
                self.retries.spoil()  # its vote was lost, or a delta
        reducing = self.dense.step + 1
        if reducing <= self.pushed and reducing not in self.reduction.sums:
            ask = Ask(view=self.view, rank=self.rank, step=reducing, lookups=[])
            for peer in self._others():
                self.send(peer, ask)
            self.retries.spoil()
