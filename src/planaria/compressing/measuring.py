"""What each encoder and bound makes of some rows of a table: bytes, errors, and seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planaria.compressing.sampling import Sample
from planaria.errors import ArgumentError
from planaria.kernels import lossy
from planaria.kernels.lossy import Measured
from planaria.kernels.twin_lossy import FRAME
from planaria.kernels.types import Bytes, Floats
from planaria.trainer.bounds import USUAL_RULE
from planaria.wire.measuring import candidates

RULE = USUAL_RULE
CLASSES = {"tight": RULE.tight, "base": RULE.base, "loose": RULE.loose}
"""Bounds, as parts of what a table's weights span."""
HALVES = ("fp16", "bf16")
ROUNDS = 5
LEAST_ROWS = 1024  # that rates are measured with: a small table is never sent alone


@dataclass(frozen=True)
class Line:
    """Of one table and one bound. A way without a bound has its own name for a class."""

    table: str
    bound_class: str
    bound: float  # 0: none
    largest_error: float
    mean_error: float
    measured: dict[str, Measured]  # by encoder


@dataclass(frozen=True)
class Report:
    """Of a checkpoint."""

    step: int
    samples: list[Sample]
    lines: list[Line]  # of a table, one behind the other

    def ratio(self, bound_class: str, encoder: str) -> float:
        """Of all tables whose lines have it, each as heavy as its sample."""
        sizes = {sample.table: sample.weights.nbytes for sample in self.samples}
        found = [
            (sizes[line.table], sizes[line.table] / line.measured[encoder].ratio)
            for line in self.lines
            if line.bound_class == bound_class and encoder in line.measured
        ]
        return sum(before for before, _ in found) / sum(after for _, after in found)

    def to_dict(self) -> dict[str, Any]:
        tables = [
            {
                "table": sample.table,
                "rows": sample.rows,
                "dim": sample.weights.shape[1],
                "sampled": len(sample.weights),
                "trained": sample.trained,
            }
            for sample in self.samples
        ]
        lines = [
            {
                **asdict(line),
                "measured": {name: one._asdict() for name, one in line.measured.items()},
            }
            for line in self.lines
        ]
        return {"step": self.step, "tables": tables, "lines": lines}


def measure(
    step: int, samples: Sequence[Sample], observe: Callable[[], None] = lambda: None
) -> Report:
    """observe: called after each table."""
    lines: list[Line] = []
    for sample in samples:
        _require_finite(sample)
        for name in HALVES:
            lines.append(_line(sample, name, 0.0, [name]))
        span = float(np.ptp(sample.weights.astype(np.float64)))
        for name, share in CLASSES.items():
            bound = min(share * span, float(lossy.HIGHEST_BOUND))
            lines.append(_line(sample, name, bound, candidates()))
        observe()
    return Report(step, list(samples), lines)


def _require_finite(sample: Sample) -> None:
    if not np.isfinite(sample.weights).all():
        raise ArgumentError(
            f"table {sample.table!r} has a NaN or an infinity among its weights, so its rows can "
            "only be sent exactly; has training diverged? An earlier checkpoint is named with "
            "--step"
        )


def _line(sample: Sample, bound_class: str, bound: float, encoders: Sequence[str]) -> Line:
    rows = sample.weights
    back = lossy.decode(_frame(rows, bound, encoders[0]), _tables(rows), rows.shape[1])
    off = np.abs(rows.astype(np.float64) - back)
    measured = {name: measured_on(rows, bound, name) for name in encoders}
    return Line(sample.table, bound_class, bound, float(off.max()), float(off.mean()), measured)


def measured_on(rows: Floats, bound: float, encoder: str) -> Measured:
    """Rates are those of one core."""
    size = len(_frame(rows, bound, encoder)) - FRAME.itemsize  # a frame has many tables' rows
    many = np.resize(rows, (max(len(rows), LEAST_ROWS), rows.shape[1]))
    frame, tables = _frame(many, bound, encoder), _tables(many)
    out, room = np.empty_like(many), np.empty(lossy.frame_bound(*many.shape, 1), np.uint8)
    encoding = _seconds(lambda: _frame(many, bound, encoder, room))
    decoding = _seconds(lambda: lossy.decode(frame, tables, many.shape[1], out))
    return Measured(rows.nbytes / size, many.nbytes / encoding, many.nbytes / decoding)


def _frame(rows: Floats, bound: float, encoder: str, out: Bytes | None = None) -> Bytes:
    return lossy.encode(rows, _tables(rows), np.array([bound], np.float32), [encoder], out=out)


def _tables(rows: Floats) -> Any:
    return np.zeros(len(rows), np.int32)


def _seconds(work: Callable[[], object]) -> float:
    """Of CPU; the median of some runs."""
    work()
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return max(statistics.median(found), 1e-9)
