"""The same problems for SciPy's HiGHS: integer programs over the steps of the curves.

`scipy` is imported here and nowhere else, by whoever calls: it takes a third of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planaria.errors import PlacementError
from planaria.kernels.types import Index
from planaria.placing.costs import Curve, Machine, Numbers
from planaria.placing.filling import Menu


@dataclass(frozen=True, eq=False)
class Exact:
    seconds: float  # of the largest server, per sample
    bound: float  # HiGHS's own: equal to it where the optimum was proven
    choice: Index  # by table: the step of its curve, or the server that has it
    proven: bool


def choose_steps(
    curves: Sequence[Curve], machine: Machine, share: float, *, limit_s: float = 60.0
) -> Exact:
    """One step of each curve for a server with this share of all rows: a knapsack with choices."""
    seconds = [share * curve.traffic.seconds(machine) for curve in curves]
    ram = [share * curve.ram for curve in curves]
    sizes = [len(one) for one in ram]
    table = np.repeat(np.arange(len(curves)), sizes)
    variables = np.arange(len(table))
    model = _Model(len(variables))
    model.add(table, variables, np.ones(len(variables)), [1.0] * len(curves), equal=True)
    model.add(np.zeros_like(table), variables, np.concatenate(ram) / _unit(machine.ram), [1.0])
    room = share * sum(curve.bytes for curve in curves) - machine.ssd
    if room > 0:  # what the disk does not hold
        model.add(np.zeros_like(table), variables, -np.concatenate(ram) / _unit(room), [-1.0])
    scale = max(sum(float(one.max()) for one in seconds), 1e-300)
    found = model.solve(np.concatenate(seconds) / scale, np.ones(len(variables)), 1.0, limit_s)
    picked = np.flatnonzero(found.x > 0.5)
    starts = np.cumsum(sizes) - sizes
    choice = np.empty(len(curves), np.int64)
    choice[table[picked]] = picked - starts[table[picked]]
    return Exact(float(found.fun) * scale, found.bound * scale, choice, found.proven)


def assign_tables(
    sizes: Numbers,
    menus: Sequence[Menu],
    kinds: Sequence[Machine],
    kind: Sequence[int],
    *,
    whole: bool = True,
    limit_s: float = 60.0,
) -> Exact:
    """Whole tables to servers, RAM filled by the segments of their curves.

    sizes: bytes of each table, parity included. menus: by kind of machine.
    whole: else tables are split over servers, which is the linear program.

    Variables: which server has which table (0 or 1), how much of each segment is in that server's
    RAM, and the largest cost, which is minimised.
    """
    tables, servers = len(sizes), len(kind)
    segments = [len(menus[one].table) for one in kind]
    first = tables * servers + np.cumsum([0, *segments])
    last = int(first[-1])
    model = _Model(last + 1)
    scale = max(float(menus[one].base.sum()) for one in kind) / servers or 1.0
    has = np.arange(tables * servers).reshape(servers, tables)
    model.add(
        np.tile(np.arange(tables), servers),
        has.ravel(),
        np.ones(has.size),
        [1.0] * tables,
        equal=True,
    )
    for server, number in enumerate(kind):
        menu, machine = menus[number], kinds[number]
        taken = np.arange(first[server], first[server + 1])
        rows = np.arange(len(taken))
        model.add(  # a segment is in the RAM of the server that has its table
            np.concatenate([rows, rows]),
            np.concatenate([taken, has[server][menu.table]]),
            np.concatenate([np.ones(len(rows)), -np.ones(len(rows))]),
            [0.0] * len(rows),
        )
        unit = _unit(machine.ram)
        model.add(np.zeros_like(taken), taken, menu.ram / unit, [machine.ram / unit])
        both = np.concatenate([has[server], taken])
        unit = _unit(machine.ssd)
        on_disk = np.concatenate([sizes, -menu.ram]) / unit
        model.add(np.zeros_like(both), both, on_disk, [machine.ssd / unit])
        cost = np.concatenate([menu.base, -menu.saved, [-scale]]) / scale
        model.add(np.zeros(len(cost), np.int64), np.append(both, last), cost, [0.0])
    goal = np.zeros(last + 1)
    goal[last] = 1.0
    integral = np.zeros(last + 1)
    integral[: has.size] = float(whole)
    upper = np.ones(last + 1)
    upper[last] = np.inf
    found = model.solve(goal, integral, upper, limit_s)
    choice = np.argmax(found.x[: has.size].reshape(servers, tables), axis=0)
    return Exact(float(found.fun) * scale, found.bound * scale, choice, found.proven)


def _unit(amount: float) -> float:
    """HiGHS has tolerances of 1e-6, so budgets are 1 for it."""
    return amount if amount > 0 else 1.0


class _Model:
    """Rows of a sparse matrix, as they come."""

    def __init__(self, variables: int) -> None:
        self.variables = variables
        self._parts: list[tuple[Index, Index, Numbers]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def add(
        self,
        rows: Index,
        columns: Index,
        values: Numbers,
        most: Sequence[float],
        *,
        equal: bool = False,
    ) -> None:
        """rows count from 0 within this part; each has its limit in `most`."""
        self._parts.append((rows + len(self._upper), columns, values))
        self._upper += most
        self._lower += most if equal else [-np.inf] * len(most)

    def solve(self, goal: Numbers, integral: Numbers, upper: Any, limit_s: float) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        rows, columns, values = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        shape = (len(self._upper), self.variables)
        matrix = csr_matrix((values, (rows, columns)), shape=shape)
        found = milp(
            goal,
            integrality=integral,
            bounds=Bounds(0.0, upper),
            constraints=LinearConstraint(matrix, self._lower, self._upper),
            options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
        )
        if found.x is None:
            raise PlacementError(f"HiGHS found no placement: {found.message}")
        found.proven = found.status == 0
        bound = getattr(found, "mip_dual_bound", None)
        found.bound = float(found.fun if bound is None else bound)
        return found
