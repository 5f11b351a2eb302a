"""How the records of a chunk become bytes: as they are, or with fewer bits.

The writer asks the encoding of an arena for the bytes of some records, the reader asks the encoding
with the same bits to turn them back. Raw records cost nothing: the bytes are those in memory, as
little-endian words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from planaria.errors import CheckpointError
from planaria.kernels.types import Bytes, Records

RAW_BITS = 32


class Encoding(Protocol):
    """Records of one arena to bytes and back. Each record stands for itself, whatever is beside."""

    @property
    def bits(self) -> int:
        """Per weight; the number that names this encoding in the file, 1 to 32."""

    def encode(self, records: Records) -> Bytes:
        """uint8[any] of uint32[n, words]; may be a view of the records."""

    def decode(self, payload: Bytes, count: int) -> Records:
        """uint32[count, words]; may be a view of the payload."""


EncodingMaker: TypeAlias = Callable[[int, int, int], Encoding]
"""(bits, dim, words) -> the encoding of an arena with so many weights and words per record."""


@dataclass(frozen=True)
class Raw:
    """Exactly the records, 32 bits per weight and for every word of optimizer state."""

    words: int
    bits: int = RAW_BITS

    def encode(self, records: Records) -> Bytes:
        return records.reshape(-1).view(np.uint8)

    def decode(self, payload: Bytes, count: int) -> Records:
        return payload.view(np.uint32).reshape(count, self.words)


def make_encoding(bits: int, dim: int, words: int) -> Encoding:
    """The encoding that this version of Planaria has for so many bits."""
    if bits == RAW_BITS:
        return Raw(words)
    raise CheckpointError(
        f"records of {bits} bits cannot be read or written here (dim {dim}); use {RAW_BITS}"
    )
