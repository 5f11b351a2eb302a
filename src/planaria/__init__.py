"""Planaria: fault-tolerant training of deep-learning recommendation models."""

from planaria.codes import Code
from planaria.errors import PlanariaError
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server import Digest, Store
from planaria.tables import Initial, Table

__version__ = "0.1.0"

__all__ = [
    "Code",
    "Digest",
    "Initial",
    "Layout",
    "Optimizer",
    "PlanariaError",
    "Store",
    "Table",
    "__version__",
]
