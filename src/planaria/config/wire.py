"""How rows and changes of records travel: the keys of `wire`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from planaria.config.kinds import (
    Kind,
    Wrong,
    auto_or,
    choice,
    named,
    number,
    or_null,
    several,
    whole,
)
from planaria.config.optimizer import MAX_STEPS

LOOKUPS = choice("exact", "fp16", "bf16", "lossy")
CODERS = ("none", "huffman", "vector-lz", "zstd", "lz4")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def bits_per_s(text: str) -> float:
    """From a number and its unit: 10Gbit, 300Mbit/s, 10Gbps. 0 where it is none."""
    found = re.fullmatch(r"([\d.]+) ?([kmgt]?)b(it(/s)?|ps)", text.strip(), re.IGNORECASE)
    try:
        return float(found[1]) * _PREFIXES[found[2].lower()] if found else 0.0
    except ValueError:
        return 0.0


def _rate() -> Kind:
    def read(value: object) -> str:
        if not isinstance(value, str) or not bits_per_s(value):
            raise Wrong
        return value

    return Kind("a rate in bits, such as 1Gbit or 300Mbit", read)


SHARE = number("a number above 0, up to 1", lambda x: 0 < x <= 1)


@dataclass(frozen=True)
class WireConfig:
    packing: Annotated[str, choice("auto", "on", "off")] = "auto"
    lookups: Annotated[str, LOOKUPS] = "exact"
    tables: Annotated[Mapping[str, str] | None, or_null(named(LOOKUPS, "tables"))] = None
    encoder: Annotated[str, choice("auto", *CODERS)] = "auto"
    encoders: Annotated[
        Mapping[str, str] | None, or_null(named(choice("exact", *CODERS), "tables"))
    ] = None
    bandwidth: Annotated[str, auto_or(_rate())] = "auto"
    bounds: Annotated[tuple[float, ...], several(SHARE, 3, 3)] = (0.01, 0.03, 0.05)
    decay_steps: Annotated[int, whole(0, MAX_STEPS)] = 65_536
    sample_steps: Annotated[int, whole(1, MAX_STEPS)] = 1024
    gradients: Annotated[str, choice("exact", "fp16", "bf16")] = "exact"

    def lookups_of(self, table: str) -> str:
        """How the rows of a table are to travel."""
        return (self.tables or {}).get(table, self.lookups)

    def encoder_of(self, table: str) -> str:
        """How they do, once it is settled."""
        how = self.lookups_of(table)
        return (self.encoders or {}).get(table, "exact") if how == "lossy" else how
