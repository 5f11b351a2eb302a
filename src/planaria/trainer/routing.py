"""From the ids of a batch to one message per server."""

from __future__ import annotations

import numpy as np

from planaria import kernels
from planaria.kernels import Parts
from planaria.kernels.types import Index
from planaria.layout import ArenaLayout


class Router:
    """Sorts arena rows by the server that holds them, in one native call."""

    def __init__(self, layout: ArenaLayout) -> None:
        k = layout.layout.k
        self.layout = layout.layout
        self._layout = layout
        self._place = np.ascontiguousarray(layout.layout.groups[:, :k])
        self._region = np.ascontiguousarray(layout.layout.region_of[:, :k])
        self._places = max(layout.layout.places) + 1

    def partition(self, rows: Index) -> Parts:
        """rows: distinct arena rows. The p-th run of the result is what place p is asked for."""
        return kernels.partition(
            rows, self._layout.rows, self._place, self._region, self._layout.slots, self._places
        )
