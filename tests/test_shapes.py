"""Jobs whose tables have several dims and optimizers: each arena is on its own, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_jobs import Model
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria import Layout, Optimizer, Store, Table
from planaria.checkpoints import DENSE, Facts, PartWriter, publish
from planaria.cluster.resuming import find_start
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.errors import ArgumentError, CheckpointError, ConfigError, StoreError
from planaria.kernels.types import Floats, Index
from planaria.optimizers import NAMES
from planaria.server.machine import ServerMachine
from planaria.server.priorities import RULES
from planaria.simulator.toy import ToyJob
from planaria.tables import Arena, make_arenas
from planaria.wire.messages import Install, Push, View

LAYOUT = Layout.fresh(4, 1, 2)
SGD, ADAM = Optimizer("sgd", lr=0.5), Optimizer("adam", lr=0.1)
MIXED = [
    Table("user", 61, 3),
    Table("item", 40, 5, optimizer=ADAM),
    Table("shop", 17, 3, optimizer=ADAM),
    Table("page", 30, 3),
    Table("city", 23, 5, optimizer=replace(ADAM, group=1)),
]

optimizers = st.builds(
    Optimizer,
    st.sampled_from(NAMES),
    lr=st.floats(0, 1),
    weight_decay=st.sampled_from([0.0, 0.1]),
    initial_accumulator=st.sampled_from([0.0, 0.5]),
)
rates = st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=4)


def gradients(arena: Arena, place: int, key: tuple[int, ...]) -> list[tuple[Index, Floats]]:
    """Of two ranks, for the rows that are on one server; a function of the key and the dim."""
    found = []
    for rank in range(2):
        random = np.random.default_rng((*key, arena.dim, rank))
        rows = random.permutation(arena.rows)[: arena.rows // 2]
        values = random.standard_normal((len(rows), arena.dim)).astype(np.float32)
        places, index = LAYOUT.arena(arena.rows).locate(rows)
        mine = np.flatnonzero(places == place)
        found.append((index[mine], np.ascontiguousarray(values[mine])))
    return found


def trained(arenas: list[Arena], lrs: list[list[float]]) -> list[Store]:
    stores = [Store(arenas, LAYOUT, place, seed=3, keep_steps=1) for place in LAYOUT.places]
    for step, of_step in enumerate(lrs, 1):
        for store in stores:
            parts = [gradients(arena, store.place, (step,)) for arena in arenas]
            changes = store.apply(step, parts, of_step)
            for holder, deltas in store.parity_deltas(changes).items():
                stores[holder].apply_parity(store.place, step, deltas)
    return stores


# --------------------------------------------------------------------------------------- arenas


def test_tables_alike_in_dim_and_optimizer_share_an_arena_in_the_order_of_the_first() -> None:
    arenas = make_arenas(MIXED, SGD)
    assert [(a.dim, a.optimizer) for a in arenas] == [
        (3, SGD), (5, ADAM), (3, ADAM), (5, replace(ADAM, group=1))
    ]  # fmt: skip
    assert [a.table_ids.tolist() for a in arenas] == [[0, 3], [1], [2], [4]]
    assert [a.words for a in arenas] == [3, 16, 10, 16]
    same = make_arenas([replace(table, optimizer=SGD) for table in MIXED], ADAM)
    assert [a.table_ids.tolist() for a in same] == [[0, 2, 3], [1, 4]]


# --------------------------------------------------------------------------------------- stores


@settings(max_examples=25, deadline=None)
@given(optimizers, optimizers, rates)
def test_two_optimizers_in_a_store_are_two_stores_with_one_each(
    first: Optimizer, second: Optimizer, rates: list[tuple[float, float]]
) -> None:
    tables = [Table("user", 61, 3), Table("item", 40, 5), Table("page", 30, 3)]
    both = [replace(t, optimizer=first if t.dim == 3 else second) for t in tables]
    mixed = trained(make_arenas(both, SGD), [[a, b] for a, b in rates])
    alone = [
        trained(make_arenas(tables, first), [[a, a] for a, _ in rates]),
        trained(make_arenas(tables, second), [[b, b] for _, b in rates]),
    ]
    for store in mixed:  # parity, too
        for number in range(2):
            expected = alone[number][store.place].arenas[number].records.copy()
            assert store.arenas[number].records.copy().tobytes() == expected.tobytes()


def test_an_arena_does_not_notice_the_others() -> None:
    arenas, lrs = make_arenas(MIXED, SGD), [0.3, 0.2, 0.1, 0.05]
    together = trained(arenas, [lrs] * 3)
    for number, arena in enumerate(arenas):
        for store in trained([arena], [[lrs[number]]] * 3):
            found = together[store.place].arenas[number].records.copy()
            assert found.tobytes() == store.arenas[0].records.copy().tobytes()


def test_without_learning_rates_a_step_takes_those_of_the_optimizers() -> None:
    arenas = make_arenas(MIXED, SGD)
    one, other = (Store(arenas, LAYOUT, 0, seed=1) for _ in range(2))
    parts = [gradients(arena, 0, (1,)) for arena in arenas]
    one.apply(1, parts)
    other.apply(1, parts, [0.5, 0.1, 0.1, 0.1])
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    "lrs", [[], [0.1], [0.1] * 5, [0.1, 0.1, 0.1, -1], [0.1, float("nan"), 0.1, 0.1]]
)
def test_what_are_no_learning_rates_changes_nothing(lrs: list[float]) -> None:
    arenas = make_arenas(MIXED, SGD)
    store = Store(arenas, LAYOUT, 0, seed=1)
    before = store.digest()
    with pytest.raises((StoreError, ArgumentError), match="learning rate"):
        store.apply(1, [gradients(arena, 0, (1,)) for arena in arenas], lrs)
    assert (store.step, store.digest()) == (0, before)


# -------------------------------------------------------------------------------------- servers


def server_of_two_ranks() -> ServerMachine:
    job = ToyJob(tables=((13, 3), (9, 2, ADAM)), trainers=2)
    server = ServerMachine("server-1", job.server_job(1.0), fresh_place=0)
    servers = [f"server-{n}" for n in range(1, 5)]
    install = Install(
        view=View(1, 1),
        committed=0,
        servers=servers,
        trainers=["trainer-1", "trainer-2"],
        rebuilding=[],
    )
    server.receive("coordinator", install)
    return server


def push(rank: int, lrs: list[float]) -> Push:
    empty: Any = [np.zeros((0, dim), np.float32) for dim in (3, 2)]
    indices: Any = [np.zeros(0, np.int64)] * 2
    return Push(view=View(1, 1), rank=rank, step=1, indices=indices, gradients=empty, lrs=lrs)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_that_disagree_about_a_learning_rate_are_named_and_train_nothing(
    order: tuple[int, int],
) -> None:
    server = server_of_two_ranks()
    lrs = {0: [0.1, 0.2], 1: [0.1, 0.25]}
    for rank in order:
        server.receive(f"trainer-{rank + 1}", push(rank, lrs[rank]))
    late, early = order[1], order[0]
    [said] = server.errors
    assert f"rank {late} has the learning rates {lrs[late]} in step 1" in said
    assert f"rank {early} has {lrs[early]}" in said
    assert server.step == 0
    server.receive(f"trainer-{late + 1}", push(late, lrs[early]))  # a control
    assert server.step == 1


@pytest.mark.parametrize("lrs", [[], [0.1], [0.1, float("inf")], [0.1, -0.1]])
def test_a_push_with_other_than_a_learning_rate_per_arena_is_refused(lrs: list[float]) -> None:
    server = server_of_two_ranks()
    for rank in range(2):
        server.receive(f"trainer-{rank + 1}", push(rank, lrs))
    assert len(server.errors) == 2
    assert all("learning rate" in error for error in server.errors)
    assert server.step == 0


@pytest.mark.parametrize("variant", RULES)
def test_priorities_choose_in_every_arena_what_it_has_changed(variant: str) -> None:
    # SCAR chose nothing under sgd, whose records have no state: its copy was the arena itself.
    arenas = make_arenas(MIXED, SGD)
    store = Store(arenas, LAYOUT, 0, seed=3)
    rule = RULES[variant](store, 0.5, 1.0)
    parts = [gradients(arena, 0, (1,)) for arena in arenas]
    store.apply(1, parts)
    for number, ranks in enumerate(parts):
        touched = np.unique(np.concatenate([index for index, _ in ranks]))
        rule.note(number, touched)
        chosen = rule.choose(number)
        assert len(chosen)
        assert np.isin(chosen, touched).all()


# ---------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("wanted", [(4, 1, 2), (6, 2, 3), (1, 0, 1)])
@pytest.mark.parametrize("parity", [False, True])
def test_a_checkpoint_of_mixed_tables_fills_any_layout(
    tmp_path: Path, wanted: tuple[int, int, int], parity: bool
) -> None:
    model = Model(1, MIXED, SGD)
    checkpoint = model.save(tmp_path, 1, LAYOUT, parity=parity)
    assert checkpoint.manifest.tables == MIXED
    model.check_restored(checkpoint, Layout.fresh(*wanted))
    changed = model.train()
    later = model.save(tmp_path, 2, LAYOUT, base=[1], changed=changed)
    model.check_restored(later, Layout.fresh(*wanted))


def test_a_checkpoint_is_not_filled_into_tables_with_other_optimizers(tmp_path: Path) -> None:
    checkpoint = Model(1, MIXED, SGD).save(tmp_path, 1, LAYOUT)
    others = [replace(table, optimizer=Optimizer("momentum")) for table in MIXED]
    with pytest.raises(CheckpointError, match=r"item 40 x 5 \(adam\)"):
        Model(1, others, SGD).check_restored(checkpoint, LAYOUT)


# ----------------------------------------------------------------------------------------- jobs


def job(folder: Path, *lrs: float, dim: int = 5) -> Config:
    """Two tables of the same dim with learning rates of their own, and one of another dim."""
    tables: list[dict[str, Any]] = [
        {"name": f"t{n}", "rows": 20, "dim": 3, "optimizer": {"name": "adam", "lr": lr}}
        for n, lr in enumerate(lrs)
    ]
    tables.append({"name": "last", "rows": 9, "dim": dim})
    return Config.from_dict({"tables": tables, "checkpoint": {"path": str(folder)}})


def test_learning_rates_may_change_on_the_way_and_tables_may_not(tmp_path: Path) -> None:
    before = job(tmp_path, 0.1, 0.2)
    model = Model(0, before.tables, before.optimizer_rule)
    parts = [model.save_part(tmp_path, 7, before.layout, p) for p in before.layout.places]
    with PartWriter(tmp_path, 7, DENSE) as dense:
        dense.add_bytes("dense", b"any")
        parts.append(dense.finish())
    config = before.to_dict()
    publish(
        tmp_path,
        7,
        parts,
        Facts(before.tables, before.optimizer_rule, before.layout, config=config),
    )
    assert find_start(before, resume=True).step == 7
    notes = find_start(job(tmp_path, 0.1, 0.3), resume=True).notes
    assert [note for note in notes if "from here on" in note] == [
        "tables.1.optimizer.lr was 0.2 and is 0.3 from here on: the digest will be another"
    ]
    for other in (job(tmp_path, 0.1, 0.1), job(tmp_path, 0.1, 0.2, dim=4)):  # one arena; a dim
        with pytest.raises(ConfigError, match=r"^tables: expected the tables .* \(20 x 3 \(adam\)"):
            find_start(other, resume=True)


def test_the_built_in_model_says_that_it_takes_tables_of_one_shape(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tables: the built-in model .* these need 3; make"):
        JobRun(job(tmp_path, 0.1, 0.2))
