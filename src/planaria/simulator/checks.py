"""The promises that every schedule must keep, looked at while it runs and when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from planaria.codes import Code
from planaria.errors import PlanariaError
from planaria.kernels.types import Floats
from planaria.layout import Layout
from planaria.server.decoding import decode, find_mates
from planaria.server.digest import Digest
from planaria.server.store import Store
from planaria.simulator.toy import Batch, Reference, ToyJob, joined, reference
from planaria.trainer.machine import TrainerMachine
from planaria.wire.control import CoordinatorState
from planaria.wire.messages import Install, Stop, View

if TYPE_CHECKING:
    from planaria.simulator.world import World

REDUNDANT_S = 12.0
"""When no fault lasts any more, every record is protected in full again within this time."""
END_S = 60.0
"""And the job is over within this time."""


class Failure(PlanariaError):
    """A schedule broke a promise; the message says which, and the seed."""


class Oracle:
    """What must hold, known from the undisturbed run and from what was seen so far."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reference: Reference = reference(world.job)
        self.installs: dict[View, Install] = {}
        self.redundant_at: float | None = None
        self.redundant_after_s = 0.0  # how long after the last fault

    # ------------------------------------------------------------------ while it runs

    def on_save(self, old: CoordinatorState, new: CoordinatorState) -> None:
        """Views are never used twice, and what is committed stays committed."""
        if (new.epoch, new.n) < (old.epoch, old.n):
            raise Failure(f"the coordinator went back from view {old.epoch, old.n} to {new.n}")
        if new.install.committed < old.install.committed:
            raise Failure(f"step {old.install.committed} was committed and is not any more")
        if new.install.view < old.install.view:
            raise Failure(f"the membership of view {new.install.view} came back")
        if new.install.moves != old.install.moves:
            self.world.lasts(0.0)  # everybody is on the way to another layout
        if (new.install.shifts, new.install.shift) != (old.install.shifts, old.install.shift):
            self.world.lasts(0.0)

    def on_install(self, member: str, install: Install) -> None:
        """One view number means one membership, for everybody."""
        if install.view not in self.installs:
            self._nobody_is_taken_for_lost(install)
        if self.installs.setdefault(install.view, install) != install:
            raise Failure(f"{member} got another membership for view {install.view}")
        members = [*install.servers, *install.trainers]
        if install.addresses != {name: f"at {name}" for name in members}:
            raise Failure(f"{member} is not told where everybody is: {install.addresses}")

    def _nobody_is_taken_for_lost(self, install: Install) -> None:
        """From its promise to the view that follows, nothing changes about a server."""
        for place in install.rebuilding:
            process = self.world.processes.get(install.servers[place])
            if process is not None and process.machine.whole:
                raise Failure(f"{install.servers[place]} is whole, and a view says otherwise")

    def on_stop(self, member: str, stop: Stop) -> None:
        """Only who was given up is sent away before the end is on disk."""
        if member not in self.world.given_up and not self.world.disk.state.ended:
            raise Failure(f"{member} was told to leave: {stop.reason}")

    def on_compute(
        self, trainer: TrainerMachine, step: int, rows: dict[int, list[Floats]]
    ) -> Batch:
        """No trainer ever sees a bit that the undisturbed run does not have at that step."""
        batch = self.reference.batches[step, trainer.rank]
        assert trainer.install
        if step <= trainer.install.committed:
            raise Failure(f"rank {trainer.rank} computes committed step {step} again")
        self.check_rows(trainer.rank, step, rows)
        dense = trainer.state_of(step - 1)
        if dense is None or dense.tobytes() != batch.dense:
            raise Failure(f"rank {trainer.rank} has a wrong dense state in step {step}")
        return batch

    def check_rows(self, rank: int, step: int, rows: dict[int, list[Floats]]) -> None:
        """Those of a step are as of the step before it."""
        for place, expected in self.reference.batches[step, rank].seen.items():
            if joined(rows[place]) != expected:
                raise Failure(f"rank {rank} got wrong rows of place {place} in step {step}")

    def on_pulse(self) -> None:
        """Once the faults are over, redundancy and then the end must come in time."""
        world = self.world
        if world.now < world.calm_at or not self._redundant():
            self.redundant_at = None
        elif self.redundant_at is None:
            self.redundant_at = world.now
            self.redundant_after_s = world.now - world.calm_at
        late_s, limit_s = world.now - world.calm_at, REDUNDANT_S * world.job.blocks
        if late_s > END_S or (self.redundant_at is None and late_s > limit_s):
            raise Failure(f"{late_s:.1f} s after the last fault it hangs: {world.state()}")

    def _redundant(self) -> bool:
        world = self.world
        install = world.disk.install
        members = [*install.servers, *install.trainers]
        machines = [world.processes[m].machine for m in members if m in world.processes]
        keepers = install.keeping()
        return (
            len(machines) == len(members)
            and all(world.processes[keeper].machine.dense for keeper in keepers)
            and all(
                machine.view == install.view
                and (not machine.blank if isinstance(machine, TrainerMachine) else machine.whole)
                for machine in machines
            )
        )

    # ------------------------------------------------------------------ at the end

    def at_end(self) -> None:
        """Nothing was lost: records, parity, dense state; and nobody had to refuse anything."""
        job, world = self.world.job, self.world
        servers = [
            world.processes[member].machine if member in world.processes else None
            for member in world.disk.install.servers
        ]
        if any(server and not server.whole for server in servers):
            raise Failure("the job ended while records were still to be rebuilt")
        left: list[Store | None] = [server.store if server else None for server in servers]
        layout = world.layout
        stores = [store or _rebuilt(place, left, job, layout) for place, store in enumerate(left)]
        found = sum((store.digest() for store in stores), Digest())
        if found != self.reference.digest:
            raise Failure("the records differ from those of the undisturbed run")
        install = world.disk.install
        for member in [*install.trainers, *install.keeping()]:
            if member not in world.processes:
                continue  # died after it had said that it was done
            dense = world.processes[member].machine.dense.as_of(job.steps)
            if dense is None or dense.tobytes() != self.reference.dense:
                raise Failure(f"the dense state of {member} differs from the undisturbed run")
        _check_stripes(stores, job, layout)
        if errors := [error for server in servers if server for error in server.errors]:
            raise Failure(f"a server refused a message: {errors[0]}")


def _rebuilt(place: int, stores: Sequence[Store | None], job: ToyJob, layout: Layout) -> Store:
    """What a replacement would rebuild for a server that died when everybody was done."""
    store = Store(job.arenas, layout, place, blank_at=job.steps)
    absent = [other for other, there in enumerate(stores) if there is None]
    for number, arena in enumerate(store.arenas):
        index = arena.missing(np.arange(len(arena.records)))
        mates = find_mates(arena.layout, place, index, absent)
        shards = np.empty((job.k, len(index), arena.arena.words), np.uint32)
        for (row, i), mate in np.ndenumerate(mates.places):
            if not mates.coef[row, i]:
                shards[i, row] = 0
                continue
            there = stores[int(mate)]
            assert there
            shards[i, row] = there.read(number, mates.indices[row, i : i + 1], job.steps)[0]
        store.restore(number, index, decode(mates, list(shards)), job.steps)
    return store


def _check_stripes(stores: Sequence[Store], job: ToyJob, layout: Layout) -> None:
    """Every stripe satisfies its parity equations, byte for byte."""
    if any(store.held_step < job.steps for store in stores):
        raise Failure("a delta of the last step is still missing")
    code, regions = Code(job.k, job.r), layout.region_of.tolist()
    groups = list(enumerate(layout.groups.tolist()))
    for (arena, of), (group, places) in product(enumerate(job.arenas), groups):
        slots = layout.arena(of.rows).slots
        starts = [region * slots for region in regions[group]]
        shards = [
            stores[place].arenas[arena].records.read(start, start + slots).view(np.uint8).ravel()
            for place, start in zip(places, starts, strict=True)
        ]
        if not code.verify(shards[: job.k], shards[job.k :]):
            raise Failure(f"a stripe of group {group} is inconsistent in arena {arena}")
