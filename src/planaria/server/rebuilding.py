"""Rebuilding and scrubbing: which records are asked for, from whom, and what becomes of them.

A *job* is a set of records of one arena, decoded together as of one committed step. Each record has
k stripe-mates; the job asks each place once, for all records that it can help with. Jobs on demand
are made of the records that a step or a lookup needs now; the background sweep makes jobs of
whatever is left, region by region (rules 13 and 14). Records of one region that lie in a row have
mates that lie in a row, so a sweep asks for ranges. A scrub decodes parity records that are there
and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from planaria import kernels
from planaria.errors import HistoryGone, InvalidRecord, PlanariaError, StepError, TierError
from planaria.kernels.types import Bytes, Index, Records
from planaria.server.arena import ArenaStore
from planaria.server.decode_jobs import DecodeJob, RangeJob, ScrubRound
from planaria.server.decoding import find_mates
from planaria.server.job import ServerJob
from planaria.server.pace import CALM, URGENT, Pace, is_paced
from planaria.server.peeking import DATA, OTHERS, Peeks, source_of
from planaria.server.store import Store
from planaria.wire.limits import PEEKED_AT_ONCE
from planaria.wire.machine import Outbox
from planaria.wire.messages import Install, MatePeek, MateReply, MateRequest, RangeRequest, View

PEEKED_BYTES = 4 << 20  # at a time, at most
PEEKS_IN_VAIN = 3  # that find what has changed, one after the other, before records are sent
RANGE_RECORDS = 4096  # regions of fewer records are not worth a request each
HEAD_START_S = 0.1  # for what a step waits for, before the sweep begins


class Rebuilder:
    """The decode jobs of one server. Requests go out through `take_requests`."""

    def __init__(self, store: Store, job: ServerJob) -> None:
        self.store = store
        self.job = job
        self.jobs: dict[int, DecodeJob | RangeJob] = {}
        self.rows_rebuilt = 0
        self.bytes_rebuilt = 0
        self._next_request = 0
        self._wanted: list[tuple[int, Index]] = []
        self._hint = 0
        self._avoid: set[int] = set()
        self._install: Install | None = None
        self._requested: list[Bytes] = []
        self._sweep_at: list[int] = []
        self._ranges_again: list[tuple[int, int, int]] = []  # arena, first, stop
        self._closed: set[int] = set()  # places whose memory cannot be read from here
        self._in_vain = 0  # peeks in a row that found what had changed
        self._scrub: ScrubRound | None = None
        self._sweeping = False
        self._leaves = False  # others take over what is here: nothing is swept
        self._sweeps_from: float | None = None  # at the latest
        self._pace = Pace(0.0)
        self._budget_bytes = 0.0  # what the sweep may still ask for, where it is limited
        self._refilled_at = 0.0

    def refill(self, now: float) -> None:
        """Time passes: the sweep may go on. At most a tenth of a second's worth is saved up.

        It begins when the first records that a step waits for are there, or nobody waits.
        """
        if self._sweeps_from is None:
            self._sweeps_from = now + HEAD_START_S
        self._sweeping = self._sweeping or now >= self._sweeps_from
        limit = self.job.rebuild_bytes_per_s
        self._budget_bytes += limit * (now - self._refilled_at)
        self._budget_bytes = min(self._budget_bytes, limit / 10)
        self._refilled_at = now
        self._pace.look(now, self.store.step, works=self._swept_now() > 0)

    @property
    def rests_s(self) -> float:
        """For how long the sweep asks for nothing, so that training keeps its speed."""
        return self._pace.rests_s

    def _swept_now(self) -> int:
        """Records that the sweep has asked for and does not have."""
        return sum([job.count for job in self.jobs.values() if job.sweep])

    @property
    def _peeks(self) -> bool:
        """Whether ranges are read where they lie: all of them, as far as has been seen. Where steps
        are too short for that, some are sent between.
        """
        may = self.job.peeks is not None and not self._closed
        return may and self._in_vain < PEEKS_IN_VAIN

    @property
    def _most_records(self) -> int:
        """That are asked for at a time. Those that are not sent take no memory on their way."""
        return self.job.rebuild_chunk * (PEEKED_AT_ONCE if self._peeks else 1)

    def _range_records(self, arena: ArenaStore) -> int:
        """While a range is read, all else stands still here."""
        most = PEEKED_BYTES // (4 * arena.arena.words)
        return min(self._most_records, max(self.job.rebuild_chunk, most))

    def _may_sweep(self) -> bool:
        """So many requests for so many records each may be under way; or more for fewer."""
        pieces = self._pace.pieces(self.job.rebuild_jobs)
        room = self._swept_now() < pieces * self._most_records
        return room and (self.job.rebuild_bytes_per_s == 0 or self._budget_bytes > 0)

    def scrub(self, number: int) -> None:
        """Starts a round of verification, unless one is under way."""
        if self._scrub is None:
            self._scrub = ScrubRound(number, [0] * len(self.store.arenas))

    @property
    def scrubbing(self) -> bool:
        return self._scrub is not None

    @property
    def working(self) -> bool:
        """Whether there is anything to decode, to restore it or to compare."""
        return self._scrub is not None or self.store.invalid_records > 0

    def take_scrubbed(self) -> ScrubRound | None:
        """The round, once all its records are compared."""
        scrub = self._scrub
        if scrub is None or scrub.again or any(job.verify for job in self.jobs.values()):
            return None
        if scrub.next_piece != [len(self._parity_pieces(a)) for a in self.store.arenas]:
            return None
        self._scrub = None
        return scrub

    def on_install(self, install: Install) -> None:
        """A new view: forget everything that is under way and start again."""
        self._install = install
        self._avoid = set(install.rebuilding)
        self._leaves = install.servers[self.store.place] not in install.staying()
        r, lost = self.store.layout.r, len(install.rebuilding)
        paced = is_paced(self.job.rebuild_priority, r, lost)
        self._pace = Pace(install.step_s if paced else 0.0, URGENT if lost else CALM)
        self._restart()

    def _restart(self) -> None:
        self.jobs.clear()
        self._wanted.clear()
        self._hint = 0
        self._requested = [np.zeros_like(arena.bitmap) for arena in self.store.arenas]
        self._sweep_at = [0] * len(self.store.arenas)
        self._ranges_again.clear()
        self._closed.clear()
        self._in_vain = 0
        self._sweeping, self._sweeps_from = False, None
        if self._scrub:  # from the start
            number, self._scrub = self._scrub.number, None
            self.scrub(number)

    def want_missing(self, requests: Sequence[Sequence[Index]]) -> bool:
        """Whether any record of these, arena by arena, is not valid yet; wants those."""
        if not self.store.invalid_records:
            return False
        found = False
        for indices in requests:
            for arena, index in enumerate(indices):
                missing = self.store.missing(arena, index)
                if len(missing):
                    found = True
                    self.want(arena, missing)
        return found

    def want(self, arena: int, index: Index) -> None:
        """These records are needed now."""
        fresh = kernels.missing(self._requested[arena], index)
        if len(fresh):
            fresh = np.unique(fresh)
            kernels.mark(self._requested[arena], fresh)
            self._wanted.append((arena, fresh))

    def answer_mate(
        self,
        view: View,
        wanted: MateRequest | RangeRequest,
        committed: int,
        room: Callable[[int], Bytes | None],
    ) -> MateReply | MatePeek:
        """What a stripe-mate asks for, or why not: see MateReply. room: see Store.export."""
        status, records = "value", None
        try:
            if not 0 <= wanted.arena < len(self.store.arenas):
                raise StepError(f"there is no arena {wanted.arena}")
            if isinstance(wanted, MateRequest):
                records = self.store.read(wanted.arena, wanted.indices, wanted.as_of)
            elif not wanted.peeks:
                last = wanted.first + wanted.count
                records = self.store.export(wanted.arena, wanted.first, last, wanted.as_of, room)
            elif self.job.peeks is None:
                status = "closed"
            else:
                return self._shown(view, wanted, self.job.peeks)
        except InvalidRecord as error:
            if self._leaves:
                # Others ask for nothing that they can decode without it: for mirrors on places
                # that have something else of the same stripes.
                self.want(wanted.arena, np.array(error.indices, np.int64))
            status = "invalid"
        except HistoryGone:
            status = "gone"
        except StepError:
            status = "behind"
        return MateReply(
            view=view,
            request=wanted.request,
            place=self.store.place,
            status=status,
            committed=committed,
            records=records,
        )

    def _shown(self, view: View, wanted: RangeRequest, peeks: Peeks) -> MatePeek:
        """Where records lie that somebody else reads; raises as `Store.export` does."""
        store, last = self.store, wanted.first + wanted.count
        parts = store.changes_after(wanted.arena, wanted.first, last, wanted.as_of)
        words = store.arenas[wanted.arena].arena.words
        kind = DATA if store.arenas[wanted.arena].has_data_at(wanted.first) else OTHERS
        return MatePeek(
            view=view,
            request=wanted.request,
            place=store.place,
            process=peeks.process,
            at=peeks.address(store, wanted.arena, wanted.first),
            counter=peeks.counter(kind),
            key=peeks.key,
            count=int(store.changes.counters[kind, 1]),
            ends=np.cumsum([len(index) for index, _ in parts]).tolist(),
            indices=np.concatenate([np.empty(0, np.int64), *(index for index, _ in parts)]),
            deltas=np.concatenate(
                [np.empty((0, words), np.uint32), *(delta for _, delta in parts)]
            ),
        )

    def take_requests(self, view: View, committed: int) -> Outbox:
        """New requests for what is wanted."""
        out: Outbox = []
        wanted, self._wanted = self._wanted, []
        for arena, index in wanted:
            out += self._start(view, arena, index, max(committed, self._hint), sweep=False)
        return out

    def take_sweep(self, view: View, committed: int) -> Outbox:
        """New requests for the next pieces of what nobody waits for; to be sent after all else."""
        if not self.store.invalid_records:
            return self._verify(view, committed) if self._scrub else []
        as_of = max(committed, self._hint)
        out: Outbox = []
        while self._sweeping and not self._leaves and self._may_sweep():
            piece = self._next_piece()
            if piece is None:
                break
            arena, index, in_a_row = piece
            self._budget_bytes -= len(index) * self.store.arenas[arena].arena.words * 4
            if in_a_row:
                out += self._start_range(view, arena, index, as_of)
            else:
                out += self._start(view, arena, index, as_of, sweep=True)
        return out

    def _start_range(self, view: View, arena: int, index: Index, as_of: int) -> Outbox:
        assert self._install
        layout = self.store.arenas[arena].layout
        mates = find_mates(layout, self.store.place, index[:1], self._avoid)
        job = RangeJob(arena, int(index[0]), len(index), as_of, mates)
        job.avoided, job.peeks = frozenset(self._avoid), self._peeks
        self._next_request += 1
        self.jobs[self._next_request] = job
        return job.requests(view, self._next_request, self._install.servers)

    def _verify(self, view: View, committed: int) -> Outbox:
        """Requests for the next parity records to compare."""
        scrub = self._scrub
        if scrub is None or scrub.held_up:
            return []
        out: Outbox = []
        while self._may_sweep():
            piece = scrub.again.pop() if scrub.again else self._next_to_verify(scrub)
            if piece is None:
                break
            out += self._start(view, *piece, max(committed, self._hint), sweep=True, verify=True)
        return out

    def _next_to_verify(self, scrub: ScrubRound) -> tuple[int, Index] | None:
        for arena, store in enumerate(self.store.arenas):
            pieces, number = self._parity_pieces(store), scrub.next_piece[arena]
            if number < len(pieces):
                scrub.next_piece[arena] += 1
                return arena, np.arange(pieces[number].start, pieces[number].stop)
        return None

    def _parity_pieces(self, arena: ArenaStore) -> list[slice]:
        """Mirrors are verified like parity."""
        size = self.job.rebuild_chunk
        return [piece for region in arena.regions("parity") for piece in arena.chunks(region, size)]

    def _next_piece(self) -> tuple[int, Index, bool] | None:
        """The next records that are neither valid nor asked for; and whether to take a range.

        A range is taken whole where at least half of it is needed: what is valid stays as it is.
        """
        if self._ranges_again:
            arena, first, stop = self._ranges_again.pop()
            end = min(stop, first + self._range_records(self.store.arenas[arena]))
            if end < stop:
                self._ranges_again.append((arena, end, stop))
            return arena, np.arange(first, end), True
        for arena, store in enumerate(self.store.arenas):
            slots = store.layout.slots
            by_region = slots >= min(self.job.rebuild_chunk, RANGE_RECORDS)
            while self._sweep_at[arena] < len(store.records):
                start = self._sweep_at[arena]
                most = self._range_records(store) if by_region else self.job.rebuild_chunk
                stop = min(start + most, len(store.records))
                if by_region:
                    stop = min(stop, (start // slots + 1) * slots)
                self._sweep_at[arena] = stop
                index = store.missing(np.arange(start, stop))
                index = kernels.missing(self._requested[arena], index)
                if len(index):
                    kernels.mark(self._requested[arena], index)
                    if by_region and 2 * len(index) >= stop - start:
                        return arena, np.arange(start, stop), True
                    return arena, index, False
        return None

    def _start(
        self, view: View, arena: int, index: Index, as_of: int, *, sweep: bool, verify: bool = False
    ) -> Outbox:
        store = self.store.arenas[arena]
        avoid = () if verify else self._avoid
        mates = find_mates(store.layout, self.store.place, index, avoid)
        out = np.zeros((len(index), store.arena.words), np.uint32)
        job = DecodeJob(arena, index, mates, as_of, out, sweep, verify)
        job.avoided = frozenset(avoid)
        needed = mates.coef > 0
        for place in np.unique(mates.places[needed]):
            asked = needed & (mates.places == place)
            rows, columns = map(np.ascontiguousarray, np.nonzero(asked))
            job.asked[int(place)] = (rows, columns)
        self._next_request += 1
        self.jobs[self._next_request] = job
        assert self._install
        return job.requests(view, self._next_request, self._install.servers)

    def resend(self, view: View, now: float) -> Outbox:
        """Asks again for what was not answered in time, with the same number."""
        if self._scrub and self._scrub.patience.over(now, self.job.retry_s):
            self._scrub.held_up = False
        assert self._install
        out: Outbox = []
        for number, job in self.jobs.items():
            if not job.patience.over(now, self.job.retry_s):
                continue
            out += job.requests(view, number, self._install.servers)
        return out

    def on_reply(self, reply: MateReply, committed: int) -> bool:
        """Whether a job has come to its end by that, one way or another."""
        job = self.jobs.get(reply.request)
        if job is None or not job.expects(reply.place):
            return False
        if reply.status != "value" or reply.records is None:
            self._hint = max(self._hint, reply.committed if reply.status == "gone" else 0)
            if reply.status == "invalid" and not job.verify:
                if reply.place in job.avoided:
                    return False  # it is asked again in time
                self._avoid.add(reply.place)
            if reply.status == "closed":
                self._closed.add(reply.place)
            self._again(reply.request, committed)
            return True
        if isinstance(job, RangeJob):
            words = self.store.arenas[job.arena].arena.words
            if job.peeks or reply.records.shape != (job.count, words):
                return False
            return self._answered(reply.request, job, reply.place, reply.records, committed)
        rows, columns = job.asked[reply.place]
        coef = np.ascontiguousarray(job.mates.coef[rows, columns])
        kernels.mul_add(job.out, rows, coef, reply.records)
        del job.asked[reply.place]
        if job.asked:
            return False
        self._finish(reply.request, job, committed)
        return True

    def on_peek(self, told: MatePeek, committed: int) -> bool:
        """The same for a mate that says where its records are."""
        job = self.jobs.get(told.request)
        if not isinstance(job, RangeJob) or not job.peeks or not job.expects(told.place):
            return False
        words, ends = self.store.arenas[job.arena].arena.words, [0, *told.ends]
        fits = told.deltas.shape == (len(told.indices), words) and ends[-1] == len(told.indices)
        if not fits or sorted(ends) != ends:
            return False
        return self._answered(told.request, job, told.place, told, committed)

    def _answered(
        self, number: int, job: RangeJob, place: int, answer: Records | MatePeek, committed: int
    ) -> bool:
        job.answers[place] = answer
        if len(job.answers) < len(job.needed()):
            return False
        words = self.store.arenas[job.arena].arena.words
        try:
            piece = (job.arena, job.first, job.count, job.as_of)
            restored = self.store.restore_range(*piece, partial(self._decode, job))
        except TierError:
            raise  # this server's own
        except PlanariaError as error:
            if not isinstance(error, HistoryGone | StepError):
                self._closed.add(place)  # what it says of its memory cannot be
            self._again(number, committed)
            return True
        del self.jobs[number]
        self._in_vain = 0
        self.rows_rebuilt += restored
        self.bytes_rebuilt += restored * words * 4
        return True

    def _decode(self, job: RangeJob, out: Records) -> None:
        """Raises StepError if a mate's records have changed since it said where they are."""
        target = out.reshape(-1).view(np.uint8)
        coef = np.ascontiguousarray(job.mates.coef[job.mates.coef > 0])
        answers = [job.answers[place] for place in job.needed()]
        if not job.peeks or self.job.peeks is None:
            sent = [one for one in answers if isinstance(one, np.ndarray)]
            mates = [records.reshape(-1).view(np.uint8) for records in sent]
            kernels.combine(mates, [target], coef[None, :])
            return
        told = [one for one in answers if isinstance(one, MatePeek)]
        sources = [source_of(one, c) for one, c in zip(told, coef.tolist(), strict=True)]
        failed = self.job.peeks.read(sources, target)
        if failed:
            place = told[abs(failed) - 1].place
            if failed < 0:
                self._closed.add(place)
            self._in_vain += 1
            raise StepError(f"the records of place {place} are not what they were")
        for answer, c in zip(told, coef.tolist(), strict=True):
            for first, end in pairwise([0, *answer.ends]):
                scale = np.full(end - first, c, np.uint8)
                part = slice(first, end)
                kernels.mul_add(out, answer.indices[part], scale, answer.deltas[part])

    def _finish(self, number: int, job: DecodeJob, committed: int) -> None:
        if job.verify:
            self._compare(number, job)
            return
        try:
            restored = self.store.restore(job.arena, job.index, job.out, job.as_of)
        except (HistoryGone, StepError):  # parity cannot be brought forward from so far back
            self._again(number, committed)
            return
        del self.jobs[number]
        self._sweeping |= all(other.sweep for other in self.jobs.values())
        self.rows_rebuilt += restored
        self.bytes_rebuilt += restored * job.out.shape[1] * 4

    def _compare(self, number: int, job: DecodeJob) -> None:
        try:
            found = self.store.read(job.arena, job.index, job.as_of)
        except (HistoryGone, StepError):
            self._again(number, job.as_of)
            return
        del self.jobs[number]
        if self._scrub:
            self._scrub.records += len(found)
            self._scrub.wrong += int((found != job.out).any(axis=1).sum())

    def _again(self, number: int, committed: int) -> None:
        """Starts the job over, as of what is committed by now."""
        job = self.jobs.pop(number)
        if isinstance(job, RangeJob):
            self._ranges_again.append((job.arena, job.first, job.first + job.count))
        elif not job.verify:
            self._wanted.append((job.arena, job.index))
        elif self._scrub:
            self._scrub.again.append((job.arena, job.index))
            self._scrub.held_up = True
