"""One digest, whatever dies: jobs on real processes, killed at random instants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import BeatenRun, Blow, blows, digest_after, leaving_nothing, tiny, undisturbed

from planaria.cluster.run import JobRun
from planaria.optimizers import NAMES
from planaria.wire.control import Rebuilt

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


def each(role: str, count: int) -> list[tuple[str, ...]]:
    return [(f"{role}:{number}",) for number in range(count)]


# ---------------------------------------------------------------------------- what decides the bits


def test_the_seed_and_the_learning_rate_decide_the_digest() -> None:
    digests = {
        undisturbed(),
        undisturbed("seed=1"),
        undisturbed("optimizer.lr=0.020001"),
    }
    assert len(digests) == 3


def test_how_a_batch_is_split_decides_the_digest_but_copies_on_servers_do_not() -> None:
    """Sums are taken in rank order, so two halves of a batch may add up to other bits."""
    assert undisturbed("trainers=2") != undisturbed()
    run = BeatenRun(tiny("servers=4", "parity=3", "k=1", "spares=0"))
    assert run.run()["digest"] == undisturbed()
    assert len(run.progress.trainers) == 1  # all but one of the copies are the servers'


def test_protection_changes_no_bit() -> None:
    report = JobRun(tiny("servers=6", "parity=1", "k=4", "trainers=2")).run()
    assert report["digest"] == undisturbed("trainers=2")
    assert 0 < report["bytes_parity"] < report["bytes_records"]
    page = (Path(__file__).parents[1] / "docs" / "report.md").read_text()
    assert [field for field in report if f"`{field}`" not in page] == []
    assert report["auc"] > 0.5


# ---------------------------------------------------------------------------- servers


def test_killing_each_server_in_turn_changes_no_bit() -> None:
    config = tiny("servers=6", "parity=1", "k=3")
    assert digest_after(config, blows(1, each("server", 6))) == undisturbed()


def test_killing_any_two_servers_at_once_changes_no_bit() -> None:
    pairs = [("server:0", "server:1"), ("server:2", "server:4"), ("server:3", "server:0")]
    config = tiny("servers=5", "parity=2", "k=3", "spares=2")
    assert digest_after(config, blows(2, pairs, every=20)) == undisturbed()


def test_killing_any_three_servers_at_once_changes_no_bit() -> None:
    triples = [("server:0", "server:1", "server:2"), ("server:5", "server:1", "server:3")]
    config = tiny("servers=6", "parity=3", "k=2", "spares=2")
    assert digest_after(config, blows(3, triples, every=25)) == undisturbed()


def test_servers_that_share_no_stripe_may_die_at_once_whatever_the_parity() -> None:
    """Where a server has few mates; the control: of all others none is without."""
    config = tiny("servers=8", "parity=1", "k=2", "scatter=4", "spares=2")
    assert sorted(config.layout.mates(0)) == [1, 2, 6, 7]
    plan = blows(5, [("server:0", "server:4"), ("server:6", "server:3")], every=30)
    assert digest_after(config, plan) == undisturbed()
    assert len(tiny("servers=8", "parity=1", "k=2").layout.mates(0)) == 7


@pytest.mark.parametrize(
    "shape", [("servers=4", "parity=1", "k=2"), ("servers=5", "parity=2", "k=2")]
)
def test_killing_the_replacements_while_they_rebuild_changes_no_bit(
    shape: tuple[str, ...],
) -> None:
    config = tiny(*shape, "spares=2", "rebuild.chunk=4", "rebuild.jobs=1")
    run = BeatenRun(config, [Blow(20, ("server:1",), 7.0)], replacements=3)
    assert run.run()["digest"] == undisturbed()
    rebuilt = [member for member, _ in run.of(Rebuilt)]
    assert len(run.killed) == 4
    assert not {*rebuilt} & {*run.killed}, "one was killed after it had rebuilt everything"
    assert len(rebuilt) == 1


def test_a_server_lost_without_a_spare_is_replaced_by_a_new_process() -> None:
    config = tiny("servers=3", "parity=1", "k=2", "spares=0")
    assert digest_after(config, blows(4, [("server:2",), ("server:0",)])) == undisturbed()


# ---------------------------------------------------------------------------- everybody else


def test_killing_each_trainer_in_turn_changes_no_bit() -> None:
    config = tiny("servers=3", "parity=1", "trainers=2")
    victims = [("trainer:0",), ("trainer:1",)]
    assert digest_after(config, blows(5, victims)) == undisturbed("trainers=2")


def test_killing_the_only_trainer_together_with_a_server_changes_no_bit() -> None:
    """The server of the first place has what the trainer had."""
    config = tiny("servers=4", "parity=1")
    victims = [("trainer:0", "server:2"), ("server:0",), ("server:3", "trainer:0")]
    assert digest_after(config, blows(7, victims)) == undisturbed()


def test_killing_the_coordinator_changes_no_bit_not_even_with_a_server() -> None:
    config = tiny("servers=4", "parity=1")
    victims = [("coordinator",), ("coordinator",), ("coordinator", "server:1"), ("server:0",)]
    assert digest_after(config, blows(8, victims)) == undisturbed()


@pytest.mark.parametrize("seed", range(2))
def test_random_blows_at_random_instants_change_no_bit(seed: int) -> None:
    config = tiny("servers=5", "parity=2", "spares=2")
    victims = [
        ("server:4", "coordinator"),
        (f"server:{seed}", f"server:{seed + 1}"),
        ("server:2", "trainer:0"),
        ("server:3", "server:0", "coordinator"),
    ]
    assert digest_after(config, blows(100 + seed, victims)) == undisturbed()


# ---------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_survives_the_loss_of_a_server_and_a_trainer(name: str) -> None:
    overrides = (f"optimizer.name={name}", "steps=60")
    config = tiny("servers=3", "parity=1", *overrides)
    victims = [("server:0",), ("server:1", "trainer:0")]
    assert digest_after(config, blows(9, victims)) == undisturbed(*overrides)


def test_no_two_optimizers_give_one_digest() -> None:
    """A control: the digests that the kills are held against tell the optimizers apart."""
    assert len({undisturbed(f"optimizer.name={name}", "steps=60") for name in NAMES}) == len(NAMES)
