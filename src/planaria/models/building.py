"""What a configuration names: samples, a model for them, and the optimizer of its dense part."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from planaria.config import Config
from planaria.data import (
    DENSE_FEATURES,
    PRESETS,
    Batch,
    Samples,
    Schema,
    Source,
    Sparse,
)
from planaria.data.opening import open_source
from planaria.data.split import split_source
from planaria.errors import ArgumentError, ConfigError
from planaria.models.registry import MODELS, load_model
from planaria.torch import EmbeddingBagConfig, KeyedJaggedTensor
from planaria.torch.devices import CPU
from planaria.trainer.training import make_source

Progress = Callable[[], None]


class Readable(Protocol):
    """Samples by number."""

    @property
    def samples(self) -> int | None: ...

    def read(self, start: int, count: int) -> Samples: ...


@dataclass(frozen=True)
class Data:
    """Samples to learn from, held-out ones to be judged by, and what they consist of."""

    training: Readable
    held_out: Readable
    schema: Schema


class Rows:
    """One row per table and sample, as Criteo's data has it, from `first` on."""

    def __init__(
        self, source: Source, keys: Sequence[str], first: int, samples: int | None
    ) -> None:
        self.samples = samples
        self._source, self._keys, self._first = source, tuple(keys), first

    def read(self, start: int, count: int) -> Samples:
        batch: Batch = self._source.read(self._first + start, count)
        lengths = np.ones(batch.ids.size, np.int32)
        values = np.ascontiguousarray(batch.ids.T).ravel()
        return Samples(batch.labels, batch.dense, self._keys, values, lengths)


def find_schema(config: Config) -> Schema:
    """Of the samples: a preset, a file, or one that is made for those of Criteo's shape."""
    wanted = config.data.schema
    if wanted is None:
        tables = zip(config.tables, config.model.table_rows, strict=True)
        numbers = [f"I{n}" for n in range(1, DENSE_FEATURES + 1)]
        return Schema.from_dict(
            {
                "label": "label",
                "dense": [{"column": name} for name in numbers],
                "sparse": [{"column": table.name, "rows": rows} for table, rows in tables],
            }
        )
    return PRESETS[wanted] if wanted in PRESETS else Schema.load(wanted)


def open_data(config: Config, on_progress: Progress = lambda: None) -> Data:
    """on_progress: called now and then while files are scanned."""
    data, schema = config.data, find_schema(config)
    if data.source == "files":
        assert data.path is not None
        source = open_source(data.path, schema, on_progress)
        return Data(*split_source(source, data.validation, config.seed), schema)
    samples = make_source(config, on_progress)
    learnt = config.steps * config.batch  # the held-out ones lie behind them
    training = Rows(samples, schema.keys, 0, samples.samples)
    return Data(training, Rows(samples, schema.keys, learnt, data.test_samples), schema)


def table_configs(schema: Schema, dim: int) -> list[EmbeddingBagConfig]:
    """A table for each name, with all columns that share it."""
    columns: dict[str, list[Sparse]] = {}
    for one in schema.sparse:
        columns.setdefault(one.table_name, []).append(one)
    return [
        EmbeddingBagConfig(some[0].rows, dim, name=name, feature_names=[one.column for one in some])
        for name, some in columns.items()
    ]


def make_model(config: Config, schema: Schema, collection: nn.Module) -> nn.Module:
    """Of the name in the configuration, with its layers; a user's class has layers of its own."""
    model, dense = config.model, len(schema.dense)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: what lies there must not pass for one of our modules
    made = load_model(model.name)
    sizes: dict[str, Any] = {}
    if model.name in ("dlrm", "dcn_v2"):
        sizes["over_arch_layer_sizes"] = (*model.top, 1)
    elif model.name in MODELS:
        sizes["deep_layer_sizes"] = (*model.top, 1)
    if model.name == "dlrm" and dense:
        sizes["dense_arch_layer_sizes"] = (*model.bottom, model.dim)
    try:
        return made(collection, dense_in_features=dense, **sizes)
    except ArgumentError as error:
        raise ConfigError(f"model.name: {model.name} does not fit the data: {error}") from None


def make_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For the dense part: the rule that the tables have, as torch has it."""
    rule, parameters = config.optimizer_rule, list(parameters)
    # One native call for all of them; torch itself takes the loop in Python on a CPU.
    fused = all(one.is_floating_point() and one.device == CPU for one in parameters)
    common = {"lr": rule.lr, "weight_decay": rule.weight_decay, "fused": fused or None}
    if rule.name == "sgd":
        return torch.optim.SGD(parameters, **common)
    if rule.name == "momentum":
        return torch.optim.SGD(parameters, momentum=rule.momentum, **common)
    if rule.name == "adam":
        betas = (rule.beta1, rule.beta2)
        return torch.optim.Adam(parameters, betas=betas, eps=rule.eps, **common)
    return torch.optim.Adagrad(
        parameters,
        eps=rule.eps,
        initial_accumulator_value=rule.initial_accumulator,
        **common,
    )


def as_tensors(samples: Samples) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """(dense features, ids by key, labels)."""
    weights = samples.weights
    features = KeyedJaggedTensor(
        list(samples.keys),
        torch.from_numpy(samples.values),
        weights=None if weights is None else torch.from_numpy(weights),
        lengths=torch.from_numpy(samples.lengths),
        stride=len(samples),
    )
    return torch.from_numpy(samples.dense), features, torch.from_numpy(samples.labels)


def one_each(logits: torch.Tensor) -> torch.Tensor:
    """What a model gives for a batch, as [B]."""
    if logits.ndim == 1 or logits.shape[1:] == (1,):
        return logits.reshape(-1)
    raise ConfigError(
        "model.name: forward must give a logit for each sample, [B] or [B, 1], not "
        f"{list(logits.shape)}"
    )


def is_weighted(schema: Schema) -> bool:
    return any(one.weights is not None for one in schema.sparse)
