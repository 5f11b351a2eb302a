"""A trained model out of its checkpoint, as files that NumPy, torch or safetensors read.

    model.json          step, samples, name, shape and optimizer of each table, and the job's config

    tables/NAME.npy     float32[rows, dim]; or tables.pt, or tables.safetensors, with the keys that
                        TorchRec's EmbeddingBagCollection has, embedding_bags.NAME.weight
    dense.npz           of planaria train's model: bottom.0.weight [outputs, inputs],
                        bottom.0.bias, ..., top.0.weight, ...; or dense.pt, or dense.safetensors
    kept.npz            of a script's job: what it kept, by NAME.key; or kept.safetensors; or
                        kept.pt, which is {NAME: state_dict}
    optimizer/NAME.PART.npy   if wanted, what the optimizer keeps for each row; or optimizer.pt, ...
    dense.state         the dense part as the job holds it: nobody's business but importing's

With DCP, all but model.json and dense.state is one checkpoint of torch.distributed.checkpoint, with
the same keys; what an optimizer keeps is embedding_bags.NAME.PART.

Rows are streamed into files that are mapped, so a model may be larger than the memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from planaria.checkpoints import Checkpoint, Piece, latest, list_checkpoints
from planaria.checkpoints.folders import AnyFolder, LocalFolder, open_folder
from planaria.cluster.parts import DENSE_NAME
from planaria.config import Config
from planaria.errors import CheckpointError
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.tables import Arena, Table
from planaria.tensors import (
    WRITERS,
    Mapped,
    Tensor,
    Writing,
    inside,
    numpy_folder,
    save_dcp,
)
from planaria.trainer.dense import dlrm_layers

DCP = "dcp"
FORMATS = (*WRITERS, DCP)
STATE_FILE = "dense.state"
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
        raise CheckpointError(
            f"'{folder}' has no whole checkpoint so far: its job saves every "
            "checkpoint.every_steps, and when it ends"
        )
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
        columns = _all_columns(checkpoint, with_state)
        _write_tables(checkpoint, room, WRITERS.get(to, numpy_folder), columns, progress)
        facts = _facts(checkpoint)
        facts |= _write_dense(checkpoint, room, to, columns)
        (room / "model.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
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


def _all_columns(checkpoint: Checkpoint, with_state: bool) -> list[list[_Column]]:
    """By table."""
    manifest = checkpoint.manifest
    return [
        _columns(table, table.optimizer or manifest.optimizer, with_state)
        for table in manifest.tables
    ]


def _write_tables(
    checkpoint: Checkpoint,
    room: Path,
    writer: Writing,
    columns: Sequence[Sequence[_Column]],
    progress: Callable[[int], None],
) -> None:
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


# ------------------------------------------------------------------ the dense part


def _write_dense(
    checkpoint: Checkpoint, room: Path, to: str, columns: Sequence[Sequence[_Column]]
) -> dict[str, Any]:
    """And with DCP the tables, which go into the same files. Returns what model.json says of it."""
    dense, kept = _dense_arrays(checkpoint), _kept(checkpoint)
    facts: dict[str, Any] = {}
    if checkpoint.manifest.dense_parts:
        checkpoint.dense()[DENSE_NAME].tofile(room / STATE_FILE)
    if to == DCP:
        _write_dcp(room, columns, dense or kept)
    elif dense:
        _write_arrays(room / "dense", to, [_tensor(*one) for one in dense.items()], dense)
    elif kept and to == "torch":
        import torch

        torch.save(kept, room / "kept.pt")
    elif kept:
        tensors, arrays, facts = _flat(kept, to)
        _write_arrays(room / "kept", to, tensors, arrays)
    return facts


def _write_arrays(
    path: Path, to: str, tensors: Sequence[Tensor], arrays: Mapping[str, Any]
) -> None:
    if to == "numpy":
        # As np.savez does it, which takes some names for arguments of its own.
        with zipfile.ZipFile(path.with_name(f"{path.name}.npz"), "w") as file:
            for key, array in arrays.items():
                with file.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return
    with WRITERS[to](path, tensors) as mapped:
        for key, array in arrays.items():
            mapped[key][...] = array


def _write_dcp(room: Path, columns: Sequence[Sequence[_Column]], dense: Mapping[str, Any]) -> None:
    """All that was written so far, and the dense part."""
    import torch

    state: dict[str, Any] = {}
    for tensor, _, place in (column for of_table in columns for column in of_table):
        rows = np.load(inside(room / place, f"{tensor.file}.npy"), mmap_mode="r+")
        key = tensor.key if place == "tables" else f"embedding_bags.{tensor.key}"
        state[key] = torch.from_numpy(rows)
    arrays = {
        key: torch.from_numpy(one) for key, one in dense.items() if isinstance(one, np.ndarray)
    }
    save_dcp(room, {**state, **dense, **arrays})
    for place in ("tables", "optimizer"):
        shutil.rmtree(room / place, ignore_errors=True)


def _tensor(key: str, array: Any) -> Tensor:
    return Tensor(key, key, array.shape, str(array.dtype))


def _kept(checkpoint: Checkpoint) -> dict[str, Any]:
    """By name, the states of what a script kept; none where no script did."""
    if not (checkpoint.manifest.dense_parts and is_script(checkpoint.manifest.config)):
        return {}
    from planaria.torch.plain import kept_states

    return kept_states(checkpoint.dense()[DENSE_NAME])


def is_script(config: Mapping[str, Any]) -> bool:
    """Whether it is the configuration of a script's job: a user's, or our own for named models."""
    return bool(config) and not Config.from_dict(config).is_built_in


def _flat(kept: Mapping[str, Any], to: str) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Tensors and their arrays by dotted key, and what is none: for files without structure."""
    import torch

    from planaria.torch.plain import leaves

    tensors, arrays, others, left_out = [], {}, {}, []
    found = (pair for name, state in kept.items() for pair in leaves(state, name))
    for key, leaf in found:
        if isinstance(leaf, torch.Tensor) and key not in arrays:
            tensor = Tensor(key, key, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            if tensor.fits(to):
                bits = leaf.view(torch.uint16) if leaf.dtype == torch.bfloat16 else leaf
                tensors.append(tensor)
                arrays[key] = bits.numpy()
                continue
        elif (leaf is None or isinstance(leaf, bool | int | float | str)) and key not in others:
            others[key] = leaf
            continue
        left_out.append(key)
    tensors.sort(key=lambda tensor: -tensor.held_as.itemsize)  # so that none lies across words
    return tensors, arrays, {"kept": others, "kept_left_out": left_out}


def _dense_arrays(checkpoint: Checkpoint) -> dict[str, Any]:
    """By name, float32; none where the dense network is not that of the built-in model."""
    config = Config.from_dict(checkpoint.manifest.config)
    if not checkpoint.manifest.dense_parts or is_script(checkpoint.manifest.config):
        return {}
    rest = checkpoint.dense()[DENSE_NAME].view(np.float32)
    found: dict[str, Any] = {}
    for name, shape in dense_shapes(config).items():
        found[name], rest = np.split(rest, [int(np.prod(shape))])
        found[name] = found[name].reshape(shape)
    return found


def dense_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of the built-in model's parameters, in their order; none where it does not fit the tables."""
    if len(config.arenas) > 1:
        return {}
    model = config.model
    layers = dlrm_layers(len(config.tables), model.dim, model.bottom, model.top)
    names = [f"bottom.{i}" for i in range(len(model.bottom) + 1)]
    names += [f"top.{i}" for i in range(len(model.top) + 1)]
    found: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in zip(names, layers, strict=True):
        found |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    return found
