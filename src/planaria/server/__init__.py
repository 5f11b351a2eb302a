"""What an embedding server keeps: records, history and validity."""

from planaria.server.decoding import Mates, decode, find_mates
from planaria.server.digest import Digest
from planaria.server.history import Change, History
from planaria.server.memory import Memory
from planaria.server.store import ParityDelta, Store

__all__ = [
    "Change",
    "Digest",
    "History",
    "Mates",
    "Memory",
    "ParityDelta",
    "Store",
    "decode",
    "find_mates",
]
