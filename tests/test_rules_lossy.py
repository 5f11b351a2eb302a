"""Lossy lookups: what becomes of a row depends on its bits, its table and the step alone.

As in test_rules.py: break a rule, and the simulator finds a schedule that fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from broken_rules import Control, assert_found, broken

from planaria.dense import DenseCopies
from planaria.errors import ArgumentError, ConfigError, NotFiniteError
from planaria.kernels import lossy
from planaria.kernels.types import Bytes, Floats, Index
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server.job import ServerJob
from planaria.server.machine import ServerMachine
from planaria.simulator import World
from planaria.simulator.campaigns import run_seed, schedule
from planaria.tables import Table, make_arenas
from planaria.trainer.adapting import Adapting
from planaria.trainer.bounds import BoundRule, Bounds, split
from planaria.trainer.job import TrainerJob
from planaria.trainer.machine import TrainerMachine
from planaria.wire.coding import Coding, bytes_spared
from planaria.wire.messages import NO_VIEW, Answer, Install, Lookup, Message, View

ON: dict[str, Any] = {"lossy": True, "steps": 8}
STRUCK: dict[str, Any] = {
    **ON,
    "trainers": 2,
    "count": 4,
    "kinds": ("kill trainer", "kill server", "suspect server"),
}
CODERS = ("none", "huffman", "vector-lz", "zstd")


# ---------------------------------------------------------------------------- the simulator


class ByMessage(Coding):
    """The bound of a table follows what else is in a message, as the paper's does."""

    def packed(
        self, layout: Layout, place: int, lookup: Lookup, indices: Any, weights: list[Floats]
    ) -> tuple[list[Floats], list[Bytes]]:
        if lookup.bounds:
            share = np.float32(1 + sum(map(len, indices)))
            lookup = msgspec.structs.replace(lookup, bounds=[lookup.bounds[0] / share])
        return super().packed(layout, place, lookup, indices, weights)


class ServerByMessage(ServerMachine):
    def __init__(self, member: str, job: ServerJob, **named: Any) -> None:
        own = job.coding
        coding = ByMessage(own.arenas, own.names, own.encoders)
        super().__init__(member, replace(job, coding=coding), **named)


class Forgetful(Adapting):
    """A replacement knows no bounds."""

    def start(self, step: int, state: Bytes) -> Bytes:
        return super().start(step, split(state)[0])


class TrainerForgets(TrainerMachine):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.blank:
            self.adapting = Forgetful(self.job)


CONTROLS: list[Control] = [
    ("not by what else is in a message", broken(ServerByMessage), 0, ON),
    ("bounds are part of the dense state", broken(TrainerForgets), 0, STRUCK),
]


@pytest.mark.parametrize(
    ("_rule", "world", "seed", "campaign"), CONTROLS, ids=[c[0] for c in CONTROLS]
)
def test_a_broken_rule_of_lossy_lookups_is_found(
    _rule: str, world: type[World], seed: int, campaign: dict[str, Any]
) -> None:
    assert_found(world, seed, campaign)


MOVING: dict[str, Any] = {**ON, "resizes": True}
ELASTIC: dict[str, Any] = {**ON, "elastic": True, "early_answers": True}


@pytest.mark.parametrize(
    "campaign", [ON, STRUCK, MOVING, ELASTIC], ids=["drawn", "struck", "moving", "elastic"]
)
def test_faults_change_no_bit_of_a_lossy_job(campaign: dict[str, Any]) -> None:
    outcomes = [run_seed(seed, **campaign) for seed in range(12)]
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []


def test_campaigns_are_lossy_in_a_quarter_of_their_schedules() -> None:
    chosen = [schedule(seed).job.lossy for seed in range(200)]
    assert 25 < sum(chosen) < 75


# ---------------------------------------------------------------------------- coding

TABLES = [
    Table("few", 3, 4),
    Table("wide", 50, 8),
    Table("many", 200, 4),
    Table("exact", 40, 4),
    Table("half", 40, 4),
]
ARENAS = make_arenas(TABLES, Optimizer("sgd", lr=0.1))
LAYOUT = Layout.fresh(3, 1, 2)
NAMES = [table.name for table in TABLES]


def coding_of(encoder: str) -> Coding:
    return Coding(ARENAS, NAMES, [encoder, encoder, encoder, "exact", "fp16"])


def drawn_rows(rng: np.random.Generator, place: int, share: float) -> list[Index]:
    """Some record numbers of that place's data, per arena."""
    found = []
    for arena in ARENAS:
        of = LAYOUT.arena(arena.rows)
        places, index = of.locate(np.flatnonzero(rng.random(arena.rows) < share))
        found.append(index[places == place])
    return found


def weights_of(rng: np.random.Generator, kind: str, rows: int, dim: int) -> Floats:
    if kind == "constant":
        return np.full((rows, dim), 0.25, np.float32)
    scale = {"normal": 1.0, "denormal": 1e-42, "large": 1e30}[kind]
    return (rng.normal(size=(rows, dim)) * scale).astype(np.float32)


def lookup_of(rows: list[Index], bounds: Floats | None, *, exact: bool = False) -> Lookup:
    carried = [] if bounds is None else [bounds]
    return Lookup(view=NO_VIEW, rank=0, step=1, part=0, indices=rows, exact=exact, bounds=carried)


def answer_of(weights: list[Floats], frames: list[Bytes], view: View = NO_VIEW) -> Answer:
    return Answer(
        view=view,
        place=0,
        step=1,
        part=0,
        protected=0,
        whole=True,
        weights=weights,
        frames=frames,
    )


@pytest.mark.parametrize("kind", ["normal", "denormal", "large", "constant"])
@pytest.mark.parametrize("encoder", CODERS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.7])
def test_no_weight_of_any_table_is_further_off_than_its_bound(
    encoder: str, kind: str, share: float
) -> None:
    rng = np.random.default_rng(7)
    coding, rule = coding_of(encoder), BoundRule()
    for round_ in range(5):
        rows = drawn_rows(rng, 0, share)
        weights = [
            weights_of(rng, kind, len(own), arena.dim)
            for own, arena in zip(rows, ARENAS, strict=True)
        ]
        bounds = np.zeros(len(TABLES), np.float32)
        for number, arena in enumerate(ARENAS):
            tables = coding.tables(LAYOUT, 0, number, rows[number])
            for local, table in enumerate(arena.table_ids.tolist()):
                own = weights[number][tables == local]
                bounds[table] = rule.bound_of(own) * (1 + round_) if len(own) else 0
        lookup = lookup_of(rows, bounds)
        coding.check(lookup)
        plain, frames = coding.packed(LAYOUT, 0, lookup, rows, weights)
        found = coding.unpacked(answer_of(plain, frames), LAYOUT, rows).weights
        for number, arena in enumerate(ARENAS):
            of = arena.table_ids[coding.tables(LAYOUT, 0, number, rows[number])]
            off = np.abs(found[number].astype(np.float64) - weights[number])
            coded = coding.adapts[of]
            assert (off[coded] <= bounds[of][coded, None]).all()
            assert (off[of == NAMES.index("exact")] == 0).all()


def test_what_is_exact_and_what_is_spared() -> None:
    rng = np.random.default_rng(1)
    coding, rows = coding_of("none"), drawn_rows(rng, 0, 0.9)
    weights = [
        weights_of(rng, "normal", len(own), arena.dim)
        for own, arena in zip(rows, ARENAS, strict=True)
    ]
    bounds = np.full(len(TABLES), 0.01, np.float32)
    plain, frames = coding.packed(LAYOUT, 0, lookup_of(rows, bounds), rows, weights)
    raw = sum(own.nbytes for own in weights)
    assert bytes_spared(answer_of(plain, frames)) == raw - sum(one.nbytes for one in frames) > 0
    for lookup in (lookup_of(rows, None, exact=True), lookup_of(rows, bounds, exact=True)):
        assert coding.packed(LAYOUT, 0, lookup, rows, weights) == (weights, [])
    assert Coding().packed(LAYOUT, 0, lookup_of(rows, None), rows, weights) == (weights, [])


@pytest.mark.parametrize("bound", [0.0, 0.1])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_nan_is_refused_with_its_tables_name(wrong: float, bound: float) -> None:
    coding, rows = coding_of("huffman"), drawn_rows(np.random.default_rng(2), 0, 0.5)
    weights = [
        np.ones((len(own), arena.dim), np.float32) for own, arena in zip(rows, ARENAS, strict=True)
    ]
    tables = coding.tables(LAYOUT, 0, 0, rows[0])
    weights[0][np.flatnonzero(tables == 1)[0], 2] = wrong
    bounds = np.full(len(TABLES), bound, np.float32)
    with pytest.raises(NotFiniteError, match=r"table 'many' has a NaN or an infinity"):
        coding.packed(LAYOUT, 0, lookup_of(rows, bounds), rows, weights)


@pytest.mark.parametrize(
    "bounds",
    [
        None,
        np.zeros(len(TABLES) + 1, np.float32),
        np.full(len(TABLES), np.nan, np.float32),
        np.full(len(TABLES), -1, np.float32),
        np.full(len(TABLES), 1e38, np.float32),
    ],
    ids=["none", "too many", "nan", "negative", "too large"],
)
def test_a_lookup_with_other_bounds_is_refused(bounds: Floats | None) -> None:
    with pytest.raises(ArgumentError, match="bound"):
        coding_of("none").check(lookup_of([], bounds))


def test_an_encoder_that_is_not_installed_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "available", lambda: ["exact", "fp16", "none"])
    with pytest.raises(ConfigError, match=r"'few' are to be sent with zstd, which is not install"):
        coding_of("zstd")


# ---------------------------------------------------------------------------- bounds


def test_bounds_follow_the_range_and_how_many_rows_are_left() -> None:
    rng, rule = np.random.default_rng(3), BoundRule()
    apart = rng.uniform(-1, 1, (500, 16)).astype(np.float32)
    span = float(apart.max() - apart.min())
    assert rule.bound_of(apart) == pytest.approx(0.05 * span)
    alike = apart * np.float32(0.001)
    alike[0, 0], alike[1, 0] = -1, 1
    assert rule.bound_of(alike) == pytest.approx(0.01 * 2)
    some = np.concatenate([apart[:350], np.repeat(apart[350:351], 150, axis=0)])
    assert rule.bound_of(some) == pytest.approx(0.03 * float(some.max() - some.min()))
    assert rule.bound_of(np.full((9, 4), 3, np.float32)) == 0.0
    assert rule.bound_of(np.array([[np.nan, 1]], np.float32)) == 0.0


def test_bounds_narrow_in_ten_steps() -> None:
    rule = BoundRule(decay_steps=1000)
    assert [rule.factor(step) for step in (0, 99, 100, 950, 1000, 10**9)] == pytest.approx(
        [2.0, 2.0, 1.9, 1.1, 1.0, 1.0]
    )
    assert BoundRule(decay_steps=0).factor(1) == 1.0


def test_ranges_are_measured_often_at_first_and_hold_from_the_second_step_on() -> None:
    rule, bounds = BoundRule(sample_steps=16), Bounds.unknown(1, 0)
    measured = []
    for step in range(1, 70):
        due = step == bounds.due
        if due:
            measured.append(step)
        before = bounds
        bounds = bounds.after(step, np.full(1, step, np.float32) if due else None, rule)
        assert bounds.next == before.later  # rows of the next step may be on their way
        assert bounds.later == (step if due else before.later)
    assert measured == [1, 2, 3, 5, 9, 17, 33, 49, 65]


def test_bounds_are_found_behind_a_state_and_nowhere_else() -> None:
    own = np.arange(200, dtype=np.uint8)
    bounds = Bounds(np.ones(3, np.float32), np.full(3, 2, np.float32), 5, 9)
    state = np.concatenate([own, bounds.pack()])
    found, trailer = split(state)
    again = Bounds.unpack(trailer)
    assert found.tolist() == own.tolist()
    assert (again.next.tolist(), again.later.tolist()) == ([1, 1, 1], [2, 2, 2])
    assert (again.first, again.due) == (5, 9)
    for wrong in (own, own[:0], state[:-1], np.concatenate([state[:205], state[206:]])):
        assert split(wrong)[0].tolist() == wrong.tolist()
    for at in range(len(own), len(state)):  # a flipped bit anywhere
        flipped = state.copy()
        flipped[at] ^= 1
        assert len(split(flipped)[1]) == 0


# ---------------------------------------------------------------------------- a trainer


def test_a_damaged_answer_is_as_if_it_had_not_come() -> None:
    arenas = make_arenas([Table("t", 64, 4)], Optimizer("sgd", lr=0.1))
    coding, layout = Coding(arenas, ["t"], ["huffman"]), Layout.fresh(1, 0)
    job = TrainerJob(layout, [64], [4], 1.0, coding)
    dense = DenseCopies()
    dense.put(0, np.zeros(4, np.uint8))
    trainer = TrainerMachine("trainer-0", job, dense, fresh_rank=0)
    view = View(1, 1)
    trainer.receive(
        "coordinator",
        Install(view=view, committed=0, servers=["s"], trainers=["trainer-0"], rebuilding=[]),
    )
    rows = np.arange(50, dtype=np.int64)
    trainer.ask(1, 0, {0: [rows]})
    sent: list[Message] = [message for _, message in trainer.take_outbox()]
    (lookup,) = [message for message in sent if isinstance(message, Lookup)]
    assert lookup.bounds[0].tolist() == [0]  # nothing is known so far
    weights = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    wide = msgspec.structs.replace(lookup, bounds=[np.full(1, 0.1, np.float32)])
    plain, (frame,) = coding.packed(layout, 0, wide, [rows], [weights])
    for wrong in (frame[:-1], np.roll(frame, 1), frame[:10], np.zeros(1, np.uint8)):
        trainer.receive("s", answer_of(plain, [wrong], view))
        assert trainer.rows(1, 0) is None
    trainer.receive("s", answer_of([], [frame], view))  # of other arenas
    trainer.receive("s", answer_of(plain, [frame, frame], view))
    assert trainer.rows(1, 0) is None
    assert len(trainer.arrivals.errors) == 6
    assert all("of place 0" in error for error in trainer.arrivals.errors)
    trainer.receive("s", answer_of(plain, [frame], view))
    found = trainer.rows(1, 0)
    assert found is not None
    assert 0 < np.abs(found[0][0] - weights).max() <= 0.1
