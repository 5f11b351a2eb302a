"""A trained model out of its checkpoint, as files that NumPy, torch or safetensors read.

    model.json          step, samples, name, shape and optimizer of each table, and the job's config

    tables/NAME.npy     float32[rows, dim]; or tables.pt, or tables.safetensors, with the keys that
                        TorchRec's EmbeddingBagCollection has, embedding_bags.NAME.weight
    dense.npz           bottom.0.weight [outputs, inputs], bottom.0.bias, ..., top.0.weight, ...;
                        or dense.pt, or dense.safetensors
    optimizer/NAME.PART.npy   if wanted, what the optimizer keeps for each row; or optimizer.pt, ...

Rows are streamed into files that are mapped, so a model may be larger than the memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from planaria.checkpoints import Checkpoint, Piece, latest, list_checkpoints
from planaria.checkpoints.folders import AnyFolder, LocalFolder, open_folder
from planaria.config import Config
from planaria.errors import CheckpointError
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.tables import Arena, Table
from planaria.tensors import WRITERS, Mapped, Tensor, Writing
from planaria.trainer.dense import dlrm_layers

FORMATS = tuple(WRITERS)
_ALONE = Layout.fresh(1, 0, 1)  # one place that holds all rows


def open_model(
    folder: AnyFolder, step: int | None = None, say: Callable[[str], None] = lambda line: None
) -> Checkpoint:
    """The checkpoint of a step, or the newest whole one; say: told which newer ones are not."""
    root = open_folder(folder)
    if isinstance(root, LocalFolder) and not root.path.is_dir():
        raise CheckpointError(
            f"the folder '{folder}' does not exist; name checkpoint.path of a job"
        )
    if step is not None:
        steps = [one.step for one in list_checkpoints(root)]
        if step not in steps:
            has = ", ".join(map(str, steps)) or "none at all"
            raise CheckpointError(f"'{folder}' has no checkpoint of step {step}; it has {has}")
        return Checkpoint(root, step)
    found = latest(root)
    for one in found.passed_over:
        say(f"passed over step {one.step}: {one.problem}")
    if found.checkpoint is None:
        raise CheckpointError(f"'{folder}' has no whole checkpoint")
    return found.checkpoint


def export(
    checkpoint: Checkpoint,
    out: Path,
    progress: Callable[[int], None] = lambda rows: None,
    *,
    to: str = "numpy",
    with_state: bool = False,
) -> None:
    """Writes the model to `out`, which must not exist. It appears when it is complete.

    progress: told how many more rows are written.
    to: one of FORMATS. with_state: what the optimizers keep for each row as well.
    """
    check_free(out)
    room = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        _write_tables(checkpoint, room, WRITERS[to], with_state, progress)
        if dense := _dense_arrays(checkpoint):
            _write_dense(room, to, dense)
        (room / "model.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(_facts(checkpoint))) + b"\n"
        )
        room.chmod(0o755)
        os.rename(room, out)
    except OSError as error:
        raise CheckpointError(f"the model could not be written to {out}: {error}") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def check_free(out: Path) -> None:
    if out.exists():
        raise CheckpointError(f"'{out}' exists; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"the folder of '{out}' does not exist")


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": manifest.step,
        "samples": manifest.samples,
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "optimizer": (table.optimizer or manifest.optimizer).name,
            }
            for table in manifest.tables
        ],
        "config": manifest.config,
    }


class _Column(NamedTuple):
    """What some words of a table's records become."""

    tensor: Tensor
    words: slice
    goes_to: str  # the file, or the folder


def _columns(table: Table, optimizer: Optimizer, with_state: bool) -> list[_Column]:
    key = f"embedding_bags.{table.name}.weight"
    weights = Tensor(key, table.name, (table.rows, table.dim))
    found, at = [_Column(weights, slice(0, table.dim), "tables")], table.dim
    for part in optimizer.state_parts(table.dim) if with_state else ():
        shape = (table.rows, *part.shape)
        file = f"{table.name}.{part.name}"
        tensor = Tensor(file, file, shape, part.dtype)
        words = slice(at, at + (part.shape[0] if part.shape else 1))
        found.append(_Column(tensor, words, "optimizer"))
        at = words.stop
    return found


def _write_tables(
    checkpoint: Checkpoint,
    room: Path,
    writer: Writing,
    with_state: bool,
    progress: Callable[[int], None],
) -> None:
    manifest = checkpoint.manifest
    columns = [
        _columns(table, table.optimizer or manifest.optimizer, with_state)
        for table in manifest.tables
    ]
    with ExitStack() as files:
        mapped: dict[str, Mapped] = {}
        for place in ("tables", "optimizer"):
            tensors = [c.tensor for of in columns for c in of if c.goes_to == place]
            if tensors:
                mapped[place] = files.enter_context(writer(room / place, tensors))
        for piece in checkpoint.read(_ALONE, 0):
            _put(checkpoint.arenas[piece.arena], piece, columns, mapped)
            progress(len(piece.index))


def _put(
    arena: Arena, piece: Piece, columns: Sequence[Sequence[_Column]], mapped: Mapping[str, Mapped]
) -> None:
    rows = _ALONE.arena(arena.rows).row_at(0, piece.index)
    which = np.searchsorted(arena.first_rows, rows, side="right") - 1
    for number in np.unique(which):
        some = np.flatnonzero(which == number)
        own = rows[some] - arena.first_rows[number]
        for tensor, words, goes_to in columns[int(arena.table_ids[number])]:
            values = np.ascontiguousarray(piece.records[some, words]).view(tensor.dtype)
            mapped[goes_to][tensor.key][own] = values.reshape(len(own), *tensor.shape[1:])


def _write_dense(room: Path, to: str, dense: Mapping[str, Any]) -> None:
    if to == "numpy":
        np.savez(room / "dense.npz", **dense)
        return
    tensors = [Tensor(name, name, array.shape) for name, array in dense.items()]
    with WRITERS[to](room / "dense", tensors) as mapped:
        for name, array in dense.items():
            mapped[name][:] = array


def _dense_arrays(checkpoint: Checkpoint) -> dict[str, Any]:
    """By name, float32; none where the dense network is not that of the built-in model."""
    config = Config.from_dict(checkpoint.manifest.config)
    built_in = config.data.source != "script" and len(config.arenas) == 1
    if not built_in or not checkpoint.manifest.dense_parts:
        return {}
    model = config.model
    rest = checkpoint.dense()["dense"].view(np.float32)
    layers = dlrm_layers(len(config.tables), model.dim, model.bottom, model.top)
    names = [f"bottom.{i}" for i in range(len(model.bottom) + 1)]
    names += [f"top.{i}" for i in range(len(model.top) + 1)]
    found: dict[str, Any] = {}
    for name, (inputs, outputs) in zip(names, layers, strict=True):
        weights, biases, rest = np.split(rest, [inputs * outputs, (inputs + 1) * outputs])
        found[f"{name}.weight"] = weights.reshape(outputs, inputs)
        found[f"{name}.bias"] = biases
    return found
