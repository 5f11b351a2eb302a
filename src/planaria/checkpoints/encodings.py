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

from planaria.errors import CheckpointError, DamagedCheckpoint
from planaria.kernels import saves
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


@dataclass(frozen=True)
class Quantised:
    """Weights in a few bits each (see planaria.kernels.saves); optimizer state exactly.

    State is left alone because steps divide by it: a denominator that is rounded to 0 makes a step
    of any size.
    """

    bits: int
    dim: int
    words: int

    def encode(self, records: Records) -> Bytes:
        return saves.quantise(records, self._segments, self.bits).reshape(-1)

    def decode(self, payload: Bytes, count: int) -> Records:
        size = saves.packed_bytes(self.words, self._segments, self.bits)
        if len(payload) != count * size:
            raise DamagedCheckpoint(
                f"{count} records of {self.bits} bits take {count * size} bytes, not {len(payload)}"
            )
        packed = payload.reshape(count, size)
        return saves.dequantise(packed, self.words, self._segments, self.bits)

    @property
    def _segments(self) -> saves.Segments:
        return ((0, self.dim),)


BITS = (RAW_BITS, *saves.BITS)
"""What a weight can be saved with."""


def make_encoding(bits: int, dim: int, words: int) -> Encoding:
    """The encoding that this version of Planaria has for so many bits."""
    if bits == RAW_BITS:
        return Raw(words)
    if bits in BITS:
        return Quantised(bits, dim, words)
    raise CheckpointError(
        f"records of {bits} bits cannot be read or written here; use one of {BITS}"
    )
