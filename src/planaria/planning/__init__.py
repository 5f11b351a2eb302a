"""Which strategy fits a job: formulas, a simulation, and a recommendation (docs/planning.md)."""

from planaria.planning.choosing import Estimate
from planaria.planning.fits import Findings, analyse
from planaria.planning.inputs import PlanInputs
from planaria.planning.plan import Recommendation, make_plan
from planaria.planning.traces import Trace, read_trace

__all__ = [
    "Estimate",
    "Findings",
    "PlanInputs",
    "Recommendation",
    "Trace",
    "analyse",
    "make_plan",
    "read_trace",
]
