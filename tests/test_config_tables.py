"""Tables that are declared one by one: what comes in, and what is refused by its path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planaria.config import Config
from planaria.errors import ConfigError
from planaria.optimizers import Optimizer
from planaria.tables import Initial, Table

DECLARED: list[dict[str, Any]] = [
    {"name": "user", "rows": 10, "dim": 4},
    {"name": "item", "rows": 5, "dim": 8, "optimizer": {"name": "adam", "lr": 0.5}},
    {"name": "shop", "rows": 7, "dim": 4, "initial": {"distribution": "normal", "b": 0.1}},
    {"name": "day", "rows": 3, "dim": 4, "optimizer": {"lr": 0.02, "group": 1}},
]


def test_declared_tables_have_their_own_shapes_optimizers_and_learning_rates() -> None:
    config = Config.from_dict(
        {"tables": DECLARED, "steps": 8, "optimizer": {"schedule": "linear", "warmup_steps": 4}}
    )
    assert config.tables == [
        Table("user", 10, 4),
        Table("item", 5, 8, optimizer=Optimizer("adam", 0.5, eps=1e-8)),
        Table("shop", 7, 4, Initial.normal(0.0, 0.1)),
        Table("day", 3, 4, optimizer=Optimizer("adagrad", 0.02, group=1)),
    ]
    assert [a.table_ids.tolist() for a in config.arenas] == [[0, 2], [1], [3]]
    assert config.lrs(2) == [0.01, 0.25, 0.01]
    assert config.lrs(6) == [config.lr(6), 0.25, config.lr(6)]
    assert (config.model.tables, config.model.rows) == (4, (10, 5, 7, 3))


def test_declared_tables_come_out_as_they_went_in() -> None:
    config = Config.from_dict({"tables": DECLARED})
    again = Config.from_dict(config.to_dict())
    assert again == config
    assert again.fingerprint() == config.fingerprint()
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    others = [{**DECLARED[0], "rows": 11}, {**DECLARED[0], "optimizer": {"lr": 0.5}}]
    prints = {Config.from_dict({"tables": [t, *DECLARED[1:]]}).fingerprint() for t in others}
    assert len(prints | {config.fingerprint(), Config().fingerprint()}) == 4


@pytest.mark.parametrize(
    ("number", "changes", "says"),
    [
        (3, {"dim": 0}, "tables.3.dim: expected a whole number from 1 to 65536, got 0"),
        (0, {"rows": "x"}, "tables.0.rows: expected a whole number from 1 to 1099511627776, got"),
        (1, {"name": "a/b"}, "tables.1.name: expected a name that a file can have, got 'a/b': "),
        (2, {"name": "user"}, "tables.2.name: expected another than tables.0.name, 'user'"),
        (1, {"optimizer": {"lr": -1}}, "tables.1.optimizer.lr: expected a number of 0 or more"),
        (1, {"optimizer": {"nmae": 1}}, "tables.1.optimizer.nmae: unknown key; did you mean name?"),
        (1, {"optimizer": "sgd"}, "tables.1.optimizer: expected null or keys with values, of name"),
        (0, {"initial": {"a": 1}}, "tables.0.initial.distribution: expected zeros, uniform or"),
        (0, {"initial": {"distribution": "uniform", "a": 1}}, "the bounds are turned around"),
        (2, {"dims": 1}, "tables.2.dims: unknown key; did you mean dim?"),
    ],
)
def test_a_wrong_table_is_refused_by_its_path(
    number: int, changes: dict[str, Any], says: str
) -> None:
    tables = [{**table, **(changes if i == number else {})} for i, table in enumerate(DECLARED)]
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"tables": tables})
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"tables.{number}.")
    assert "\n" not in str(caught.value)


def test_everything_that_is_wrong_with_tables_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"tables": [{"rows": 0, "dim": 0, "x": 1}, {}]})
    assert len(str(caught.value).splitlines()) == 7


def test_what_model_says_of_declared_tables_must_be_true() -> None:
    same = {"tables": 4, "rows": [10, 5, 7, 3], "dim": 9}  # no dim is that of all tables
    assert Config.from_dict({"tables": DECLARED, "model": same}).model.rows == (10, 5, 7, 3)
    alike = [{"name": name, "rows": 6, "dim": 2} for name in "ab"]
    assert Config.from_dict({"tables": alike, "model": {"rows": 6}}).model.dim == 2
    for key, value in (("tables", 3), ("rows", [10, 5]), ("rows", 11)):
        with pytest.raises(ConfigError, match=rf"^model.{key}: .*as tables says, got .*leave"):
            Config.from_dict({"tables": DECLARED, "model": {key: value}})
    with pytest.raises(ConfigError, match=r"^model.dim: expected 2, as tables says, got 3"):
        Config.from_dict({"tables": alike, "model": {"dim": 3}})
