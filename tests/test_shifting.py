"""What a coordinator makes of a wish for another number of trainers, without any process."""

from __future__ import annotations

import copy

from planaria.coordinator.moving import FORGOTTEN_S
from planaria.coordinator.shifting import NOT_ELASTIC, Crew, Shifting
from planaria.wire.messages import NO_VIEW, Install, Member, Promise, Scaled, ScaleTrainers, Shift

DEADLINE_S = 5.0
SERVERS = ["server-0", "server-1", "server-2"]


def install(trainers: int, keepers: int = 0, shift: Shift | None = None) -> Install:
    return Install(
        view=NO_VIEW,
        committed=0,
        servers=SERVERS,
        trainers=[f"trainer-{rank}" for rank in range(trainers)],
        rebuilding=[],
        keepers=keepers,
        shift=shift,
    )


def promises(of: Install, held: int, *, rests: bool = True) -> dict[Member, Promise]:
    return {
        who: Promise(view=NO_VIEW, held=held, blank=False, whole=True, dense=True, rests=rests)
        for who in [*of.servers, *of.trainers]
    }


def ask(
    shifting: Shifting,
    of: Install,
    trainers: int,
    after: int = 0,
    now: float = 0.0,
    number: int = 0,
) -> Scaled:
    wanted = ScaleTrainers(view=NO_VIEW, trainers=trainers, after=after, number=number)
    return shifting.on_scale(wanted, of, 0, now)


def after_view(of: Install, crew: Crew) -> Install:
    """The install that follows from a crew."""
    names = crew.trainers + [f"trainer-{10 + number}" for number in range(crew.come)]
    found = install(0, crew.keepers, crew.shift)
    found.trainers, found.shifts = names, crew.shifts
    return found


def test_a_job_that_is_not_elastic_refuses() -> None:
    found = ask(Shifting(parity=1, most=0, deadline_s=DEADLINE_S), install(2), 3)
    assert (found.state, found.why, found.trainers) == ("refused", NOT_ELASTIC, 2)


def test_one_shift_at_a_time() -> None:
    shifting = Shifting(parity=1, most=8, deadline_s=DEADLINE_S)
    assert ask(shifting, install(2), 2).state == "done"
    assert ask(shifting, install(2), 3).state == "moving"
    assert ask(shifting, install(2), 3).state == "moving"
    refused = ask(shifting, install(2, shift=Shift(8, 3)), 4, number=1)
    assert (refused.state, refused.why) == (
        "refused",
        "the job is changing to 3 trainers; wait for that",
    )


def test_a_later_request_takes_the_place_of_one_that_has_not_begun() -> None:
    shifting = Shifting(parity=1, most=8, deadline_s=DEADLINE_S)
    first = ask(shifting, install(2), 3, number=1)
    assert (first.state, ask(shifting, install(2), 3, number=1).why) == (
        "moving",
        "waiting for 1 more to start",
    )
    assert ask(shifting, install(2), 4, number=2).state == "moving"
    assert ask(shifting, install(2), 3, number=1).state == "refused"
    assert shifting.comes(install(2)) == 2
    assert ask(shifting, install(2), 2, number=3).state == "done"
    assert shifting.comes(install(2)) == 0


def test_nobody_rests_before_those_are_there_that_come() -> None:
    """A view that comes meanwhile, because somebody died, does not begin it."""
    shifting = Shifting(parity=1, most=8, deadline_s=DEADLINE_S)
    two = install(2)
    ask(shifting, two, 4)
    assert shifting.next(two, two.trainers, promises(two, 8), 8, spares=1).shift is None
    assert shifting.next(two, two.trainers, promises(two, 8), 8, spares=2).shift == Shift(8, 4)


def test_it_is_after_a_step_that_nobody_is_past() -> None:
    shifting = Shifting(parity=1, most=8, deadline_s=DEADLINE_S)
    two = install(2)
    ask(shifting, two, 3)
    told = promises(two, held=7)
    told["trainer-1"].rests = False  # it computes step 8
    assert shifting.next(two, two.trainers, told, 7, spares=1).shift == Shift(8, 3)
    ask(shifting, two, 3, after=7)
    assert shifting.next(two, two.trainers, told, 7, spares=1).shift is None
    given_up = ask(shifting, two, 3, after=7)
    assert (given_up.state, given_up.why) == ("given up", "step 7 is over")


def test_everybody_must_hold_the_step_and_nothing_after_it() -> None:
    shifting = Shifting(parity=1, most=8, deadline_s=DEADLINE_S)
    two = install(2, shift=Shift(8, 3))
    good = promises(two, held=8)
    assert len(shifting.next(two, two.trainers, good, 8, spares=1).shifts) == 1
    for who in ("server-1", "trainer-1"):
        for change in ({"held": 7}, {"rests": False}):
            told = promises(two, held=8)
            for name, value in change.items():
                setattr(told[who], name, value)
            crew = shifting.next(two, two.trainers, told, 8, spares=1)
            assert (crew.shift, crew.shifts, crew.come) == (two.shift, [], 0)
    assert shifting.next(two, two.trainers, good, 8, spares=0).shifts == []
    replaced = ["trainer-0", "trainer-9"]  # who has just come has no dense state
    assert shifting.next(two, replaced, good, 8, spares=1).shifts == []


def test_there_are_enough_copies_of_the_dense_state_at_all_times() -> None:
    """Servers have them before trainers leave, and still after others have come."""
    shifting = Shifting(parity=2, most=8, deadline_s=DEADLINE_S)
    now = install(3)
    for trainers in (1, 3):
        ask(shifting, now, trainers)
        now = after_view(now, shifting.next(now, now.trainers, promises(now, 8), 8, spares=2))
        assert now.keepers == 2
        assert now.shift == Shift(8, trainers)
        now = after_view(now, shifting.next(now, now.trainers, promises(now, 8), 8, spares=2))
        assert (len(now.trainers), now.keepers) == (trainers, 2)


def test_what_cannot_be_had_in_time_is_given_up() -> None:
    shifting = Shifting(parity=1, most=8, deadline_s=DEADLINE_S)
    two = install(2, shift=Shift(8, 3))
    assert not shifting.is_due(two, ["trainer-0"], 100.0)
    assert shifting.is_due(two, two.trainers, 101.0)
    assert shifting.comes(two) == 1
    assert shifting.is_due(two, two.trainers, 101.0 + DEADLINE_S + 0.1)
    assert shifting.comes(two) == 0  # nobody is waited for any more
    crew = shifting.next(two, two.trainers, promises(two, 8), 8, spares=0)
    assert (crew.shift, crew.trainers, crew.shifts) == (None, two.trainers, [])
    now = after_view(two, crew)
    later = copy.deepcopy(shifting)
    found = ask(shifting, now, 3)
    assert (found.state, found.trainers) == ("given up", 2)
    found = ask(later, now, 3, number=1)
    assert found.state == "moving", "that was the answer to somebody else"


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    shifting = Shifting(parity=1, most=8, deadline_s=DEADLINE_S)
    two = install(2)
    ask(shifting, two, 3, now=100.0)
    shifting.forget(101.0)
    assert shifting.is_due(two, [], 101.0)
    shifting.forget(100.1 + FORGOTTEN_S)
    assert not shifting.is_due(two, [], 101.0)
