"""Which server holds which record: groups, regions, and the arithmetic between rows and places.

Pure functions of their arguments; nothing here does I/O. `Layout` is the door: `Layout.fresh` for a
new cluster, `Layout.resized` when servers come or go, `Layout.arena` for the rows of one arena.
"""

from planaria.layout.arithmetic import ArenaLayout, Layout, Regions
from planaria.layout.groups import choose_groups, default_k, default_scatter, least_scatter
from planaria.layout.regroup import moved_share, regroup

__all__ = [
    "ArenaLayout",
    "Layout",
    "Regions",
    "choose_groups",
    "default_k",
    "default_scatter",
    "least_scatter",
    "moved_share",
    "regroup",
]
