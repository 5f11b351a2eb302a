"""How the rows of each table travel: chosen before a job starts, and written down with it.

A choice that follows measured rates is made once. It becomes a part of the configuration, which
all processes, replacements and later runs of the job read: so no bit depends on a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planaria import kernels
from planaria.config import Config
from planaria.config.kinds import Named
from planaria.config.wire import bits_per_s
from planaria.errors import ConfigError
from planaria.kernels.lossy import Measured, choose
from planaria.kernels.types import Floats
from planaria.tables import Arena, Table
from planaria.trainer.bounds import BoundRule
from planaria.wire.measuring import candidates, loopback_bytes_per_s, measure

SAMPLED_ROWS = 4096
SAID = {"none": "lossy, plain codes", "exact": "exact"} | {
    name: f"lossy, {name}" for name in ("huffman", "vector-lz", "zstd", "lz4")
}
LEAST_FLOATS = 1 << 16  # of a sample: calls must not be all that is measured


def bound_rule(config: Config) -> BoundRule:
    wire = config.wire
    tight, base, loose = wire.bounds
    return BoundRule(tight, base, loose, wire.decay_steps, wire.sample_steps)


def settle_lookups(
    config: Config, saved: Mapping[str, Any] | None = None, *, many_machines: bool = False
) -> tuple[Config, str]:
    """The job with an encoder for each table, and a line that says so; "" where all is exact.

    saved: the section `wire` of the job that is resumed. many_machines: whether the network is
    another than this machine's own, which is the one that can be measured before a job starts.
    """
    wire, tables = config.wire, config.tables
    names = [table.name for table in tables]
    for key, given in (("wire.tables", wire.tables), ("wire.encoders", wire.encoders)):
        unknown = [name for name in given or {} if name not in names]
        if unknown:
            raise ConfigError(
                f"{key}.{unknown[0]}: this job has no such table; known are "
                f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )
    lossy = [table for table in tables if wire.lookups_of(table.name) == "lossy"]
    if not lossy:
        halves = [one for one in map(wire.encoder_of, names) if one != "exact"]
        return config, _said(halves, len(names), "") if halves else ""
    known = wire.encoders or _of_before(config, saved)
    missing = [table for table in lossy if table.name not in known]
    why = "as it was written down"
    if missing and wire.encoder != "auto":
        _require_installed(wire.encoder)
        known = {**known, **{table.name: wire.encoder for table in missing}}
        why = "wire.encoder says so"
    elif missing:
        if wire.bandwidth == "auto" and (many_machines or config.cluster.leaves_machine):
            raise ConfigError(
                "wire.bandwidth: expected a rate, such as 1Gbit, because rows leave this machine: "
                "only within it is auto measured; or say wire.encoder"
            )
        stated = wire.bandwidth != "auto"
        rate = bits_per_s(wire.bandwidth) / 8 or loopback_bytes_per_s()
        wire = replace(wire, bandwidth=wire.bandwidth if stated else _shown(rate))
        why = f"for a bandwidth of {wire.bandwidth}, which was {'given' if stated else 'measured'}"
        known = {**known, **_chosen(config, missing, rate)}
    elif wire.bandwidth == "auto" and saved and "bandwidth" in saved:
        wire = replace(wire, bandwidth=saved["bandwidth"])
    wire = replace(wire, encoders=Named({table.name: known[table.name] for table in lossy}))
    config = replace(config, wire=wire)
    return config, _said([wire.encoder_of(name) for name in names], len(names), why)


def _of_before(config: Config, saved: Mapping[str, Any] | None) -> Mapping[str, str]:
    """What was chosen when the job began, unless it is asked for something else now."""
    wire, saved = config.wire, saved or {}
    same = wire.encoder == saved.get("encoder", "auto")
    rates = [bits_per_s(one) for one in (wire.bandwidth, saved.get("bandwidth", "auto"))]
    same &= wire.bandwidth == "auto" or rates[0] == rates[1]
    return (saved.get("encoders") or {}) if same else {}


def _require_installed(encoder: str) -> None:
    if encoder not in candidates():
        raise ConfigError(
            f"wire.encoder: {encoder} is not installed here; pip install planaria[compression]"
        )


def _said(encoders: Sequence[str], tables: int, why: str) -> str:
    counts = Counter(encoders)
    if why and set(counts) == {"exact"}:
        return f"lookups: all rows travel exactly, for nothing pays {why}"
    told = ", ".join(f"{SAID.get(n, n)} for {count}" for n, count in sorted(counts.items()))
    return f"lookups: {told} of {tables} tables" + (f", {why}" if why else "")


def _shown(bytes_per_s: float) -> str:
    """As wire.bandwidth takes it."""
    mbit = max(bytes_per_s * 8 / 1e6, 0.001)
    unit, number = ("Gbit", mbit / 1000) if mbit >= 1000 else ("Mbit", mbit)
    return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"


# ---------------------------------------------------------------------------- the choice


def _chosen(config: Config, tables: Sequence[Table], bandwidth: float) -> dict[str, str]:
    """Tables that begin alike, but for the scale, are measured once."""
    rule, wanted = bound_rule(config), {table.name for table in tables}
    measured: dict[tuple[object, ...], Mapping[str, Measured]] = {}
    found = {}
    for arena in config.arenas:
        for local, number in enumerate(arena.table_ids.tolist()):
            table = config.tables[number]
            if table.name not in wanted:
                continue
            rows = min(table.rows, SAMPLED_ROWS)
            start = table.start
            alike = (table.dim, rows, start.distribution, start.a == -start.b, not start.a)
            if alike not in measured:
                sample = first_rows(config.seed, arena, local, rows)
                bound = rule.bound_of(sample) * rule.factor(1)
                if not bound:  # nothing is known of what such a table will be
                    sample = np.random.default_rng(0).normal(size=sample.shape).astype(np.float32)
                    bound = rule.bound_of(sample) * rule.factor(1)
                measured[alike] = measure(sample, bound, candidates())
            found[table.name] = choose(measured[alike], bandwidth)
    return found


def first_rows(seed: int, arena: Arena, local: int, rows: int) -> Floats:
    """Weights of step 0 of an arena's table, enough of them: some twice where it has few."""
    count = max(rows, -(-LEAST_FLOATS // arena.dim))
    wanted = int(arena.first_rows[local]) + np.arange(count, dtype=np.int64) % rows
    records = np.empty((count, arena.words), np.uint32)
    state = arena.optimizer.initial_state(arena.dim)
    kernels.init_records(seed, arena.init, arena.rows, wanted, state, records)
    return np.ascontiguousarray(records[:, : arena.dim]).view(np.float32)
