"""Failure traces: when which server failed, from a JSON or CSV file.

JSON: a list of objects. CSV: a first line with names. Each failure has

    server        its name or number; also read: node_id, node, host
    time_hours    when, counted from any instant; or time_days, time_seconds, or
    time          a date and time as in 2024-03-30T14:05:00

and, if the file also lists repairs, `event_type`, of which everything but `failure` and
`fault_start` is passed over. An `event_time` is in days, as in the public trace of a GPU cluster
(InfiniteHBD-Trace) that this planner is tested with.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.errors import ConfigError

SERVER_FIELDS = ("server", "node_id", "node", "host")
HOURS_PER_UNIT = {
    "time_hours": 1.0,
    "time_days": 24.0,
    "time_seconds": 1 / 3600,
    "event_time": 24.0,
}
FAILURES = ("failure", "fault_start")
LEAST_FAILURES = 10  # fewer say nothing about a distribution


@dataclass(frozen=True)
class Trace:
    """Failures in order of time, which starts with the first one."""

    hours: npt.NDArray[np.float64]
    servers: npt.NDArray[np.int64]  # 0, 1, ... in order of appearance

    @property
    def named_servers(self) -> int:
        """How many servers failed at all; a trace does not name the others."""
        return int(self.servers.max()) + 1

    @property
    def mtbf_hours(self) -> float:
        return float(self.hours[-1]) / (len(self.hours) - 1)


def read_trace(path: Path) -> Trace:
    """The failures of a file; a ConfigError says what is wrong, and in which entry."""
    found: list[tuple[float, str]] = []
    for number, entry in enumerate(_entries(path), 1):
        where = f"--trace {path}, entry {number}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected fields with values, got {entry!r:.60}")
        if entry.get("event_type", FAILURES[0]) in FAILURES:
            found.append((_hours(entry, where), _server(entry, where)))
    if len(found) < LEAST_FAILURES:
        raise ConfigError(
            f"--trace {path}: expected {LEAST_FAILURES} failures or more, found {len(found)}"
        )
    found.sort(key=lambda failure: failure[0])
    if found[0][0] == found[-1][0]:
        raise ConfigError(f"--trace {path}: expected different times; all failures have the same")
    numbers: dict[str, int] = {}
    servers = [numbers.setdefault(name, len(numbers)) for _, name in found]
    hours = np.array([at for at, _ in found])
    return Trace(hours - hours[0], np.array(servers, np.int64))


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text("utf-8-sig")  # spreadsheets write a mark first
        if path.suffix.lower() == ".csv":
            return list(csv.DictReader(text.splitlines()))
        entries = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, csv.Error) as error:
        raise ConfigError(f"--trace {path}: expected JSON or, named .csv, CSV: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"--trace {path}: expected a list of failures")
    return entries


def _hours(entry: Mapping[str, Any], where: str) -> float:
    for name, factor in HOURS_PER_UNIT.items():
        if name in entry:
            try:
                hours = float(entry[name]) * factor
            except (TypeError, ValueError, OverflowError):
                hours = math.nan
            if not math.isfinite(hours):
                raise ConfigError(f"{where}: {name}: expected a number, got {entry[name]!r:.60}")
            return hours
    if "time" not in entry:
        raise ConfigError(f"{where}: expected time_hours, time_days, time_seconds or time")
    try:
        at = datetime.fromisoformat(str(entry["time"]))
    except ValueError:
        raise ConfigError(
            f"{where}: time: expected a date and time as in 2024-03-30T14:05:00, "
            f"got {entry['time']!r:.60}"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() / 3600


def _server(entry: Mapping[str, Any], where: str) -> str:
    for name in SERVER_FIELDS:
        if entry.get(name) not in (None, ""):
            return str(entry[name])
    raise ConfigError(f"{where}: expected the server that failed, as {' or '.join(SERVER_FIELDS)}")
