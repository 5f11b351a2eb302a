"""Sizes and rates as people write them, one for all servers or one for each."""

from __future__ import annotations

import re

from planaria.errors import ConfigError

UNITS = {
    "": 1.0,
    **{f"{letter}B": 1000.0**power for power, letter in enumerate("kMGTP", 1)},
    **{f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGTP", 1)},
}
EXAMPLE = "such as 64GB, or 64GB*3,128GB for each server"


def for_servers(option: str, text: str, servers: int) -> list[float]:
    """Bytes by server: "64GB" is for all of them, "64GB*3,128GB" for three and a fourth."""
    found: list[float] = []
    for part in text.split(","):
        matched = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*(?:\*\s*(\d+))?\s*", part)
        units = {name.lower(): factor for name, factor in UNITS.items()}
        unit = matched and units.get(matched[2].lower(), units.get(f"{matched[2]}b".lower()))
        if not matched or unit is None or matched[1].count(".") > 1 or matched[1] == ".":
            raise ConfigError(f"{option}: expected sizes {EXAMPLE}, got {part.strip()!r}")
        times = int(matched[3] or 1)
        if not 1 <= times <= servers:
            raise ConfigError(f"{option}: there are {servers} servers, not {times}; got {text!r}")
        found += [float(matched[1]) * unit] * times
    if len(found) == 1:
        found *= servers
    if len(found) != servers:
        raise ConfigError(
            f"{option}: expected one size, or {servers}, one for each server; got {len(found)}"
        )
    return found
