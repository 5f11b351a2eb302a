"""The checkpoints of a folder: publishing one, finding the newest that is whole, removing old ones.

    folder/
      step-00001000/
        place-00000-1f0c22a9.part     one per server
        place-00001-8d11e0b4.part
        dense-77e3c9d0.part
        MANIFEST.json                 written last: without it the rest does not count
      step-00001200/
        ...

A checkpoint counts from the moment that its manifest appears, and not before. It is removed the
other way round, manifest first, so that there is never one that counts and lacks files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planaria.checkpoints.checkpoint import Checkpoint, Seen
from planaria.checkpoints.chunks import FORMAT
from planaria.checkpoints.encodings import EncodingMaker, make_encoding
from planaria.checkpoints.folders import AnyFolder, Folder, open_folder
from planaria.checkpoints.manifest import (
    MANIFEST,
    Link,
    Manifest,
    PartSummary,
    encode_manifest,
    step_folder,
    step_of,
)
from planaria.checkpoints.reader import check_size
from planaria.errors import CheckpointError, DamagedCheckpoint
from planaria.kernels.checks import require
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.tables import Table, make_arenas


@dataclass(frozen=True)
class Facts:
    """What the parts do not say: enough to restore without the job's configuration at hand."""

    tables: Sequence[Table]
    optimizer: Optimizer
    layout: Layout
    samples: int = 0
    """The position in the training data."""
    base: Sequence[int] = ()
    """Steps that a differential checkpoint needs, oldest first; its parts list what changed since
    the last of them."""
    config: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None
    """Of all records, where it is known."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else that JSON can hold."""


class Listed(NamedTuple):
    """One checkpoint of a folder; `problem` says why it cannot be used, where it cannot."""

    step: int
    checkpoint: Checkpoint | None
    problem: str | None


class Found(NamedTuple):
    """The newest whole checkpoint, if there is one, and the newer ones that are not whole."""

    checkpoint: Checkpoint | None
    passed_over: list[Listed]


def publish(folder: AnyFolder, step: int, parts: Sequence[PartSummary], facts: Facts) -> Checkpoint:
    """Makes the checkpoint of `step` count, after a look at every part of it.

    One that was published for the same step before is replaced, at once. Files that the manifest
    does not name, of writers that were given up, are removed.
    """
    root = open_folder(folder)
    own = root.folder(step_folder(step))
    manifest = _make_manifest(root, step, parts, facts)
    for part in parts:
        check_size(own, part)
    content, _ = encode_manifest(manifest)
    try:
        own.write(MANIFEST, content)
    except OSError as why:
        raise CheckpointError(
            f"{MANIFEST} of step {step} was not written to {own} ({why}); this checkpoint does not "
            "count, the ones before it do. Make room or lower keep_last, and save again"
        ) from why
    _remove_unnamed(own, manifest)
    return Checkpoint(root, step)


def list_checkpoints(folder: AnyFolder) -> list[Listed]:
    """All checkpoints of a folder by step, also unfinished and damaged ones."""
    root = open_folder(folder)
    seen: Seen = {}
    return [_look(root, step, seen=seen) for step in _steps(root)]


def latest(
    folder: AnyFolder,
    *,
    before: int | None = None,
    verify: bool = False,
    encodings: EncodingMaker = make_encoding,
) -> Found:
    """The newest whole checkpoint, and why each newer one was passed over.

    before: look only at earlier steps, for when that one turned out to be damaged while it was
    read. verify: read every byte now, instead of as it is restored.
    """
    root = open_folder(folder)
    passed_over: list[Listed] = []
    for step in reversed(_steps(root)):
        if before is not None and step >= before:
            continue
        listed = _look(root, step, verify=verify, encodings=encodings)
        if listed.checkpoint:
            return Found(listed.checkpoint, passed_over)
        passed_over.append(listed)
    return Found(None, passed_over)


def prune(folder: AnyFolder, keep_last: int, up_to: int | None = None) -> list[int]:
    """Removes all but the newest `keep_last` whole checkpoints and what those need.

    Unfinished and damaged ones go as well if they are older than the newest whole one; a newer one
    may be in the making. up_to: leave later steps out of it: a job that was resumed from an earlier
    one, because they were damaged, has not come there again. Returns the steps that were removed.
    """
    require(keep_last >= 1, f"keep_last must be 1 or more, not {keep_last}")
    root = open_folder(folder)
    found = [one for one in list_checkpoints(root) if up_to is None or one.step <= up_to]
    whole = [listed.checkpoint for listed in found if listed.checkpoint]
    if not whole:
        return []
    kept = {manifest.step for one in whole[-keep_last:] for manifest in one.chain}
    old = [listed.step for listed in found if listed.step < whole[-1].step]
    removed = [step for step in old if step not in kept]
    # The newest first: what a differential checkpoint needs must not go before it.
    for step in reversed(removed):
        _remove(root.folder(step_folder(step)), step)
    return removed


def discard(folder: AnyFolder, step: int) -> None:
    """Removes what there is of a checkpoint that was given up: it only takes up room."""
    root = open_folder(folder)
    if step in _steps(root):
        _remove(root.folder(step_folder(step)), step)


def _make_manifest(root: Folder, step: int, parts: Sequence[PartSummary], facts: Facts) -> Manifest:
    bits = {part.bits for part in parts if part.place >= 0}
    places = sorted(part.place for part in parts if part.place >= 0)
    if places != list(facts.layout.places) or len(bits) != 1:
        raise CheckpointError(
            f"step {step} has parts of the places {places} with {sorted(bits)} bits; it needs one "
            f"of each of {list(facts.layout.places)}, all with the same bits"
        )
    manifest = Manifest(
        format=FORMAT,
        step=step,
        base=_links(root, step, facts),
        bits=bits.pop(),
        tables=list(facts.tables),
        optimizer=facts.optimizer,
        k=facts.layout.k,
        groups=facts.layout.groups.tolist(),
        parts=list(parts),
        samples=facts.samples,
        config=facts.config,
        digest=facts.digest,
        extra=facts.extra,
    )
    _check_content(manifest, facts)
    return manifest


def _check_content(manifest: Manifest, facts: Facts) -> None:
    """A full checkpoint has every record, a differential one lists what changed."""
    arenas = [facts.layout.arena(a.rows) for a in make_arenas(facts.tables, facts.optimizer)]
    for part in manifest.record_parts:
        for number, arena in enumerate(arenas):
            if manifest.full and not part.covers(number, arena.data_records(part.place)):
                raise CheckpointError(
                    f"step {manifest.step}: {part.file} has records {part.ranges.get(number, [])} "
                    f"of arena {number} and lacks others up to "
                    f"{arena.data_records(part.place) - 1}; a full checkpoint needs them all"
                )


def _links(root: Folder, step: int, facts: Facts) -> list[Link]:
    """What the checkpoint needs: the last of its base, and what that one needs."""
    if not facts.base:
        return []
    last = facts.base[-1]
    try:
        needed = Checkpoint(root, last)
    except DamagedCheckpoint as why:
        raise CheckpointError(
            f"step {step} needs step {last}, which is not whole: {why}; save a full checkpoint"
        ) from why
    manifest = needed.manifest
    if (manifest.tables, manifest.optimizer) != (list(facts.tables), facts.optimizer):
        raise CheckpointError(
            f"step {step} has other tables or another optimizer than step {last}, which it needs; "
            "save a full checkpoint"
        )
    links = [*manifest.base, Link(last, needed.checksum)]
    if last >= step or [link.step for link in links] != list(facts.base):
        raise CheckpointError(
            f"step {step} cannot be a difference on top of {list(facts.base)}: the first must be a "
            "full checkpoint, and each other one a difference from those before it"
        )
    return links


def _steps(root: Folder) -> list[int]:
    try:
        names = root.names()
    except OSError as why:
        raise CheckpointError(f"the checkpoints in {root} cannot be listed: {why}") from why
    return sorted(step for name in names if (step := step_of(name)) is not None)


def _look(
    root: Folder,
    step: int,
    verify: bool = False,
    encodings: EncodingMaker = make_encoding,
    seen: Seen | None = None,
) -> Listed:
    try:
        checkpoint = Checkpoint(root, step, encodings=encodings, seen=seen)
        if verify:
            checkpoint.verify()
    except CheckpointError as why:
        return Listed(step, None, str(why))
    return Listed(step, checkpoint, None)


def _remove_unnamed(own: Folder, manifest: Manifest) -> None:
    named = {MANIFEST, *(part.file for part in manifest.parts)}
    with contextlib.suppress(OSError):  # they only take up room
        for name in set(own.names()) - named:
            own.remove(name)


def _remove(own: Folder, step: int) -> None:
    try:
        if own.size(MANIFEST) is not None:
            own.remove(MANIFEST)
        own.remove_all()
    except OSError as why:
        raise CheckpointError(f"step {step} in {own} could not be removed: {why}") from why
