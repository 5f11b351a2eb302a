"""What a job's limit of memory means for each of its servers: see tier.ram."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from planaria.config import Config
from planaria.errors import TierError
from planaria.records.budget import ArenaNeeds, ServerNeeds, Tier, server_needs, slots_within
from planaria.records.coldfile import RecordsFile
from planaria.tables import Arena

UNEVEN = 1.25  # a server may change more rows in a step than the mean of them


def touched_rows(config: Config, tables: int) -> int:
    """Distinct rows of a step in so many tables, at most; a script's bags may be of any size."""
    return max(config.batch, config.trainers * config.script.ids // len(config.tables)) * tables


def tier_of(config: Config) -> Tier | None:
    """None where all records are to be in memory, or have room there."""
    if config.tier.ram is None or config.tier.path is None:
        return None
    arenas, history = _arenas(config), _history(config)
    if config.tier.ram >= server_needs(arenas, history).all:
        return None
    return Tier(config.tier.path, slots_within(config.tier.ram, arenas, history))


def needs_of(config: Config) -> ServerNeeds:
    return server_needs(_arenas(config), _history(config))


def tier_problems(config: Config) -> Iterator[str]:
    """Whether a server's share fits into its memory, and the others into the folder."""
    needs, limit = needs_of(config), config.tier.ram
    if limit is None or config.tier.path is None:
        return
    if limit < needs.least:
        yield (
            f"tier.ram: expected {needs.least} or more, got {limit}: {needs.history} are for the "
            f"history, the rest for the rows of a step and to know where all others are. With "
            f"{needs.all} all records are in memory; lower batch or history.steps, or take more "
            "servers"
        )
    if limit >= needs.all:
        return
    try:
        needed = config.servers * sum(
            RecordsFile(config.tier.path, arena.words, 0).stride * arena.records
            for arena in _arenas(config)
        )
        free = shutil.disk_usage(config.tier.path).free
    except (TierError, OSError) as error:
        yield f"tier.path: {error}"
        return
    if needed > free:
        yield (
            f"tier.path: the records of all servers take {needed} bytes there, but {free} are "
            "free; make room, choose another folder, or raise tier.ram"
        )


def _arenas(config: Config) -> list[ArenaNeeds]:
    found = []
    for arena in config.arenas:
        layout = config.layout.arena(arena.rows)
        most = max(layout.records(place) for place in config.layout.places)
        rows = min(_changed_rows(config, arena), most)
        found.append(ArenaNeeds(most, arena.words, rows))
    return found


def _changed_rows(config: Config, arena: Arena) -> int:
    """Records of one server that a step changes, data and parity."""
    touched = min(touched_rows(config, len(arena.table_ids)), arena.rows)
    return int(UNEVEN * touched * (1 + config.r) / config.servers) + 1


def _history(config: Config) -> int:
    """Of one server: a delta and an index of each of those, for every step that is kept."""
    per_step = sum((4 * arena.words + 8) * _changed_rows(config, arena) for arena in config.arenas)
    return per_step * config.history.steps
