"""Which tables to send how over links of a given rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from planaria.compressing.measuring import CLASSES, Report
from planaria.compressing.sampling import Sample
from planaria.kernels import lossy


class Choice(NamedTuple):
    """For a table."""

    table: str
    bound_class: str
    encoder: str
    ratio: float
    gain: float


@dataclass(frozen=True)
class Recommendation:
    bits_per_s: float
    choices: list[Choice]

    def sentences(self) -> list[str]:
        return [
            f"at {self.bits_per_s / 1e6:,g} Mbit/s; gain: how many times sooner rows arrive than "
            "as they are, encoding and decoding included"
        ]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "choices": [one._asdict() for one in self.choices]}


def class_of(sample: Sample) -> str:
    """The fewer rows still differ once they are codes, the more a table loses by a wide bound."""
    span = np.ptp(sample.weights.astype(np.float64))
    if span == 0:
        return "loose"
    codes = np.rint(sample.weights / (2 * CLASSES["base"] * span))
    left = len(np.unique(codes, axis=0)) / len(sample.weights)
    return "tight" if left < 0.5 else "base" if left < 0.95 else "loose"


def recommend(report: Report, bits_per_s: float) -> Recommendation:
    choices = []
    for sample in report.samples:
        bound_class = class_of(sample)
        line = next(
            line
            for line in report.lines
            if (line.table, line.bound_class) == (sample.table, bound_class)
        )
        encoder = lossy.choose(line.measured, bits_per_s / 8)
        if encoder == "exact":
            choices.append(Choice(sample.table, bound_class, encoder, 1.0, 1.0))
        else:
            found = line.measured[encoder]
            gain = lossy.gain(found, bits_per_s / 8)
            choices.append(Choice(sample.table, bound_class, encoder, found.ratio, gain))
    return Recommendation(bits_per_s, choices)
