"""Failure traces: when which server failed, from a JSON or CSV file.

JSON: a list of objects. CSV: a first line with names. Each failure has

    server        its name or number; also read: hostname, host, node_id, node
    time_hours    when, counted from any instant; or time_days, time_seconds, or
    timestamp     a date and time as in 2024-03-30T14:05:00, or seconds since 1970; or time

and, if the file also lists repairs, `event_type`, of which everything but `failure` and
`fault_start` is passed over. An `event_time` is in days, as in the public trace of a GPU cluster
(InfiniteHBD-Trace) that this planner is tested with. Capitals in names do not matter.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.errors import ConfigError

SERVER_FIELDS = ("server", "hostname", "host", "node_id", "node")
HOURS_PER_UNIT = {
    "time_hours": 1.0,
    "time_days": 24.0,
    "time_seconds": 1 / 3600,
    "event_time": 24.0,
}
_UNITS = {1.0: "hours", 24.0: "days", 1 / 3600: "seconds"}
INSTANT_FIELDS = ("time", "timestamp")
# A plain number that is an instant counts from 1970. Between these it is seconds, of the years 1973
# to 5138; from there to a thousand times as much, milliseconds. Smaller ones have no unit.
EPOCH_SECONDS = (1e8, 1e11)
FAILURES = ("failure", "fault_start")
LEAST_FAILURES = 10  # fewer say nothing about a distribution


@dataclass(frozen=True)
class Trace:
    """Failures in order of time, which starts with the first one."""

    hours: npt.NDArray[np.float64]
    servers: npt.NDArray[np.int64]  # 0, 1, ... in order of appearance
    understood: str = ""  # how the file's fields were read

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
    read_as: dict[str, None] = {}  # in order of appearance
    for number, entry in enumerate(_entries(path), 1):
        where = f"--trace {path}, entry {number}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected fields with values, got {entry!r:.60}")
        facts = {str(name).strip().lower(): value for name, value in entry.items()}
        if facts.get("event_type", FAILURES[0]) in FAILURES:
            hours, time_as = _hours(facts, where)
            server, server_as = _server(facts, where)
            found.append((hours, server))
            read_as |= {time_as: None, server_as: None}
    if len(found) < LEAST_FAILURES:
        raise ConfigError(
            f"--trace {path}: expected {LEAST_FAILURES} failures or more, found {len(found)}"
        )
    found.sort(key=lambda failure: failure[0])
    if found[0][0] == found[-1][0]:
        raise ConfigError(f"--trace {path}: expected different times; all failures have the same")
    return _as_trace(found, f"trace {path}: {', '.join(read_as)}")


def _as_trace(found: Iterable[tuple[float, str]], understood: str) -> Trace:
    """found: (hours, server) in order of time."""
    numbers: dict[str, int] = {}
    servers = [numbers.setdefault(name, len(numbers)) for _, name in found]
    hours = np.array([at for at, _ in found])
    return Trace(hours - hours[0], np.array(servers, np.int64), understood)


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


def _hours(entry: Mapping[str, Any], where: str) -> tuple[float, str]:
    """When, in hours from any instant; and how that was read."""
    for name, factor in HOURS_PER_UNIT.items():
        if name in entry:
            number = _number(entry[name])
            if number is None:
                raise ConfigError(f"{where}: {name}: expected a number, got {entry[name]!r:.60}")
            return number * factor, f"{name} is in {_UNITS[factor]}"
    for name in INSTANT_FIELDS:
        if name in entry:
            seconds, read_as = _instant(entry[name], f"{where}: {name}")
            return seconds / 3600, f"{name} is {read_as}"
    raise ConfigError(
        f"{where}: expected time_hours, time_days, time_seconds, or an instant as "
        f"{' or '.join(INSTANT_FIELDS)}"
    )


def _instant(value: object, where: str) -> tuple[float, str]:
    """Seconds since 1970, of a date or of a number that can be nothing else."""
    number, (least, most) = _number(value), EPOCH_SECONDS
    if number is not None and least <= number < most:
        return number, "in seconds since 1970"
    if number is not None and most <= number < 1000 * most:
        return number / 1000, "in milliseconds since 1970"
    try:
        at = datetime.fromisoformat(str(value))
    except ValueError:
        raise ConfigError(
            f"{where}: expected a date and time as in 2024-03-30T14:05:00, or seconds since 1970, "
            f"got {value!r:.60}; other numbers go by their unit: time_hours, time_seconds"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), "a date and time"


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _server(entry: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Which, and how that was read."""
    for name in SERVER_FIELDS:
        if entry.get(name) not in (None, ""):
            return str(entry[name]), f"{name} is the server"
    raise ConfigError(f"{where}: expected the server that failed, as {' or '.join(SERVER_FIELDS)}")
