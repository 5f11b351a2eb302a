"""Which samples are looked at, and where they come from: the same ones for the same seed.

Samples are cut into stretches, and one run of neighbours is drawn in each, by (seed, stretch). So
all of the data has its part, what changes with time as well, and a file of blocks has few of them
decoded. Runs are short enough that there are many, and as long as RUN where that leaves enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from planaria.config import Config
from planaria.data.presets import PRESETS
from planaria.data.samples import Samples
from planaria.data.schema import Schema
from planaria.errors import ConfigError
from planaria.kernels.twin_numbers import GOLDEN, mix

RUN = 4096
FEWEST_RUNS = 64
Progress = Callable[[], None]


class Readable(Protocol):
    def read(self, start: int, count: int) -> Samples: ...


@dataclass(frozen=True)
class Feature:
    key: str  # of the samples
    table: str


@dataclass(frozen=True)
class SurveyedTable:
    name: str
    rows: int
    record_bytes: int | None  # None: only the data are known, and no job


@dataclass(frozen=True)
class Surveyed:
    """What is to be sampled; whoever opened it calls `close`."""

    source: Readable
    samples: int
    features: tuple[Feature, ...]
    tables: tuple[SurveyedTable, ...]
    close: Callable[[], None] = lambda: None


def sampled_runs(samples: int, share: float, seed: int) -> Iterator[tuple[int, int]]:
    """(start, count), ascending and apart from each other; about `share` of all samples."""
    wanted = min(max(round(samples * share), 1), samples)
    run = max(min(RUN, wanted // FEWEST_RUNS), 1)
    runs = -(-wanted // run)
    key = mix(np.array([seed], np.uint64) + GOLDEN)
    others = samples - wanted
    for number in range(runs):
        first, end = (wanted * edge // runs for edge in (number, number + 1))
        passed, more = (others * edge // runs for edge in (number, number + 1))
        draw = int(mix(mix(np.array([number], np.uint64) * GOLDEN) ^ key)[0])
        yield first + passed + draw % (more - passed + 1), end - first


def open_job(config: Config, on_progress: Progress = lambda: None) -> Surveyed:
    """The samples that a job trains on."""
    if config.data.source == "script":
        raise ConfigError(
            "data.source: a script reads its samples itself; give planaria stats the files that "
            "it reads, and --schema"
        )
    from planaria.models.building import Rows, find_schema  # imports torch
    from planaria.trainer.training import make_source

    schema, rule = find_schema(config), config.optimizer_rule
    if config.data.source == "files":
        size = 4 * rule.record_words(config.model.dim)
        sizes = [SurveyedTable(name, rows, size) for name, rows in schema.tables.items()]
        return _of_files(config, schema, tuple(sizes), on_progress)
    source = make_source(config, on_progress)
    samples = source.samples or config.steps * config.batch
    tables = [
        SurveyedTable(table.name, table.rows, 4 * (table.optimizer or rule).record_words(table.dim))
        for table in config.tables
    ]
    training = Rows(source, schema.keys, 0, samples)
    close = getattr(source, "close", lambda: None)
    return Surveyed(training, samples, _features(schema), tuple(tables), close)


def _of_files(
    config: Config, schema: Schema, tables: tuple[SurveyedTable, ...], on_progress: Progress
) -> Surveyed:
    from planaria.data.opening import open_source  # imports PyArrow
    from planaria.data.split import split_source

    assert config.data.path is not None
    source = open_source(config.data.path, schema, on_progress)
    training, _ = split_source(source, config.data.validation, config.seed)
    return Surveyed(training, training.samples, _features(schema), tables, source.close)


def open_files(
    paths: list[str], schema: str | None, on_progress: Progress = lambda: None
) -> Surveyed:
    """All samples of some files. schema: a preset or a file; without, one that is recognised."""
    from planaria.data.opening import open_source, open_tables  # imports PyArrow

    if schema is None:
        opened = open_tables(paths)
        opened.tables.close()
        found = opened.preset
        if found is None:
            raise ConfigError(
                f"--schema: nobody knows what the columns of {paths[0]} are; name a schema, which "
                "planaria data inspect --write makes"
            )
    else:
        found = PRESETS[schema] if schema in PRESETS else Schema.load(Path(schema))
    source = open_source(paths, found, on_progress)
    tables = [SurveyedTable(name, rows, None) for name, rows in found.tables.items()]
    return Surveyed(source, source.samples, _features(found), tuple(tables), source.close)


def _features(schema: Schema) -> tuple[Feature, ...]:
    return tuple(Feature(one.column, one.table_name) for one in schema.sparse)
