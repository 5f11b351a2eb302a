"""What a server's memory is used for."""

from __future__ import annotations

from typing import NamedTuple


class Memory(NamedTuple):
    """Bytes in use, by purpose."""

    data: int
    parity: int
    history: int
    validity: int

    @property
    def total(self) -> int:
        return sum(self)
