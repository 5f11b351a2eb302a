"""From statistics and servers to a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from planaria.errors import PlacementError
from planaria.kernels.types import Index
from planaria.placement import HotRows, PlacedServer, PlacedTable, Placement
from planaria.placing.costs import Curve, Machine, Storing
from planaria.placing.exact import choose_steps
from planaria.placing.filling import hot_rows
from planaria.placing.simple import METRICS, even_split, greedy, slow_lookups
from planaria.placing.spreading import Spread, spread
from planaria.placing.statistics import Statistics
from planaria.placing.whole import Assigned, Problem, assign_exactly, assign_heuristically

SOLVERS = ("auto", "highs", "heuristic")
WORTH_PROVING = 1.001  # largest cost over its bound: below, there is nothing to win
MOST_CHOICES = 20_000  # steps of all curves that `auto` gives to HiGHS
MOST_ASSIGNMENTS = 150  # tables x servers
LIMIT_S = 30.0


@dataclass(frozen=True)
class Wishes:
    """What is asked of a plan, beside the servers."""

    storing: Storing = field(default_factory=Storing)
    whole: bool = False  # tables
    even: bool = True  # shares of rows
    solver: str = "auto"
    record_bytes: int | None = None  # instead of what the statistics say
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Made:
    """A plan, its hot rows, and what it is worth."""

    plan: Placement
    hot: dict[tuple[int, int], HotRows]
    seconds: float  # that planning took
    even_split: float  # rows per sample from SSDs, if every table had the same RAM
    greedy: dict[str, float]  # largest server of greedy sharding, by metric; of whole tables alone
    known_of_all: float  # the same of this plan's budgets, with statistics of all data


def curves_of(statistics: Statistics, wishes: Wishes, *, of_all: bool = False) -> list[Curve]:
    return [
        Curve(table.heat(wishes.record_bytes, of_all=of_all), wishes.storing)
        for table in statistics.tables
    ]


def make_placement(
    statistics: Statistics,
    heat: Sequence[Index],
    machines: Sequence[Machine],
    wishes: Wishes,
) -> Made:
    """heat: the rows that the sample met, by table, hottest first."""
    started = time.perf_counter()
    curves = curves_of(statistics, wishes)
    plan = _plan(statistics, curves, machines, wishes)
    seconds = time.perf_counter() - started
    hot = {
        (table, level): HotRows.of(one.rows, hottest(heat[table], one.rows, count))
        for table, one in enumerate(plan.tables)
        for level, count in enumerate(one.hot)
    }
    ram = sum(machine.ram for machine in machines)
    split = slow_lookups(curves, even_split(curves, ram))
    sharded = _greedy(curves, machines) if wishes.whole else {}
    better = _plan(statistics, curves_of(statistics, wishes, of_all=True), machines, wishes)
    return Made(plan, hot, seconds, split, sharded, better.slow_lookups)


def _greedy(curves: Sequence[Curve], machines: Sequence[Machine]) -> dict[str, float]:
    """Microseconds per sample; without those that find no room."""
    found = {}
    for metric in METRICS:
        with suppress(PlacementError):
            found[metric] = 1e6 * float(greedy(curves, machines, metric).max())
    return found


def hottest(heat: Index, rows: int, count: int) -> Index:
    """The first `count` rows by heat; behind those that a sample met, others by their numbers."""
    if count <= len(heat):
        return heat[:count]
    others = np.ones(rows, np.bool_)
    others[heat] = False
    return np.concatenate([heat, np.flatnonzero(others)[: count - len(heat)]])


def _plan(
    statistics: Statistics, curves: list[Curve], machines: Sequence[Machine], wishes: Wishes
) -> Placement:
    if wishes.whole:
        return _of_whole_tables(statistics, curves, machines, wishes)
    found = spread(curves, machines, even=wishes.even)
    solver = "linear program, by its best segments"
    choices = sum(len(curve.ram) for curve in curves)
    worth = found.largest > WORTH_PROVING * found.bound and choices <= MOST_CHOICES
    if wishes.solver == "highs" or (wishes.solver == "auto" and worth):
        found, solver = _with_steps(curves, found, solver)
    return _of_spread_rows(statistics, curves, machines, wishes, found, solver)


def _with_steps(curves: list[Curve], found: Spread, solver: str) -> tuple[Spread, str]:
    """With the integer program's steps on every kind of server where they cost less."""
    hot, seconds = found.hot.copy(), found.seconds.copy()
    for kind, (machine, share) in enumerate(zip(found.kinds, found.shares, strict=True)):
        exact = choose_steps(curves, machine, float(share), limit_s=LIMIT_S)
        if exact.seconds < seconds[kind]:
            solver = "HiGHS"
            seconds[kind] = exact.seconds
            hot[kind] = [
                int(curve.hot[step]) for curve, step in zip(curves, exact.choice, strict=True)
            ]
    return Spread(found.kinds, found.kind, found.shares, hot, seconds, found.bound), solver


def _of_spread_rows(
    statistics: Statistics,
    curves: list[Curve],
    machines: Sequence[Machine],
    wishes: Wishes,
    found: Spread,
    solver: str,
) -> Placement:
    servers = []
    for machine, kind in zip(machines, found.kind, strict=True):
        share = float(found.shares[kind])
        parts = [(curve, int(n), share) for curve, n in zip(curves, found.hot[kind], strict=True)]
        servers.append(_server(machine, kind, share, parts))
    tables = tuple(
        PlacedTable(curve.heat.name, curve.heat.rows, curve.heat.record_bytes, tuple(levels))
        for curve, levels in zip(curves, found.hot.T.tolist(), strict=True)
    )
    return _placement(statistics, wishes, tables, servers, found.bound, solver)


def _of_whole_tables(
    statistics: Statistics, curves: list[Curve], machines: Sequence[Machine], wishes: Wishes
) -> Placement:
    if wishes.storing.r:
        raise PlacementError(
            "--whole-tables: Planaria's parity is of rows that are spread; add --parity 0"
        )
    problem = Problem(curves, machines)
    found = _assigned(problem, wishes)
    hot = hot_rows(curves, found.ram)
    servers = []
    for number, machine in enumerate(machines):
        own = np.flatnonzero(found.server == number)
        parts = [(curves[table], int(hot[table]), 1.0) for table in own]
        servers.append(_server(machine, 0, 0.0, parts))
    tables = tuple(
        PlacedTable(one.heat.name, one.heat.rows, one.heat.record_bytes, (int(n),), int(server))
        for one, n, server in zip(curves, hot, found.server, strict=True)
    )
    return _placement(statistics, wishes, tables, servers, found.bound, found.solver)


def _assigned(problem: Problem, wishes: Wishes) -> Assigned:
    if wishes.solver == "highs":
        return assign_exactly(problem, limit_s=LIMIT_S)
    found = assign_heuristically(problem, seed=wishes.seed)
    small = len(problem.curves) * len(problem.machines) <= MOST_ASSIGNMENTS
    if wishes.solver == "auto" and small and found.largest > WORTH_PROVING * found.bound:
        exact = assign_exactly(problem, limit_s=LIMIT_S)
        found = exact if exact.largest <= found.largest else found
    return found


def _server(
    machine: Machine, level: int, share: float, parts: Sequence[tuple[Curve, int, float]]
) -> PlacedServer:
    """parts: curves, hot rows, and how much of the table's rows this server has."""
    ram = ssd = lookups_ram = lookups_ssd = seconds = 0.0
    traffic = np.zeros(4)
    for curve, hot, part in parts:
        n = np.array([float(hot)])
        of_table, accesses = curve.traffic_of(n), curve.heat.accesses
        in_ram, on_hot = float(curve.ram_of(n)[0]), float(curve.share_of(n)[0])
        ram += part * in_ram
        ssd += part * (curve.bytes - in_ram)
        lookups_ram += part * accesses * on_hot
        lookups_ssd += part * accesses * max(1 - on_hot, 0.0)
        columns = (of_table.ram, of_table.ssd, of_table.parity_ram, of_table.parity_ssd)
        traffic += part * np.array([float(one[0]) for one in columns])
        seconds += part * float(of_table.seconds(machine)[0])
    fast, slow, parity_fast, parity_slow = traffic.tolist()
    return PlacedServer(
        ram=int(machine.ram),
        ssd=int(machine.ssd),
        level=level,
        share=share,
        ram_used=int(ram),
        ssd_used=max(int(ssd), 0),
        lookups_ram=lookups_ram,
        lookups_ssd=lookups_ssd,
        bytes_ram=fast + parity_fast,
        bytes_ssd=slow + parity_slow,
        parity_ram=parity_fast,
        parity_ssd=parity_slow,
        microseconds=1e6 * seconds,
    )


def _placement(
    statistics: Statistics,
    wishes: Wishes,
    tables: tuple[PlacedTable, ...],
    servers: list[PlacedServer],
    bound: float,
    solver: str,
) -> Placement:
    storing = wishes.storing
    return Placement(
        tables=tables,
        servers=tuple(servers),
        k=storing.k,
        r=storing.r,
        renumbered=storing.renumbered,
        bound_microseconds=1e6 * bound,
        solver=solver,
        statistics=statistics.source,
    )
