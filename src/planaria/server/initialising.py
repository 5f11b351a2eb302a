"""The records of step 0: every server makes its own, and parity from the data that it protects.

That may be tens of gigabytes of memory that nobody has touched yet, so it is done by all cores, in
pieces, and told after each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from planaria import kernels
from planaria.codes import COEFFICIENTS
from planaria.kernels.types import Bytes, Records
from planaria.server.arena import ArenaStore

PIECE_BYTES = 2**25  # enough to keep many cores busy, a fraction of a second for one


def initialise(store: ArenaStore, seed: int, on_progress: Callable[[], None]) -> None:
    """Fills an arena whose parity records are zero; its bits do not depend on the threads."""
    layout = store.layout.layout
    own = layout.regions(store.place)
    state = store.arena.optimizer.initial_state(store.arena.dim)
    piece = min(max(PIECE_BYTES // (4 * store.arena.words), 1), store.layout.slots)

    def initial(group: int, position: int, chunk: slice, out: Records) -> None:
        slot = np.arange(chunk.start, chunk.stop) % store.layout.slots
        stripe = slot * layout.n_groups + group
        row = stripe * layout.k + position
        kernels.init_records(seed, store.arena.init, store.arena.rows, row, state, out)

    with all_cores():
        for region in store.regions("data"):
            for chunk in store.chunks(region, piece):
                with store.records.writing(chunk.start, chunk.stop) as out:
                    initial(own.group[region], own.position[region], chunk, out)
                on_progress()
        scratch = np.empty((piece, store.arena.words), np.uint32)
        for region in store.regions("parity"):
            parity = int(own.position[region]) - layout.k
            for chunk in store.chunks(region, piece):
                data = scratch[: chunk.stop - chunk.start]
                with store.records.writing(chunk.start, chunk.stop) as out:
                    for position in range(layout.k):
                        initial(own.group[region], position, chunk, data)
                        coef = int(COEFFICIENTS[parity, position])
                        kernels.mul_add_bytes(_bytes(out), coef, _bytes(data))
                        on_progress()


@contextmanager
def all_cores() -> Iterator[None]:
    """As many threads as this process may run at once, and then as many as before."""
    before = kernels.threads()
    kernels.set_threads(min(max(len(os.sched_getaffinity(0)), before), kernels.MAX_THREADS))
    try:
        yield
    finally:
        kernels.set_threads(before)


def _bytes(records: Records) -> Bytes:
    return records.reshape(-1).view(np.uint8)
