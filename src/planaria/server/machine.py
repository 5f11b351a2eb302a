"""The embedding server as a state machine: rules 1 to 5 of a step, 9 to 15 of a recovery.

It applies step t when it holds push(t) from all ranks, answers lookup(t + 1) as of t, sends each
parity holder one delta(t), and votes for what it holds: for t, when it also has delta(t) of all
whose parity it holds. Records that are not valid yet are decoded before they are used
(server/rebuilding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from planaria.errors import NotFiniteError, PlanariaError, TierError
from planaria.kernels.types import Bytes, Floats, Index
from planaria.layout import Layout
from planaria.layout.resizing import layout_after
from planaria.server.answering import delta_of, rows_of
from planaria.server.checking import check_arenas, check_lrs, check_message
from planaria.server.decode_jobs import ScrubRound
from planaria.server.early import EarlyRows, LookupKey, packed
from planaria.server.job import ServerJob, nothing
from planaria.server.keeping import KeptCopies
from planaria.server.rebuilding import Rebuilder
from planaria.server.store import ParityDelta, Store
from planaria.wire.machine import COORDINATOR, Machine, Outbox
from planaria.wire.messages import (
    Answer,
    Ask,
    Delta,
    DenseCopy,
    DenseRequest,
    Install,
    Installed,
    Lacks,
    Lookup,
    MatePeek,
    MateReply,
    MateRequest,
    Member,
    Message,
    Promise,
    Push,
    RangeRequest,
    Scrub,
    Scrubbed,
    Vote,
)


class ServerMachine(Machine):
    """One server. `fresh_place`: it starts the job with its records initialised, at step 0.

    `restored_at`: it starts at that step instead, and the driver fills its store from a checkpoint
    before anything else happens. Without a place it is a spare, and gets its place and its step
    from the first install that names it.
    """

    def __init__(
        self,
        member: Member,
        job: ServerJob,
        *,
        fresh_place: int | None = None,
        restored_at: int | None = None,
    ) -> None:
        super().__init__(member, job.retry_s)
        self.job = job
        self.place = -1
        self.trainers = 0  # in this view
        self.store: Store | None = None
        self.rebuilder: Rebuilder | None = None
        self.pushes: dict[int, dict[int, Push]] = {}  # step -> rank
        self.lookups: dict[LookupKey, tuple[Member, Lookup]] = {}
        self.early: EarlyRows | None = None
        self.dense = KeptCopies()
        self.last: int | None = None  # the last step of the job, once a trainer has said so
        self.voted = 0  # the step up to which the trainers were told that all is held here
        self.unsent: list[int] = []  # steps whose deltas are still to be sent
        self.holders: tuple[int, ...] = ()
        self.scrubbed: list[ScrubRound] = []  # finished rounds, for the log
        self.errors: list[str] = []  # messages that were refused, for the log
        self.unsendable = ""  # why the job must end: rows that no bound can be kept for
        self.on_applied: Callable[[Sequence[Push]], None] | None = None  # for a driver that counts
        self.room: Callable[[Member, int], Bytes | None] = nothing  # for what it sends
        if fresh_place is not None:
            self._take_place(fresh_place, restored_at)

    @property
    def step(self) -> int:
        return self.store.step if self.store else 0

    @property
    def whole(self) -> bool:
        return self.store is not None and self.store.invalid_own == 0

    @property
    def mirrored(self) -> bool:
        """Whether it is, and what it mirrors, too."""
        return self.store is not None and self.store.invalid_records == 0

    @property
    def done(self) -> bool:
        """Whether all records are what they are after the last step, and a keeper has its copy."""
        over = self.step == self.last and not self.frozen()
        return over and self.whole and self.dense.complete

    @property
    def wants_save(self) -> bool:
        """Whether the driver must fill the store from the last save, and call `filled`."""
        return self.job.partial and self.store is not None and not self.whole

    def filled(self) -> Outbox:
        """All records are there: not as of this step, but that is what partial recovery means."""
        assert self.whole
        self.report()
        self._progress()
        return self.take_outbox()

    def _take_place(self, place: int, blank_at: int | None, layout: Layout | None = None) -> None:
        job = self.job
        self.store = Store(
            job.arenas,
            layout or job.layout,
            place,
            seed=job.seed,
            keep_steps=job.keep_steps,
            blank_at=blank_at,
            on_progress=job.on_progress,
            reserve=job.reserve,
            tier=job.tier,
            changes=job.peeks.changes if job.peeks else None,
        )
        self._adopt(self.store)

    def _adopt(self, store: Store) -> None:
        """All that follows from what this server holds."""
        self.place = store.place
        self.early = EarlyRows(store, self.job.coding) if self.job.early_answers else None
        self.holders = store.holders
        self.rebuilder = Rebuilder(store, self.job)

    # ------------------------------------------------------------------ views

    def held(self) -> Promise:
        held = self.store.held_step if self.store else 0
        return Promise(
            view=self.promised,
            held=min(held, self.dense.step) if self.dense else held,
            blank=self.store is None,
            whole=self.whole,
            dense=bool(self.dense),
            step_s=self.retries.step_s,
            mirrored=self.mirrored,
            moves=self.install.moves if self.install else -1,
            rests=self.store is None or self.store.latest_step == held,
        )

    def on_install(self, old: Install | None, new: Install) -> None:
        if self.member not in new.servers:
            return  # a spare, or fenced off: the driver looks at `install`
        place = new.servers.index(self.member)
        layout = layout_after(self.job.layout, new.resizes, new.moving)
        late = old is None and (place, new.committed) != (self.place, self.step)
        if self.store is None or late:  # late: given up before its first view, now a spare
            self._take_place(place, new.committed, layout)
        elif layout != self.store.layout:
            self.store.rearrange(layout, place, new.committed)
            self._adopt(self.store)
        elif old is not None:
            for source in self.store.sources:  # rule 9
                if new.servers[source] != old.servers[source]:
                    self.store.retract(source, new.committed)
        assert self.store
        assert self.rebuilder
        self.dense.ask_for(due=self.member in new.keeping())
        self.trainers = len(new.trainers)
        self.pushes.clear()  # rule 11
        self.lookups.clear()
        if self.early:
            self.early.sent.clear()
        self.voted = new.committed  # rule 10
        later = range(new.committed + 1, self.store.step + 1)
        self.unsent = list(later) if self.holders else []
        self.rebuilder.on_install(new)
        self.report()
        self._progress()

    def report(self) -> None:
        if self.store is not None:
            installed = Installed(
                view=self.view, whole=self.whole, dense=bool(self.dense), mirrored=self.mirrored
            )
            self.send(COORDINATOR, installed)

    # ------------------------------------------------------------------ messages

    def on_message(self, sender: Member, message: Message) -> None:
        if self.store is None or self.rebuilder is None:
            return
        try:
            match message:
                case Lookup():
                    self._on_lookup(sender, message)
                case Push():
                    self._on_push(message)
                case Ask():
                    self._on_ask(sender, message)
                    return  # it moves nothing here
                case Delta():
                    self._on_delta(sender, message)
                case Lacks():
                    self._on_lacks(message)
                    return
                case DenseCopy():
                    self._on_dense(message)
                case DenseRequest():
                    self._on_dense_request(sender, message)
                    return
                case MateRequest() | RangeRequest():
                    self._on_mate_request(sender, message)
                case Scrub():
                    self.rebuilder.scrub(message.round)
                case MateReply():
                    if not self.rebuilder.on_reply(message, self._committed_here()):
                        return  # others are still to come
                case MatePeek():
                    if not self.rebuilder.on_peek(message, self._committed_here()):
                        return
        except TierError:
            raise  # records are lost: the process ends, and another decodes them
        except PlanariaError as error:
            # Nothing was changed: every handler checks before it writes.
            self.errors.append(f"{type(message).__name__} from {sender}: {error}")
        self._progress()

    def _on_lookup(self, sender: Member, message: Lookup) -> None:
        store = self._checked(message.step, message.rank, message.indices)
        if message.step <= store.step - store.own.keep:
            return  # an answer that everybody has long used
        for arena, index in enumerate(message.indices):
            store.check_data(arena, index)
        self.job.coding.check(message)
        for held, index in zip(store.arenas, message.indices, strict=True):
            held.records.prefetch(index)
        self.lookups[message.step, message.rank, message.part] = (sender, message)
        if message.last:
            self.last = message.step - 1

    def _on_push(self, message: Push) -> None:
        store = self._checked(message.step, message.rank, message.indices)
        check_arenas(self.job, message.gradients)
        if message.step <= store.step:
            return
        for arena, (index, gradients) in enumerate(
            zip(message.indices, message.gradients, strict=True)
        ):
            store.check_push(arena, index, gradients)
        check_lrs(store, message, self.pushes.get(message.step, {}))
        self.pushes.setdefault(message.step, {})[message.rank] = message

    def _on_ask(self, sender: Member, ask: Ask) -> None:
        """What is here need not come again, however long it takes to make something of it."""
        store = self._checked(ask.step, ask.rank, self.store.arenas if self.store else ())
        pushes = [
            step
            for step in range(store.step + 1, ask.step)
            if ask.rank not in self.pushes.get(step, ())
        ]
        # Lookups that were answered are asked for again, too.
        lookups = [
            (step, part) for step, part in ask.lookups if (step, ask.rank, part) not in self.lookups
        ]
        if pushes or lookups:
            lacks = Lacks(view=self.view, place=self.place, pushes=pushes, lookups=lookups)
            self.send(sender, lacks)
        self.send(sender, Vote(view=self.view, place=self.place, protected=self.protected))

    def _checked(self, step: int, rank: int, per_arena: Sequence[object]) -> Store:
        assert self.store
        check_message(self.job, self.trainers, self.store, step, rank, per_arena)
        return self.store

    def _on_delta(self, sender: Member, message: Delta) -> None:
        assert self.store
        history = self.store.history_of(message.place)
        check_arenas(self.job, message.indices)
        check_arenas(self.job, message.deltas)
        if message.step == history.last + 1:
            deltas = [
                ParityDelta(*pair) for pair in zip(message.indices, message.deltas, strict=True)
            ]
            self.store.apply_parity(message.place, message.step, deltas)
        # Else it came again, or one before it was lost on the way, and will be asked for.

    def _on_lacks(self, message: Lacks) -> None:
        """A holder has waited. What is still to be sent for the first time will come anyway."""
        assert self.store
        if message.place in self.holders and not self.frozen():
            for step in message.deltas:
                if step not in self.unsent and self.store.own.oldest < step <= self.step:
                    self._send_delta(step, [message.place])

    def _on_dense(self, message: DenseCopy) -> None:
        assert self.install
        had = bool(self.dense)
        if self.dense.take(message.step, message.state, self.install.committed) and not had:
            self.report()

    def _on_dense_request(self, sender: Member, message: DenseRequest) -> None:
        state = self.dense.as_of(message.as_of)
        if state is not None:
            self.send(sender, DenseCopy(view=self.view, step=message.as_of, state=state))

    def _on_mate_request(self, sender: Member, message: MateRequest | RangeRequest) -> None:
        """Rule 14: answer at once, whatever the answer is."""
        assert self.rebuilder
        room = partial(self.room, sender)
        self.send(
            sender, self.rebuilder.answer_mate(self.view, message, self._committed_here(), room)
        )

    def _committed_here(self) -> int:
        """The latest step that this server knows to be committed (rule 2)."""
        assert self.store
        assert self.install
        lasts = [history.last - 1 for history in self.store.sources.values()]
        committed = max([self.install.committed, self.store.step - 1, *lasts])
        if len(self.pushes.get(self.store.step + 1, ())) == self.trainers:
            committed = max(committed, self.store.step)
        return committed

    # ------------------------------------------------------------------ progress

    @property
    def protected(self) -> int:
        """The last step that this server holds all of: data, parity and, as a keeper, the dense
        state. What all servers hold is protected, for each delta has its holder among them.
        """
        held = self.store.held_step if self.store else 0
        return self.dense.protects(held, self.install.committed if self.install else 0)

    def _progress(self) -> None:
        if self.store is None or self.rebuilder is None or self.frozen() or self.wants_save:
            return
        was_whole, was_mirrored = self.whole, self.mirrored
        while self._apply_next():
            pass
        # What is not due yet is looked at only where its rows may have to be decoded first.
        due = self.store.step + 1 if was_whole else np.inf
        try:
            for key in sorted([key for key in self.lookups if key[0] <= due]):
                self._answer(key)
            self._vote()
            if self.early and was_whole and self.protected == self.step:  # what is due is out
                self.outbox += self.early.take(self.lookups, self.view)
        except NotFiniteError as error:
            self.unsendable = str(error)
            return
        if was_mirrored and not self.rebuilder.scrubbing:
            return
        self.outbox += self.rebuilder.take_requests(self.view, self._committed_here())
        if scrubbed := self.rebuilder.take_scrubbed():
            self.scrubbed.append(scrubbed)
            self.send(
                COORDINATOR,
                Scrubbed(
                    view=self.view,
                    round=scrubbed.number,
                    place=self.place,
                    records=scrubbed.records,
                    wrong=scrubbed.wrong,
                ),
            )
        if (was_whole, was_mirrored) != (self.whole, self.mirrored):
            self.report()

    def _apply_next(self) -> bool:
        """Applies the next step if all its pushes are here and all its rows are valid."""
        assert self.store
        assert self.rebuilder
        step = self.store.step + 1
        pushes = self.pushes.get(step)
        if pushes is None or len(pushes) < self.trainers:
            return False
        in_rank_order = [pushes[rank] for rank in range(self.trainers)]
        if self.rebuilder.want_missing([push.indices for push in in_rank_order]):
            return False
        contributions: list[list[tuple[Index, Floats]]] = [
            [(push.indices[arena], push.gradients[arena]) for push in in_rank_order]
            for arena in range(len(self.store.arenas))
        ]
        self.store.apply(step, contributions, pushes[0].lrs)
        if self.on_applied is not None:
            self.on_applied(in_rank_order)
        del self.pushes[step]
        if self.holders:
            self.unsent.append(step)
        if self.job.scrub_every and step % self.job.scrub_every == 0:
            self.rebuilder.scrub(step)
        return True

    def protect(self) -> Outbox:
        """The deltas of what was applied. Asked for when the answers are out: they can wait."""
        if self.unsent and not self.frozen():
            for step in self.unsent:
                self._send_delta(step, self.holders)
            self.unsent.clear()
        return self.take_outbox()

    def sweep(self) -> Outbox:
        """Requests for what nobody waits for. Asked for when all else is out."""
        if self.install and self.rebuilder and self.rebuilder.working:
            if not self.frozen() and not self.wants_save:
                self.outbox += self.rebuilder.take_sweep(self.view, self._committed_here())
        return self.take_outbox()

    def _vote(self) -> None:
        """Rule 4: trainers push t + 1 only when all servers have voted for t. An answer is a vote,
        too, for the trainer that gets it.
        """
        assert self.install
        protected = self.protected
        if protected <= self.voted:
            return
        self.voted = protected
        vote = Vote(view=self.view, place=self.place, protected=self.voted)
        answered = {
            to
            for to, message in self.outbox
            if isinstance(message, Answer) and message.protected == self.voted
        }
        for trainer in self.install.trainers:
            if trainer not in answered:
                self.send(trainer, vote)

    def _answer(self, key: LookupKey) -> None:
        """Answers as of step - 1 once that is applied."""
        assert self.store
        assert self.rebuilder
        sender, lookup = self.lookups[key]
        as_of = lookup.step - 1
        if self.rebuilder.want_missing([lookup.indices]) or self.store.step < as_of:
            return
        which = self.early.rest(key, lookup) if self.early else []
        weights, frames = rows_of(self.store, self.job.coding, lookup, which, as_of)
        del self.lookups[key]
        answer = Answer(
            view=self.view,
            place=self.place,
            step=lookup.step,
            part=lookup.part,
            protected=self.protected,
            whole=self.whole,
            weights=weights,
            which=packed(which),
            frames=frames,
        )
        self.send(sender, answer)

    def _send_delta(self, step: int, holders: Sequence[int]) -> None:
        assert self.store
        assert self.install
        changes = self.store.own.after(step - 1)[0]
        deltas = self.store.parity_deltas(changes)
        for holder in holders:
            delta = delta_of(self.view, self.place, step, deltas[holder])
            self.send(self.install.servers[holder], delta)

    # ------------------------------------------------------------------ timers

    def tick(self, now: float) -> Outbox:
        if self.install and self.rebuilder and self.rebuilder.working and not self.frozen():
            self.rebuilder.refill(now)
            self.outbox += self.rebuilder.resend(self.view, now)
            self._progress()
        return super().tick(now)

    def progress(self) -> tuple[int, object]:
        deltas = sum(history.last for history in self.store.sources.values()) if self.store else 0
        came = (len(self.pushes.get(self.step + 1, ())), deltas)
        return self.step, (self.step, self.dense.step, came)

    def on_retry(self) -> None:
        if self.store is None or self.install is None:
            return
        for source, history in self.store.sources.items():
            if history.last < self.step:
                deltas = list(range(history.last + 1, self.step + 1))
                lacks = Lacks(view=self.view, place=self.place, deltas=deltas)
                self.send(self.install.servers[source], lacks)
                self.retries.spoil()
        wanted = self.dense.wanted(self.step, self.install.committed)
        if wanted is not None:
            for trainer in self.install.trainers:
                self.send(trainer, DenseRequest(view=self.view, as_of=wanted))
