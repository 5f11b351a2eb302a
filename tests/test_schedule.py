"""Failures on purpose: a schedule says who and when, and means the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config import Config
from planaria.errors import ConfigError
from planaria.schedule import Fault, Freeze, Kill, parse_freeze, parse_kill, processes, resolve

PATIENT = settings(max_examples=50, deadline=None)  # a busy machine is no failure
numbers = st.integers(0, 10**6)
victims = st.one_of(
    st.tuples(st.just("coordinator"), st.none(), st.just(1)),
    st.tuples(st.sampled_from(["server", "trainer", "spare"]), numbers, st.just(1)),
    st.tuples(st.sampled_from(["server", "trainer", "spare"]), st.none(), st.integers(1, 99)),
)
seconds = st.integers(1, 10**6).map(lambda ms: ms / 1000)


@PATIENT
@given(victims, numbers, seconds)
def test_an_event_reads_as_it_is_written(
    victim: tuple[str, int | None, int], step: int, pause: float
) -> None:
    kill, freeze = Kill(*victim, step), Freeze(*victim, step, pause)
    assert parse_kill(str(kill)) == kill
    assert parse_freeze(str(freeze)) == freeze


def test_the_forms_of_an_event() -> None:
    assert parse_kill("server:2@100") == Kill("server", 2, 1, 100)
    assert parse_kill("server:any@100") == Kill("server", None, 1, 100)
    assert parse_kill("server:any*2@100") == Kill("server", None, 2, 100)
    assert parse_kill("coordinator@7") == Kill("coordinator", None, 1, 7)
    assert parse_freeze("spare:0@100:2.5") == Freeze("spare", 0, 1, 100, 2.5)


@pytest.mark.parametrize("parse", [parse_kill, parse_freeze])
@PATIENT
@given(text=st.text() | st.from_regex(r"(server|trainer|spare):(any|\d)[*@:]\d*(@|:)?\d*"))
def test_no_schedule_raises_anything_else(parse: Callable[[str], Fault], text: str) -> None:
    with suppress(ConfigError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("banana", "--kill banana: expected WHO@STEP, as in server:2@100, where WHO is server:2"),
        ("server:2", "expected WHO@STEP"),
        ("server:2@100:5", "expected WHO@STEP"),
        ("coordinator:0@1", "expected WHO@STEP"),
        ("server:-1@1", "expected WHO@STEP"),
        ("server:٣@1", "expected WHO@STEP"),
        ("server:any*0@1", "expected any*1 or more"),
        ("server:6@1", "--kill server:6@1: expected server:0 to server:5"),
        ("trainer:2@1", "expected trainer:0 to trainer:1"),
        ("spare:1@1", "expected spare:0 to spare:0"),
        ("server:any*7@1", "expected at most 6 servers"),
        ("server:1@0", "expected a step from 1 to 400"),
        ("server:1@401", "expected a step from 1 to 400"),
    ],
)
def test_an_event_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([parse_kill(text)], Config.load(None, ["parity=2"]))
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["server:2@9", "server:2@9:", "server:2@9:0", "server:2@9:99999"])
def test_a_freeze_needs_seconds(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--freeze .*(SECONDS|seconds)"):
        parse_freeze(text)


def test_no_process_stands_twice_at_one_step() -> None:
    with pytest.raises(
        ConfigError, match="--freeze server:2@9:5: expected server:2 once at step 9"
    ):
        resolve([parse_kill("server:2@9"), parse_freeze("server:2@9:5")], Config())
    with pytest.raises(ConfigError, match="expected at most 5, for the others are named already"):
        resolve([parse_kill("server:any*6@9"), parse_kill("server:2@9")], Config())
    with pytest.raises(ConfigError, match="this job has no spares"):
        resolve([parse_kill("spare:any@9")], Config.load(None, ["spares=0"]))


events = st.builds(Kill, st.just("server"), st.none(), st.integers(1, 3), st.integers(1, 400))


@PATIENT
@given(st.lists(events, max_size=3), st.integers(0, 2**64 - 1), st.integers(0, 8))
def test_any_is_decided_by_the_seed_and_never_names_one_twice(
    schedule: list[Fault], seed: int, named: int
) -> None:
    config = Config.from_dict({"seed": seed, "servers": 12})
    schedule = [*schedule, parse_kill(f"server:{named}@200"), parse_freeze("coordinator@100:1")]
    resolved = resolve(schedule, config)
    assert resolved == resolve(schedule, config) == resolve(resolved, config)
    assert [event.step for event in resolved] == sorted(event.step for event in resolved)
    assert len(resolved) == sum(event.count for event in schedule)
    assert len({(event.role, event.number, event.step) for event in resolved}) == len(resolved)
    assert all(event.is_named and event.count == 1 for event in resolved)
    assert all((event.number or 0) < processes(config)[event.role]
               for event in resolved if event.role != "coordinator")  # fmt: skip


def test_any_means_every_server_sooner_or_later() -> None:
    chosen = set()
    for seed in range(60):
        [event] = resolve([parse_kill("server:any@10")], Config(seed=seed))
        chosen.add(event.number)
    assert chosen == set(range(6))


def test_any_names_the_same_servers_for_ever() -> None:
    resolved = resolve([parse_kill("server:any*3@100"), parse_freeze("trainer:any@7:2")], Config())
    assert [str(event) for event in resolved] == [
        "trainer:0@7:2",
        "server:1@100",
        "server:2@100",
        "server:3@100",
    ]
