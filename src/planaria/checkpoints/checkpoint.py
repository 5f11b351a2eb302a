"""A published checkpoint: opening it, and streaming its records to any layout.

A differential checkpoint needs others before it, its *chain*: a full one, then differences. Records
are streamed from the newest to the oldest, and of each row the first value met is the right one. So
every row is delivered once, and parity, which cannot take a value back, comes out right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from planaria.checkpoints.chunks import Chunk, Kind
from planaria.checkpoints.encodings import RAW_BITS, EncodingMaker, make_encoding
from planaria.checkpoints.folders import AnyFolder, Folder, open_folder
from planaria.checkpoints.manifest import Manifest, PartSummary, read_manifest, step_folder
from planaria.checkpoints.reader import PartReader, check_size, read_named, verify_part
from planaria.checkpoints.target import Taken, Taker, Target, pick
from planaria.errors import DamagedCheckpoint
from planaria.kernels.types import Bytes, Index, Records
from planaria.layout import Layout
from planaria.tables import Arena


@dataclass(frozen=True, eq=False)
class Piece:
    """Some records of one arena on one place. They are the stream's until the next piece."""

    arena: int
    index: Index
    records: Records


@dataclass(frozen=True, eq=False)
class Offer:
    """Records of a chunk, and which of them a target took."""

    arena: int
    taken: Taken
    records: Records  # all of the chunk


@dataclass
class Seen:
    """What was found whole just before, so that nothing is looked at twice."""

    manifests: dict[int, tuple[Manifest, str]] = field(default_factory=dict)
    """By step, with its checksum; its record parts are there."""
    parts: set[tuple[int, str]] = field(default_factory=set)
    """Step and file: parts that are there, with the right length."""
    read: set[tuple[int, str]] = field(default_factory=set)
    """Parts whose every byte was read."""

    def check_part(self, own: Folder, step: int, part: PartSummary) -> None:
        """Raises unless it is there. own: the checkpoint's folder."""
        if (step, part.file) not in self.parts:
            check_size(own, part)
            self.parts.add((step, part.file))


class Checkpoint:
    """A checkpoint whose manifests, and those of its chain, are whole and whose files are there.

    What the files hold is checked as it is read; `verify` reads all of it.
    """

    def __init__(
        self,
        folder: AnyFolder,
        step: int,
        *,
        encodings: EncodingMaker = make_encoding,
        seen: Seen | None = None,
    ) -> None:
        """folder: the one of all checkpoints. Raises DamagedCheckpoint if something is amiss.

        seen: what was found whole just before, for whoever opens many that need the same ones.
        """
        self.folder = open_folder(folder)
        self._encodings = encodings
        self._seen = seen or Seen()
        own = self.folder.folder(step_folder(step))
        self.manifest, self.checksum = self._look_at(step)
        for part in self.manifest.dense_parts:
            self._seen.check_part(own, step, part)
        self.chain = [*self._read_base(), self.manifest]
        """Manifests: a full one, differences in the order of their steps, this one."""
        self.layout: Layout = self.manifest.layout()
        self._layouts = {
            manifest.step: self.layout if self._same_layout(manifest) else manifest.layout()
            for manifest in self.chain
        }
        self.arenas: list[Arena] = self.manifest.arenas()
        if not all(_covers_data(self.chain[0], self.arenas)):
            raise DamagedCheckpoint(f"{own}: step {self.chain[0].step} lacks records of its tables")

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def job(self) -> str:
        """The id of the job that saved it."""
        return self.manifest.job

    def dense(self) -> dict[str, Bytes]:
        """The dense state by name, uint8[any]; the caller owns it."""
        own = self.folder_of(self.manifest)
        found: dict[str, Bytes] = {}
        for part in self.manifest.dense_parts:
            found |= read_named(own, self.step, part)
        return found

    def verify(self, seen: Seen | None = None) -> None:
        """Reads every byte, those of the chain included. seen: what need not be read again."""
        read = (seen or Seen()).read
        for manifest in self.chain:
            for part in manifest.parts:
                if (manifest.step, part.file) not in read:
                    verify_part(self.folder_of(manifest), manifest.step, part)
                    read.add((manifest.step, part.file))

    def read(self, layout: Layout, place: int) -> Iterator[Piece]:
        """The data records that `place` holds in `layout`, each once, in no particular order."""
        targets = self.targets(layout, place, parity=False)
        for offer in self.stream(targets):
            records = pick(offer.records, offer.taken.at)
            yield Piece(offer.arena, offer.taken.index, records)

    def targets(
        self, layout: Layout, place: int, *, data: bool = True, parity: bool = True
    ) -> list[Target]:
        """One per arena, for `stream`."""
        again = len(self.chain) > 1
        return [
            Target(layout.arena(arena.rows), place, data=data, parity=parity, each_once=again)
            for arena in self.arenas
        ]

    def stream(
        self, targets: Sequence[Taker], on_progress: Callable[[], None] = lambda: None
    ) -> Iterator[Offer]:
        """What the targets need, chunk by chunk. Chunks that none of them needs are not read.

        on_progress: called at each chunk, needed or not.
        """
        for manifest in reversed(self.chain):
            layouts = [self.layout_of(manifest).arena(arena.rows) for arena in self.arenas]
            for part in manifest.record_parts:
                if not any(target.lacking for target in targets):
                    return
                for chunk, reader in self.chunks(manifest, part):
                    on_progress()
                    layout, target = layouts[chunk.arena], targets[chunk.arena]
                    limit = layout.records(part.place)
                    if chunk.kind == Kind.RANGE:
                        index = np.arange(chunk.first, chunk.end)
                        taken = target.take(layout.row_at(part.place, index))
                        if len(taken.at):
                            _, records = self.records(reader, chunk, limit)
                            yield Offer(chunk.arena, taken, records)
                    else:
                        # The list decides what is taken, so it is checked first, and for that the
                        # whole body is read.
                        index, records = self.records(reader, chunk, limit)
                        taken = target.take(layout.row_at(part.place, index))
                        if len(taken.at):
                            yield Offer(chunk.arena, taken, records)
        for arena, target in enumerate(targets):
            if target.lacking:
                raise DamagedCheckpoint(
                    f"step {self.step} in {self.folder} lacks {target.lacking} rows of arena "
                    f"{arena}, though its files are as they were written"
                )

    # ------------------------------------------------------------------ one part

    def folder_of(self, manifest: Manifest) -> Folder:
        return self.folder.folder(step_folder(manifest.step))

    def layout_of(self, manifest: Manifest) -> Layout:
        """The layout that a checkpoint of the chain was saved in."""
        return self._layouts[manifest.step]

    def chunks(self, manifest: Manifest, part: PartSummary) -> Iterator[tuple[Chunk, PartReader]]:
        """The chunks of a part's records, each with the reader that stands before its body."""
        own = self.folder_of(manifest)
        layout = self.layout_of(manifest)
        limits = [layout.arena(arena.rows).records(part.place) for arena in self.arenas]
        with PartReader(own, manifest.step, part) as reader:
            for number, chunk in enumerate(reader.chunks()):
                if not self._fits(chunk, limits):
                    raise DamagedCheckpoint(
                        f"chunk {number} of {part.file} in {own} does not belong to these tables"
                    )
                yield chunk, reader

    def records(self, reader: PartReader, chunk: Chunk, limit: int) -> tuple[Index, Records]:
        """Record numbers below `limit`, none for a range, and records: the reader's until its
        next chunk.
        """
        key, payload = reader.body(chunk)
        index = key.view(np.int64)
        arena = self.arenas[chunk.arena]
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < limit:
            raise DamagedCheckpoint(f"step {self.step} lists records outside 0 to {limit - 1}")
        encoding = self._encodings(chunk.bits, arena.dim, arena.words)
        records = encoding.decode(payload, chunk.count)
        if records.shape != (chunk.count, arena.words):
            raise DamagedCheckpoint(f"a chunk of step {self.step} decodes to {records.shape}")
        return index, records

    def _fits(self, chunk: Chunk, limits: Sequence[int]) -> bool:
        """Whether a chunk is one of these tables: its checksums do not say that."""
        if chunk.kind == Kind.NAMED or chunk.arena >= len(limits):
            return False
        raw_bytes = 4 * chunk.words * chunk.count
        return (
            chunk.words == self.arenas[chunk.arena].words
            and chunk.end <= limits[chunk.arena]
            and (chunk.bits != RAW_BITS or chunk.payload_bytes == raw_bytes)
        )

    def _read_base(self) -> list[Manifest]:
        chain: list[Manifest] = []
        for link in self.manifest.base:
            needs = f"step {self.step} in {self.folder} needs step {link.step}"
            try:
                manifest, checksum = self._look_at(link.step)
            except DamagedCheckpoint as why:
                raise DamagedCheckpoint(f"{needs}, but {why}") from why
            if checksum != link.checksum:
                raise DamagedCheckpoint(f"{needs}, which was saved anew since and is another now")
            chain.append(manifest)
        return chain

    def _look_at(self, step: int) -> tuple[Manifest, str]:
        """A manifest whose parts, but for the dense one, are there."""
        if step not in self._seen.manifests:
            own = self.folder.folder(step_folder(step))
            manifest, checksum = read_manifest(own, step)
            for part in manifest.record_parts:
                self._seen.check_part(own, step, part)
            self._seen.manifests[step] = (manifest, checksum)
        return self._seen.manifests[step]

    def _same_layout(self, manifest: Manifest) -> bool:
        own = self.manifest
        return (manifest.k, manifest.groups, manifest.regions) == (own.k, own.groups, own.regions)


def _covers_data(manifest: Manifest, arenas: Sequence[Arena]) -> Iterator[bool]:
    layout = manifest.layout()
    for part in manifest.record_parts:
        for number, arena in enumerate(arenas):
            yield part.covers(number, layout.arena(arena.rows).data_records(part.place))
