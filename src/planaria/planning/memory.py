"""What a strategy keeps in the memory of one server."""

from __future__ import annotations

from dataclasses import astuple, dataclass

VARIANTS = ("vanilla", "scar", "mfu", "ssu")  # of partial recovery: cpr.variant
WORD = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one server, by what they are for."""

    records: float
    parity: float
    history: float  # the deltas of the last steps, of its own records and of those it protects
    priorities: float  # by which partial recovery chooses the rows that it saves
    snapshot: float  # what a save in the background may come to hold while it is written

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


def memory_of(
    *,
    records: float,
    touched: float,
    history_steps: int,
    k: int = 1,
    r: int = 0,
    in_background: bool = False,
    priorities: float = 0.0,
) -> Memory:
    """records, touched: the bytes of one server, and those of them that a step changes."""
    return Memory(
        records=records,
        parity=records * r / k,
        # Every owner's delta is kept by itself and by its r holders; on average that comes to r + 1
        # servers' deltas on each.
        history=history_steps * (1 + r) * touched,
        priorities=priorities,
        snapshot=records if in_background else 0.0,
    )


def priority_bytes(variant: str, rows: float, dim: int, rho: float) -> float:
    """What partial recovery keeps for so many rows of a server; rho: the share that a save has."""
    if variant == "vanilla":
        return 0.0
    of_a_row = {
        "mfu": WORD,  # a counter
        "ssu": 1 / 8 + WORD * rho,  # a bit, and the entries of the sample
        "scar": WORD * dim,  # the weights as they were saved
    }
    return rows * (1 + of_a_row[variant])  # and a byte: is it a row of a large table?
