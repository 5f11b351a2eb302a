"""plan.json and the bitmaps beside it: which rows of every table are in RAM, on which server.

The bitmaps are in a file of NumPy's, which the JSON names with its SHA-256, so that a plan goes
with no other's rows. An array `T.L` has the hot rows of table T at level L: servers whose RAM
differs keep different numbers of rows, so each has a level, and a larger level's rows hold a
smaller one's.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from planaria.errors import ArgumentError, PlacementError
from planaria.files import write_atomically
from planaria.placement.hot_rows import HotRows
from planaria.tables import MAX_ROWS

VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class PlacedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    record_bytes: Positive
    hot: tuple[Count, ...]  # rows in RAM, by level
    server: Count | None = None  # that has all of the table; None: rows are spread over all


class PlacedServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Budgets in bytes; what a sample costs this server, on average."""

    ram: Count
    ssd: Count
    level: Count
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]  # of the rows of every table
    ram_used: Count
    ssd_used: Count
    lookups_ram: Amount  # rows
    lookups_ssd: Amount
    bytes_ram: Amount  # read and written, parity included
    bytes_ssd: Amount
    parity_ram: Amount  # of these, for parity
    parity_ssd: Amount
    microseconds: Amount


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tables: tuple[PlacedTable, ...]
    servers: tuple[PlacedServer, ...]
    k: Positive
    r: Count
    renumbered: bool  # hot rows lie together, so that stripes are hot or cold as a whole
    bound_microseconds: Amount  # no placement in this model is below it
    solver: str
    statistics: str  # what it was made from
    rows_file: str = ""  # beside the plan
    rows_sha256: str = ""
    kind: Literal["planaria placement"] = "planaria placement"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        levels = 1 + max((one.level for one in self.servers), default=0)
        for table in self.tables:
            if len(table.hot) != levels or max(table.hot, default=0) > table.rows:
                raise ValueError(
                    f"table {table.name}: expected {levels} numbers of hot rows, up to "
                    f"{table.rows}, got {list(table.hot)}"
                )
            if table.server is not None and table.server >= len(self.servers):
                raise ValueError(f"table {table.name}: there is no server {table.server}")

    @property
    def slow_lookups(self) -> float:
        """Rows that a sample reads from an SSD, on all servers."""
        return sum(server.lookups_ssd for server in self.servers)

    @property
    def largest(self) -> float:
        """Microseconds per sample of the server that has most to do."""
        return max(server.microseconds for server in self.servers)

    @property
    def balance(self) -> float:
        """That over the mean."""
        total = sum(server.microseconds for server in self.servers)
        return self.largest * len(self.servers) / total if total else 1.0


Hot = Mapping[tuple[int, int], HotRows]
"""By (table, level)."""


def write_plan(path: Path, plan: Placement, hot: Hot) -> Placement:
    """The plan as it stands on file, where it names its bitmaps. These are there first."""
    content = packed_arrays(
        {f"{table}.{level}": rows.words for (table, level), rows in hot.items()}
    )
    beside = path.with_suffix(".npz")
    plan = msgspec.structs.replace(plan, rows_file=beside.name, rows_sha256=digest_of(content))
    write_atomically(beside, content)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    return plan


def read_plan(path: Path) -> tuple[Placement, dict[tuple[int, int], HotRows]]:
    """Raises PlacementError for whatever is not a whole plan with its own bitmaps."""
    plan = read_typed(path, Placement, "planaria place")
    arrays = unpacked_arrays(path, plan.rows_file, plan.rows_sha256, "planaria place")
    hot = {}
    for number, table in enumerate(plan.tables):
        for level, count in enumerate(table.hot):
            name = f"{number}.{level}"
            try:
                hot[number, level] = rows = HotRows(table.rows, arrays[name])
            except (ArgumentError, KeyError) as error:
                raise PlacementError(f"{plan.rows_file}, {name}: {error}; plan again") from None
            if rows.count != count:
                raise PlacementError(
                    f"{plan.rows_file}, {name}: {rows.count} rows are hot, but {path} has {count}; "
                    "plan again"
                )
    return plan, hot


# ------------------------------------------------- JSON with arrays beside it, for statistics, too

T = TypeVar("T")


def read_typed(path: Path, kind: type[T], maker: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise PlacementError(
            f"cannot read {path}: {error.strerror}; {maker} writes such files"
        ) from None
    except msgspec.DecodeError as error:
        raise PlacementError(f"{path}: {error}; expected what {maker} writes") from None


def packed_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """As numpy.load reads them; equal bytes for equal arrays."""
    made = io.BytesIO()
    np.savez(made, **arrays)  # type: ignore[arg-type]
    return made.getvalue()


def unpacked_arrays(
    path: Path, name: str, sha256: str, maker: str
) -> dict[str, NDArray[np.uint64]]:
    """The arrays in the file of this name beside `path`."""
    if not name or os.path.basename(name) != name:
        raise PlacementError(f"{path}: expected the name of a file beside it, got {name!r}")
    beside = path.with_name(name)
    try:
        content = beside.read_bytes()
        if digest_of(content) != sha256:
            raise PlacementError(
                f"{beside} is not the file that {path} was written with; run {maker} again"
            )
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except OSError as error:
        raise PlacementError(
            f"cannot read {beside}: {error.strerror}; it belongs beside {path}"
        ) from None
    except (ValueError, zipfile.BadZipFile) as error:
        raise PlacementError(f"{beside}: {error}; run {maker} again") from None


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
