"""The bandwidth model: bytes as the messages and groups have them, and what follows from them."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from planaria.cli import app
from planaria.errors import ConfigError
from planaria.layout import Layout
from planaria.planning.bandwidth import (
    MESSAGE_BYTES,
    WAYS,
    Cluster,
    Link,
    StepBytes,
    Table,
    busy_share,
    bytes_of_rows,
    bytes_of_tables,
    distinct_rows,
    link_of,
    lost_bytes,
    rebuild_bytes,
    rebuild_time,
    step_time,
)
from planaria.server.decoding import find_mates
from planaria.wire.codec import encode
from planaria.wire.messages import Answer, Delta, Lookup, Push, View

LINK = Link(10e9)
SIX, TWELVE = Cluster(6, 2, 4, 1), Cluster(12, 2, 4, 1)
SHAPES = [(6, 4, 1), (6, 4, 2), (12, 4, 1), (16, 4, 2), (48, 4, 1), (60, 8, 2), (7, 1, 1)]


# ---------------------------------------------------------------- a step


def test_a_step_has_the_bytes_of_its_messages() -> None:
    rows, dim, words, view = 1000, 16, 32, View(1, 1)
    index, weights = np.arange(rows), np.zeros((rows, dim), np.float32)
    records = np.zeros((rows, words), np.uint32)
    sent = bytes_of_rows(rows, rows, dim, 4 * words)
    messages = {
        "lookups": Lookup(view=view, rank=0, step=1000, part=0, indices=[index]),
        "pushes": Push(view=view, rank=0, step=1000, indices=[index], gradients=[weights], lrs=[1]),
        "answers": Answer(
            view=view, place=1, step=1000, part=0, protected=999, whole=True, weights=[weights]
        ),
        "deltas": Delta(view=view, place=1, step=1000, indices=[index], deltas=[records]),
    }
    for name, message in messages.items():
        assert getattr(sent, name) == message.array_bytes()
        framed = len(encode(bytes(16), "server-12", "tcp://10.0.0.12:40000", message)[1])
        assert MESSAGE_BYTES / 2 < framed + 32 < MESSAGE_BYTES * 1.5  # and the sizes


def test_rows_that_a_step_names_are_those_that_draws_name() -> None:
    drawn = np.random.default_rng(1).integers(0, 5000, 2048)
    assert distinct_rows(5000, 2048) == pytest.approx(len(np.unique(drawn)), rel=0.02)
    assert distinct_rows(5000, 2048) != pytest.approx(2048, rel=0.1)  # control
    assert distinct_rows(1, 2048) >= 1
    assert distinct_rows(10**12, 2048) == pytest.approx(2048)
    sent = bytes_of_tables([Table(5000, 16, 32), Table(5000, 8, 8)], batch=2048, trainers=2)
    assert sent.answers == pytest.approx(distinct_rows(5000, 2048) * (16 + 8) * 4)
    assert sent.deltas == pytest.approx(distinct_rows(5000, 4096) * (32 * 4 + 8 + 8 * 4 + 8))


def test_more_servers_help_a_step_until_a_trainers_link_is_what_it_waits_for() -> None:
    sent = StepBytes(lookups=1e6, pushes=9e6, answers=8e6, deltas=17e6)
    few, enough, many = (step_time(sent, Cluster(n, 8, 2, 1), LINK) for n in (4, 8, 16))
    assert few.bounds[0] == "server in"
    assert many.bounds[0] == "trainer out"
    assert few.push > 1.9 * enough.push
    assert many.push == pytest.approx(enough.push, rel=0.01)
    assert many.protect < enough.protect


def test_protection_takes_time_only_beyond_what_trainers_compute() -> None:
    sent = StepBytes(lookups=1e6, pushes=9e6, answers=8e6, deltas=60e6)
    plain, parity = (step_time(sent, Cluster(6, 2, 4, r), LINK, compute_s=0.1) for r in (0, 1))
    assert parity.seconds == pytest.approx(plain.seconds)
    plain, parity = (step_time(sent, Cluster(6, 2, 4, r), LINK) for r in (0, 1))
    assert parity.seconds == pytest.approx(plain.seconds + LINK.seconds(10e6), rel=1e-3)


def test_a_step_takes_at_least_what_one_link_does_and_at_most_all_one_after_the_other() -> None:
    sent = StepBytes(lookups=1e6, pushes=9e6, answers=8e6, deltas=17e6)
    found = step_time(sent, SIX, LINK, compute_s=0.01)
    assert max(found.push, found.answers) + 0.01 < found.least < found.seconds
    far = step_time(sent, SIX, LINK._replace(latency_s=0.1), compute_s=0.01)
    assert far.seconds == pytest.approx(found.seconds + 0.3)  # push, answer, vote


def test_keepers_are_sent_copies_where_trainers_are_too_few() -> None:
    sent = StepBytes(lookups=1, pushes=1, answers=1, deltas=1, gradient=1e6, state=50e6)
    alone, two = (step_time(sent, Cluster(6, trainers, 4, 1), LINK) for trainers in (1, 2))
    assert alone.protect >= LINK.seconds(50e6)
    assert two.protect < LINK.seconds(1e5)
    assert two.push >= LINK.seconds(0.5e6)  # the dense sum, which one alone does not need
    assert alone.push < LINK.seconds(1e5)


# ---------------------------------------------------------------- a rebuild


@pytest.mark.parametrize("scatter", [None, 20])
@pytest.mark.parametrize(("servers", "k", "r"), SHAPES)
def test_mates_are_as_many_as_the_groups_have(
    servers: int, k: int, r: int, scatter: int | None
) -> None:
    layout = Layout.fresh(servers, r, k, scatter=scatter)
    assert Cluster(servers, 1, k, r, scatter).mates == len(layout.mates(0))


@pytest.mark.parametrize(("servers", "k", "r"), SHAPES)
def test_a_rebuild_moves_what_the_true_groups_make_it_move(servers: int, k: int, r: int) -> None:
    """Record by record: what comes in at the replacement, and goes out of each mate."""
    layout = Layout.fresh(servers, r, k)
    arena = layout.arena(4 * layout.n_groups * k)  # four slots, all of them used
    lost = arena.records(0)
    assert lost == pytest.approx(lost_bytes(arena.rows, Cluster(servers, 1, k, r)))
    asked = Counter(find_mates(arena, 0, np.arange(lost)).places.ravel().tolist())
    expected = rebuild_bytes("replacement", lost, Cluster(servers, 1, k, r))
    assert asked.total() == expected["replacement in"]
    assert max(asked.values()) < 2 * expected["survivor out"]  # groups are not quite even
    assert np.mean(list(asked.values())) == pytest.approx(expected["survivor out"], rel=0.35)


def test_twelve_servers_rebuild_no_faster_than_six_unless_survivors_share_it() -> None:
    """With as many bytes lost: a replacement that decodes by itself takes in k times those, and
    its link is no faster where there are more of the others.
    """
    ratios = {
        way: rebuild_time(way, 1e10, TWELVE, LINK).seconds
        / rebuild_time(way, 1e10, SIX, LINK).seconds
        for way in WAYS
    }
    assert ratios == pytest.approx({"replacement": 1.0, "survivors": 5 / 11, "partial sums": 1.0})
    whole, spread, sums = (rebuild_time(way, 1e10, SIX, LINK) for way in WAYS)
    assert whole.bound == sums.bound == "replacement in"
    assert sums.seconds == pytest.approx(whole.seconds / 4)
    assert spread.seconds == pytest.approx(whole.seconds / 5)


def test_survivors_can_take_over_evenly_what_a_lost_server_was_a_member_of() -> None:
    """Each group needs somebody from outside of it: what the model's `spread` takes for given."""
    for servers in (6, 12):
        layout = Layout.fresh(servers, 1, 4)
        taken: Counter[int] = Counter()
        for group in layout.groups[layout.regions(0).group]:
            outside = [place for place in range(servers) if place not in group]
            taken[min(outside, key=lambda place: taken[place])] += 1
        assert max(taken.values()) <= 1.25 * taken.total() / (servers - 1)
    assert rebuild_time("survivors", 1e10, Cluster(5, 2, 4, 1), LINK).seconds == math.inf


def test_steps_take_their_share_of_the_link_from_a_rebuild() -> None:
    sent = StepBytes(lookups=0, pushes=30e6, answers=0, deltas=0)
    busy = busy_share(sent, SIX, LINK, step_s=0.1)
    assert busy == pytest.approx(LINK.seconds(10e6) / 0.1, rel=0.01)
    calm, shared = (rebuild_time("replacement", 1e10, SIX, LINK, part) for part in (0.0, busy))
    assert shared.seconds == pytest.approx(calm.seconds / (1 - busy))
    assert busy_share(sent, SIX, LINK, step_s=1e-6) < 1  # and it still ends


# ---------------------------------------------------------------- planaria plan


def test_links_are_named_as_people_name_them() -> None:
    assert link_of("10Gbit").bits_per_s == 10e9
    assert link_of("2.5 gbit/s").bits_per_s == 2.5e9
    assert link_of("300Mbit").bits_per_s == 300e6
    for wrong in ("10", "10GB", "fast", "0Gbit", "1.2.3Gbit", "-1Gbit"):
        with pytest.raises(ConfigError, match="--link"):
            link_of(wrong)


def test_a_plan_with_a_link_says_what_a_step_and_a_rebuild_take_on_it() -> None:
    plan = ["plan", "--servers", "12", "--k", "4", "--runs", "5"]
    shown = CliRunner().invoke(app, [*plan, "--link", "10Gbit"]).output
    assert "links of 10.0 Gbit/s" in shown
    (line,) = (
        line for line in shown.splitlines() if line.startswith("erasure r=1") and "out" in line
    )
    cluster = Cluster(12, 8, 4, 1)
    lost = lost_bytes(1e12, cluster)
    for way in WAYS:
        assert f"{rebuild_time(way, lost, cluster, LINK).seconds:.3g}" in line.split()
    assert "Gbit/s" not in CliRunner().invoke(app, plan).output
    both = CliRunner().invoke(app, [*plan, "--link", "10Gbit", "--network-gb-per-s", "1"])
    assert both.exit_code == 2
    made = json.loads(CliRunner().invoke(app, [*plan, "--link", "1Gbit", "--json", "-"]).stdout)
    slow = next(row for row in made["network"] if row["name"] == "erasure r=1")
    assert slow["rebuild"]["replacement"]["bound"] == "replacement in"
    hours = next(row for row in made["estimates"] if row["name"] == "erasure r=1")["behaviour"]
    assert hours["rebuild"] * 3600 == pytest.approx(slow["rebuild"]["replacement"]["seconds"])
