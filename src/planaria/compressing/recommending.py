"""Which tables to send how over links of a given rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from planaria.compressing.measuring import RULE, Report
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
        found = [
            f"at {self.bits_per_s / 1e6:,g} Mbit/s; gain: how many times sooner rows arrive than "
            "as they are, encoding and decoding included"
        ]
        if any(one.encoder != "exact" for one in self.choices):
            return [*found, "for the job's file, of which wire.bounds has the bounds:", self.yaml()]
        return [*found, "nothing pays: leave wire.lookups at exact"]

    def settings(self) -> dict[str, Any]:
        """Keys of a job."""
        encoders = {one.table: one.encoder for one in self.choices}
        rate = f"{self.bits_per_s / 1e6:g}Mbit"
        return {"wire": {"lookups": "lossy", "bandwidth": rate, "encoders": encoders}}

    def yaml(self) -> str:
        text: str = yaml.safe_dump(self.settings(), sort_keys=False)
        return text.rstrip()

    def to_dict(self) -> dict[str, Any]:
        choices = [one._asdict() for one in self.choices]
        return {**asdict(self), "choices": choices, "settings": self.settings()}


def class_of(sample: Sample) -> str:
    """As a job would class it by these rows."""
    flat = sample.weights.min() == sample.weights.max()
    return "tight" if flat else RULE.class_of(sample.weights)


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
