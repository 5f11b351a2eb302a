"""Filling a server's arenas from a checkpoint, for any number of servers and any (k, r).

In the layout that was saved, a server reads its own files straight into its arenas. In any other,
and for parity that was not saved, it goes through all parts and takes the rows that concern it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planaria.checkpoints.checkpoint import Checkpoint
from planaria.checkpoints.chunks import Chunk, Kind
from planaria.checkpoints.encodings import RAW_BITS
from planaria.checkpoints.manifest import Manifest
from planaria.checkpoints.reader import PartReader
from planaria.checkpoints.target import Target
from planaria.errors import CheckpointError
from planaria.kernels.checks import require
from planaria.layout import Layout
from planaria.records import StoredRecords
from planaria.tables import Arena


def restore(
    checkpoint: Checkpoint,
    arenas: Sequence[Arena],
    layout: Layout,
    place: int,
    out: Sequence[StoredRecords],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fills all records, data and parity, of the server at `place` of `layout`.

    out: one per arena, which nobody else uses meanwhile. What was in them does not matter. After an
    error they hold nothing of use.
    on_progress: called at each chunk of a part, for this may take minutes.
    """
    _check(checkpoint, arenas, layout, place, out)
    if any(checkpoint.layout_of(manifest) != layout for manifest in checkpoint.chain):
        for number, records in enumerate(out):
            _clear(arenas[number], layout, place, records)
        _fill(checkpoint, checkpoint.targets(layout, place), out, on_progress)
        return
    with_parity = _parity_saved(checkpoint, arenas, place)
    for manifest in checkpoint.chain:
        _read_own_part(checkpoint, manifest, place, out, with_parity, on_progress)
    if not with_parity:
        fill_parity(checkpoint, arenas, layout, place, out, on_progress)


def fill_parity(
    checkpoint: Checkpoint,
    arenas: Sequence[Arena],
    layout: Layout,
    place: int,
    out: Sequence[StoredRecords],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """The parity records of `place` alone, encoded from the data in the checkpoint."""
    _check(checkpoint, arenas, layout, place, out)
    for number, records in enumerate(out):
        _clear(arenas[number], layout, place, records)
    _fill(checkpoint, checkpoint.targets(layout, place, data=False), out, on_progress)


def _fill(
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    out: Sequence[StoredRecords],
    on_progress: Callable[[], None],
) -> None:
    for offer in checkpoint.stream(targets, on_progress):
        targets[offer.arena].put(offer.taken, offer.records, out[offer.arena])


def _read_own_part(
    checkpoint: Checkpoint,
    manifest: Manifest,
    place: int,
    out: Sequence[StoredRecords],
    with_parity: bool,
    on_progress: Callable[[], None],
) -> None:
    part = manifest.part_of(place)
    layouts = [checkpoint.layout.arena(arena.rows) for arena in checkpoint.arenas]
    for chunk, reader in checkpoint.chunks(manifest, part):
        on_progress()
        if chunk.kind == Kind.RANGE:
            if with_parity or chunk.first < layouts[chunk.arena].data_records(place):
                _read_range(checkpoint, reader, chunk, out[chunk.arena])
            continue
        index, records = checkpoint.records(reader, chunk, len(out[chunk.arena]))
        out[chunk.arena].scatter(index, records)


def _read_range(
    checkpoint: Checkpoint, reader: PartReader, chunk: Chunk, out: StoredRecords
) -> None:
    own = out.memory(chunk.first, chunk.end) if chunk.bits == RAW_BITS else None
    if own is not None:
        reader.body_into(chunk, own.reshape(-1).view(np.uint8))
    else:
        out.put(chunk.first, checkpoint.records(reader, chunk, len(out))[1])


def _parity_saved(checkpoint: Checkpoint, arenas: Sequence[Arena], place: int) -> bool:
    """Whether the newest part has all records, and as they are: parity of what was saved is not
    parity of what an encoding makes of it.
    """
    part = checkpoint.manifest.part_of(place)
    return part.bits == RAW_BITS and all(
        part.covers(number, checkpoint.layout.arena(arena.rows).records(place))
        for number, arena in enumerate(arenas)
    )


def _clear(arena: Arena, layout: Layout, place: int, records: StoredRecords) -> None:
    """Zeroes what no row is copied to: padding, which is always in the last slot, and parity."""
    where = layout.arena(arena.rows)
    last = np.flatnonzero(layout.regions(place).is_data) * where.slots + where.slots - 1
    padding = last[where.row_at(place, last) < 0]
    records.scatter(padding, np.zeros((len(padding), records.words), np.uint32))
    records.clear(where.data_records(place), len(records))


def _check(
    checkpoint: Checkpoint,
    arenas: Sequence[Arena],
    layout: Layout,
    place: int,
    out: Sequence[StoredRecords],
) -> None:
    if list(map(_shape, checkpoint.arenas)) != list(map(_shape, arenas)):
        manifest = checkpoint.manifest
        tables = ", ".join(
            f"{t.name} {t.rows} x {t.dim} ({(t.optimizer or manifest.optimizer).name})"
            for t in manifest.tables
        )
        raise CheckpointError(
            f"step {checkpoint.step} was saved with the tables {tables}, which are not those of "
            "this job; restore it with the same"
        )
    require(len(out) == len(arenas), f"{len(arenas)} arenas are restored into {len(out)}")
    for number, (arena, records) in enumerate(zip(arenas, out, strict=True)):
        shape = (layout.arena(arena.rows).records(place), arena.words)
        found = (len(records), records.words)
        require(found == shape, f"out[{number}] has {found} records and words, not {shape}")


def _shape(arena: Arena) -> tuple[object, ...]:
    """What must be equal for the records of one arena to be those of another."""
    tables = (arena.table_ids.tolist(), arena.first_rows.tolist(), arena.rows)
    return arena.dim, arena.optimizer.name, arena.words, tables
