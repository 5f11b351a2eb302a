"""Many schedules: which job and which faults a seed stands for, and runs of many of them.

Two families. Seeded schedules are drawn at random. The kills at every message boundary are
exhaustive: one undisturbed schedule is run, and before each of its deliveries it is copied once per
set of servers to kill.
"""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

from planaria.optimizers import Optimizer
from planaria.server.pace import PRIORITIES
from planaria.simulator.checks import Failure
from planaria.simulator.coordinators import MOST_TRAINERS
from planaria.simulator.faults import WHILE_RESIZING, Faults
from planaria.simulator.network import NETWORKS
from planaria.simulator.toy import ToyJob, ToyTable
from planaria.simulator.world import World
from planaria.wire.messages import (
    Delta,
    Install,
    Lookup,
    MateReply,
    MateRequest,
    Member,
    Message,
    Prepare,
    Push,
    RangeRequest,
    Shift,
    Stop,
    View,
)

SHAPES = (  # servers, k, r, trainers
    (4, 2, 1, 2),
    (5, 2, 2, 2),
    (6, 4, 2, 1),
    (3, 1, 1, 1),
    (4, 1, 3, 2),
    (4, 2, 1, 3),
    (5, 2, 2, 3),
    (4, 1, 3, 1),
)
OPTIMIZERS = ("sgd", "adagrad", "adam")
DROPS = (0.0, 0.0, 0.0, 0.02, 0.1)
MOMENTUM = Optimizer("momentum", lr=0.03)  # none of OPTIMIZERS, so it always makes an arena
TABLES: tuple[tuple[ToyTable, ...], ...] = (
    ((24, 2),),
    ((24, 2),),
    ((13, 3), (9, 2, MOMENTUM), (7, 3)),  # two arenas, two rules, two learning rates
)
STARTS = (0, 0, 0, 3)  # the step of the checkpoint that everybody starts from
CHUNK_SEEDS = 20


@dataclass(frozen=True)
class Schedule:
    """Everything that a run depends on, besides the code."""

    seed: int
    job: ToyJob
    faults: Faults
    spares: int
    network: str

    def world(self, kind: type[World] = World) -> World:
        return kind(self.job, self.seed, self.faults, spares=self.spares, network=self.network)


def schedule(seed: int, **overrides: Any) -> Schedule:
    """What a seed stands for. Overrides are fields of ToyJob and Faults, `spares`, `network`.

    steps: so many are run, after the one that the job is restored at. resizes: servers come and go.
    survivors: these rebuild what was lost. elastic: the number of trainers changes meanwhile.
    """
    elastic = overrides.pop("elastic", False)
    draw = random.Random(f"schedule {seed}")
    servers, k, r, trainers = draw.choice(SHAPES)
    job = ToyJob(
        servers,
        k,
        r,
        trainers,
        optimizer=Optimizer(draw.choice(OPTIMIZERS), lr=0.1),
        keep_steps=draw.choice((1, 2)),
        rebuild_chunk=1 if seed % 2 else 5,
        rebuild_priority=PRIORITIES[seed % 3],
        peeks=seed % 4 in (1, 2),
    )
    drop = draw.choice(DROPS)
    faults = Faults(draw.randint(1, 5), drop=drop, duplicate=drop)
    drawn = Schedule(seed, job, faults, draw.choice((0, 1, 2)), draw.choice(list(NETWORKS)))
    started, tables = draw.choice(STARTS), draw.choice(TABLES)
    early = draw.choice((False, True))
    lossy = draw.choice((False, False, False, True))
    if overrides.pop("resizes", False):
        overrides = {**_resizes(seed, job), **overrides}
    if overrides.pop("survivors", False):
        overrides = {**_by_survivors(job), **overrides}
    started = overrides.pop("restored_at", started)
    drawn = _overridden(
        drawn, {"tables": tables, "early_answers": early, "lossy": lossy, **overrides}
    )
    steps = started + drawn.job.steps
    job = replace(drawn.job, restored_at=started, steps=steps)
    return replace(drawn, job=replace(job, shifts=_shifts(seed, job)) if elastic else job)


def _shifts(seed: int, job: ToyJob) -> tuple[Shift, ...]:
    """One or two, after any of the steps."""
    draw = random.Random(f"shifts {seed}")
    shifts, trainers = [], job.trainers
    steps = range(job.restored_at + 1, job.steps + 1)
    for after in sorted(draw.sample(steps, draw.choice((1, 2)))):
        others = [n for n in range(1, MOST_TRAINERS + 1) if n != trainers]
        trainers = draw.choice(others)
        shifts.append(Shift(after, trainers))
    return tuple(shifts)


def _resizes(seed: int, job: ToyJob) -> dict[str, Any]:
    """Twice, up or down."""
    draw = random.Random(f"resizes {seed}")
    sizes = range(job.k + job.r, job.servers + 4)
    scales = tuple(draw.sample([size for size in sizes if size != job.servers], 2))
    return {"scales": scales, "blocks": 3, "steps": 8, "kinds": WHILE_RESIZING}


def _by_survivors(job: ToyJob) -> dict[str, Any]:
    """With servers enough to take over what one has lost, and time to grow back."""
    more = {"servers": max(job.servers, job.k + job.r + 2), "blocks": 3, "steps": 8}
    return {"by_survivors": True, "kinds": WHILE_RESIZING, **more}


def _overridden(drawn: Schedule, overrides: dict[str, Any]) -> Schedule:
    fields = dict(overrides)

    def those_of(record: Any) -> dict[str, Any]:
        return {name: fields.pop(name) for name in list(fields) if hasattr(record, name)}

    job = replace(drawn.job, **those_of(drawn.job))
    faults = replace(drawn.faults, **those_of(drawn.faults))
    return replace(drawn, job=job, faults=faults, **fields)


@dataclass(frozen=True)
class Outcome:
    """How one schedule ended."""

    seed: int
    failed: str | None  # which promise was broken, with the story
    given_up: str | None  # what the coordinator named as lost, beyond the budget
    delivered: int
    redundant_after_s: float
    resized: int = 0  # how often the number of servers has changed
    taken_over: int = 0  # and how often because survivors took over what was lost


def run_seed(seed: int, kind: type[World] = World, **overrides: Any) -> Outcome:
    world = schedule(seed, **overrides).world(kind)
    failed = None
    try:
        world.run()
    except Failure as failure:
        failed = str(failure)
    after_s = world.oracle.redundant_after_s
    taken_over = sum(resize.lost > 0 for resize in world.disk.install.resizes)
    return Outcome(seed, failed, world.failure, world.delivered, after_s, world.resized, taken_over)


def _run_chunk(seeds: Sequence[int], overrides: dict[str, Any]) -> list[Outcome]:
    return [run_seed(seed, **overrides) for seed in seeds]


def run_seeds(seeds: Sequence[int], workers: int = 1, **overrides: Any) -> Iterator[Outcome]:
    """Runs schedules, in order of their seeds."""
    chunks = [seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS)]
    for outcomes in _spread(_run_chunk, [(chunk, overrides) for chunk in chunks], workers):
        yield from outcomes


Result = TypeVar("Result")


def _spread(
    work: Callable[..., Result], calls: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[Result]:
    """The results of the calls, in order; by several processes if asked for."""
    if workers == 1:
        yield from (work(*call) for call in calls)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in [pool.submit(work, *call) for call in calls]:
            yield future.result()


# ---------------------------------------------------------------- messages of older views

NO_ECHO = (Prepare, Install, Stop, Push, Lookup, MateRequest, RangeRequest, MateReply)
SLOW_S = 0.2


class OldViews(World):
    """Whatever a member was told in one view it is told again when it enters the next.

    Replacements are hard to reach: what comes to them is slow, and the first delta of each owner
    is lost. What was believed of their predecessors is then wrong of them for long enough to
    matter.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.told: dict[Member, list[tuple[Member, Message]]] = {}
        self.lost: set[tuple[Member, Member, View]] = set()
        super().__init__(*arguments, **named)

    def send(self, sender: Member, to: Member, message: Message) -> None:
        process = self.processes.get(to)
        replacement = process and process.role == "server" and to not in self.first_members[0]
        if not replacement or isinstance(message, Prepare | Install | Stop):
            super().send(sender, to, message)
        elif isinstance(message, Delta) and (sender, to, message.view) not in self.lost:
            self.lost.add((sender, to, message.view))
        else:
            self.after(self.random.expovariate(1 / SLOW_S), self._arrive, sender, to, message)

    def hand_over(self, sender: Member, to: Member, message: Message) -> None:
        process = self.processes.get(to)
        if process is None or process.role == "coordinator":
            super().hand_over(sender, to, message)
            return
        before = process.machine.view
        super().hand_over(sender, to, message)
        if process.machine.view > before:
            for old_sender, old in self.told.pop(to, ()):
                self.after(0.001, self.deliver, old_sender, to, old)
        if not isinstance(message, NO_ECHO):
            self.told.setdefault(to, []).append((sender, message))


# ---------------------------------------------------------------- kills at every message boundary

EXHAUSTIVE = ToyJob(servers=6, k=4, r=2, trainers=1, steps=3, keep_steps=1)


class KillsAt(World):
    """An undisturbed schedule, in which some servers are killed before one delivery."""

    def __init__(self, job: ToyJob, boundary: int, places: Sequence[int]) -> None:
        self.boundary = boundary
        self.places = places
        super().__init__(job, 0, Faults(count=0), spares=2, network="even")

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if self.delivered == self.boundary:
            self.strike(self.places)

    def strike(self, places: Sequence[int]) -> None:
        for place in places:
            self.kill(self.disk.install.servers[place])


class Branching(KillsAt):
    """Goes on undisturbed itself, and at each boundary sends a copy down every other path."""

    def __init__(self, job: ToyJob, part: int, parts: int) -> None:
        super().__init__(job, 0, ())
        self.part, self.parts = part, parts
        self.is_copy = False
        self.boundaries = 0
        self.failures: list[tuple[int, tuple[int, ...], str]] = []
        self.subsets = [
            places
            for count in range(1, job.r + 1)
            for places in combinations(range(job.servers), count)
        ]

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if self.is_copy or self.delivered % self.parts != self.part:
            return
        self.boundaries += 1
        # Protocol 5 keeps what is read-only read-only.
        here = pickle.dumps((self, (sender, to, message)), protocol=5)
        for places in self.subsets:
            copy, delivery = pickle.loads(here)
            copy.is_copy = True
            copy.strike(places)
            copy.now_first(copy.hand_over, *delivery)
            self.follow(copy, places)

    def follow(self, copy: World, places: tuple[int, ...]) -> None:
        try:
            copy.run()
        except Failure as failure:
            self.failures.append((self.delivered, places, str(failure)))


def _run_part(job: ToyJob, part: int, parts: int) -> tuple[int, list[str]]:
    """Every `parts`-th boundary: how many schedules that were, and those that failed."""
    world = Branching(job, part, parts)
    world.run()
    return world.boundaries * len(world.subsets), [
        f"--kill {','.join(map(str, places))} --at {boundary}: {said}"
        for boundary, places, said in world.failures
    ]


def run_boundaries(
    job: ToyJob = EXHAUSTIVE, workers: int = 1, parts: int = 40, every: int = 1
) -> Iterator[tuple[int, list[str]]]:
    """Kills every set of up to r servers before every delivery; see `_run_part` for the results.

    every: 2 takes every second delivery only, and so on; `parts` is a multiple of it.
    """
    yield from _spread(_run_part, [(job, part, parts) for part in range(0, parts, every)], workers)
