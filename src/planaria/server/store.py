"""The store of one server: its records, their history, and nothing about messages or time.

Data records and parity records lie in one array per arena, data first (planaria.layout says where).
A record is *valid* when it holds what it should; on a replacement server all start invalid and
become valid as they are decoded. A step arrives as gradients for data records and as deltas for
parity records; either is applied whole or, on any error, not at all. (A signal handler that raises
in the middle of a step breaks that: throw such a store away. The server process ignores SIGINT.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from planaria import kernels
from planaria.errors import RowError, StepError, StoreError
from planaria.kernels.checks import array
from planaria.kernels.parity import share_deltas
from planaria.kernels.types import Bytes, Floats, Index, Records
from planaria.layout import Layout
from planaria.layout.arithmetic import NOBODY
from planaria.records.budget import Tier
from planaria.server.arena import ArenaStore, rules_of
from planaria.server.changed import ChangedRows
from planaria.server.decoding import delta_coefficients
from planaria.server.digest import Digest, digest_of
from planaria.server.history import Change, History
from planaria.server.housing import house
from planaria.server.initialising import initialise
from planaria.server.memory import Memory, memory_of
from planaria.server.peeking import DATA, OTHERS, Changes
from planaria.server.reserve import Reserve
from planaria.server.snapshot import FrozenArena, Snapshot, Wanted
from planaria.tables import Arena

Contributions = Sequence[tuple[Index, Floats]]
"""Per rank, in rank order: record numbers and gradients [n, dim] for one arena."""


class ParityDelta(NamedTuple):
    """What a step did to the data records of one owner that one holder protects."""

    indices: Index  # the parity records' numbers on the holder
    delta: Records


class Store:
    """All records of the server at `place`, at one step."""

    def __init__(
        self,
        arenas: Sequence[Arena],
        layout: Layout,
        place: int,
        *,
        seed: int = 0,
        keep_steps: int = 2,
        blank_at: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        reserve: Reserve | None = None,
        tier: Tier | None = None,
        changes: Changes | None = None,
    ) -> None:
        """A store at step 0 with every record initialised; or, for a replacement, a blank one.

        keep_steps: how many steps of history to keep, at least 1.
        blank_at: the step that a replacement starts at, with every record invalid. Whoever has all
        records as of that step from elsewhere puts them into the arenas and calls `set_all_valid`.
        on_progress: see `initialise`.
        reserve: where its memory comes from, if there is some left; tier: where cold records lie.
        changes: where it counts what happens to its records, if others read them.
        """
        if keep_steps < 1:
            raise StoreError(f"keep_steps must be at least 1, not {keep_steps}")
        if blank_at is not None and blank_at < 0:
            raise StoreError(f"a replacement cannot start at step {blank_at}")
        self.seed = seed
        step = 0 if blank_at is None else blank_at
        self.changes = changes or Changes()
        with self.changes.to(DATA, OTHERS):  # whoever reads those of an earlier store is told
            pass
        self.arenas = []
        for number, arena in enumerate(arenas):
            within = layout.arena(arena.rows)
            records = house(number, arena, within, place, reserve, tier)
            self.arenas.append(ArenaStore(arena, within, place, blank_at is None, records))
        self.changed: ChangedRows | None = None
        """Where `apply` notes what it changes, for whoever wants to know."""
        self._snapshot: Snapshot | None = None
        self._keep_steps = keep_steps
        self._arrange(layout, place, step)
        if blank_at is None:
            self.initialise(on_progress)

    def _arrange(self, layout: Layout, place: int, step: int) -> None:
        """Whom it tells of changes and who tells it, from `step` on."""
        self.layout = layout
        self.place = place
        self.first_step = step  # nothing before it can be read
        self.own = History(self._keep_steps, step)
        self.sources = {s: History(self._keep_steps, step) for s in layout.sources(place)}
        self.holders = layout.holders(place)
        whom, where = layout.protecting(place)
        nobody = len(self.holders)
        number = np.searchsorted(self.holders, whom) if nobody else whom
        # By region and protection: which holder, and which region there; and how many holders.
        self._protecting = (
            np.where(whom == NOBODY, nobody, number).astype(np.int32),
            where,
            nobody + int((whom == NOBODY).any()),
        )
        self._coef_by_region = {
            source: delta_coefficients(layout, place, source) for source in self.sources
        }

    def rearrange(self, layout: Layout, place: int, step: int) -> None:
        """From now on this server has another part in another layout, as of `step`: later steps are
        taken back, and come again. What it keeps stays where it is.
        """
        with self.changes.to(DATA, OTHERS):
            for source in self.sources:
                self.retract(source, step)
            for changes in reversed(self.own.retract(step)):
                undo = partial(self._undo, changes)
                self.snapshot.across(undo) if self.snapshot else undo()
            stays = [s.rearrange(layout.arena(s.arena.rows), place) for s in self.arenas]
        if self.snapshot and not all(stays):
            self.snapshot.close()  # what reads it is told
        self.changed = None
        self._arrange(layout, place, step)

    def initialise(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Gives every record of a fresh or blank store the value that it has at step 0.

        on_progress: called after each piece of bounded size, for this may take minutes.
        """
        with self.changes.to(DATA, OTHERS):
            for store in self.arenas:
                initialise(store, self.seed, on_progress)
            self.set_all_valid()

    # ------------------------------------------------------------------ reading

    @property
    def step(self) -> int:
        """The last step applied to data records."""
        return self.own.last

    @property
    def held_step(self) -> int:
        """The last step that both data and parity records hold."""
        return min([self.own.last, *[history.last for history in self.sources.values()]])

    @property
    def latest_step(self) -> int:
        """The last step that any record holds."""
        return max([self.step, *(history.last for history in self.sources.values())])

    def lookup(self, arena: int, index: Index, as_of: int | None = None) -> Floats:
        """Weights, float32[n, dim], of data records, as of a step of the history."""
        store = self.arenas[arena]
        width = store.arena.dim
        if as_of is None or as_of == self.step:
            store.require_valid(index)
            self.check_data(arena, index)
            out = np.empty((len(index), width), np.uint32)
            return store.records.gather(index, out).view(np.float32)
        self.check_data(arena, index)
        return np.ascontiguousarray(self.read(arena, index, as_of)[:, :width]).view(np.float32)

    def read(self, arena: int, index: Index, as_of: int) -> Records:
        """Whole records, data or parity, as of a step: uint32[n, words]."""
        store = self.arenas[arena]
        store.require_valid(index)
        return self._take_back(arena, index, store.records.gather(index), as_of)

    def export(
        self,
        arena: int,
        start: int,
        stop: int,
        as_of: int,
        room: Callable[[int], Bytes | None] = lambda _: None,
    ) -> Records:
        """Records start .. stop - 1, all data or all parity, as of a step: for bulk rebuilds.

        room: memory of so many bytes, if there is some, that they are wanted in.
        """
        store = self.arenas[arena]
        self._check_range(store, start, stop)
        if store.invalid:
            store.require_valid(np.arange(start, stop))
        shape = (stop - start, store.arena.words)
        given = room(shape[0] * shape[1] * 4)
        values = np.empty(shape, np.uint32) if given is None else given.view(np.uint32)
        values = values.reshape(shape)
        store.records.read_into(start, values)
        self._take_back_range(arena, start, values, as_of)
        return values

    def changes_after(
        self, arena: int, start: int, stop: int, as_of: int
    ) -> list[tuple[Index, Records]]:
        """What must be taken out of records start .. stop - 1 where they lie, to have what `export`
        gives: record numbers from `start` on, each of them once in a part, and deltas.
        """
        store = self.arenas[arena]
        self._check_range(store, start, stop)
        if store.invalid:
            store.require_valid(np.arange(start, stop))
        parts = []
        for history in [self.own] if store.has_data_at(start) else self.sources.values():
            for index, coef, delta in history.within(arena, start, stop - start, as_of):
                if coef is not None:
                    scaled = np.zeros_like(delta)
                    kernels.mul_add(scaled, np.arange(len(delta)), coef, delta)
                    delta = scaled
                parts.append((index, delta))
        return parts

    def check_data(self, arena: int, index: Index) -> None:
        """Raises unless all are data records of this server."""
        store = self.arenas[arena]
        array("index", index, np.int64, 1)
        # As unsigned numbers those below 0 are the largest.
        if len(index) and index.view(np.uint64).max() >= store.data_records:
            raise RowError(
                f"a record outside 0 to {store.data_records - 1}, which are the data records, "
                f"was asked for: {index.min()} to {index.max()}"
            )
        if not store.in_order and not store.is_data(index).all():
            raise RowError("a record that is none of this server's data was asked for")

    def check_push(self, arena: int, index: Index, gradients: Floats) -> None:
        """Raises unless these are distinct data records and their gradients."""
        self.check_data(arena, index)
        shape = (len(index), self.arenas[arena].arena.dim)
        array("gradients", gradients, np.float32, 2, shape=shape)
        kernels.check_distinct(index, self.arenas[arena].data_records)

    def missing(self, arena: int, index: Index) -> Index:
        """Those of `index` that must be decoded before they can be used."""
        return self.arenas[arena].missing(index)

    @property
    def invalid_records(self) -> int:
        return sum([store.invalid for store in self.arenas])

    @property
    def invalid_own(self) -> int:
        """Without those that are only mirrored here."""
        return sum([store.invalid - store.invalid_mirrors for store in self.arenas])

    def digest(self, on_progress: Callable[[], None] = lambda: None) -> Digest:
        """Of the data records: the sum over all servers does not depend on the layout."""
        return digest_of(self.arenas, on_progress)

    def memory(self) -> Memory:
        return memory_of(self.arenas, (self.own, *self.sources.values()))

    # ------------------------------------------------------------------ a step

    def apply(
        self,
        step: int,
        contributions: Sequence[Contributions],
        lrs: Sequence[float] | None = None,
    ) -> list[Change]:
        """Takes one optimizer step on data records and says what changed, arena by arena.

        contributions: one entry per arena. Nothing changes if any of them is refused.
        lrs: the learning rates of this step, one per arena; without, those of the optimizers.
        """
        self.own.check_next(step)
        contributions = [list(ranks) for ranks in contributions]
        if len(contributions) != len(self.arenas):
            raise StoreError(
                f"{len(contributions)} arenas contributed; this job has {len(self.arenas)}"
            )
        for store, ranks in zip(self.arenas, contributions, strict=True):
            for index, _ in ranks:
                store.require_valid(index)
        rules = rules_of(self.arenas, lrs)

        def take_step() -> list[Change]:
            changes: list[Change] = []
            try:
                for store, rule, ranks in zip(self.arenas, rules, contributions, strict=True):
                    applied = store.records.apply(rule, store.data_records, store.arena.dim, ranks)
                    applied.delta.flags.writeable = False  # it is history from here on
                    changes.append(Change(applied.indices, None, applied.delta))
            except BaseException:
                self._undo(changes)
                raise
            return changes

        snapshot = self.snapshot
        with self.changes.to(DATA):
            changes = snapshot.across(take_step) if snapshot else take_step()
        self.own.push(step, changes)
        if self.changed:
            self.changed.note(changes)
        return changes

    @property
    def snapshot(self) -> Snapshot | None:
        """The one that is being read."""
        if self._snapshot and self._snapshot.closed:
            self._snapshot = None
        return self._snapshot

    def take_snapshot(self, wanted: Sequence[Wanted] | None = None) -> Snapshot:
        """The data records as of now; wanted: which, arena by arena, if not all of them.

        Only `apply` changes data records of a store whose records are all valid, and it knows.
        """
        if self.invalid_own or self.snapshot:
            why = "records are still to be rebuilt" if self.invalid_own else "one is being read"
            raise StoreError(f"no snapshot can be taken: {why}; wait for that")
        chosen = [None] * len(self.arenas) if wanted is None else wanted
        self._snapshot = Snapshot(
            [
                FrozenArena(store.records, store.data_records, store.layout.slots, bits)
                for store, bits in zip(self.arenas, chosen, strict=True)
            ]
        )
        return self._snapshot

    def parity_deltas(self, changes: Sequence[Change]) -> dict[int, list[ParityDelta]]:
        """What each holder of this server's parity must be sent: per holder, one per arena.

        Every holder is named, also those for which nothing changed.
        """
        deltas: dict[int, list[ParityDelta]] = {holder: [] for holder in self.holders}
        if not self.holders:
            return deltas
        for store, change in zip(self.arenas, changes, strict=True):
            # One copy of each delta per holder, all made at once; the holders get slices of it.
            indices, delta, counts = share_deltas(
                change.indices, change.delta, store.layout.slots, *self._protecting
            )
            ends = np.cumsum(counts).tolist()
            for holder, start, end in zip(self.holders, [0, *ends], ends, strict=False):
                deltas[holder].append(ParityDelta(indices[start:end], delta[start:end]))
        return deltas

    def apply_parity(self, source: int, step: int, deltas: Sequence[ParityDelta]) -> None:
        """Applies the delta(step) of one source to the parity records, in all arenas.

        Those that are not valid yet get it from the history, when they are restored: until then
        their memory, which may never have been touched, is left alone.
        """
        history = self.history_of(source)
        history.check_next(step)
        if len(deltas) != len(self.arenas):
            raise StoreError(f"{len(deltas)} arenas in the delta; this job has {len(self.arenas)}")
        changes: list[Change] = []
        with self.changes.to(OTHERS):
            try:
                for store, (index, delta) in zip(self.arenas, deltas, strict=True):
                    by_region, slots = self._coef_by_region[source], store.layout.slots
                    valid = store.bitmap if store.invalid else None
                    coef = store.records.add_delta(index, slots, by_region, delta, valid)
                    changes.append(Change(index, coef, delta))
            except BaseException:
                self._undo(changes)
                raise
        history.push(step, changes)

    def retract(self, source: int, step: int) -> None:
        """XORs out the deltas of one source after `step` and forgets them."""
        with self.changes.to(OTHERS):
            for changes in self.history_of(source).retract(step):
                self._undo(changes)

    # ------------------------------------------------------------------ rebuilding

    def restore(self, arena: int, index: Index, values: Records, as_of: int) -> int:
        """Takes in decoded records as of a step and makes them valid; returns how many.

        Records that are valid already are left alone: they may have moved on. Parity records are
        brought forward with the deltas after `as_of` that arrived meanwhile; data records need no
        such thing, because a step is never applied to a record before it is valid.
        """
        store = self.arenas[arena]
        array("values", values, np.uint32, 2, shape=(len(index), store.arena.words))
        missing = store.missing(index)
        if len(missing) < len(index):
            wanted = np.isin(index, missing)
            index, values = index[wanted], values[wanted]
        parity = ~store.is_data(index)
        if not parity.all():
            self._check_enters(as_of)
        if parity.any():
            values = values.copy()
            values[parity] = self._forward(arena, index[parity], values[parity], as_of)
        with self.changes.to(DATA, OTHERS):
            store.records.scatter(index, values)
        store.set_valid(index)
        return len(index)

    def restore_range(
        self, arena: int, first: int, count: int, as_of: int, fill: Callable[[Records], None]
    ) -> int:
        """The same for records in a row, all data or all parity, which `fill` writes to where they
        belong: what is valid of them is put back. If `fill` raises, nothing comes of it.
        """
        store = self.arenas[arena]
        self._check_range(store, first, first + count)
        index = np.arange(first, first + count)
        missing = store.missing(index)
        is_data = store.has_data_at(first)
        if is_data:
            self._check_enters(as_of)
        for history in () if is_data else self.sources.values():
            history.after(as_of)  # raises before anything is written
        is_there = np.ones(count, np.bool_)
        is_there[missing - first] = False
        there = index[is_there]
        kept = store.records.gather(there)
        with self.changes.to(DATA if is_data else OTHERS):
            try:
                with store.records.writing(first, first + count) as out:
                    fill(out)
                    if not is_data:
                        self._take_back_range(arena, first, out, as_of)
            finally:
                store.records.scatter(there, kept)
        store.set_valid(missing)
        return len(missing)

    def _check_enters(self, as_of: int) -> None:
        if not self.first_step <= as_of <= self.step:
            raise StepError(
                f"data as of step {as_of} cannot enter a store that started at step "
                f"{self.first_step} and is at step {self.step}"
            )

    def set_all_valid(self) -> None:
        """All records, data and parity, were filled in as of the step that the store started at."""
        if {self.step, *(history.last for history in self.sources.values())} != {self.first_step}:
            raise StepError(
                f"the store has moved from step {self.first_step} to {self.step}; fill it first"
            )
        with self.changes.to(DATA, OTHERS):  # from elsewhere, and just now
            for store in self.arenas:
                store.set_all_valid()

    def _forward(self, arena: int, index: Index, values: Records, as_of: int) -> Records:
        # Taking a delta out and putting it in are one operation.
        for history in self.sources.values():
            history.take_back(arena, index, values, as_of)
        return values

    # ------------------------------------------------------------------ inside

    def _take_back(self, arena: int, index: Index, values: Records, as_of: int) -> Records:
        parity = ~self.arenas[arena].is_data(index)
        if not parity.any():
            self.own.take_back(arena, index, values, as_of)
            return values
        if parity.all():
            return self._forward(arena, index, values, as_of)
        values[parity] = self._take_back(arena, index[parity], values[parity], as_of)
        values[~parity] = self._take_back(arena, index[~parity], values[~parity], as_of)
        return values

    def _take_back_range(self, arena: int, first: int, values: Records, as_of: int) -> None:
        if self.arenas[arena].has_data_at(first):
            self.own.take_back_range(arena, first, values, as_of)
            return
        for history in self.sources.values():
            history.take_back_range(arena, first, values, as_of)

    def _check_range(self, store: ArenaStore, start: int, stop: int) -> None:
        if 0 <= start <= stop <= len(store.records):
            regions = store.own.is_data[
                start // store.layout.slots : -(-stop // store.layout.slots)
            ]
            if regions.all() or not regions.any():
                return
        raise RowError(
            f"records {start} to {stop} of {len(store.records)} are not all data or all parity"
        )

    def _undo(self, changes: Sequence[Change]) -> list[Change]:
        for store, change in zip(self.arenas, changes, strict=False):
            store.records.add(*change)
        return list(changes)

    def history_of(self, source: int) -> History:
        try:
            return self.sources[source]
        except KeyError:
            raise StoreError(
                f"place {source} has no parity here; this server protects {sorted(self.sources)}"
            ) from None
