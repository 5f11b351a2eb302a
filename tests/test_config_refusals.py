"""All that is wrong is said at once, and every line of it is true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planaria.config import KINDS, Config, describe_protection, describe_shared
from planaria.config.combinations import wrong_combinations
from planaria.errors import ConfigError
from planaria.layout import Layout


def refusals(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides)
    return str(caught.value).splitlines()


def test_everything_that_is_wrong_is_said_at_once_as_it_is_said_alone(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("steps: many\noptimizer: {lrr: 1, lr: fast}\nhistory: 3\nzzz: 1\nbatch: 1\n")
    overrides = ["data.path=x", "servers=1", "k", "model.zipf=[", "zzz=2"]
    said = refusals(file, *overrides)
    alone = []
    for text in (
        "steps: many",
        "optimizer: {lrr: 1, lr: fast}",
        "history: 3",
        "zzz: 1",
        "batch: 1",
    ):
        single = tmp_path / "single.yaml"
        single.write_text(text)
        alone += refusals(single)
    for override in overrides[:-1]:
        alone += refusals(None, override)
    assert sorted(said) == sorted(alone)


def test_what_no_other_value_could_mend_is_said_beside_it() -> None:
    """A parity of 7 hid that k = 9 is too much for 6 servers, whatever the parity."""
    too_much = "k: expected less than servers, 6, unless parity is 0, got 9"
    wrong_parity = "parity: expected a whole number from 0 to 4, got 7"
    assert refusals(None, "parity=7", "k=9") == [wrong_parity, too_much]
    assert refusals(None, "parity=7", "k=5") == [wrong_parity]  # which fits with parity 1
    assert refusals(None, "parity=7", "k=9", "strategy=none") == [wrong_parity]
    too_few = "servers: expected 3 or more, because parity is 2, got 2"
    assert refusals(None, "servers=2", "parity=2", "k=many")[1:] == [too_few]
    # Nothing is said twice, and nothing of parity where there is none.
    assert refusals(None, "servers=2", "parity=2", "k=9") == [
        "servers: expected 11 or more, because k is 9 and parity is 2, got 2"
    ]
    assert Config.load(None, ["parity=0", "k=9"]).layout.k == 1


def test_combinations_are_judged_by_what_was_given_alone() -> None:
    assert refusals(None, "strategy=checkpoint", "checkpoint.every_step=5") == [
        "checkpoint.every_step: unknown key; did you mean checkpoint.every_steps?"
    ]
    assert len(refusals(None, "batch=1", "cluster.heartbeat_ms=5000", "trainers=none")) == 2
    twice = refusals(None, "strategy=cpr", "checkpoint.every_s=auto", "cpr.variant=mfu")
    assert [line.partition(":")[0] for line in twice] == ["checkpoint.every_s", "checkpoint.path"]


def test_jobs_that_go_back_are_not_elastic() -> None:
    """They begin with the trainers that they had at first."""
    elastic = ("trainer.elastic=on", "checkpoint.path=x", "checkpoint.every_steps=5")
    for strategy in ("checkpoint", "cpr"):
        (said,) = refusals(None, f"strategy={strategy}", *elastic)
        assert said.startswith(f"trainer.elastic: expected off, because strategy is {strategy}")
    assert Config.load(None, elastic).most_trainers == 16
    assert Config.load(None, ["batch=3", *elastic]).most_trainers == 3
    assert Config.load(None).most_trainers == 2


def test_every_rule_names_all_the_keys_that_it_looks_at() -> None:
    """Values that no rule forgives: where a key is unsure, the rules about it must be silent."""
    broken = Config.from_dict({})
    broken = replace(
        broken,
        strategy="cpr",
        batch=1,
        model=replace(broken.model, rows=(1,)),
        data=replace(broken.data, path="x"),
        cluster=replace(broken.cluster, heartbeat_ms=9000, retry_ms=60000),
        checkpoint=replace(broken.checkpoint, every_s="auto", every_steps=3, policy="one-shot"),
        cpr=replace(broken.cpr, variant="mfu"),
        trainer=replace(broken.trainer, elastic="on"),
    )
    said = wrong_combinations(broken, ())
    assert len(said) == 10
    for path in KINDS:
        section, _, name = path.rpartition(".")
        name = {"tables": "declared_tables"}.get(path, name)
        default: Any = getattr(getattr(Config(), section) if section else Config(), name)
        inner: dict[str, Any] = {name: default}
        if section:
            inner = {section: replace(getattr(broken, section), **inner)}
        mended = replace(broken, **inner)
        silent = wrong_combinations(broken, [path])
        assert silent == wrong_combinations(mended, [path]), f"{path} decides a rule in secret"


def test_two_keys_that_stand_twice_are_both_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("steps: 3\nseed: 1\nsteps: 4\nseed: 1\n")
    assert [line.partition(", ")[2] for line in refusals(file, "steps=x")] == [
        "line 3, column 1: 'steps' stands here twice",
        "line 4, column 1: 'seed' stands here twice",
        "got 'x'",
    ]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["servers=3"],
            "k = 1, parity 1: every record is kept twice (memory x 2.00); any 1 server of 3 may "
            "die at once; with servers: 6 k is 4 (memory x 1.25)",
        ),
        (
            ["servers=3", "k=1", "parity=2", "trainers=3"],
            "k = 1, parity 2: every record is kept three times (memory x 3.00); any 2 servers of 3 "
            "may die at once",
        ),
        (
            [],
            "k = 4, parity 1: every 4 records share 1 parity record (memory x 1.25); any 1 server "
            "of 6 may die at once",
        ),
        (
            ["strategy=none"],
            "no parity (memory x 1.00): the job does not survive the death of a server",
        ),
    ],
)
def test_a_job_says_what_its_parity_costs(overrides: list[str], says: str) -> None:
    assert describe_protection(Config.load(None, overrides)) == says


def test_hosts_that_several_members_of_a_group_share_are_named() -> None:
    layout = Layout(np.array([[0, 1, 2], [1, 2, 3]], np.int32), 2)
    assert describe_shared(layout, ["a", "b", "c", "a"]) == ""
    assert "stand on a now" in describe_shared(layout, ["a", "b", "a", "c"])
    assert "stand on b, c now" in describe_shared(layout, ["b", "b", "c", "c"])


def test_survivors_that_rebuild_must_be_enough() -> None:
    said = "rebuild.by: expected replacement, unless there is parity and 6 servers or more"
    by_survivors = ("rebuild.by=survivors", "k=4")
    assert refusals(None, *by_survivors, "servers=5")[0].startswith(said)
    assert refusals(None, *by_survivors, "strategy=none")[0].startswith("rebuild.by: expected")
    assert Config.load(None, [*by_survivors, "servers=6"]).layout.k == 4
