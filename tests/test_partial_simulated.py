"""Partial recovery under the simulator, where the moment of recovery can be looked at.

A server is killed at one message after the other. Its replacement starts from the save, and at
that moment every other server has, to the bit, what it has in the undisturbed run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planaria.coordinator.machine import CoordinatorMachine
from planaria.kernels.types import Floats, Records
from planaria.server.digest import Digest
from planaria.server.job import ServerJob
from planaria.server.machine import ServerMachine
from planaria.server.store import Store
from planaria.simulator.checks import Failure, Oracle
from planaria.simulator.faults import Faults
from planaria.simulator.toy import Batch, ToyJob, by_place, located
from planaria.simulator.world import World
from planaria.trainer.machine import TrainerMachine
from planaria.wire.machine import Outbox
from planaria.wire.messages import Install, Member, Message

VICTIM = 1


class PartialJob(ToyJob):
    def server_job(self, retry_s: float) -> ServerJob:
        return replace(super().server_job(retry_s), partial=True)


JOB = PartialJob(servers=3, k=1, r=0, trainers=2, steps=6, tables=((30, 2),))


class PartialCoordinator(CoordinatorMachine):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named, partial=True)


class Onlooker(Oracle):
    """Gradients follow from what a trainer sees, which may be the rows of a save."""

    def check_rows(self, rank: int, step: int, rows: dict[int, list[Floats]]) -> None:
        """Nor are those the undisturbed run's."""

    def on_compute(
        self, trainer: TrainerMachine, step: int, rows: dict[int, list[Floats]]
    ) -> Batch:
        job, batch = self.world.job, self.reference.batches[step, trainer.rank]
        own = job.rows_of(step, trainer.rank)
        ((places, _),) = there = located(job.layout, job.arenas, own)
        values = np.empty((len(places), 2), np.float32)
        for place, found in rows.items():
            values[places == place] = found[0]
        dense = trainer.dense.as_of(step - 1)
        assert dense is not None
        seen = dense.view(np.float32)
        sparse, gradient = job.gradients(step, trainer.rank, own, [values], seen)
        return replace(batch, pushes=by_place(job, there, sparse), dense_gradient=gradient)

    def at_end(self) -> None:
        """The tests look themselves."""


class PartialWorld(World):
    """Saves every server at one step, and kills one of them at one delivery."""

    coordinator_class = PartialCoordinator

    def __init__(
        self,
        seed: int,
        *,
        save_at: int = 0,
        kill_at: int = 0,
        with_trainer: bool = False,
        job: PartialJob = JOB,
        network: str = "even",
    ) -> None:
        """with_trainer: a trainer dies at the same moment."""
        self.with_trainer = with_trainer
        self.states: dict[int, dict[int, Records]] = defaultdict(dict)  # place -> step
        self.save_at = save_at
        self.kill_at = kill_at
        self.survivors: dict[int, Records] = {}  # at the moment of recovery
        self.recovered_at = self.went_back_to = -1
        super().__init__(job, seed, Faults(count=0), network=network)
        self.oracle = Onlooker(self)

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if self.kill_at and self.delivered == self.kill_at:
            self.kill(self.disk.install.servers[VICTIM])
            if self.with_trainer:
                self.kill(self.disk.install.trainers[1])

    def finish_call(self, member: Member, outbox: Outbox) -> None:
        machine = self.processes[member].machine
        if isinstance(machine, ServerMachine) and machine.store is not None:
            if machine.wants_save:
                self._fill(machine.store)
                outbox = outbox + machine.filled()
            self.states[machine.place][machine.step] = machine.store.arenas[0].records.copy()
        super().finish_call(member, outbox)

    def _fill(self, store: Store) -> None:
        if self.save_at in self.states[store.place] and self.save_at <= store.step:
            store.arenas[0].records.put(0, self.states[store.place][self.save_at])
            store.set_all_valid()
            self.went_back_to = self.save_at
        else:
            store.initialise()
            self.went_back_to = 0
        self.recovered_at = store.step
        for other in self.disk.install.servers:
            there = self.processes[other].machine
            if there.place != VICTIM:
                index = np.arange(len(there.store.arenas[0].records))
                self.survivors[there.place] = there.store.read(0, index, store.step)

    def digest(self) -> Digest:
        servers = [self.processes[member].machine for member in self.disk.install.servers]
        return sum((server.store.digest() for server in servers), Digest())


@pytest.fixture(scope="module")
def undisturbed() -> PartialWorld:
    world = PartialWorld(0)
    world.run()
    assert world.digest() == world.oracle.reference.digest  # gradients are as in the reference
    return world


def test_only_the_lost_server_differs_when_it_recovers(undisturbed: PartialWorld) -> None:
    exact = lossy = 0
    for kill_at in range(40, undisturbed.delivered - 20, 3):
        world = PartialWorld(0, save_at=2, kill_at=kill_at)
        world.run()
        if world.recovered_at < 0:
            continue  # the job was over before anybody noticed
        assert world.survivors.keys() == {0, 2}
        for place, records in world.survivors.items():
            expected = undisturbed.states[place][world.recovered_at]
            assert np.array_equal(records, expected), (kill_at, place)
        equal = world.digest() == undisturbed.digest()
        assert equal == (world.recovered_at == world.went_back_to), kill_at
        exact += equal
        lossy += not equal
    assert exact > 0  # killed right after the save
    assert lossy > 0  # the control


class SumsAgain(TrainerMachine):
    """Rule 12: who has a sum gives that; this one gives its gradient, and all sum again."""

    def on_install(self, old: Install | None, new: Install) -> None:
        self.reduction.sums.clear()
        super().on_install(old, new)


class SummedAgain(PartialWorld):
    trainer_class = SumsAgain


class KeepsWhatCame(TrainerMachine):
    """Rule 12: a reduction that is not finished starts over in a new view."""

    def on_install(self, old: Install | None, new: Install) -> None:
        self.reduction.start_over = lambda: None  # type: ignore[method-assign]
        super().on_install(old, new)


class KeptWhatCame(PartialWorld):
    trainer_class = KeepsWhatCame


def differing(world: type[PartialWorld], seeds: range) -> int:
    """In how many schedules the trainers end with more than one dense network, or not at all."""
    job = replace(JOB, trainers=3)
    found = 0
    for seed in seeds:
        for kill_at in range(60, 200, 7):
            run = world(
                seed, save_at=2, kill_at=kill_at, with_trainer=True, job=job, network="ragged"
            )
            try:
                run.run()
            except Failure:
                found += 1
                continue
            states = {
                run.processes[member].machine.dense.states[run.job.steps].tobytes()
                for member in run.disk.install.trainers
                if member in run.processes
            }
            found += len(states) > 1
    return found


@pytest.mark.campaign
def test_a_trainer_lost_with_a_server_leaves_one_dense_network() -> None:
    """Rows go back, so its replacement gets other gradients for a step that another trainer has
    passed: that one's sum is taken.
    """
    assert differing(PartialWorld, range(10)) == 0
    assert differing(SummedAgain, range(3)) > 0
    assert differing(KeptWhatCame, range(20)) > 0
