"""Where the records of an arena live, and the one door to them.

A store, a snapshot and a checkpoint gather, scatter, apply, add and take ranges; whether a record
lies in memory or elsewhere is nobody else's business, and no bit depends on it.
"""

from planaria.records.door import StoredRecords
from planaria.records.ram import RamRecords
from planaria.records.tiered import TieredRecords

__all__ = ["RamRecords", "StoredRecords", "TieredRecords"]
