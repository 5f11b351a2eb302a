"""What a server sends in every step: rows of an answer, and deltas."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.kernels.types import Bytes, Floats, Index, Mask
from planaria.server.store import ParityDelta, Store
from planaria.wire.coding import Coding
from planaria.wire.messages import Delta, Lookup, View


def chosen(indices: Sequence[Index], which: Sequence[Mask]) -> list[Index]:
    """Those rows of a lookup; all if nothing is said."""
    if not which:
        return list(indices)
    return [index[mask] for index, mask in zip(indices, which, strict=True)]


def rows_of(
    store: Store, coding: Coding, lookup: Lookup, which: Sequence[Mask], as_of: int | None = None
) -> tuple[list[Floats], list[Bytes]]:
    """Per arena: weights, and frames in their place where rows travel in fewer bytes."""
    rows = chosen(lookup.indices, which)
    found = [store.lookup(arena, index, as_of) for arena, index in enumerate(rows)]
    return coding.packed(store.layout, store.place, lookup, rows, found)


def delta_of(view: View, place: int, step: int, deltas: Sequence[ParityDelta]) -> Delta:
    """For one holder; deltas: of the records that it has parity of, per arena."""
    return Delta(
        view=view,
        place=place,
        step=step,
        indices=[one.indices for one in deltas],
        deltas=[one.delta for one in deltas],
    )
