"""Some rows of each table of a checkpoint: as many as wanted, however large the model is.

Which ones depends on the tables alone, so whoever asks again is shown the same. Most rows of a
large table may never have been looked up: they are what they were in the beginning, small and
alike, and answers hold few of them. So a few times as many are read as are wanted, and those that
training has changed come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from planaria import kernels
from planaria.checkpoints import Checkpoint, Taken
from planaria.kernels.types import Floats, Index, Mask
from planaria.tables import Arena

READ_FOR_EACH = 4  # rows that are read for each that is wanted


class Sample(NamedTuple):
    table: str
    rows: int  # of the table
    weights: Floats  # [n, dim]
    trained: int  # how many of them are not what they were in the beginning


class Named:
    """Takes the rows of one arena that are in a list."""

    def __init__(self, rows: Index) -> None:
        """rows: ascending."""
        self._rows = rows
        self._lacks = np.ones(len(rows), np.bool_)

    @property
    def lacking(self) -> int:
        return int(self._lacks.sum())

    def take(self, rows: Index) -> Taken:
        place = np.searchsorted(self._rows, rows).clip(max=len(self._rows) - 1)
        at = np.flatnonzero((self._rows[place] == rows) & self._lacks[place])
        index = place[at]
        self._lacks[index] = False
        return Taken(at, index, np.zeros(len(at), np.uint8), index)


def take_samples(
    checkpoint: Checkpoint, rows: int, on_progress: Callable[[], None] = lambda: None
) -> list[Sample]:
    """Of each table, in their order: up to so many rows. on_progress: called at each chunk."""
    chosen = [_chosen(checkpoint, arena, READ_FOR_EACH * rows) for arena in checkpoint.arenas]
    found = [
        np.empty((len(own), arena.dim), np.float32)
        for own, arena in zip(chosen, checkpoint.arenas, strict=True)
    ]
    for offer in checkpoint.stream([Named(own) for own in chosen], on_progress):
        dim = checkpoint.arenas[offer.arena].dim
        words = np.ascontiguousarray(offer.records[offer.taken.at, :dim])
        found[offer.arena][offer.taken.index] = words.view(np.float32)
    by_table: dict[int, Sample] = {}
    for arena, own, weights in zip(checkpoint.arenas, chosen, found, strict=True):
        trained = _trained(checkpoint, arena, own, weights)
        tables, _ = arena.table_row(own)
        for number in arena.table_ids.tolist():
            table = checkpoint.manifest.tables[number]
            mine = tables == number
            by_table[number] = _first(table.name, table.rows, weights[mine], trained[mine], rows)
    return [by_table[number] for number in sorted(by_table)]


def _chosen(checkpoint: Checkpoint, arena: Arena, most: int) -> Index:
    """Rows of an arena, ascending: up to so many of each of its tables."""
    found = []
    for number, first in zip(arena.table_ids.tolist(), arena.first_rows.tolist(), strict=True):
        rows = checkpoint.manifest.tables[number].rows
        rng = np.random.default_rng([number, rows])
        own = np.arange(rows) if rows <= most else np.unique(rng.integers(rows, size=most))
        found.append(first + own)
    return np.concatenate(found)


def _trained(checkpoint: Checkpoint, arena: Arena, rows: Index, weights: Floats) -> Mask:
    """Which rows are not what the job's seed has made of them; all, where that is not known."""
    seed = checkpoint.manifest.config.get("seed")
    if seed is None:
        return np.ones(len(rows), np.bool_)
    initial = np.empty((len(rows), arena.words), np.uint32)
    state = arena.optimizer.initial_state(arena.dim)
    kernels.init_records(seed, arena.init, arena.rows, rows, state, initial)
    changed: Mask = (weights.view(np.uint32) != initial[:, : arena.dim]).any(axis=1)
    return changed


def _first(table: str, rows: int, weights: Floats, trained: Mask, most: int) -> Sample:
    order = np.argsort(~trained, kind="stable")[:most]
    return Sample(table, rows, weights[order], int(trained[order].sum()))
