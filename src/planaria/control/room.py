"""Processes that a job cannot do without, and that no host has room for.

Nobody hangs then, and nobody is to blame: the job waits for a host that joins, though not for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from planaria.control.children import Child


class Room:
    """What the job lacks, and since when."""

    def __init__(self, limit_s: float, notes: list[str]) -> None:
        """notes: where it says that the job waits."""
        self._notes = notes
        self._limit_s = limit_s
        self._since: float | None = None

    def lacks(self, children: Iterable[Child], wanted: Mapping[str, int], now: float) -> str:
        """What a view cannot do without, in words; "" if that is nothing. wanted: by role."""
        lacking = Counter(
            child.role for child in children if child.waits and (child.placed or wanted[child.role])
        )
        named = " and ".join(f"{n} {role}{'s' * (n != 1)}" for role, n in sorted(lacking.items()))
        if not named:
            self._since = None
        elif self._since is None:
            self._since = now
            self._notes.append(
                f"the job stands still: no host has room for {named} in place of what was lost; "
                f"it waits {self._limit_s:.0f} s at most for one that joins (cluster.join_s)"
            )
        return named

    def sentence(self, named: str, now: float) -> str | None:
        """How it ends, if it has waited too long for these."""
        if self._since is None or now - self._since <= self._limit_s:
            return None
        return (
            f"no host has had room for {named} within {self._limit_s:.0f} s (cluster.join_s), in "
            "place of what was lost"
        )
