"""Rows that leave before the step is applied which they wait for: what it changes follows later.

A lookup of t + 1 arrives before the gradients of t do, which are large. It is answered in two
parts. The first has the rows that nobody has asked for in step t, so that t will hardly change
them, and travels while those gradients come the other way. The second has all others, and of the
first those that t did change after all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planaria.kernels.types import Bytes, Index, Mask
from planaria.server.answering import rows_of
from planaria.server.store import Store
from planaria.wire.coding import EXACTLY, Coding
from planaria.wire.machine import Outbox
from planaria.wire.messages import Early, Lookup, Member, View

LookupKey = tuple[int, int, int]
"""Step, rank, and which part of that trainer's step."""


class Marks:
    """A set of records, arena by arena, that belongs to one step.

    To empty it costs what is in it, and to look something up is one gather, however many records
    there are.
    """

    def __init__(self, records: Sequence[int]) -> None:
        self.step = -1
        self._marked = [np.zeros(count, np.bool_) for count in records]
        self._added: list[Sequence[Index]] = []

    def add(self, step: int, indices: Sequence[Index]) -> None:
        """To those of this step; those of any other are forgotten."""
        if step != self.step:
            for added in self._added:
                self._set(added, to=False)
            self._added.clear()
            self.step = step
        self._added.append(indices)
        self._set(indices, to=True)

    def among(self, indices: Sequence[Index]) -> list[Mask]:
        """Per arena, which of these are in the set."""
        return [marked[index] for marked, index in zip(self._marked, indices, strict=True)]

    def _set(self, indices: Sequence[Index], *, to: bool) -> None:
        for marked, index in zip(self._marked, indices, strict=True):
            marked[index] = to


class EarlyRows:
    """What one store has given early of which lookup."""

    def __init__(self, store: Store, coding: Coding = EXACTLY) -> None:
        self.store = store
        self.coding = coding
        records = [arena.data_records for arena in store.arenas]
        self.named = Marks(records)  # that were asked for in the step to come
        self.changed = Marks(records)  # by the last step
        self.sent: dict[LookupKey, list[Mask]] = {}

    def take(self, lookups: Mapping[LookupKey, tuple[Member, Lookup]], view: View) -> Outbox:
        """What can leave now: of lookups whose step is not the next one here, but the one after."""
        due = [key for key in lookups if key[0] == self.store.step + 2 and key not in self.sent]
        out: Outbox = []
        for key in sorted(due):
            sender, lookup = lookups[key]
            which = self.sent[key] = self._unlikely_to_change(lookup)
            if any(mask.any() for mask in which):
                out.append((sender, self._early(view, lookup, which)))
        return out

    def _unlikely_to_change(self, lookup: Lookup) -> list[Mask]:
        if self.named.step != self.store.step + 1:
            return [np.ones(len(index), np.bool_) for index in lookup.indices]
        return [~named for named in self.named.among(lookup.indices)]

    def _early(self, view: View, lookup: Lookup, which: list[Mask]) -> Early:
        weights, frames = rows_of(self.store, self.coding, lookup, which)
        return Early(
            view=view,
            place=self.store.place,
            step=lookup.step,
            part=lookup.part,
            which=packed(which),
            weights=weights,
            frames=frames,
        )

    def rest(self, key: LookupKey, lookup: Lookup) -> list[Mask]:
        """Rows that are still to be sent, now that the step before is applied; none: all of them,
        and whatever was given early does not count.
        """
        if lookup.step == self.store.step + 1:
            self.named.add(lookup.step, lookup.indices)
        sent, as_of = self.sent.pop(key, None), lookup.step - 1
        if sent is None or self.store.step != as_of or not any(mask.any() for mask in sent):
            return []
        if self.changed.step != as_of:
            changes = self.store.own.after(as_of - 1)[0]
            self.changed.add(as_of, [change.indices for change in changes])
        changed = self.changed.among(lookup.indices)
        return [~early | again for early, again in zip(sent, changed, strict=True)]


def packed(which: Sequence[Mask]) -> list[Bytes]:
    """As messages have them."""
    return [np.packbits(mask) for mask in which]
