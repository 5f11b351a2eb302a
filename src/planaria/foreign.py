"""Models from elsewhere: what `planaria export` wrote, and state_dicts that anybody saved.

All have named arrays, which are mapped, or read one by one: never are all of them in memory. Keys
are those of state_dicts; what an optimizer keeps for a table's rows is embedding_bags.NAME.PART.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planaria.errors import CheckpointError, ConfigError
from planaria.exporting import STATE_FILE
from planaria.kernels.types import Bytes
from planaria.tensors import SAFETENSORS_NAMES

PREFIX = "embedding_bags."
SAVE_A_STATE = "save model.state_dict(), and nothing else"
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True)
class Array:
    """One that can be read. dtype: by the name that NumPy and torch have in common."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any]  # mapped, where its file allows it


Arrays = dict[str, Array]


@dataclass(frozen=True)
class Foreign:
    path: Path
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What model.json says, where `export` wrote the model."""
    state: Bytes | None = None
    """The dense part as a job held it."""


def open_foreign(path: Path) -> Foreign:
    """path: a folder that `export` wrote, or a file of a state_dict."""
    if path.is_file():
        return Foreign(path, _read(_file_reader(path), path))
    if not path.is_dir():
        raise ConfigError(
            f"'{path}' does not exist; name a folder that planaria export wrote, or a state_dict: "
            "a file .pt or .safetensors"
        )
    arrays: Arrays = {}
    for kind in ("tables", "optimizer", "dense"):
        found = _of_kind(path, kind)
        if kind == "optimizer":
            found = {PREFIX + key: array for key, array in found.items()}
        arrays |= found
    if (path / ".metadata").is_file():
        arrays |= _read(_dcp, path)
    if not arrays:
        raise ConfigError(
            f"'{path}' has no tables; name a folder that planaria export wrote, or a state_dict"
        )
    facts, state = _content(path / "model.json"), _content(path / STATE_FILE)
    try:
        said = msgspec.json.decode(facts, type=dict[str, Any]) if facts else {}
    except msgspec.DecodeError as error:
        raise CheckpointError(f"'{path / 'model.json'}' cannot be read: {error}") from error
    return Foreign(path, arrays, said, np.frombuffer(state, np.uint8) if state else None)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def _of_kind(folder: Path, kind: str) -> Arrays:
    """Tables, what optimizers keep, or the dense part: whichever file it is in."""
    if (folder / kind).is_dir():
        return _numpy(folder / kind, kind)
    for ending in (".npz", ".safetensors", ".pt"):
        path = folder / f"{kind}{ending}"
        if path.is_file():
            return _read(_file_reader(path), path)
    return {}


def _file_reader(path: Path) -> Callable[[Path], Arrays]:
    found = {".npz": _npz, ".safetensors": _safetensors, ".pt": _torch, ".pth": _torch}
    if path.suffix not in found:
        raise ConfigError(f"'{path}' is none of {', '.join(found)}; save the state_dict as one")
    return found[path.suffix]


def _read(reader: Callable[[Path], Arrays], path: Path) -> Arrays:
    try:
        return reader(path)
    # Whatever a file that is cut, or of another kind, makes of a reader: torch's raises anything.
    except Exception as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def _numpy(folder: Path, kind: str) -> Arrays:
    found: Arrays = {}
    for path in sorted(folder.glob("*.npy")):
        key = path.name.removesuffix(".npy")
        (array,) = _read(_npy, path).values()
        found[f"{PREFIX}{key}.weight" if kind == "tables" else key] = array
    return found


def _npy(path: Path) -> Arrays:
    return {path.name: _held(np.load(path, mmap_mode="r"))}


def _npz(path: Path) -> Arrays:
    """Small ones: the dense part."""
    with np.load(path) as arrays:
        return {key: _held(arrays[key]) for key in arrays.files}


def _held(array: Any) -> Array:
    return Array(array.shape, str(array.dtype), lambda: array)


def _safetensors(path: Path) -> Arrays:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise ValueError("it is no file of safetensors, or cut off")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found: Arrays = {}
    for key, entry in header.items():
        shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"], entry["dtype"])
        at = 8 + length + entry["data_offsets"][0]
        if 8 + length + entry["data_offsets"][1] > path.stat().st_size:
            raise ValueError("it is cut off")
        # What has a dtype that NumPy does not know is never read.
        found[key] = Array(shape, dtype, partial(np.memmap, path, dtype, "r", at, shape))
    return found


def _torch(path: Path) -> Arrays:
    import torch

    from planaria.torch.plain import leaves

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # which says, in many lines, how to run whatever is in it
        raise ValueError(f"it holds more than tensors in containers; {SAVE_A_STATE}") from None
    if not isinstance(state, Mapping):
        raise ValueError(f"it holds a {type(state).__name__}; {SAVE_A_STATE}")
    found = [pair for name, one in state.items() for pair in leaves(one, str(name))]
    return {key: _of_torch(leaf) for key, leaf in found if isinstance(leaf, torch.Tensor)}


def _of_torch(tensor: Any) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Array(tuple(tensor.shape), dtype, lambda: tensor.detach().numpy())


def _dcp(folder: Path) -> Arrays:
    """Each is read when it is asked for, and belongs to whoever asked."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: one for key, one in metadata.items() if hasattr(one, "chunks")}
    return {
        key: Array(
            tuple(one.size),
            str(one.properties.dtype).removeprefix("torch."),
            partial(_dcp_tensor, folder, key, one),
        )
        for key, one in tensors.items()
    }


def _dcp_tensor(folder: Path, key: str, metadata: Any) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp

    wanted = {key: torch.empty(metadata.size, dtype=metadata.properties.dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(wanted, checkpoint_id=folder)
    return wanted[key].numpy()
