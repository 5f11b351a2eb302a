"""The manifest: what makes a checkpoint count, and all that must be known to read it.

MANIFEST.json is written last and appears at once. It is

    {"sha256": "<of the bytes of content>", "content": {...}}

so that a manifest that was cut, flipped or edited is noticed. It names every part with its length
and its seal, which in turn stands for every byte of the part.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from planaria.checkpoints.chunks import DENSE, FORMAT
from planaria.checkpoints.folders import Folder
from planaria.checkpoints.names import is_job_id, name_problem
from planaria.errors import CheckpointError, DamagedCheckpoint, PlanariaError
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.tables import Arena, Table, make_arenas

MANIFEST = "MANIFEST.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


class PartSummary(msgspec.Struct, frozen=True):
    """A finished part, as its writer knows it."""

    file: str
    place: int
    bytes: int
    chunks: int
    seal: str
    bits: int
    records: int
    ranges: dict[int, list[tuple[int, int]]]  # by arena: first record, one past the last; merged

    def covers(self, arena: int, end: int) -> bool:
        """Whether records 0 to end - 1 of an arena are there as ranges."""
        return end == 0 or any(a == 0 and b >= end for a, b in self.ranges.get(arena, []))


class BaseLink(msgspec.Struct, frozen=True):
    """An earlier checkpoint that a differential one needs: exactly that one, no other of its step.

    `checksum` is its manifest's.
    """

    step: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True):
    """The content of a manifest."""

    format: int
    step: int
    base: list[BaseLink]  # oldest first; a full checkpoint has none
    bits: int
    tables: list[Table]
    optimizer: Optimizer
    k: int
    groups: list[list[int]]
    parts: list[PartSummary]
    samples: int
    config: dict[str, Any]
    digest: str | None
    extra: dict[str, Any]
    job: str = ""  # the id of the job that saved it
    regions: list[list[int]] | None = None  # where the groups' members have them, if servers moved

    @property
    def full(self) -> bool:
        return not self.base

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def record_parts(self) -> list[PartSummary]:
        return [part for part in self.parts if part.place != DENSE]

    @property
    def dense_parts(self) -> list[PartSummary]:
        return [part for part in self.parts if part.place == DENSE]

    def part_of(self, place: int) -> PartSummary:
        return next(part for part in self.record_parts if part.place == place)

    def layout(self) -> Layout:
        regions = None if self.regions is None else tuple(map(tuple, self.regions))
        return _layout(tuple(map(tuple, self.groups)), self.k, regions)

    def arenas(self) -> list[Arena]:
        return _arenas(tuple(self.tables), self.optimizer)


# The checkpoints of a job are alike, and a chain of them is read as a whole.
@lru_cache(maxsize=4)
def _layout(
    groups: tuple[tuple[int, ...], ...], k: int, regions: tuple[tuple[int, ...], ...] | None
) -> Layout:
    given = None if regions is None else np.array(regions, np.int32)
    return Layout(np.array(groups, np.int32), k, given)


@lru_cache(maxsize=4)
def _arenas(tables: tuple[Table, ...], optimizer: Optimizer) -> list[Arena]:
    return make_arenas(tables, optimizer)


class _Sealed(msgspec.Struct):
    sha256: str
    content: msgspec.Raw


class _Version(msgspec.Struct):
    format: int


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None if the name is not one's."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match and step_folder(int(match[1])) == name else None


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """The file's bytes, and the checksum by which others refer to it."""
    content = msgspec.json.encode(manifest)
    checksum = hashlib.sha256(content).hexdigest()
    return msgspec.json.encode(_Sealed(checksum, msgspec.Raw(content))), checksum


def read_manifest(folder: Folder, step: int) -> tuple[Manifest, str]:
    """The manifest in a checkpoint's own folder, and its checksum."""
    try:
        text = folder.read(MANIFEST)
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{folder} has no {MANIFEST}: step {step} was never saved to the end, or was removed"
        ) from None
    except OSError as why:
        raise DamagedCheckpoint(f"{MANIFEST} in {folder} cannot be read: {why}") from why
    manifest, checksum = _decode(text, folder)
    if manifest.step != step:
        raise DamagedCheckpoint(
            f"{MANIFEST} in {folder} is that of step {manifest.step}; the folder was renamed"
        )
    return manifest, checksum


def _decode(text: bytes, folder: Folder) -> tuple[Manifest, str]:
    try:
        sealed = msgspec.json.decode(text, type=_Sealed)
    except (msgspec.DecodeError, UnicodeDecodeError) as why:
        raise DamagedCheckpoint(f"{MANIFEST} in {folder} is cut or damaged: {why}") from why
    content = bytes(sealed.content)
    if hashlib.sha256(content).hexdigest() != sealed.sha256:
        raise DamagedCheckpoint(
            f"{MANIFEST} in {folder} does not match its own checksum: it was changed after it was "
            "written"
        )
    try:
        version = msgspec.json.decode(content, type=_Version).format
        if version != FORMAT:
            raise CheckpointError(
                f"{folder} has format {version} and this version of Planaria reads {FORMAT}; use "
                "the version that wrote it"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
        _check(manifest, folder)
    except (msgspec.DecodeError, msgspec.ValidationError) as why:
        raise DamagedCheckpoint(f"{MANIFEST} in {folder} makes no sense: {why}") from why
    return manifest, sealed.sha256


def _check(manifest: Manifest, folder: Folder) -> None:
    """What the readers rely on; a manifest with a right checksum can still be a forgery."""
    try:
        layout = manifest.layout()
        manifest.arenas()
    except (PlanariaError, ValueError) as why:
        raise DamagedCheckpoint(f"{MANIFEST} in {folder} makes no sense: {why}") from why
    named = [("part", part.file) for part in manifest.parts]
    named += [("table", table.name) for table in manifest.tables]
    for what, name in named:
        if problem := name_problem(name):
            raise DamagedCheckpoint(
                f"{MANIFEST} in {folder} has a {what} named {name!r}, which cannot be the name of "
                f"a file: {problem}. It is damaged or forged; use another checkpoint"
            )
    if not is_job_id(manifest.job):
        raise DamagedCheckpoint(
            f"{MANIFEST} in {folder} says that {manifest.job!r} saved it, which is no job's id"
        )
    places = sorted(part.place for part in manifest.record_parts)
    if places != list(layout.places):
        raise DamagedCheckpoint(
            f"{MANIFEST} in {folder} has parts of places {places}, its layout {layout.places}"
        )
