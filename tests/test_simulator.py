"""The protocol holds: thousands of seeded schedules, and every kill at every message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planaria.simulator import Failure, Faults, ToyJob, World, reference
from planaria.simulator.campaigns import (
    EXHAUSTIVE,
    SHAPES,
    STARTS,
    TABLES,
    Branching,
    KillsAt,
    run_boundaries,
    run_seed,
    run_seeds,
    schedule,
)
from planaria.simulator.checks import REDUNDANT_S
from planaria.simulator.faults import KINDS
from planaria.wire.messages import Install, Member, Message, Prepare

SEEDS = range(2000)
WORKERS = min(os.cpu_count() or 1, 8)
EVERY = 1 if os.environ.get("PLANARIA_ALL_BOUNDARIES") else 2


# ---------------------------------------------------------------- what must hold


def test_two_thousand_schedules_lose_nothing() -> None:
    """A failure prints its seed: python -m planaria.simulator --seed N --trace."""
    outcomes = list(run_seeds(SEEDS, WORKERS))
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []
    assert [outcome.seed for outcome in outcomes] == list(SEEDS)
    assert max(outcome.redundant_after_s for outcome in outcomes) < REDUNDANT_S


@pytest.mark.campaign
def test_killing_any_two_servers_at_any_message_changes_no_bit() -> None:
    """At every second one, for the time that it takes; at all with PLANARIA_ALL_BOUNDARIES=1.

    A failure prints what replays it: python -m planaria.simulator --kill P,Q --at N.
    """
    schedules, failures = 0, []
    for count, failed in run_boundaries(workers=WORKERS, every=EVERY):
        schedules += count
        failures += failed
    assert failures == []
    deliveries = KillsAt(EXHAUSTIVE, 0, ()).run().delivered
    assert schedules == deliveries // EVERY * (6 + 15)  # six servers alone and fifteen pairs


@pytest.mark.parametrize(
    "campaign",
    [
        {"count": 10, "spares": 0},
        {"drop": 0.2, "duplicate": 0.2},
        {"pause_s": 8.0},
        {"kinds": ("kill coordinator", "pause coordinator", "kill coordinator saving"), "count": 8},
        {"kinds": ("kill trainer", "suspect trainer"), "count": 8, "trainers": 3},
        {"kinds": ("kill rebuilding", "kill server", "kill spare", "kill newborn"), "count": 10},
        {"steps": 1, "count": 6},
    ],
    ids=lambda campaign: " ".join(campaign),
)
@pytest.mark.campaign
def test_harder_campaigns_hold_too(campaign: dict[str, Any]) -> None:
    outcomes = run_seeds(range(5000, 5040), **campaign)
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []


class KillsAtTheEnd(World):
    """Kills a server when the first member says that it is done."""

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if type(message).__name__ == "Done" and not self.dead:
            self.kill(self.disk.install.servers[self.seed % self.job.servers])


def test_a_server_that_dies_when_trainers_are_done_is_rebuilt_before_the_end() -> None:
    """The job does not end before all that live have told what they hold."""
    worlds = [KillsAtTheEnd(ToyJob(), seed, Faults(count=0)).run() for seed in range(40)]
    assert all(len(world.dead) == 1 for world in worlds)
    assert {len(world.oracle.installs) for world in worlds} == {2}


# ---------------------------------------------------------------- the simulator itself


def test_faults_stay_within_the_budget_beside_a_partition_that_outlasts_the_deadline() -> None:
    """Two of three trainers were cut off for 7.7 s, and 17 ms later the third paused for 2.8 s.

    The coordinator missed the third and one of the others first, and gave both up. Then the last
    one that it had was silent, too, and stayed so: nobody was left who held the dense state.
    """
    world = schedule(11832).world().run()
    faults = [line.split(" ", 1)[1].partition(":")[0] for line in world.story]
    assert faults[:2] == ["long partition", "pause several"]


def test_a_coordinator_that_nobody_has_replaced_yet_is_told_of_no_death_for_nothing() -> None:
    """It woke up before its successor had claimed an epoch, and what it was told, to find out that
    it is fenced, was the second loss of a group that bears one.
    """
    kinds = ("pause coordinator", "kill server")
    for seed in (49, 91, 93, 119):  # each of them failed
        outcome = run_seed(seed, servers=4, k=2, r=1, kinds=kinds, count=3, pause_s=0.2)
        assert outcome.failed is None


def test_one_seed_is_one_schedule() -> None:
    first, again = run_seed(17), run_seed(17)
    assert first == again
    assert run_seed(18) != first
    assert next(iter(run_seeds([17]))) == first


class Remembering(Branching):
    """Keeps the worlds at the ends of its branches."""

    def __init__(self, job: ToyJob) -> None:
        super().__init__(job, part=0, parts=1)
        self.ends: dict[tuple[int, tuple[int, ...]], World] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ends": {}}

    def follow(self, copy: World, places: tuple[int, ...]) -> None:
        super().follow(copy, places)
        self.ends[self.delivered, places] = copy


def test_a_branch_and_its_replay_are_the_same_schedule() -> None:
    small = ToyJob(servers=3, k=1, r=1, trainers=1, steps=1, tables=((4, 2),))
    counts = list(run_boundaries(small, parts=3))
    assert [failed for _, failed in counts] == [[], [], []]
    branching = Remembering(small)
    branching.run()
    assert sum(count for count, _ in counts) == 3 * branching.delivered == len(branching.ends)
    for (boundary, places), end in branching.ends.items():
        replay = KillsAt(small, boundary, places).run()
        assert (end.story, end.now, end.delivered) == (replay.story, replay.now, replay.delivered)
        assert end.random.getstate() == replay.random.getstate()
        assert end.story != []


def test_seeds_reach_every_shape_and_every_kind_of_fault() -> None:
    drawn = [schedule(seed) for seed in SEEDS]
    shapes = Counter((s.job.servers, s.job.k, s.job.r, s.job.trainers) for s in drawn)
    assert set(shapes) == set(SHAPES)
    assert {s.job.keep_steps for s in drawn} == {1, 2}
    assert {s.spares for s in drawn} == {0, 1, 2}
    assert len({s.job.optimizer.name for s in drawn}) == 3
    assert {len(s.job.arenas) for s in drawn} == {1, 2}
    assert {s.job.restored_at for s in drawn} == set(STARTS)
    worlds = [schedule(seed).world().run() for seed in range(200)]
    story = "; ".join("; ".join(world.story) for world in worlds)
    told = {"kill rebuilding": "kill server", "kill spare": "kill server", "kill newborn": "birth"}
    told |= {"kill coordinator saving": "kill coordinator", "disk error": "cannot write"}
    missing = {kind for kind in KINDS if told.get(kind, kind) not in story}
    assert missing == set()
    assert "another coordinator has taken over" in story


class Watching(World):
    """Counts view changes, and what was committed when each began."""

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        self.seen = getattr(self, "seen", Counter())
        self.seen[type(message)] += 1


def test_without_faults_nothing_is_prepared_and_the_result_is_the_reference() -> None:
    world = Watching(ToyJob(), 3, Faults(count=0))
    world.run()
    assert world.seen[Prepare] == 0
    assert world.seen[Install] >= 4 + 2
    assert world.story == []


def test_the_reference_depends_on_every_choice() -> None:
    digests = {
        reference(job).digest
        for job in (ToyJob(), ToyJob(seed=2), ToyJob(steps=6), ToyJob(trainers=3), ToyJob(ids=5))
    }
    assert len(digests) == 5
    assert reference(ToyJob(servers=5, r=2)).digest == reference(ToyJob()).digest
    two = ToyJob(tables=TABLES[-1])
    assert reference(two).digest not in digests
    assert reference(replace(two, servers=5, r=2)).digest == reference(two).digest


def test_a_job_restored_at_a_step_goes_on_as_if_it_had_never_stopped() -> None:
    for tables in TABLES:
        job = ToyJob(tables=tables, steps=7, restored_at=4)
        world = World(job, 3, Faults(count=0)).run()
        assert world.oracle.reference.digest == reference(replace(job, restored_at=0)).digest
        servers = [world.processes[member].machine for member in world.disk.install.servers]
        assert {server.store.first_step for server in servers} == {4}


def test_the_arenas_of_a_job_differ_in_rows_and_size_and_some_get_no_rows() -> None:
    job = ToyJob(tables=TABLES[-1])
    assert [(arena.rows, arena.dim) for arena in job.arenas] == [(20, 3), (9, 2)]
    drawn = [job.rows_of(step, rank) for step in range(1, 40) for rank in range(2)]
    for arena, rows in zip(job.arenas, zip(*drawn, strict=True), strict=True):
        assert set(np.concatenate(rows)) == set(range(arena.rows))
    assert {len(second) > 0 for _, second in drawn} == {True, False}


def test_a_wrong_bit_anywhere_is_found() -> None:
    class Flips(World):
        def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
            if self.delivered == 150:
                records = self.processes["server-2"].machine.store.arenas[0].records
                delta = np.ones((1, records.words), np.uint32)
                records.add(np.array([len(records) - 1]), None, delta)

    with pytest.raises(Failure, match=r"seed 5: .*inconsistent"):
        Flips(ToyJob(), 5, Faults(count=0)).run()


def simulator(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planaria.simulator", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_runs_seeds_and_says_how_it_went() -> None:
    done = simulator("--seeds", "0-24", "--drop", "0.05", "--servers", "4", "--k", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"25 schedules, \d+ deliveries, .*: 0 failed", done.stdout)


def test_the_command_replays_one_schedule_message_by_message() -> None:
    done = simulator("--kill", "0,3", "--at", "217", "--trace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "*** kill server-1" in done.stdout
    assert "Prepare (1, 2)" in done.stdout
    assert done.stdout.endswith("all promises were kept\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "9-2"], "--seeds"),
        (["--kill", "9", "--at", "3"], "--kill"),
        (["--kill", "1"], "belong together"),
        (["--trace"], "give --seed"),
        (["--workers", "0"], "--workers must be 1 or more"),
        (["--servers", "2", "--parity", "2", "--seed", "1"], "servers"),
    ],
)
def test_bad_arguments_get_a_sentence_and_exit_code_2(arguments: list[str], says: str) -> None:
    done = simulator(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
