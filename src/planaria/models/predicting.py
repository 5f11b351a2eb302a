"""Scores for the samples of a file, by a model out of its checkpoint, in this process alone.

Tables are mapped files that the rows of the checkpoint are streamed into, so a model may be larger
than the memory; samples are read and scored some at a time.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from planaria.checkpoints import Checkpoint
from planaria.config import Config
from planaria.data import PRESETS, Evaluation, Quality, Schema, chances
from planaria.data.blocks import Paths, find_files
from planaria.data.csv import ENDINGS as TEXT
from planaria.data.opening import first_line, open_source, open_tables
from planaria.data.parquet import ENDINGS as PARQUET
from planaria.errors import ConfigError, DataError
from planaria.exporting import export
from planaria.files import write_atomically
from planaria.kernels.types import Floats
from planaria.models.building import (
    as_tensors,
    find_schema,
    is_weighted,
    make_model,
    one_each,
    table_configs,
)
from planaria.torch import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from planaria.torch.frozen import unpack

SCORED_SAMPLES = 16_384  # at a time


class MappedTables(nn.Module):  # type: ignore[misc]
    """A collection whose tables are files: TABLE.npy in a folder."""

    def __init__(self, configs: list[EmbeddingBagConfig], folder: Path, weighted: bool) -> None:
        super().__init__()
        self._configs, self._weighted = configs, weighted
        self._tables = [
            # Copied on writing, which nobody does: torch warns of arrays that cannot be written.
            torch.from_numpy(np.load(folder / f"{one.name}.npy", mmap_mode="c"))
            for one in configs
        ]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        keys, pooled = [], []
        for config, table in zip(self._configs, self._tables, strict=True):
            for name in config.feature_names:
                bags = features[name]
                weights = bags.weights() if self._weighted else None
                pooled.append(
                    nn.functional.embedding_bag(
                        bags.values(),
                        table,
                        bags.offsets(),
                        mode="sum",
                        per_sample_weights=weights,
                        include_last_offset=True,
                    )
                )
                keys.append(name)
        dims = [one.shape[1] for one in pooled]
        return KeyedTensor(keys, dims, torch.cat(pooled, 1))


class Scores(NamedTuple):
    """Of some samples; labels: None where the file has none."""

    logits: Floats
    labels: Floats | None


class Scored(NamedTuple):
    samples: int
    quality: Quality | None  # None without labels, and where all are equal


class Predictor:
    """A model that is ready to score. Use it in a `with` statement: it has files of its own."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        scratch: Path,
        progress: Callable[[int], None] = lambda rows: None,
        schema: str | None = None,
    ) -> None:
        """scratch: a folder with room for the tables. progress: told of more rows that are read.
        schema: where the job's is by now.
        """
        config = Config.from_dict(checkpoint.manifest.config)
        if schema is not None:
            if config.data.source != "files":
                raise ConfigError("--schema: the job was trained without one; leave it out")
            config = replace(config, data=replace(config.data, schema=schema))
        self.config = config
        if config.data.source == "script":
            raise ConfigError(
                "the checkpoint is of a script, whose model only the script knows; planaria export "
                "writes its tables and what it has kept"
            )
        self.schema = _schema(config)
        self._room = ExitStack()
        folder = Path(self._room.enter_context(tempfile.TemporaryDirectory(dir=scratch))) / "model"
        try:
            export(checkpoint, folder, progress)
            configs = table_configs(self.schema, config.model.dim)
            _check_tables(configs, config)
            tables = MappedTables(configs, folder / "tables", is_weighted(self.schema))
            self.model = make_model(config, self.schema, tables).eval()
            self.model.load_state_dict(_dense_state(config, checkpoint, folder), strict=True)
        except BaseException:
            self._room.close()
            raise

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.close()

    def score(self, paths: Paths) -> Iterator[Scores]:
        """The chances of all samples of some files, in their order."""
        schema = _without_missing_label(paths, self.schema)
        with open_source(paths, schema) as source, torch.no_grad():
            for first in range(0, source.samples, SCORED_SAMPLES):
                dense, features, labels = as_tensors(source.read(first, SCORED_SAMPLES))
                logits = one_each(self.model(dense, features)).numpy()
                yield Scores(logits, labels.numpy() if schema.label else None)


def _check_tables(found: list[EmbeddingBagConfig], config: Config) -> None:
    """Whether the schema is still the one that the job was trained with."""
    names = {one.name: one.num_embeddings for one in found}
    trained = {one.name: one.rows for one in config.tables}
    if names != trained:
        raise ConfigError(
            f"data.schema: {config.data.schema} has the tables {names}, but the model was trained "
            f"with {trained} (name: rows); name its schema by --schema"
        )


def write_scores(scores: Iterator[Scores], out: Path) -> Scored:
    """A chance for each sample: as text with a header line, or for NumPy; `out` says by its end."""
    judged, kept = Evaluation(), [np.empty(0, np.float32)]
    for logits, labels in scores:
        kept.append(chances(logits).astype(np.float32))
        if labels is not None:
            judged.add(labels, logits)
    content, found = io.BytesIO(), np.concatenate(kept)
    if out.suffix == ".npy":
        np.save(content, found)
    else:
        np.savetxt(content, found, fmt="%.9g", header="score", comments="")
    try:
        write_atomically(out, content.getvalue())
    except OSError as error:
        raise DataError(f"the scores could not be written to {out}: {error}") from error
    known = len(judged) > 0 and judged.labels.min() != judged.labels.max()
    return Scored(len(found), judged.measure() if known else None)


def _schema(config: Config) -> Schema:
    """Samples of Criteo's shape are read as Criteo's files, from text or Parquet."""
    if config.data.source == "files":
        return find_schema(config)
    preset = PRESETS["criteo"]
    if len(config.tables) != len(preset.sparse):
        raise ConfigError(
            f"the model has {len(config.tables)} tables, but a file of Criteo's shape has "
            f"{len(preset.sparse)}; train on files with a schema to score others"
        )
    pairs = zip(preset.sparse, config.tables, strict=True)
    sparse = tuple(
        msgspec.structs.replace(one, rows=table.rows, table=table.name) for one, table in pairs
    )
    return msgspec.structs.replace(preset, sparse=sparse)


def _without_missing_label(paths: Paths, schema: Schema) -> Schema:
    """Samples that are to be scored need not be labelled."""
    first = find_files(paths, (*PARQUET, *TEXT))[0]
    if schema.columns and not first.endswith(PARQUET):  # no header: there is one column fewer
        rest = tuple(name for name in schema.columns if name != schema.label)
        if first_line(first).count(schema.delimiter) + 1 == len(rest):
            return msgspec.structs.replace(schema, label="", columns=rest)
        return schema
    with closing(open_tables(paths, schema).tables) as tables:
        labelled = schema.label in tables.columns
    return schema if labelled else msgspec.structs.replace(schema, label="")


def _dense_state(config: Config, checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Of the dense part, by the names of planaria.models."""
    if not config.is_built_in:
        kept: dict[str, dict[str, Any]] = unpack(checkpoint.dense()["dense"], on_cpu=True)
        return kept["model"]
    found: dict[str, Any] = {}
    with np.load(folder / "dense.npz") as arrays:
        for name, array in arrays.items():
            part, number, kind = name.split(".")
            module = {"bottom": "dense_arch", "top": "over_arch"}[part]
            found[f"{module}.{2 * int(number)}.{kind}"] = torch.from_numpy(array)  # ReLUs between
    return found
