"""Files of named arrays whose rows come in any order: NumPy's, safetensors', torch's and DCP's.

Every array is a mapped part of a file that has its full size from the beginning, so arrays may be
larger than the memory and rows are written where they belong as they come.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planaria.errors import DamagedCheckpoint

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_AS_BITS = {"bfloat16": "uint16"}  # what NumPy does not have


@dataclass(frozen=True)
class Tensor:
    key: str  # in a state_dict
    file: str  # its name where each array is a file, without an ending
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def held_as(self) -> np.dtype[Any]:
        """What NumPy maps it as."""
        return np.dtype(_AS_BITS.get(self.dtype, self.dtype))

    def fits(self, to: str) -> bool:
        """Whether files of NumPy or of safetensors have such numbers."""
        if to == "safetensors":
            return self.dtype in SAFETENSORS_NAMES
        try:
            return np.dtype(self.dtype) == self.held_as
        except TypeError:
            return False

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.held_as.itemsize


Mapped = Mapping[str, Any]
"""By key: arrays to be written to."""
Writing = Callable[[Path, Sequence[Tensor]], AbstractContextManager[Mapped]]
"""Makes the file or folder of that path, without its ending; it is complete at the end of the
context."""


@contextmanager
def numpy_folder(path: Path, tensors: Sequence[Tensor]) -> Iterator[Mapped]:
    """A folder with FILE.npy for each."""
    path.mkdir(parents=True)
    yield from _flushed({t.key: _npy(inside(path, f"{t.file}.npy"), t) for t in tensors})


@contextmanager
def safetensors_file(path: Path, tensors: Sequence[Tensor]) -> Iterator[Mapped]:
    """PATH.safetensors: the length of a header, the header, and the arrays without a gap."""
    path = path.with_name(f"{path.name}.safetensors")
    header, start = {}, 0
    for tensor in tensors:
        offsets = [start, start + tensor.bytes]
        name = SAFETENSORS_NAMES[tensor.dtype]
        header[tensor.key] = {"dtype": name, "shape": tensor.shape, "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    _grow(path, 8 + len(text) + start)
    found, at = {}, 8 + len(text)
    for tensor in tensors:
        found[tensor.key] = np.memmap(path, tensor.held_as, "r+", at, tensor.shape)
        at += tensor.bytes
    yield from _flushed(found)


@contextmanager
def torch_file(path: Path, tensors: Sequence[Tensor]) -> Iterator[Mapped]:
    """PATH.pt: a dictionary that torch.load takes with weights_only.

    torch.save writes each array from where it is mapped, so they lie in a file of their own
    meanwhile, one at a time in nobody's memory.
    """
    import torch

    rows = path.with_name(f"{path.name}.rows")
    with numpy_folder(rows, tensors) as mapped:
        yield mapped
    state = {key: torch.from_numpy(array) for key, array in mapped.items()}
    torch.save(state, path.with_name(f"{path.name}.pt"))
    for tensor in tensors:
        inside(rows, f"{tensor.file}.npy").unlink()
    rows.rmdir()


def save_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """What torch.distributed.checkpoint loads, in one process or in many.

    It writes tensors one by one, each from where it is mapped. Nested states get dotted keys.
    """
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        # That there is no process group is what is meant. Not as an argument: torch 2.4 has none.
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save(dict(state), checkpoint_id=folder)


WRITERS: dict[str, Writing] = {
    "numpy": numpy_folder,
    "safetensors": safetensors_file,
    "torch": torch_file,
}


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder, whatever its name: manifests are checked when they are read,
    and what is written where it should not be cannot be taken back.
    """
    path = folder / name
    if path.resolve().parent != folder.resolve() or path.name != name:
        raise DamagedCheckpoint(f"{name!r} is not the name of a file in {folder}; nothing written")
    return path


def _npy(path: Path, tensor: Tensor) -> Any:
    array = np.lib.format.open_memmap(path, "w+", tensor.held_as, tensor.shape)
    _grow(path, path.stat().st_size)
    return array


def _grow(path: Path, size: int) -> None:
    """A mapped page that finds no room ends the process, so the room is taken first."""
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _flushed(mapped: dict[str, Any]) -> Iterator[Mapped]:
    yield mapped
    for array in mapped.values():
        array.flush()
