"""The machines of a job under the seeded scheduler, with records that have no room in memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from planaria.kernels.types import Index
from planaria.records import TieredRecords
from planaria.records.budget import Tier
from planaria.server.job import ServerJob
from planaria.simulator.checks import Failure
from planaria.simulator.faults import Faults
from planaria.simulator.toy import ToyJob
from planaria.simulator.world import World


@dataclass(frozen=True)
class TieredJob(ToyJob):
    """Of the records of a server, so many of each arena are in memory."""

    folder: str = ""
    slots: int = 1

    def server_job(self, retry_s: float) -> ServerJob:
        tier = Tier(self.folder, (self.slots,) * len(self.arenas))
        return replace(super().server_job(retry_s), tier=tier)


SHAPES = {
    "one parity": {"servers": 4, "k": 2, "r": 1},
    "two parities": {"servers": 5, "k": 3, "r": 2},
    "ranges": {"servers": 4, "k": 2, "r": 1, "rebuild_chunk": 1},
    "early answers": {"servers": 4, "k": 2, "r": 1, "early_answers": True},
    "arenas": {"servers": 4, "k": 2, "r": 1, "tables": ((24, 2), (17, 3), (9, 1))},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slots", [1, 4])
def test_no_schedule_loses_anything_of_two_tiers(tmp_path: Path, shape: str, slots: int) -> None:
    tiered = 0
    for seed in range(8):
        job = TieredJob(**SHAPES[shape], folder=str(tmp_path), slots=slots)  # type: ignore[arg-type]
        world = World(job, seed, Faults()).run()
        for process in world.processes.values():
            store = getattr(process.machine, "store", None)
            if store is not None:
                records = [arena.records for arena in store.arenas]
                tiered += sum(isinstance(some, TieredRecords) for some in records)
        del world, process, store, records
        gc.collect()
    assert tiered > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scales", [(6,), (4, 6), (6, 4)])
def test_servers_come_and_go_with_two_tiers(tmp_path: Path, scales: tuple[int, ...]) -> None:
    for seed in range(4):
        job = TieredJob(servers=5, folder=str(tmp_path), slots=3, steps=8, blocks=2)
        World(job, seed, Faults(count=1, scales=scales)).run()
        gc.collect()


def test_a_tier_that_forgets_what_it_writes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = TieredRecords._fill

    def forgets(self: TieredRecords, records: Index, slots: Index, read: bool) -> int:
        self._changed[slots] = False
        return fill(self, records, slots, read)

    monkeypatch.setattr(TieredRecords, "_fill", forgets)
    with pytest.raises(Failure):
        World(TieredJob(folder=str(tmp_path)), 3, Faults(count=0)).run()
