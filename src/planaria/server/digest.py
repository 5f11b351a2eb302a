"""The digest of logical contents: equal rows give equal digests, on any number of servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Digest:
    """128 bits that can be added up over arenas and servers, in any order."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.first + other.first) % 2**64, (self.second + other.second) % 2**64)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"
