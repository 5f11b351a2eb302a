"""Which rows are hot, and which server has how many of them in RAM: what a plan says, on file.

planaria.placing makes plans; whoever keeps records reads them.
"""

from planaria.placement.hot_rows import HotRows
from planaria.placement.plan import PlacedServer, PlacedTable, Placement, read_plan, write_plan

__all__ = [
    "HotRows",
    "PlacedServer",
    "PlacedTable",
    "Placement",
    "read_plan",
    "write_plan",
]
