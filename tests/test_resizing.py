"""Servers come and go while training: no bit changes, and nothing is unprotected meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from planaria.coordinator import moving
from planaria.coordinator.machine import CoordinatorMachine
from planaria.coordinator.moving import Moving
from planaria.errors import LayoutError
from planaria.layout import Layout
from planaria.layout.arithmetic import NOBODY
from planaria.layout.resizing import Resize, layout_after, resized, staged
from planaria.server.machine import ServerMachine
from planaria.server.rebuilding import Rebuilder
from planaria.server.store import Store
from planaria.simulator.campaigns import run_seed, run_seeds
from planaria.simulator.world import World
from planaria.trainer.machine import TrainerMachine
from planaria.trainer.rerouting import Rerouting, Route
from planaria.wire.machine import Outbox
from planaria.wire.messages import Install, Promise, Scale, View

WORKERS = min(os.cpu_count() or 1, 8)
SEARCH = range(60)

# ---------------------------------------------------------------- what must hold


@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, 2300), marks=pytest.mark.campaign)],
    ids=["a few", "two thousand"],
)
def test_schedules_in_which_servers_come_and_go_lose_nothing(seeds: Sequence[int]) -> None:
    """A failure prints its seed: python -m planaria.simulator --seed N --resizes --trace."""
    outcomes = list(run_seeds(seeds, WORKERS, resizes=True))
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []
    # Some jobs are over before their second resize; most are not.
    assert sum(outcome.resized for outcome in outcomes) > 1.2 * len(seeds)


@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, 2300), marks=pytest.mark.campaign)],
    ids=["a few", "two thousand"],
)
def test_schedules_in_which_survivors_rebuild_lose_nothing(seeds: Sequence[int]) -> None:
    """A failure prints its seed: python -m planaria.simulator --seed N --survivors --trace."""
    outcomes = list(run_seeds(seeds, WORKERS, survivors=True))
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []
    assert sum(outcome.taken_over for outcome in outcomes) > 0.3 * len(seeds)


@pytest.mark.campaign
def test_servers_may_come_and_go_while_survivors_rebuild() -> None:
    # With more losses, some steps of seven servers take seconds, and the job more than a minute.
    outcomes = list(run_seeds(range(100), WORKERS, survivors=True, resizes=True, drop=0.02))
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []


def test_a_resize_moves_what_it_must_and_copies_nothing_within_a_server() -> None:
    before = Layout.fresh(6, 1, 4)
    resize = Resize((0, 1, 2, 3, 4, 5), 2)
    meanwhile, after = staged(before, resize), resized(before, resize)
    assert meanwhile.mirrors is not None
    moves = meanwhile.mirrors.place != NOBODY
    assert moves.mean() == pytest.approx(2 / 8, abs=0.01)
    kept = ~moves
    assert np.array_equal(after.groups[kept], before.groups[kept])
    assert np.array_equal(after.region_of[kept], before.region_of[kept])
    assert np.array_equal(after.groups[moves], meanwhile.mirrors.place[moves])
    assert np.array_equal(after.region_of[moves], meanwhile.mirrors.region[moves])


@pytest.mark.parametrize("r", [0, 1, 2])
def test_rows_are_found_after_any_resizes(r: int) -> None:
    first = Layout.fresh(6, r, 1 if r == 0 else 3)
    done = [
        Resize((0, 1, 2, 3, 4, 5), 3),
        Resize((8, 0, 2, 4, 6), 0),
        Resize((1, 2, 3, 4), 4),
    ]
    rows = np.arange(1000)
    for count in range(len(done) + 1):
        layout = layout_after(first, done[:count])
        arena = layout.arena(len(rows))
        place, index = arena.locate(rows)
        assert set(place.tolist()) == set(layout.places) == set(range(len(layout.places)))
        found = [arena.row_at(p, index[place == p]) for p in layout.places]
        assert np.array_equal(
            np.concatenate(found), np.concatenate([rows[place == p] for p in layout.places])
        )
        for group in layout.groups:
            assert len(set(group.tolist())) == layout.groups.shape[1]
        for p in layout.places:  # nothing lies in two places at once
            regions = layout.region_of[layout.groups == p]
            assert len(set(regions.tolist())) == len(regions)


@pytest.mark.parametrize(
    ("resize", "why"),
    [
        (Resize((0, 1, 2), 0), "too few"),
        (Resize((0, 0, 1, 2, 3), 1), "cannot stay"),
        (Resize((0, 1, 2, 3, 9), 1), "cannot stay"),
        (Resize((0, 1, 2, 3, 4, 5), 1000), "too many"),
    ],
)
def test_resizes_that_cannot_be_are_refused(resize: Resize, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        staged(Layout.fresh(6, 1, 4), resize)


def test_what_a_driver_asks_for_comes_back_as_it_asked() -> None:
    first = Layout.fresh(6, 1, 4)
    now = layout_after(first, [Resize((0, 1, 2, 3, 4, 5), 2), Resize((7, 6, 5, 4, 3), 0)])
    rows = np.random.default_rng(0).permutation(500)[:200]
    place, index = first.arena(500).locate(rows)
    asked = {p: [index[place == p]] for p in first.places}
    route = Rerouting(now, [500]).route(asked, first)
    # Each row's value is its own number, wherever it is asked for.
    answers = {
        p: [now.arena(500).row_at(p, route.rows[p][0])[:, None].astype(np.float32)]
        for p in now.places
    }
    back = route.back(answers)
    for p in first.places:
        assert back[p][0].ravel().tolist() == first.arena(500).row_at(p, asked[p][0]).tolist()
    there = route.there(back)
    assert all(np.array_equal(there[p][0], answers[p][0]) for p in now.places)


# ---------------------------------------------------------------- what is wanted


SERVERS = [f"server-{place}" for place in range(6)]


def install_of(**more: Any) -> Install:
    more = {"servers": SERVERS, **more}
    return Install(view=View(1, 1), committed=3, trainers=[], rebuilding=[], **more)


def test_who_asks_again_is_told_how_far_it_is() -> None:
    layout, wants = Layout.fresh(6, 1, 4), Moving()
    eight = Scale(view=View(0, 0), servers=8)
    assert wants.on_scale(eight, install_of(), layout, False).state == "moving"
    assert wants.on_scale(eight, install_of(), layout, False).state == "moving"
    seven = Scale(view=View(0, 0), servers=7)
    assert "wait for that" in wants.on_scale(seven, install_of(), layout, False).why
    assert wants.comes(install_of()) == 2
    wants.forget(6.0)
    later = wants.on_scale(seven, install_of(), layout, False, now=6.0)
    assert later.state == "moving", "nobody has asked for eight any more"
    assert wants.comes(install_of()) == 1
    six = Scale(view=View(0, 0), servers=6, number=-1)
    assert wants.on_scale(six, install_of(), layout, False).state == "done", "as it is, since seven"
    assert Moving().on_scale(six, install_of(), layout, False).state == "done"
    four = Scale(view=View(0, 0), servers=4)
    assert "too few" in Moving().on_scale(four, install_of(), layout, False).why
    assert "cpr" in Moving().on_scale(eight, install_of(), layout, True).why


def test_who_asks_while_others_make_up_for_a_loss_waits() -> None:
    """Nobody has asked for that, so nobody can be told to wait for it."""
    layout, seven = Layout.fresh(6, 1, 4), Scale(view=View(0, 0), servers=7)
    lost = Resize((0, 1, 2, 3, 4), 0, lost=1)
    meanwhile = install_of(moving=lost)
    assert Moving().on_scale(seven, meanwhile, layout, False).state == "moving"
    grows_back = install_of(moving=Resize((0, 1, 2, 3, 4), 1), resizes=[lost])
    assert Moving().on_scale(seven, grows_back, layout, False).state == "moving"


def test_a_job_grows_back_unless_fewer_servers_are_asked_for() -> None:
    layout, lost = Layout.fresh(7, 1, 4), Resize((0, 1, 2, 3, 4, 5), 0, lost=1)
    after = install_of(resizes=[lost])
    wants = Moving(by_survivors=True)
    assert wants.comes(after) == 1
    assert wants.is_due(after, ["spare-1"])
    assert not wants.is_due(after, [])
    assert Moving().comes(install_of(resizes=[lost, Resize((0, 1, 2, 3, 4), 1)])) == 0
    assert Moving().comes(install_of(resizes=[lost, lost._replace(lost=2)])) == 3
    as_it_is = Scale(view=View(0, 0), servers=6)
    assert wants.on_scale(as_it_is, after, layout, False).state == "moving"
    assert wants.comes(after) == 0
    drained = Scale(view=View(0, 0), servers=None, without=["server-3"])
    wants = Moving(by_survivors=True)
    assert wants.on_scale(drained, after, layout, False).state == "moving"
    assert wants.wanted == Resize((0, 1, 2, 4, 5), 1), "one for whom was lost, none for whom leaves"


def test_who_cannot_grow_back_does_not_try_again_and_again() -> None:
    """The only spare stands in a domain that would have two members of a group."""
    layout = resized(Layout.fresh(6, 1, 4), lost := Resize((0, 1, 2, 3, 4), 0, lost=1))
    five = [f"server-{place}" for place in range(5)]
    after = install_of(resizes=[lost], servers=five)
    wants = Moving(by_survivors=True)
    wants.domains = dict(zip([*five, "spare-1", "spare-2"], "abcdeaf", strict=True))
    promises = {name: promise(moves=2) for name in five}
    wants.domains["server-4"] = "a"
    assert wants.is_due(after, ["spare-1"])
    assert wants.next(after, five, promises, ["spare-1"], layout).moving is None
    assert not wants.is_due(after, ["spare-1"])
    assert wants.is_due(after, ["spare-2"])


def promise(**more: Any) -> Promise:
    return Promise(view=View(1, 2), held=3, blank=False, whole=True, dense=False, **more)


@pytest.mark.parametrize(("moves", "switches"), [(1, True), (0, False)])
def test_only_who_knows_of_a_resize_can_end_it(moves: int, *, switches: bool) -> None:
    """A server that has not heard of it has no mirrors, and so none that is not whole. No schedule
    was found to notice: others take longer to fill theirs than it takes to hear of a view.
    """
    resize = Resize((0, 1, 2, 3, 4), 0)
    promises = {name: promise(moves=1) for name in SERVERS}
    promises["server-3"] = promise(moves=moves)
    layout = Layout.fresh(6, 1, 4)
    found = Moving().next(install_of(moving=resize), SERVERS, promises, [], layout)
    assert (found.moving is None) == switches
    assert found.retire == (["server-5"] if switches else [])


# ---------------------------------------------------------------- controls


def finds(**more: Any) -> list[str]:
    more = {"resizes": True, **more}
    found: Iterator[str | None] = (run_seed(seed, **more).failed for seed in SEARCH)
    return [failed for failed in found if failed]


def test_control_steps_after_the_committed_one_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that begins at c lacks what a delta of c + 1, sent before, did not bring it."""
    rearrange = Store.rearrange

    def keeps(self: Store, *arguments: Any) -> None:
        self.sources = {}
        rearrange(self, *arguments)

    monkeypatch.setattr(Store, "rearrange", keeps)
    assert finds()


def test_control_mirrors_become_records_before_they_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ServerMachine, "mirrored", ServerMachine.whole)
    assert finds()


def test_control_a_replacement_has_what_its_predecessor_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A view change that ends a resize must not replace anybody whose mirrors are lost with it."""

    def carelessly(*_: object) -> bool:
        return True

    monkeypatch.setattr(moving, "_all_is_there", carelessly)
    assert finds(kinds=("kill server", "kill mirroring"), count=5)


def test_control_who_leaves_decodes_nothing_for_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are on places that have something else of the same stripes, which is then too few."""
    answer = Rebuilder.answer_mate

    def wants_nothing(self: Rebuilder, *arguments: Any) -> Any:
        leaves, self._leaves = self._leaves, False
        try:
            return answer(self, *arguments)
        finally:
            self._leaves = leaves

    monkeypatch.setattr(Rebuilder, "answer_mate", wants_nothing)
    assert finds(resizes=False, survivors=True)


class Misnumbering(CoordinatorMachine):
    """Names who is not whole by the places of before somebody left."""

    def take_outbox(self) -> Outbox:
        return [
            (to, msgspec.structs.replace(message, rebuilding=[0]))
            if isinstance(message, Install) and message.resizes and not message.moving
            else (to, message)
            for to, message in super().take_outbox()
        ]


class Misnumbered(World):
    coordinator_class = Misnumbering


def test_control_places_are_those_of_before() -> None:
    found = finds(kind=Misnumbered, resizes=False, survivors=True)
    assert any("is whole, and a view says otherwise" in failed for failed in found)


def test_control_keepers_to_come_have_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only trainer dies in the view that retires the only keeper."""

    def those_of_now(self: Install) -> list[str]:
        return self.servers[: self.keepers]

    monkeypatch.setattr(Install, "keeping", those_of_now)
    kinds = ("kill trainer", "cut off trainer", "suspect trainer")
    sizes: dict[str, Any] = {"servers": 3, "k": 1, "r": 1, "trainers": 1, "scales": (4, 5, 4, 3)}
    assert finds(**sizes, kinds=kinds, count=6, steps=14)


def test_control_nobody_tells_mirrors_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    protecting = Layout.protecting

    def parity_alone(self: Layout, place: int) -> Any:
        whom, where = protecting(self, place)
        return whom[:, : self.r], where[:, : self.r]

    monkeypatch.setattr(Layout, "protecting", parity_alone)
    assert finds()


def test_control_trainers_ask_where_rows_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_before(self: TrainerMachine, install: Install) -> None:
        self.servers = len(install.servers)
        nothing = [np.zeros(0, np.int64) for _ in self.job.dims]
        for part, route in self.asked.items():
            rows = {p: route.asked.get(p, nothing) for p in range(self.servers)}
            self.asked[part] = Route(rows, None, route.asked, route.layout)

    monkeypatch.setattr(TrainerMachine, "_reroute", as_before)
    assert finds()
