"""One job under several strategies and the same failures: planaria compare (docs/comparing.md)."""

from planaria.comparing.accounts import Account, Interval95
from planaria.comparing.emulation import CONTENDERS, Emulation
from planaria.comparing.runs import Comparison, Outcome, Row, compare

__all__ = [
    "CONTENDERS",
    "Account",
    "Comparison",
    "Emulation",
    "Interval95",
    "Outcome",
    "Row",
    "compare",
]
