"""The tables of a collection, as TorchRec describes them.

A table's first weights come from the servers, which make them from (seed, table, row) whenever
they are needed; so they can be uniform, normal or zero, but not the result of a function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch

from planaria.errors import ArgumentError
from planaria.tables import Initial, Table


class PoolingType(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


@dataclass
class BaseEmbeddingConfig:
    """One table and the features that look rows up in it.

    init_fn: a planaria.Initial, or functools.partial of torch.nn.init.uniform_ or normal_. Without
    it, uniform from weight_init_min to weight_init_max; without these, uniform within
    1 / sqrt(num_embeddings) of zero, as DLRM's.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Any = None

    def num_features(self) -> int:
        return len(self.feature_names)

    def table(self) -> Table:
        """As the rest of Planaria knows it, if it is a table at all."""
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentError(
                "a table needs a name: checkpoints and exports know it by that; pass name=..."
            )
        return Table(self.name, self.num_embeddings, self.embedding_dim, self._initial())

    def _initial(self) -> Initial | None:
        if self.init_fn is not None:
            return _initial_of(self.name, self.init_fn)
        low, high = self.weight_init_min, self.weight_init_max
        if low is None and high is None:
            return None
        bound = float(self.num_embeddings**-0.5)
        return Initial.uniform(-bound if low is None else low, bound if high is None else high)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose rows are pooled, bag by bag."""

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose rows are returned one by one."""


Config = TypeVar("Config", bound=BaseEmbeddingConfig)


def checked_configs(tables: Sequence[Any], kind: type[Config]) -> list[Config]:
    """The tables of one collection, ours or TorchRec's, if they make sense together."""
    if isinstance(tables, BaseEmbeddingConfig) or not tables:
        raise ArgumentError(f"a collection needs a list of one {kind.__name__} or more")
    configs = [_as_config(table, kind) for table in tables]
    for config in configs:
        config.table()
        _check_features(config)
        if isinstance(config, EmbeddingBagConfig) and not isinstance(config.pooling, PoolingType):
            raise ArgumentError(
                f"table {config.name}: pooling must be PoolingType.SUM or PoolingType.MEAN, "
                f"not {config.pooling!r}"
            )
    twice = [name for name, count in Counter(c.name for c in configs).items() if count > 1]
    if twice:
        raise ArgumentError(f"two tables are called {twice[0]!r}; give each its own name")
    return configs


def _as_config(table: Any, kind: type[Config]) -> Config:
    """TorchRec's configs have the same fields; those that it alone has are about sharding."""
    if isinstance(table, kind):
        return table
    if isinstance(table, BaseEmbeddingConfig) or not hasattr(table, "num_embeddings"):
        raise ArgumentError(f"expected {kind.__name__}, got {type(table).__name__}")
    data_type = getattr(getattr(table, "data_type", None), "value", "FP32")
    if data_type != "FP32":
        raise ArgumentError(f"table {table.name}: data_type must be FP32, not {data_type}")
    known = {one.name: getattr(table, one.name) for one in fields(kind) if hasattr(table, one.name)}
    if "pooling" in known:
        value = str(getattr(known["pooling"], "value", None))
        known["pooling"] = PoolingType.__members__.get(value, known["pooling"])
    return kind(**known)


def _check_features(config: BaseEmbeddingConfig) -> None:
    names = config.feature_names
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"table {config.name}: feature_names must be a list of one name or more, not {names!r}"
        )
    if len(set(names)) < len(names):
        raise ArgumentError(f"table {config.name}: a feature stands twice in {names}")


def _initial_of(name: str, init_fn: Any) -> Initial:
    if isinstance(init_fn, Initial):
        return init_fn
    given = init_fn.keywords if isinstance(init_fn, partial) and not init_fn.args else None
    if given is not None and init_fn.func is torch.nn.init.uniform_ and given.keys() <= {"a", "b"}:
        return Initial.uniform(given.get("a", 0.0), given.get("b", 1.0))
    if (
        given is not None
        and init_fn.func is torch.nn.init.normal_
        and given.keys()
        <= {
            "mean",
            "std",
        }
    ):
        return Initial.normal(given.get("mean", 0.0), given.get("std", 1.0))
    raise ArgumentError(
        f"table {name}: init_fn {init_fn!r} cannot run on the servers, which make rows from the "
        "seed; pass planaria.Initial.uniform(low, high), planaria.Initial.normal(mean, std), or "
        "functools.partial of torch.nn.init.uniform_ or normal_ with keywords"
    )


def result_names(configs: Sequence[BaseEmbeddingConfig]) -> list[str]:
    """By table, then by feature: a feature of several tables has a result from each."""
    tables_of = Counter(name for config in configs for name in config.feature_names)
    return [
        name if tables_of[name] == 1 else f"{name}@{config.name}"
        for config in configs
        for name in config.feature_names
    ]
