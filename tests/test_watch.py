"""Who is silent: by one clock, and never because the watcher itself slept."""

from __future__ import annotations

from planaria.coordinator.watch import Pulse, Silence, Watch


def watch() -> Watch:
    """Has heard of `a` at 10.0, and ticks every half second."""
    new = Watch(limit_s=2.0, hang_s=5.0)
    new.heard("a", 10.0)
    new.tick(10.0)
    return new


def ticked(watched: Watch, until: float, start: float = 10.0) -> list[Silence]:
    found: list[Silence] = []
    while start <= until:
        found = watched.tick(start)
        start += 0.5
    return found


def test_who_is_not_heard_of_for_longer_than_the_limit_is_silent_until_it_is_heard() -> None:
    watched = watch()
    assert ticked(watched, 12.0) == []
    assert ticked(watched, 12.5, 12.5) == [Silence("a", 2.5, hung=False)]
    assert ticked(watched, 13.0, 13.0) == [Silence("a", 3.0, hung=False)]
    watched.heard("a", 13.1)
    assert ticked(watched, 13.5, 13.5) == []


def test_who_was_never_heard_of_or_is_forgotten_is_not_expected() -> None:
    watched = watch()
    watched.forget("a")
    watched.forget("b")
    assert ticked(watched, 20.0) == []


def test_who_is_expected_must_show_itself_though_it_was_never_heard_of() -> None:
    watched = watch()
    watched.expect(["a", "b"], 11.0)  # which is no sign of life of `a`
    assert ticked(watched, 12.5) == [Silence("a", 2.5, hung=False)]
    assert [silence.member for silence in ticked(watched, 13.5, 13.0)] == ["a", "b"]


def test_a_watcher_that_slept_gives_everybody_a_fresh_start() -> None:
    watched = watch()
    assert watched.tick(75.0) == []
    assert ticked(watched, 77.0, 75.5) == []
    assert [silence.member for silence in ticked(watched, 77.5, 77.5)] == ["a"]


def test_beats_beside_a_main_loop_that_hangs_are_no_sign_of_life() -> None:
    watched = watch()
    watched.heard("a", 10.4, age_s=4.0)
    assert ticked(watched, 10.5, 10.5) == []
    watched.heard("a", 11.0, age_s=5.1)
    assert watched.tick(11.0) == [Silence("a", 5.1, hung=True)]
    watched.heard("a", 11.2)  # its main loop sends something
    assert watched.tick(11.5) == []


def test_a_pulse_tells_how_long_the_main_loop_stood_still() -> None:
    pulse = Pulse(beat_s=0.2, now=100.0)
    assert [pulse.beat(now) for now in (100.2, 100.4, 100.6)] == [200, 400, 600]
    pulse.turn(100.7)
    assert pulse.beat(100.8) == 100


def test_a_process_that_slept_as_a_whole_did_not_hang() -> None:
    pulse = Pulse(beat_s=0.2, now=100.0)
    pulse.turn(100.1)
    assert 0 <= pulse.beat(165.2) <= 200


def test_who_is_given_up_for_silence_buys_the_others_time() -> None:
    """On a machine with far too much to do, one trainer after the other was taken for dead in its
    first step, until the job gave up.
    """
    watched = watch()
    (lost,) = ticked(watched, 12.5)
    assert lost == Silence("a", 2.5, hung=False)
    watched.forget("a")
    watched.gave_up(lost, 12.5)
    watched.heard("b", 12.5)
    assert ticked(watched, 16.5, 13.0) == []  # a control is above: 2.5 s were too long there
    assert ticked(watched, 17.0, 17.0) == [Silence("b", 4.5, hung=False)]
    for _ in range(5):
        watched.gave_up(lost, 17.0)
    assert watched.limit_s(17.0) == 16.0  # and no more, however many
    watched.heard("b", 17.0)
    ticked(watched, 80.0, 17.5)
    assert watched.limit_s(80.0) == 2.0


def test_who_falls_silent_with_another_is_not_waited_for_any_longer() -> None:
    """All processes of a machine that died were given up one after the other, after 2, 4 and 8 s,
    because beats come at different moments.
    """
    watched = watch()
    watched.heard("b", 10.2)
    assert ticked(watched, 12.0) == []
    (lost,) = watched.tick(12.1)
    watched.forget("a")
    watched.gave_up(lost, 12.1)
    watched.heard("c", 12.0)
    assert [one.member for one in watched.tick(12.3)] == ["b"]
    watched.forget("b")
    assert ticked(watched, 14.5, 12.4) == [], "c lived on, and may only be slow"
