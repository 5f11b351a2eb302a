"""stats.json: what a sample says of every table, and beside it the rows that it met, by heat.

The rows are in a file of NumPy's: array `T` has those of table T, hottest first, uint32 where the
table has fewer than 2^32 rows. The JSON names it with its SHA-256.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from planaria.errors import PlacementError
from planaria.files import write_atomically
from planaria.kernels.types import Index
from planaria.placement.plan import (
    Amount,
    Count,
    Positive,
    digest_of,
    packed_arrays,
    read_typed,
    unpacked_arrays,
)
from planaria.placing.costs import Heat, Numbers
from planaria.placing.counting import RowCounts
from planaria.placing.curves import fitted_tail, knots, known_share
from planaria.placing.sampling import Surveyed, SurveyedTable, sampled_runs
from planaria.tables import MAX_ROWS

MOST_ROWS = (
    2**24
)  # counted one by one, in all tables: 16 bytes each, and as much while they are sorted
FEWEST_ROWS = 2**12  # of each table

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class FeatureStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    coverage: Share  # samples that have it at all
    pooling: Amount  # rows of a sample that has it, on average


class TableStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    record_bytes: Positive | None  # None: of the data alone, without a job
    features: tuple[FeatureStatistics, ...]
    accesses: Count  # in the sample
    distinct: Count  # rows that the sample met
    distinct_of_all: Count  # that all samples meet, estimated
    unseen: Share  # of accesses, on rows that the sample did not meet, estimated
    exponent: Amount | None  # of the fitted tail; None where all rows are met or known well
    exact: bool  # all rows were counted; else there were too many, and the coldest were followed
    hot_rows: tuple[Count, ...]
    share: tuple[Share, ...]  # of accesses, that so many rows take: those met most often
    share_of_all: tuple[Share, ...]  # the same if all data were known, by the fitted tail

    def __post_init__(self) -> None:
        length = len(self.hot_rows)
        if not length == len(self.share) == len(self.share_of_all) or length < 2:
            raise ValueError(f"table {self.name}: its curves must have as many points as hot_rows")
        for curve in (self.hot_rows, self.share, self.share_of_all):
            if any(a > b for a, b in pairwise(curve)):
                raise ValueError(f"table {self.name}: its curves must ascend")
        if (self.hot_rows[0], self.hot_rows[-1]) != (0, self.rows) or self.distinct > self.rows:
            raise ValueError(f"table {self.name}: its curves must go from 0 to {self.rows} rows")

    @property
    def coverage(self) -> float:
        return max((one.coverage for one in self.features), default=0.0)

    @property
    def pooling(self) -> float:
        """Of the features that share the table, the mean over samples that have one."""
        covered = sum(one.coverage for one in self.features)
        return self.accesses_per_sample / covered if covered else 0.0

    @property
    def accesses_per_sample(self) -> float:
        return sum(one.coverage * one.pooling for one in self.features)

    def hottest(self, part: float) -> float:
        """The share of accesses that this part of all rows takes."""
        return float(np.interp(part * self.rows, self.hot_rows, self.share))

    def heat(self, record_bytes: int | None = None, *, of_all: bool = False) -> Heat:
        size = record_bytes or self.record_bytes
        if size is None:
            raise PlacementError(
                f"table {self.name}: nobody knows how large its records are; name them with "
                "--record-bytes, or make the statistics from a job"
            )
        share = np.array(self.share_of_all if of_all else self.share)
        hot = np.array(self.hot_rows, np.int64)
        return Heat(self.name, self.rows, size, self.accesses_per_sample, hot, share)


class Statistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    samples: Positive
    sampled: Positive
    seed: Count
    tables: tuple[TableStatistics, ...]
    rows_file: str = ""
    rows_sha256: str = ""
    kind: Literal["planaria statistics"] = "planaria statistics"
    version: Literal[1] = 1


def gather(
    surveyed: Surveyed,
    source: str,
    share: float = 0.01,
    seed: int = 0,
    *,
    most_rows: int = MOST_ROWS,
    observe: Callable[[int], None] = lambda samples: None,
) -> tuple[Statistics, list[Index]]:
    """The statistics, and the rows of each table by heat. observe: called with samples read."""
    limit = max(most_rows // max(len(surveyed.tables), 1), FEWEST_ROWS)
    counts = {table.name: RowCounts(limit) for table in surveyed.tables}
    covered = {feature.key: 0 for feature in surveyed.features}
    met = dict(covered)
    sampled = 0
    for start, count in sampled_runs(surveyed.samples, share, seed):
        samples = surveyed.source.read(start, count)
        sampled += len(samples)
        for feature in surveyed.features:
            rows, lengths = samples.bags(feature.key)
            counts[feature.table].add(rows)
            covered[feature.key] += int(np.count_nonzero(lengths))
            met[feature.key] += len(rows)
        observe(len(samples))
    if not sampled:
        raise PlacementError(f"{source} has no samples; expected some")
    features: dict[str, list[FeatureStatistics]] = {}
    for feature in surveyed.features:
        has, rows_met = covered[feature.key], met[feature.key]
        found = FeatureStatistics(feature.key, has / sampled, rows_met / has if has else 0.0)
        features.setdefault(feature.table, []).append(found)
    part = sampled / surveyed.samples
    tables = tuple(
        summarised(table, counts[table.name], tuple(features.get(table.name, ())), part)
        for table in surveyed.tables
    )
    heat = [counts[table.name].by_heat[0] for table in surveyed.tables]
    return Statistics(source, surveyed.samples, sampled, seed, tables), heat


def summarised(
    table: SurveyedTable, counted: RowCounts, features: tuple[FeatureStatistics, ...], part: float
) -> TableStatistics:
    """part: of all samples, that were counted."""
    counts, rows_with = counted.spectrum
    identified = len(counted.by_heat[0])
    distinct = min(max(round(float(rows_with.sum())), identified), table.rows)
    at = np.union1d(knots(table.rows), [identified])
    known = known_share(counts, rows_with, table.rows, identified, at)
    tail = fitted_tail(counts, rows_with, table.rows, at, known)
    accesses = float(counts @ rows_with)
    once = float(rows_with[counts == 1].sum())
    all_met = tail.start + tail.distinct(accesses / part)
    return TableStatistics(
        name=table.name,
        rows=table.rows,
        record_bytes=table.record_bytes,
        features=features,
        accesses=counted.accesses,
        distinct=distinct,
        distinct_of_all=min(max(round(all_met), distinct), table.rows),
        unseen=once / accesses if accesses and distinct < table.rows else 0.0,
        exponent=tail.exponent if tail.start < distinct < table.rows else None,
        exact=counted.exact,
        hot_rows=tuple(at.tolist()),
        share=_ascending(known),
        share_of_all=_ascending(tail.share_of(at, known)),
    )


def _ascending(share: Numbers) -> tuple[float, ...]:
    """As it is, but for the last digits of sums."""
    share = np.clip(np.maximum.accumulate(share), 0.0, 1.0)
    share[-1] = 1.0
    return tuple(share.tolist())


def write_statistics(path: Path, found: Statistics, heat: list[Index]) -> Statistics:
    arrays = {
        str(number): rows.astype(np.uint32 if table.rows < 2**32 else np.int64)
        for number, (table, rows) in enumerate(zip(found.tables, heat, strict=True))
    }
    content = packed_arrays(arrays)
    beside = path.with_suffix(".npz")
    found = msgspec.structs.replace(found, rows_file=beside.name, rows_sha256=digest_of(content))
    write_atomically(beside, content)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return found


def read_statistics(path: Path) -> tuple[Statistics, list[Index]]:
    found = read_typed(path, Statistics, "planaria stats")
    if not found.tables:
        raise PlacementError(f"{path}: there are no tables in it; run planaria stats again")
    arrays = unpacked_arrays(path, found.rows_file, found.rows_sha256, "planaria stats")
    heat = []
    for number, table in enumerate(found.tables):
        rows = arrays.get(str(number))
        if rows is None or rows.ndim != 1 or rows.dtype not in (np.uint32, np.int64):
            raise PlacementError(
                f"{found.rows_file}: expected the rows of table {table.name} by heat; run planaria "
                "stats again"
            )
        if len(rows) > table.rows or (len(rows) and rows.max() >= table.rows):
            raise PlacementError(
                f"{found.rows_file}: table {table.name} has {table.rows} rows, but others are "
                "named; run planaria stats again"
            )
        heat.append(rows.astype(np.int64))
    return found, heat
