"""Collections of tables that live on servers, with TorchRec's interface; one table, with torch's.

They are modules without parameters: the rows of a batch come when forward needs them, and their
gradients go to the job's step in backward. The optimizer is a part of the job, not of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from planaria.errors import ArgumentError
from planaria.tables import Initial, Table
from planaria.torch.bridge import as_keyed, like
from planaria.torch.configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    checked_configs,
    result_names,
)
from planaria.torch.devices import CPU, checked_device
from planaria.torch.features import FeatureTables
from planaria.torch.jagged import JaggedTensor
from planaria.torch.keyed import KeyedTensor
from planaria.torch.keyed_jagged import KeyedJaggedTensor
from planaria.torch.lookups import Call, pooled, single
from planaria.torch.sparse import Prepared


class _OnServers(nn.Module):  # type: ignore[misc]
    """What the modules of this file have in common."""

    def __init__(self, tables: FeatureTables, optimizer: Any, device: Any) -> None:
        super().__init__()
        self.tables = tables
        self.optimizer = optimizer
        tables.use(optimizer)
        self._device = None if device is None else checked_device(device)

    @property
    def device(self) -> torch.device:
        """Where results are: the one that was named, or else the job's (`trainer.device`)."""
        if self._device is not None:
            return self._device
        return CPU if self.tables.bound is None else self.tables.bound.device

    def _call(self, keyed: KeyedJaggedTensor, sources: tuple[Any, ...]) -> Call:
        bound = self.tables.in_job()
        step = bound.steps.current_step()
        prepared = self.tables.prepared(step, keyed, sources)
        return Call.of(step, prepared, bound.arenas, self.tables.width, self.device)

    def extra_repr(self) -> str:
        lines = [
            f"{table.name}: {table.rows} x {table.dim}, {', '.join(config.feature_names)}"
            for table, config in zip(self.tables.tables, self.tables.configs, strict=True)
        ]
        return "\n".join(lines if len(lines) <= 8 else [*lines[:7], f"... {len(lines)} tables"])


class EmbeddingBagCollection(_OnServers):
    """TorchRec's EmbeddingBagCollection: KeyedJaggedTensor in, KeyedTensor out.

    The result has a key for each feature of each table, by table, then by feature; a feature of
    several tables is called feature@table. Keys of the batch that no table knows are left alone.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        optimizer: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        """is_weighted: each id has a weight that its row is multiplied by."""
        configs = checked_configs(tables, EmbeddingBagConfig)
        means = [config.name for config in configs if config.pooling == PoolingType.MEAN]
        if is_weighted and means:
            raise ArgumentError(
                f"table {means[0]}: weights go with PoolingType.SUM; divide them by their number "
                "for a weighted mean, or leave is_weighted out"
            )
        tables_of = [config.table() for config in configs]
        super().__init__(FeatureTables(configs, tables_of, _keyed), optimizer, device)
        self._configs = configs
        self._is_weighted = is_weighted
        self._names = result_names(configs)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def prepare(self, features: Any) -> Prepared:
        """Ahead of forward(features), in any thread; see SparseStep.expect."""
        return self.tables.prepare_from(features)

    def forward(self, features: Any) -> Any:
        keyed, came_from_torchrec = as_keyed(features)
        call = self._call(keyed, (features,))
        values = pooled(call, self._weights(keyed, call) if self._is_weighted else [])
        return like(KeyedTensor(self._names, self.tables.dims, values), came_from_torchrec)

    def _weights(self, keyed: KeyedJaggedTensor, call: Call) -> list[torch.Tensor]:
        """Per arena, in the order of its bags; gradients flow back to the batch's."""
        weights, starts = keyed.weights(), keyed.offset_per_key()
        found = []
        for own in call.arenas:
            keys = self.tables.keys_of(keyed, own)
            if keys == list(range(keys[0], keys[0] + len(keys))):
                found.append(weights[starts[keys[0]] : starts[keys[-1] + 1]])
            else:
                found.append(torch.cat([weights[starts[key] : starts[key + 1]] for key in keys]))
        return found


class EmbeddingCollection(_OnServers):
    """TorchRec's EmbeddingCollection: KeyedJaggedTensor in, by feature a JaggedTensor of rows out.

    A feature of several tables is called feature@table. Tables may have several sizes.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        configs = checked_configs(tables, EmbeddingConfig)
        tables_of = [config.table() for config in configs]
        super().__init__(FeatureTables(configs, tables_of, _keyed), optimizer, device)
        self._configs = configs
        self._names = result_names(configs)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def embedding_dim(self) -> int:
        """Of all tables, where it is one."""
        sizes = {config.embedding_dim for config in self._configs}
        if len(sizes) > 1:
            each = ", ".join(map(str, sorted(sizes)))
            raise ArgumentError(
                f"embedding_dim: the tables have several, {each}; ask embedding_configs()"
            )
        return sizes.pop()

    def need_indices(self) -> bool:
        """Results have no ids beside their rows: the batch has them."""
        return False

    def embedding_names_by_table(self) -> list[list[str]]:
        names = iter(self._names)
        return [[next(names) for _ in config.feature_names] for config in self._configs]

    def prepare(self, features: Any) -> Prepared:
        """Ahead of forward(features), in any thread; see SparseStep.expect."""
        return self.tables.prepare_from(features)

    def forward(self, features: Any) -> Any:
        keyed, came_from_torchrec = as_keyed(features)
        call = self._call(keyed, (features,))
        by_key, lengths = keyed.length_per_key(), keyed.lengths().to(self.device)
        samples = keyed.stride()
        found: dict[int, JaggedTensor] = {}
        for rows, own in zip(single(call), call.arenas, strict=True):
            keys = self.tables.keys_of(keyed, own)
            # One split, whose backward is one concatenation, whatever the number of features.
            parts = rows.split([by_key[key] for key in keys])
            for number, key, part in zip(own.numbers, keys, parts, strict=True):
                of_key = lengths[key * samples : (key + 1) * samples]
                found[number] = JaggedTensor._cut(part, None, of_key)
        return like({name: found[n] for n, name in enumerate(self._names)}, came_from_torchrec)


class EmbeddingBag(_OnServers):
    """nn.EmbeddingBag with its rows on servers: one table, input and offsets in, bags out.

    Weights start as nn.EmbeddingBag's do, normal with mean 0 and std 1, unless `initial` says
    otherwise. Gradients are sparse whether or not sparse=True is passed.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        name: str = "",
        initial: Initial | None = None,
        optimizer: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        """name: the table's, in checkpoints and exports; without it, one by order of creation."""
        if mode not in ("sum", "mean"):
            raise ArgumentError(
                f"mode must be 'sum' or 'mean', not {mode!r}; for max, take EmbeddingCollection "
                "and reduce the rows of each bag yourself"
            )
        if padding_idx is not None:
            raise ArgumentError(
                "padding_idx is not supported; leave the padding out of the bags, whose lengths "
                "may differ, or give it per_sample_weights of 0"
            )
        config = EmbeddingBagConfig(
            num_embeddings, embedding_dim, name, ["input"], pooling=PoolingType[mode.upper()]
        )
        table = Table(name, num_embeddings, embedding_dim, initial or Initial.normal(0.0, 1.0))
        self._keyed = partial(_keyed_bags, include_last_offset)
        super().__init__(FeatureTables([config], [table], self._keyed), optimizer, device)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.include_last_offset = mode, include_last_offset

    def prepare(self, input: torch.Tensor, offsets: torch.Tensor | None = None) -> Prepared:
        """Ahead of forward(input, offsets, ...), in any thread; see SparseStep.expect."""
        return self.tables.prepare_from(input, offsets)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input: ids [N] with offsets [bags], or [bags, ids of each]; gives [bags, dim]."""
        if per_sample_weights is not None and self.mode != "sum":
            raise ArgumentError("per_sample_weights go with mode='sum', as torch's do")
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise ArgumentError(
                f"per_sample_weights must have the shape of input, {list(input.shape)}, not "
                f"{list(per_sample_weights.shape)}"
            )
        call = self._call(self._keyed(input, offsets), (input, offsets))
        return pooled(call, [] if per_sample_weights is None else [per_sample_weights.flatten()])


def _keyed(features: Any) -> KeyedJaggedTensor:
    return as_keyed(features)[0]


def _keyed_bags(
    include_last_offset: bool, input: torch.Tensor, offsets: torch.Tensor | None
) -> KeyedJaggedTensor:
    """As nn.EmbeddingBag is called."""
    if input.ndim == 2:
        if offsets is not None:
            raise ArgumentError("input of two dimensions has its bags in rows; omit offsets")
        bags, each = input.shape
        lengths = torch.full((bags,), each, dtype=torch.int64, device=input.device)
        return KeyedJaggedTensor(["input"], input.flatten(), lengths=lengths, stride=bags)
    if input.ndim != 1 or offsets is None or offsets.ndim != 1:
        raise ArgumentError(
            "input must have two dimensions, or one with offsets of one dimension; got "
            f"{list(input.shape)} with {'no' if offsets is None else list(offsets.shape)} "
            "offsets"
        )
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_tensor([len(input)])])
    return KeyedJaggedTensor(["input"], input, offsets=offsets)
