"""CPR's rules choose what they say they choose, by brute force on a real store."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from planaria.kernels.types import Index
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server.priorities import Mfu, Priorities, Scar, Ssu, large_tables
from planaria.server.store import Store
from planaria.tables import Table, make_arenas

OPTIMIZER = Optimizer(name="adagrad", lr=0.1)
TABLES = [Table("large", 4000, 4), Table("small", 30, 4), Table("middle", 900, 4)]
RHO = 0.125


def make_store(place: int = 1) -> Store:
    return Store(make_arenas(TABLES, OPTIMIZER), Layout.fresh(3, 0, 1), place, seed=3)


def table_of(store: Store, index: Index) -> Index:
    rows = store.arenas[0].layout.row_at(store.place, index)
    return store.arenas[0].arena.table_row(rows)[0]


def train(store: Store, rule: Priorities, steps: int, seed: int = 0) -> Counter[int]:
    """Zipf updates; returns how often each record was used."""
    draw = np.random.default_rng(seed)
    last = store.arenas[0].data_records
    used: Counter[int] = Counter()
    for step in range(store.step + 1, store.step + 1 + steps):
        index = np.unique(draw.zipf(1.3, 60) % last)  # padding is the last record, if any
        gradients = draw.normal(size=(len(index), 4)).astype(np.float32)
        store.apply(step, [[(index, gradients)]])
        rule.note(0, index)
        used.update(index.tolist())
    return used


def test_the_largest_tables_are_the_fewest_that_hold_the_share() -> None:
    arenas = make_arenas(TABLES, OPTIMIZER)
    assert large_tables(arenas, 0.99) == {0, 2}
    assert large_tables(arenas, 0.8) == {0}
    assert large_tables(arenas, 1) == {0, 1, 2}
    assert large_tables(arenas, 0) == set()


def test_mfu_takes_the_true_top_and_counts_from_there() -> None:
    store = make_store()
    rule = Mfu(store, RHO, 0.99)
    used = train(store, rule, 60)
    unsaved = Counter(used)
    for _ in range(3):
        large = {row: n for row, n in unsaved.items() if table_of(store, np.array([row]))[0] != 1}
        ranked = sorted(large, key=lambda row: (-large[row], row))[: rule.quota[0]]
        chosen = rule.choose(0)
        assert chosen.tolist() == sorted(ranked)
        rule.saved(0, chosen)
        for row in ranked:
            del unsaved[row]
        assert rule.unsaved == sum(unsaved.values())
        unsaved += train(store, rule, 20, seed=store.step)


def test_scar_takes_the_rows_that_have_moved_farthest_since_they_were_saved() -> None:
    store = make_store()
    rule = Scar(store, 0.02, 0.99)
    arena = store.arenas[0]
    saved = arena.records.copy()[: arena.data_records, :4]
    for _ in range(3):
        train(store, rule, 30, seed=store.step)
        now = arena.records.copy()[: arena.data_records, :4]
        moved = (now.view(np.float32) - saved.view(np.float32)).astype(np.float64)
        distance = (moved**2).sum(axis=1)
        distance[rule.others(0)] = 0
        chosen = rule.choose(0)
        assert len(chosen) == rule.quota[0]
        rest = np.delete(distance, chosen)
        assert distance[chosen].min() >= rest.max() * (1 - 1e-5)
        rule.saved(0, chosen)
        saved[chosen] = now[chosen]


def test_ssu_overlaps_mfu_as_far_as_its_sampling_lets_it() -> None:
    """Every second use enters and a random row leaves: a row of weight w of the uses since the
    list was filled is in it with a chance that grows with w. So what is used most is in both.
    """
    store = make_store()
    mfu, ssu = Mfu(store, RHO, 0.99), Ssu(store, RHO, 0.99)
    draw = np.random.default_rng(5)
    last = store.arenas[0].data_records
    for _ in range(400):
        index = np.unique(draw.zipf(1.3, 60) % last)
        mfu.note(0, index)
        ssu.note(0, index)
    top, sample = mfu.choose(0), ssu.choose(0)
    assert len(sample) <= ssu.quota[0]
    assert not np.isin(sample, ssu.others(0)).any()
    by_chance = len(sample) / np.count_nonzero(ssu.large[0])
    overlap = np.isin(top, sample).mean()
    hottest = top[np.argsort(-mfu.counters[0][top].astype(np.int64), kind="stable")[:20]]
    assert overlap > 3 * by_chance
    assert np.isin(hottest, sample).mean() > 0.9
    ssu.saved(0, sample)
    assert len(ssu.choose(0)) == 0


@pytest.mark.parametrize("rule", [Mfu, Ssu, Scar])
def test_what_was_not_used_is_not_saved_again(rule: type[Priorities]) -> None:
    store = make_store()
    made = rule(store, RHO, 0.99)
    assert made.choose(0).tolist() == []
    assert set(table_of(store, made.others(0)).tolist()) == {1}
    train(store, made, 5)
    chosen = made.choose(0)
    assert len(chosen) > 0
    assert (np.diff(chosen) > 0).all()
    made.saved(0, chosen)
    if rule is not Ssu:  # which forgets what it did not take
        again = made.choose(0)
        assert not np.isin(again, chosen).any()
