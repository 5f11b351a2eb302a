"""A checkpoint out of a model from elsewhere, so that a job starts with it: planaria import.

What the model lacks begins as it does in a fresh job. One that lacks nothing, because `export`
wrote it with what optimizers keep, goes on at its step, exactly; any other begins at step 0.

Rows are read and written piece by piece, table by table.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planaria.checkpoints import (
    DENSE,
    Facts,
    Lease,
    PartSummary,
    PartWriter,
    discard,
    list_checkpoints,
    new_job_id,
    publish,
)
from planaria.checkpoints.chunks import CHUNK_BYTES
from planaria.checkpoints.folders import LocalFolder, open_folder
from planaria.cluster.parts import DENSE_NAME
from planaria.config import Config
from planaria.errors import CheckpointError, ConfigError, DataError
from planaria.exporting import dense_shapes, is_script
from planaria.foreign import PREFIX, Array, Foreign
from planaria.kernels.types import Bytes, Records
from planaria.layout import Layout
from planaria.optimizers import Optimizer, StatePart
from planaria.tables import Table
from planaria.trainer.dense import DenseState

IN_ORDER = Layout(np.zeros((1, 1), np.int32), 1)
"""One place and one group: record numbers are row numbers."""
COLLECTIONS = (PREFIX, "embeddings.")  # TorchRec's: what is in them is a table


@dataclass(frozen=True)
class TableSource:
    """Where the records of a table come from."""

    table: Table
    optimizer: Optimizer
    weights: Array
    parts: Sequence[tuple[StatePart, Array | None]]  # None: as a fresh job has it


@dataclass(frozen=True)
class Fitted:
    """A model and the job that it fits."""

    config: Config
    step: int
    tables: Sequence[TableSource]  # as the job numbers them
    dense: Bytes | None  # None: as a fresh job makes it
    notes: Sequence[str]  # what the user should know


# ------------------------------------------------------------------ whether it fits


def fit(model: Foreign, config: Config) -> Fitted:
    """Raises ConfigError, with the name of the table, if the model is not one of this job."""
    keys = _match(model, config.tables)
    tables = [_source(model, t, t.optimizer or config.optimizer_rule, keys) for t in config.tables]
    dense, notes = _dense(model, config)
    lacking = [s.table.name for s in tables if any(array is None for _, array in s.parts)]
    if lacking:
        notes.append(f"what optimizers keep begins afresh for {_some(lacking)}")
    whole = not lacking and dense is not None and model.state is dense
    step = int(model.facts.get("step", 0)) if whole else 0
    if not whole and model.facts.get("step"):
        notes.append("the job begins at step 0; a model of planaria export --optimizer goes on")
    return Fitted(config, step, tables, dense, notes)


def _match(model: Foreign, tables: Sequence[Table]) -> dict[str, str]:
    """The keys of the weights, by table."""
    left = [key for key in model.arrays if key.endswith(".weight")]
    if model.facts:  # a script may have kept what is called like a table
        left = [key for key in left if key.startswith(PREFIX)]
    found: dict[str, str] = {}
    # The longest first: a key may end in the name of a.b, and so in that of b.
    for table in sorted(tables, key=lambda table: -len(table.name)):
        end = f"{table.name}.weight"
        keys = [key for key in left if key == PREFIX + end]
        keys = keys or [key for key in left if key == end or key.endswith(f".{end}")]
        if len(keys) != 1:
            has = f"{_some(keys)}, more than one" if keys else f"{_some(left) or 'none'}"
            raise ConfigError(
                f"table {table.name}: expected one key that ends in {end} in {model.path}, got "
                f"{has}; give the job's settings by --config, --set or --script, or rename the key"
            )
        found[table.name] = keys[0]
        left.remove(keys[0])
    for key in left:
        for collection in COLLECTIONS:
            _, is_table, name = f".{key}".rpartition(f".{collection}")
            if is_table:
                raise ConfigError(
                    f"table {name.removesuffix('.weight')}: {model.path} has it, and the job does "
                    f"not; declare it in the job, or take {key} out of the model"
                )
    return found


def _source(
    model: Foreign, table: Table, optimizer: Optimizer, keys: dict[str, str]
) -> TableSource:
    weights = model.arrays[keys[table.name]]
    _check(table, "weights", weights, (table.rows, table.dim), "float32")
    parts: list[tuple[StatePart, Array | None]] = []
    were = {one["name"]: one["optimizer"] for one in model.facts.get("tables", ())}
    same = were.get(table.name, optimizer.name) == optimizer.name
    for part in optimizer.state_parts(table.dim):
        array = model.arrays.get(f"{PREFIX}{table.name}.{part.name}") if same else None
        if array is not None:
            _check(table, part.name, array, (table.rows, *part.shape), part.dtype)
        parts.append((part, array))
    return TableSource(table, optimizer, weights, parts)


def _check(table: Table, what: str, array: Array, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape:
        raise ConfigError(
            f"table {table.name}: expected {what} of {_shape(shape)}, as the job has it, got "
            f"{_shape(array.shape)}; set the job's rows and dim to the model's"
        )
    if array.dtype != dtype:
        raise ConfigError(
            f"table {table.name}: expected {what} of {dtype}, got {array.dtype}; convert the model"
        )


def _dense(model: Foreign, config: Config) -> tuple[Bytes | None, list[str]]:
    """The bytes that trainers begin with, and what is to be said of them."""
    script = is_script(config.to_dict())
    if model.state is not None and _is_of(model, config):
        return model.state, []
    fresh = "the script's own, before its first step" if script else "a fresh job's"
    shapes = {} if script else dense_shapes(config)
    there = [key for key in shapes if key in model.arrays]
    if not there:
        return None, [f"the dense part is {fresh}"]
    for key, shape in shapes.items():
        array = model.arrays.get(key)
        if array is None or (array.shape, array.dtype) != (shape, "float32"):
            got = "none" if array is None else f"{array.dtype} of {_shape(array.shape)}"
            raise ConfigError(
                f"model: expected {key}, float32 of {_shape(shape)}, in {model.path}, got {got}; "
                "set model.bottom and model.top to the model's, or take its dense part out"
            )
    flat = np.concatenate([np.ravel(model.arrays[key].read()) for key in shapes])
    state = DenseState(len(flat), config.optimizer_rule, initial=flat.astype(np.float32))
    return state.export(), []


def _is_of(model: Foreign, config: Config) -> bool:
    """Whether the bytes of a dense part are those of such a job."""
    was = model.facts.get("config", {})
    if is_script(was) or is_script(config.to_dict()):
        return is_script(was) and is_script(config.to_dict())
    parameters = sum(int(np.prod(shape)) for shape in dense_shapes(config).values())
    if model.state is None or not parameters:
        return False
    size = 4 * DenseState(parameters, config.optimizer_rule).words
    same = was.get("optimizer", {}).get("name") == config.optimizer.name
    return same and len(model.state) == size


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ------------------------------------------------------------------ the checkpoint


def check_empty(folder: str) -> None:
    if there := [one.step for one in list_checkpoints(folder)]:
        raise ConfigError(
            f"'{folder}' has checkpoints already, of step {_some(list(map(str, there)))}; name "
            "another folder"
        )


def import_model(
    fitted: Fitted, folder: str, progress: Callable[[int], None] = lambda rows: None
) -> None:
    """Makes the checkpoint, from which --resume starts; or leaves nothing behind.

    progress: told how many more rows are written.
    """
    check_empty(folder)
    root, job, step = open_folder(folder), new_job_id(), fitted.step
    is_new = isinstance(root, LocalFolder) and not root.path.exists()
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    lease = Lease(folder, job, owner=owner)
    lease.acquire(time.monotonic())

    def told(rows: int) -> None:
        lease.renew(time.monotonic())
        progress(rows)

    try:
        parts = [_write_records(fitted, folder, job, told)]
        if fitted.dense is not None:
            with PartWriter(folder, step, DENSE, job=job) as part:
                part.add_bytes(DENSE_NAME, fitted.dense)
                parts.append(part.finish())
        publish(folder, step, parts, _checkpoint_facts(fitted, folder, job), lease=lease)
    except BaseException:
        with contextlib.suppress(CheckpointError):
            discard(folder, step, job=job)
        raise
    finally:
        with contextlib.suppress(CheckpointError):
            lease.release()
        if is_new:
            root.remove_if_empty()


def _checkpoint_facts(fitted: Fitted, folder: str, job: str) -> Facts:
    config = fitted.config
    config = replace(config, checkpoint=replace(config.checkpoint, path=folder))
    return Facts(
        config.tables,
        config.optimizer_rule,
        IN_ORDER,
        samples=fitted.step * config.batch,
        config=config.to_dict(),
        extra={"rows": "all"},
        job=job,
    )


def _write_records(
    fitted: Fitted, folder: str, job: str, progress: Callable[[int], None]
) -> PartSummary:
    with PartWriter(folder, fitted.step, 0, job=job) as part:
        for number, arena in enumerate(fitted.config.arenas):
            for table, first in zip(arena.table_ids, arena.first_rows, strict=True):
                at = int(first)
                for records in _records(fitted.tables[table]):
                    part.add(number, at, records)
                    at += len(records)
                    progress(len(records))
        return part.finish()


def _records(source: TableSource) -> Iterable[Records]:
    """Of one table, in the order of its rows; what they are made of is let go with the last."""
    table, dim = source.table, source.table.dim
    fresh = source.optimizer.initial_state(dim)
    weights = source.weights.read()
    parts = [(part, array.read() if array else None) for part, array in source.parts]
    step = max(1, CHUNK_BYTES // (4 * (dim + len(fresh))))
    for start in range(0, table.rows, step):
        rows = slice(start, min(start + step, table.rows))
        records = np.empty((rows.stop - start, dim + len(fresh)), np.uint32)
        records[:, :dim] = _words(weights[rows])
        _refuse_nan(table, records[:, :dim].view(np.float32), start)
        records[:, dim:] = fresh
        at = dim
        for part, array in parts:
            end = at + (part.shape[0] if part.shape else 1)
            if array is not None:
                records[:, at:end] = _words(array[rows]).reshape(len(records), -1)
            at = end
        yield records


def _words(values: Any) -> Any:
    """As uint32, whatever the numbers are, and wherever in a file they lie."""
    return np.array(values, order="C").view(np.uint32)


def _refuse_nan(table: Table, weights: Any, first: int) -> None:
    wrong = np.isnan(weights).any(axis=1)
    if wrong.any():
        raise DataError(
            f"table {table.name}: row {first + int(wrong.argmax())} has a weight that is no number "
            "(NaN), from which nothing can be learnt; import an earlier model"
        )
