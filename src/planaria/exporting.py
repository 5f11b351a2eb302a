"""A trained model out of its checkpoint, as files that NumPy reads.

    model.json              step, samples, name, rows and dim of each table, and the job's config
    tables/NAME.npy         float32[rows, dim]
    dense.npz               bottom.0.weight [outputs, inputs], bottom.0.bias, ..., top.0.weight, ...

Rows are streamed into files that are mapped, so a model may be larger than the memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planaria.checkpoints import Checkpoint, Piece, latest, list_checkpoints
from planaria.checkpoints.folders import AnyFolder, LocalFolder, open_folder
from planaria.config import Config
from planaria.errors import CheckpointError, DamagedCheckpoint
from planaria.layout import Layout
from planaria.tables import Arena
from planaria.trainer.dense import dlrm_layers

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
    checkpoint: Checkpoint, out: Path, progress: Callable[[int], None] = lambda rows: None
) -> None:
    """Writes the model to `out`, which must not exist. It appears when it is complete.

    progress: told how many more rows are written.
    """
    check_free(out)
    room = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        _write_tables(checkpoint, room / "tables", progress)
        np.savez(room / "dense.npz", **_dense_arrays(checkpoint))
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
            {"name": table.name, "rows": table.rows, "dim": table.dim} for table in manifest.tables
        ],
        "config": manifest.config,
    }


def _write_tables(checkpoint: Checkpoint, folder: Path, progress: Callable[[int], None]) -> None:
    folder.mkdir()
    tables: list[Any] = []
    for table in checkpoint.manifest.tables:
        path = _inside(folder, f"{table.name}.npy")
        tables.append(np.lib.format.open_memmap(path, "w+", np.float32, (table.rows, table.dim)))
        with path.open("r+b") as file:  # a mapped page that finds no room ends the process
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    for piece in checkpoint.read(_ALONE, 0):
        _put(checkpoint.arenas[piece.arena], piece, tables)
        progress(len(piece.index))
    for table in tables:
        table.flush()


def _inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder, whatever its name: manifests are checked when they are read,
    and what is written where it should not be cannot be taken back.
    """
    path = folder / name
    if path.resolve().parent != folder.resolve() or path.name != name:
        raise DamagedCheckpoint(f"{name!r} is not the name of a file in {folder}; nothing written")
    return path


def _put(arena: Arena, piece: Piece, tables: list[Any]) -> None:
    weights = np.ascontiguousarray(piece.records[:, : arena.dim]).view(np.float32)
    rows = _ALONE.arena(arena.rows).row_at(0, piece.index)
    which = np.searchsorted(arena.first_rows, rows, side="right") - 1
    for number in np.unique(which):
        some = np.flatnonzero(which == number)
        tables[int(arena.table_ids[number])][rows[some] - arena.first_rows[number]] = weights[some]


def _dense_arrays(checkpoint: Checkpoint) -> dict[str, Any]:
    """By name, float32."""
    config = Config.from_dict(checkpoint.manifest.config)
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
