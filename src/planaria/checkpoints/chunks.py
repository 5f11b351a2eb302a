"""The bytes of a part file: one header, then chunks. All numbers are little-endian.

    part file    | file header | chunk | chunk | ...                   the manifest knows its length

    file header, 32 bytes
     0  magic            8   "PLANARIA"
     8  format           4   1
    12  place            4   signed; -1 for the dense part
    16  step             8
    24  zeros            4
    28  checksum         4   of the 28 bytes before

    chunk        | chunk header | record numbers or name | payload |

    chunk header, 48 bytes
     0  magic            4   "chnk"
     4  kind             1   0 a range of records, 1 listed records, 2 named bytes
     5  bits             1   32 for records as in memory, fewer for quantised ones
     6  zeros            2
     8  arena            4   0 for named bytes
    12  words            4   4-byte words per record; 0 for named bytes
    16  first            8   first record; for named bytes where in them the payload belongs
    24  count            8   records; for named bytes the length of the name
    32  payload bytes    8
    40  body checksum    4   of everything between this header and the next
    44  header checksum  4   of the 44 bytes before

Listed records have their numbers, int64, in front of the payload; named bytes have their name, in
UTF-8. A record is weights, then optimizer state, so both are always of one step.

All checksums are CRC-32, which Python's library has as well; that of bodies is computed by
planaria.kernels.saves. Because a header holds its body's checksum, the headers in order stand for
the whole file. Their SHA-256 is the part's *seal*; the manifest keeps it, and no large thing is
summed twice. (A CRC-32 would not do: that of bytes which end with their own CRC-32 is the same
whatever the bytes are.)
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from enum import IntEnum

FORMAT = 1
DENSE = -1
"""The place of the part that holds the trainers' dense state."""
CHUNK_BYTES = 4 << 20
"""What a writer aims at: large enough for the disk, small enough to find the damaged one."""

_FILE = struct.Struct("<8sIiQ4x")
_CHUNK = struct.Struct("<4sBB2xIIQQQI")
_CHECKSUM = struct.Struct("<I")
FILE_HEADER_BYTES = _FILE.size + _CHECKSUM.size
CHUNK_HEADER_BYTES = _CHUNK.size + _CHECKSUM.size
_FILE_MAGIC, _CHUNK_MAGIC = b"PLANARIA", b"chnk"


class Kind(IntEnum):
    RANGE = 0
    LISTED = 1
    NAMED = 2


@dataclass(frozen=True)
class Chunk:
    """A chunk's header."""

    kind: int
    bits: int
    arena: int
    words: int
    first: int
    count: int
    payload_bytes: int
    checksum: int  # of the body

    @property
    def key_bytes(self) -> int:
        """What stands before the payload: record numbers or a name."""
        match self.kind:
            case Kind.LISTED:
                return 8 * self.count
            case Kind.NAMED:
                return self.count
        return 0

    @property
    def body_bytes(self) -> int:
        return self.key_bytes + self.payload_bytes

    @property
    def end(self) -> int:
        """One past the last record of a range."""
        return self.first + self.count


def pack_file_header(place: int, step: int) -> bytes:
    return _with_checksum(_FILE.pack(_FILE_MAGIC, FORMAT, place, step))


def unpack_file_header(header: bytes) -> tuple[int, int] | None:
    """(place, step); None if this is not the header of a part of this format."""
    if not _is_whole(header, FILE_HEADER_BYTES):
        return None
    magic, version, place, step = _FILE.unpack_from(header)
    return (place, step) if (magic, version) == (_FILE_MAGIC, FORMAT) else None


def pack_chunk(chunk: Chunk) -> bytes:
    return _with_checksum(_CHUNK.pack(_CHUNK_MAGIC, *astuple(chunk)))


def unpack_chunk(header: bytes) -> Chunk | None:
    """The chunk's header; None if it is damaged or none at all."""
    if not _is_whole(header, CHUNK_HEADER_BYTES):
        return None
    magic, *fields = _CHUNK.unpack_from(header)
    chunk = Chunk(*fields)
    return chunk if magic == _CHUNK_MAGIC and chunk.kind in tuple(Kind) else None


def _with_checksum(header: bytes) -> bytes:
    return header + _CHECKSUM.pack(zlib.crc32(header))


def _is_whole(header: bytes, size: int) -> bool:
    if len(header) != size:
        return False
    return _with_checksum(header[: -_CHECKSUM.size]) == header
