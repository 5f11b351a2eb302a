"""Models to save and restore, and what their servers must hold, worked out without the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st

from planaria import Initial, Layout, Optimizer, Table, kernels
from planaria.checkpoints import (
    DENSE,
    Checkpoint,
    Encoding,
    Facts,
    Lease,
    PartSummary,
    PartWriter,
    Raw,
    publish,
    restore,
)
from planaria.checkpoints.folders import AnyFolder
from planaria.codes import Code
from planaria.kernels.types import Bytes, Index, Records
from planaria.records import RamRecords
from planaria.tables import Arena, make_arenas

TABLES = (
    Table("user", 61, 3),
    Table("item", 40, 5, Initial.normal(0.0, 1.0)),
    Table("shop", 17, 3),
)


@dataclass(frozen=True)
class Half:
    """A stand-in for quantised records: the upper half of every word, made odd.

    So parity of what is decoded is not what parity decodes to, and padding does not stay zero.
    """

    words: int
    bits: int = 16

    def encode(self, records: Records) -> Bytes:
        return (records >> 16 | 1).astype(np.uint16).reshape(-1).view(np.uint8)

    def decode(self, payload: Bytes, count: int) -> Records:
        halves = payload.view(np.uint16).reshape(count, self.words)
        return halves.astype(np.uint32) << np.uint32(16)


def half_or_raw(bits: int, dim: int, words: int) -> Encoding:
    return Half(words) if bits == 16 else Raw(words)


@dataclass(eq=False)
class Model:
    """All rows of all tables at some step, arena by arena."""

    seed: int = 0
    tables: Sequence[Table] = TABLES
    optimizer: Optimizer = field(default_factory=lambda: Optimizer("rowwise_adagrad"))
    job: str = ""
    arenas: list[Arena] = field(init=False)
    rows: list[Records] = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.arenas = make_arenas(self.tables, self.optimizer)
        self.rows = [
            self.random.integers(0, 2**32, (a.rows, a.words), np.uint32) for a in self.arenas
        ]

    def train(self, share: float = 0.3) -> list[Index]:
        """Changes some rows; returns which, arena by arena."""
        changed = [np.flatnonzero(self.random.random(a.rows) < share) for a in self.arenas]
        for rows, some in zip(self.rows, changed, strict=True):
            rows[some] = self.random.integers(0, 2**32, (len(some), rows.shape[1]), np.uint32)
        return changed

    def server(self, layout: Layout, place: int) -> list[Records]:
        """What the server at `place` holds: data, parity and padding."""
        own, held = layout.regions(place), []
        for number in range(len(self.arenas)):
            stripes = self._stripes(layout, number)
            parts = [
                stripes[g, p]
                for g, p in zip(own.group.tolist(), own.position.tolist(), strict=True)
            ]
            held.append(np.ascontiguousarray(np.concatenate(parts)))
        return held

    def _stripes(self, layout: Layout, number: int) -> Records:
        """uint32[G, k + r, slots, words], encoded afresh."""
        rows, k, groups = self.rows[number], layout.k, layout.n_groups
        slots = layout.arena(len(rows)).slots
        padded = np.zeros((slots * groups * k, rows.shape[1]), np.uint32)
        padded[: len(rows)] = rows
        by_slot = padded.reshape(slots, groups, k, rows.shape[1])
        data = np.ascontiguousarray(by_slot.transpose(2, 1, 0, 3))  # [k, G, slots, words]
        parity = Code(k, layout.r).encode([shard.reshape(-1).view(np.uint8) for shard in data])
        shards = [*data, *(shard.view(np.uint32).reshape(data[0].shape) for shard in parity)]
        return np.stack(shards, axis=1)

    def facts(self, layout: Layout, base: Sequence[int] = ()) -> Facts:
        return Facts(
            self.tables,
            self.optimizer,
            layout,
            samples=self.seed,
            base=base,
            config={"a": [1]},
            job=self.job,
        )

    def save(
        self,
        folder: AnyFolder,
        step: int,
        layout: Layout,
        *,
        base: Sequence[int] = (),
        changed: Sequence[Index] | None = None,
        parity: bool = False,
        bits: int = 32,
        lease: Lease | None = None,
    ) -> Checkpoint:
        """Full, or differential where `changed` has the changed rows by arena."""
        parts = [
            self.save_part(folder, step, layout, place, changed, parity=parity, bits=bits)
            for place in layout.places
        ]
        with PartWriter(folder, step, DENSE, job=self.job) as dense:
            dense.add_bytes("weights", np.full(100, step, np.float32))
            dense.add_bytes("nothing", b"")
            parts.append(dense.finish())
        return publish(folder, step, parts, self.facts(layout, base), lease=lease)

    def save_part(
        self,
        folder: AnyFolder,
        step: int,
        layout: Layout,
        place: int,
        changed: Sequence[Index] | None = None,
        *,
        parity: bool = False,
        bits: int = 32,
    ) -> PartSummary:
        encodings = None if bits == 32 else [Half(arena.words) for arena in self.arenas]
        with PartWriter(folder, step, place, encodings, self.job) as part:
            for number, records in enumerate(self.server(layout, place)):
                arena = layout.arena(self.arenas[number].rows)
                if changed is None:
                    end = len(records) if parity else arena.data_records(place)
                    part.add(number, end // 2, records[end // 2 : end])  # in any order
                    part.add(number, 0, records[: end // 2])
                else:
                    places, index = arena.locate(changed[number])
                    mine = index[places == place]
                    part.add_rows(number, mine, kernels.gather(records, mine))
            return part.finish()

    def check_restored(self, checkpoint: Checkpoint, layout: Layout) -> None:
        """Every server of `layout`, filled from the checkpoint, holds what it must."""
        for place in layout.places:
            out = restored(checkpoint, self.arenas, layout, place)
            for found, expected in zip(out, self.server(layout, place), strict=True):
                np.testing.assert_array_equal(found, expected)


def restored(
    checkpoint: Checkpoint, arenas: Sequence[Arena], layout: Layout, place: int
) -> list[Records]:
    """Arenas that held garbage before."""
    shapes = [(layout.arena(arena.rows).records(place), arena.words) for arena in arenas]
    out = [np.full(shape, 0xDEADBEEF, np.uint32) for shape in shapes]
    restore(checkpoint, arenas, layout, place, list(map(RamRecords, out)))
    return out


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any (servers, k, r), fresh or after a server has come or gone."""
    r = draw(st.integers(0, 3))
    k = draw(st.integers(1, 5))
    servers = draw(st.integers(k + r, k + r + 3))
    layout = Layout.fresh(servers, r, k)
    if draw(st.booleans()):
        layout = layout.resized(range(1, servers + 1))
    return layout


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[None]:
    """Parts of many chunks, although the tables of tests are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planaria.checkpoints.writer.CHUNK_BYTES", 400)
        yield
