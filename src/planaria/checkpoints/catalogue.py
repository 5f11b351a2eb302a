"""The checkpoints of a folder: publishing one, finding the newest that is whole, removing old ones.

    folder/
      LEASE.json                               whose turn it is; see lease.py
      step-00001000/
        place-00000-5be1f7d0-1f0c22a9.part     one per server: place, job, chance
        place-00001-5be1f7d0-8d11e0b4.part
        dense-5be1f7d0-77e3c9d0.part
        MANIFEST.json                          written last: without it the rest does not count
      step-00001200/
        ...

A checkpoint counts from the moment that its manifest appears, and not before. It is removed the
other way round, manifest first, so that there is never one that counts and lacks files.

A job removes and replaces what is its own: files by their names, checkpoints by what the manifest
says. What it cannot tell whose it is stays. With a lease, it looks at that right before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planaria.checkpoints.checkpoint import Checkpoint, Seen
from planaria.checkpoints.chunks import FORMAT
from planaria.checkpoints.encodings import EncodingMaker, make_encoding
from planaria.checkpoints.folders import AnyFolder, Folder, open_folder, what_to_do
from planaria.checkpoints.lease import Lease
from planaria.checkpoints.manifest import (
    MANIFEST,
    BaseLink,
    Manifest,
    PartSummary,
    encode_manifest,
    read_manifest,
    step_folder,
    step_of,
)
from planaria.checkpoints.names import (
    another_job,
    check_job_id,
    is_file_of,
    is_part_of,
    name_problem,
    said_job,
)
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
    job: str = ""
    """The id of the job that saves it; see `new_job_id`."""


class Listed(NamedTuple):
    """One checkpoint of a folder; `problem` says why it cannot be used, where it cannot."""

    step: int
    checkpoint: Checkpoint | None
    problem: str | None


class Found(NamedTuple):
    """The newest whole checkpoint, if there is one, and the newer ones that are not whole."""

    checkpoint: Checkpoint | None
    passed_over: list[Listed]


def publish(
    folder: AnyFolder,
    step: int,
    parts: Sequence[PartSummary],
    facts: Facts,
    *,
    lease: Lease | None = None,
) -> Checkpoint:
    """Makes the checkpoint of `step` count, after one look at every part of it.

    One that the same job published for the same step before is replaced, at once. The job's files
    that the manifest does not name, of writers that were given up, are removed.
    """
    check_job_id(facts.job)
    root = open_folder(folder)
    own = root.folder(step_folder(step))
    seen = Seen()
    manifest = _make_manifest(root, step, parts, facts, seen)
    for part in parts:
        seen.check_part(own, step, part)
    _refuse_to_replace_another_s(own, step, facts.job)
    content, checksum = encode_manifest(manifest)
    if lease:
        lease.check()
    try:
        own.write(MANIFEST, content, facts.job)
    except OSError as why:
        raise CheckpointError(
            f"{MANIFEST} of step {step} was not written to {own} ({why}); this checkpoint does not "
            f"count. To save again, {what_to_do(why)}"
        ) from why
    _remove_unnamed(own, manifest)
    seen.manifests[step] = (manifest, checksum)
    return Checkpoint(root, step, seen=seen)


def list_checkpoints(folder: AnyFolder) -> list[Listed]:
    """All checkpoints of a folder by step, also unfinished and damaged ones."""
    root = open_folder(folder)
    seen = Seen()
    return [_look(root, step, seen) for step in _steps(root)]


def latest(
    folder: AnyFolder,
    *,
    job: str | None = None,
    before: int | None = None,
    verify: bool = False,
    encodings: EncodingMaker = make_encoding,
) -> Found:
    """The newest whole checkpoint, and why each newer one was passed over.

    job: only one that this job has saved will do. before: look only at earlier steps, for when that
    one turned out to be damaged while it was read. verify: read every byte now, instead of as it is
    restored.
    """
    root = open_folder(folder)
    seen = Seen()
    passed_over: list[Listed] = []
    for step in reversed(_steps(root)):
        if before is not None and step >= before:
            continue
        listed = _look(root, step, seen, job, verify, encodings)
        if listed.checkpoint:
            return Found(listed.checkpoint, passed_over)
        passed_over.append(listed)
    return Found(None, passed_over)


def prune(
    folder: AnyFolder,
    keep_last: int,
    up_to: int | None = None,
    *,
    job: str = "",
    lease: Lease | None = None,
) -> list[int]:
    """Removes all but the newest `keep_last` whole checkpoints of a job and what those need.

    Unfinished and damaged ones go as well if they are older than the newest whole one; a newer one
    may be in the making. up_to: leave later steps out of it: a job that was resumed from an earlier
    one, because they were damaged, has not come there again. Returns the steps that were removed.
    """
    check_job_id(job)
    require(keep_last >= 1, f"keep_last must be 1 or more, not {keep_last}")
    root = open_folder(folder)
    found = [one for one in list_checkpoints(root) if up_to is None or one.step <= up_to]
    whole = [one.checkpoint for one in found if one.checkpoint and one.checkpoint.job == job]
    if not whole:
        return []
    kept = {manifest.step for one in whole[-keep_last:] for manifest in one.chain}
    old = [listed.step for listed in found if listed.step < whole[-1].step]
    # The newest first: what a differential checkpoint needs must not go before it.
    removed = [s for s in reversed(old) if s not in kept and _remove(root, s, job, lease)]
    return removed[::-1]


def discard(
    folder: AnyFolder,
    step: int,
    *,
    job: str = "",
    lease: Lease | None = None,
    published: bool = True,
) -> None:
    """Removes what there is of a job's checkpoint that was given up: it only takes up room.

    published: also one that counts. Else what it names stays: another set of the job's processes
    has saved it, and was given up too early.
    """
    check_job_id(job)
    root = open_folder(folder)
    if step not in _steps(root):
        return
    own = root.folder(step_folder(step))
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(own, step)[0]
        if manifest.job == job and not published:
            if lease:
                lease.check()
            _remove_unnamed(own, manifest)
            return
    _remove(root, step, job, lease)


def discard_parts(folder: AnyFolder, step: int, files: Sequence[str]) -> None:
    """Removes parts by their whole names, which nobody but their writers chose: for a job that has
    lost its lease, and must not go by the names that all of a job's parts have.
    """
    own = open_folder(folder).folder(step_folder(step))
    for name in files:
        try:
            own.remove(name)
        except FileNotFoundError:
            pass
        except OSError as why:
            raise CheckpointError(f"{name} in {own} could not be removed: {why}") from why
    own.remove_if_empty()


def _make_manifest(
    root: Folder, step: int, parts: Sequence[PartSummary], facts: Facts, seen: Seen
) -> Manifest:
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
        base=_links(root, step, facts, seen),
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
        job=facts.job,
        regions=None if facts.layout.is_fresh else facts.layout.region_of.tolist(),
    )
    _check_content(manifest, facts)
    return manifest


def _check_content(manifest: Manifest, facts: Facts) -> None:
    """A full checkpoint has every record, a differential one lists what changed; and no name in it
    is one that readers refuse.
    """
    for table in facts.tables:
        if problem := name_problem(table.name):
            raise CheckpointError(
                f"a table named {table.name!r} cannot be saved, because it becomes a file when the "
                f"model is exported: {problem}. Give it another name"
            )
    for part in manifest.parts:
        if not is_part_of(part.file, facts.job):
            raise CheckpointError(
                f"step {manifest.step}: {part.file} is no part of {said_job(facts.job)}; give its "
                "writer the id of the job"
            )
    arenas = [facts.layout.arena(a.rows) for a in make_arenas(facts.tables, facts.optimizer)]
    for part in manifest.record_parts:
        for number, arena in enumerate(arenas):
            if manifest.full and not part.covers(number, arena.data_records(part.place)):
                raise CheckpointError(
                    f"step {manifest.step}: {part.file} has records {part.ranges.get(number, [])} "
                    f"of arena {number} and lacks others up to "
                    f"{arena.data_records(part.place) - 1}; a full checkpoint needs them all"
                )


def _links(root: Folder, step: int, facts: Facts, seen: Seen) -> list[BaseLink]:
    """What the checkpoint needs: the last of its base, and what that one needs."""
    if not facts.base:
        return []
    last = facts.base[-1]
    try:
        needed = Checkpoint(root, last, seen=seen)
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
    if manifest.job != facts.job:
        raise CheckpointError(
            f"step {step} needs step {last}, which was saved by {another_job(manifest.job)}; save "
            "a full checkpoint"
        )
    links = [*manifest.base, BaseLink(last, needed.checksum)]
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
    seen: Seen,
    job: str | None = None,
    verify: bool = False,
    encodings: EncodingMaker = make_encoding,
) -> Listed:
    try:
        checkpoint = Checkpoint(root, step, encodings=encodings, seen=seen)
        if job is not None and checkpoint.job != job:
            return Listed(step, None, f"it was saved by {another_job(checkpoint.job)}")
        if verify:
            checkpoint.verify(seen)
    except CheckpointError as why:
        return Listed(step, None, str(why))
    return Listed(step, checkpoint, None)


def _refuse_to_replace_another_s(own: Folder, step: int, job: str) -> None:
    try:
        manifest, _ = read_manifest(own, step)
    except DamagedCheckpoint:
        return  # there is none that counts
    if manifest.job != job:
        raise CheckpointError(
            f"{own} was saved by {another_job(manifest.job)}, and is not replaced; give each job "
            "its own checkpoint.path"
        )


def _remove_unnamed(own: Folder, manifest: Manifest) -> None:
    named = {part.file for part in manifest.parts}
    with contextlib.suppress(OSError):  # they only take up room
        for name in set(own.names()) - named:
            if is_file_of(name, manifest.job):
                own.remove(name)


def _remove(root: Folder, step: int, job: str, lease: Lease | None) -> bool:
    """What a job has of a step, the manifest first; whether there was anything."""
    own = root.folder(step_folder(step))
    try:
        names = own.names()
        removed = [name for name in names if is_file_of(name, job)]
        if MANIFEST in names and _is_manifest_of(own, step, job, names):
            removed.insert(0, MANIFEST)
        if removed and lease:
            lease.check()
        for name in removed:
            with contextlib.suppress(FileNotFoundError):  # its writer has removed it
                own.remove(name)
    except OSError as why:
        raise CheckpointError(f"step {step} in {own} could not be removed: {why}") from why
    own.remove_if_empty()
    return bool(removed)


def _is_manifest_of(own: Folder, step: int, job: str, names: Sequence[str]) -> bool:
    """Whose one is that cannot be read, the parts beside it say: if they are all of one job."""
    try:
        return read_manifest(own, step)[0].job == job
    except CheckpointError:
        parts = [name for name in names if name.endswith(".part")]
        return bool(parts) and all(is_part_of(name, job) for name in parts)
