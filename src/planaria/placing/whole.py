"""Whole tables to servers, as RecShard and most systems have them: greedy, then local search.

A server with some tables fills its RAM with their best segments (filling.py); what is decided here
is which tables those are, so that the largest cost is least. Greedy: the linear program over all
servers together gives RAM a price, in seconds per byte; at that price a table weighs its seconds
and the RAM that it would take. The heaviest one first, each goes where the sum is least. Local
search: a table of the server that costs most moves, or changes places with another one, if both
servers then cost less than that one did. Weights at each server's own price of RAM find the
candidates, true costs decide. Where no exchange helps, a few at random and another search; the best
that was seen counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planaria.errors import PlacementError
from planaria.kernels.types import Index
from planaria.placing.costs import Curve, Machine, Numbers
from planaria.placing.exact import assign_tables
from planaria.placing.filling import Menu, menu_of
from planaria.placing.spreading import check_room, in_bytes, kinds_of

CANDIDATES = 48  # exchanges that are costed truly, of those that the weights like best
KICKED = 3  # random exchanges before another search
FEWEST_KICKS, MOST_KICKS = 12, 40
EVALUATIONS = 60_000  # in all kicks, about: a table more makes each search longer
SLACK = 1 + 1e-9
CLOSE = 1.0001  # to the bound: nothing is left to look for


@dataclass(frozen=True, eq=False)
class Assigned:
    server: Index  # int64[tables]: who has it
    ram: Numbers  # float64[tables]: bytes of it in RAM
    seconds: Numbers  # float64[servers]: per sample
    bound: float  # no assignment's largest cost is below it
    solver: str

    @property
    def largest(self) -> float:
        return float(self.seconds.max())


class Problem:
    """Tables and servers, and what any set of tables costs a server."""

    def __init__(self, curves: Sequence[Curve], machines: Sequence[Machine]) -> None:
        check_room(curves, machines, even=False)
        self.curves, self.machines = curves, machines
        self.kinds, self.kind = kinds_of(machines)
        self.menus = [menu_of(curves, machine) for machine in self.kinds]
        self.sizes = np.array([curve.bytes for curve in curves])
        self.room = np.array([machine.ram + machine.ssd for machine in machines])
        self._check_largest()

    def _check_largest(self) -> None:
        largest = int(np.argmax(self.sizes))
        if self.sizes[largest] > self.room.max() * SLACK:
            raise PlacementError(
                f"table {self.curves[largest].heat.name} has {in_bytes(self.sizes[largest])}, and "
                f"no server has room for more than {in_bytes(self.room.max())}: "
                f"{in_bytes(self.sizes[largest] - self.room.max())} are missing; raise --ram or "
                "--ssd, or leave out --whole-tables"
            )

    def seconds(self, server: int, tables: Index) -> float:
        """Per sample; infinite where they have no room."""
        if self.sizes[tables].sum() > self.room[server] * SLACK:
            return np.inf
        menu = self.menus[self.kind[server]]
        ram = self.machines[server].ram
        return float(menu.base[tables].sum()) - menu.saving(menu.members(tables), ram)

    def assigned(self, server: Index, bound: float, solver: str) -> Assigned:
        ram, seconds = np.zeros(len(self.curves)), np.zeros(len(self.machines))
        for number, machine in enumerate(self.machines):
            menu, tables = self.menus[self.kind[number]], np.flatnonzero(server == number)
            ram += menu.fill(menu.members(tables), machine.ram)
            seconds[number] = self.seconds(number, tables)
        return Assigned(server, ram, seconds, bound, solver)

    def bound(self) -> float:
        """The larger of two: tables split at will, and the dearest table alone on the best server.

        Servers of a kind are one large server to the linear program, whose optimum may as well
        treat them alike.
        """
        alone = self.alone.min(axis=0)
        counts = np.bincount(self.kind)
        if len(self.kinds) == 1:
            menu, ram = self.menus[0], self.kinds[0].ram * counts[0]
            every = np.arange(len(menu.table))
            split = (float(menu.base.sum()) - menu.saving(every, ram)) / int(counts[0])
        else:
            split = self._split_bound(counts)
        return max(split, float(alone.max()))

    @cached_property
    def alone(self) -> Numbers:
        """float64[kinds, tables]: seconds of a server that has nothing but this table."""
        return np.array(
            [
                [
                    float(menu.base[table]) - menu.saving(menu.members([table]), machine.ram)
                    for table in range(menu.tables)
                ]
                for menu, machine in zip(self.menus, self.kinds, strict=True)
            ]
        )

    def _split_bound(self, counts: Index) -> float:
        together = [
            replace(
                machine,
                ram=machine.ram * count,
                ssd=machine.ssd * count,
                ram_rate=machine.ram_rate * count,
                ssd_rate=machine.ssd_rate * count,
            )
            for machine, count in zip(self.kinds, counts.tolist(), strict=True)
        ]
        menus = [menu_of(self.curves, machine) for machine in together]
        every = range(len(together))
        return assign_tables(self.sizes, menus, together, tuple(every), whole=False).bound


def assign_heuristically(
    problem: Problem, *, seed: int = 0, observe: Callable[[float], None] = lambda best: None
) -> Assigned:
    """observe: called with the largest cost whenever it falls."""
    search = _Search(problem)
    bound = problem.bound()
    best = search.descend(search.greedy())
    observe(search.largest(best))
    rng = np.random.default_rng(seed)
    kicks = EVALUATIONS // (len(problem.curves) * CANDIDATES)
    for _ in range(int(np.clip(kicks, FEWEST_KICKS, MOST_KICKS))):
        if search.largest(best) <= bound * CLOSE:
            break
        found = search.descend(search.kicked(best, rng))
        if search.largest(found) < search.largest(best):
            best = found
            observe(search.largest(best))
    if not np.isfinite(search.largest(best)):
        raise PlacementError(search.what_is_missing(best))
    return problem.assigned(best, bound, "greedy and local search")


def assign_exactly(problem: Problem, *, limit_s: float = 60.0) -> Assigned:
    found = assign_tables(
        problem.sizes, problem.menus, problem.kinds, problem.kind, limit_s=limit_s
    )
    bound = max(problem.bound(), found.bound)
    proven = "" if found.proven else f", stopped after {limit_s:g} s"
    return problem.assigned(found.choice, bound, f"HiGHS{proven}")


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kind = np.array(problem.kind)

    def greedy(self) -> Index:
        problem = self.problem
        ram = sum(machine.ram for machine in problem.machines)
        price = _price(problem.menus[0], np.arange(len(problem.menus[0].table)), ram)
        weight = np.array([_weights(menu, price) for menu in problem.menus])
        server = np.zeros(len(problem.curves), np.int64)
        # RAM that a server has is what the weights of its tables do not have to pay for.
        load = -price * np.array([machine.ram for machine in problem.machines])
        room = problem.room.copy()
        for table in np.argsort(-weight.max(axis=0), kind="stable"):
            after = load + weight[self.kind, table]
            fits = room >= problem.sizes[table]
            # Nobody has room: whoever has most of it, and the search may mend that.
            chosen = int(np.argmin(np.where(fits, after, np.inf)) if fits.any() else room.argmax())
            server[table] = chosen
            load[chosen] = after[chosen]
            room[chosen] -= problem.sizes[table]
        return server

    def price(self, server: Index, number: int) -> float:
        menu = self.problem.menus[self.kind[number]]
        own = menu.members(np.flatnonzero(server == number))
        return _price(menu, own, self.problem.machines[number].ram)

    def costs(self, server: Index) -> Numbers:
        return np.array(
            [
                self.problem.seconds(number, np.flatnonzero(server == number))
                for number in range(len(self.problem.machines))
            ]
        )

    def largest(self, server: Index) -> float:
        return float(self.costs(server).max())

    def descend(self, server: Index) -> Index:
        server, costs = server.copy(), self.costs(server)
        prices = np.array([self.price(server, number) for number in range(len(costs))])
        while True:
            dearest = int(np.argmax(costs))
            exchange = self._improvement(server, costs, prices, dearest)
            if exchange is None:
                return server
            given, other, taken, costs[dearest], costs[other] = exchange
            server[given] = other
            if taken >= 0:
                server[taken] = dearest
            for number in (dearest, other):
                prices[number] = self.price(server, number)

    def _improvement(
        self, server: Index, costs: Numbers, prices: Numbers, dearest: int
    ) -> tuple[int, int, int, float, float] | None:
        """(table that goes, where to, table that comes or -1, what both servers then cost)."""
        own = np.flatnonzero(server == dearest)
        others = np.flatnonzero(server != dearest)
        idle = np.flatnonzero(np.arange(len(costs)) != dearest)
        # Columns: tables of others, then nothing in return, from each of them.
        partner = np.concatenate([server[others], idle])
        back = np.concatenate([others, np.full(len(idle), -1)])
        without = np.array([self.problem.seconds(dearest, own[own != table]) for table in own])
        here = self._at(prices[dearest])
        mine = np.minimum(without, 1e300)[:, None]
        mine = mine + np.where(back < 0, 0.0, here[self.kind[dearest], back])
        theirs = np.maximum(
            self._least(server, here, prices[dearest], own, partner, back),
            self._least_at_own_price(costs, prices, own, partner, back),
        )
        estimate = np.maximum(mine, theirs).ravel()
        count = min(CANDIDATES, len(estimate))
        likely = np.argpartition(estimate, count - 1)[:count] if count else np.empty(0, np.int64)
        for at in likely[np.argsort(estimate[likely], kind="stable")]:
            given, column = int(own[at // len(partner)]), at % len(partner)
            other, taken = int(partner[column]), int(back[column])
            found = self._exchanged(server, dearest, given, other, taken)
            if max(found) * SLACK < costs[dearest]:
                return given, other, taken, *found
        return None

    def _at(self, price: float) -> Numbers:
        """float64[kinds, tables]: weights at this price."""
        return np.array([_weights(menu, price) for menu in self.problem.menus])

    def _least(
        self, server: Index, weight: Numbers, price: float, own: Index, partner: Index, back: Index
    ) -> Numbers:
        """Whatever the price, weights less the price of all RAM are no more than the true cost."""
        kind = self.kind
        every = weight[kind[server], np.arange(len(server))]
        ram = np.array([machine.ram for machine in self.problem.machines])
        load = np.bincount(server, every, len(kind)) - price * ram
        left = load[partner] - np.where(back < 0, 0.0, weight[kind[partner], back])
        found: Numbers = left + weight[kind[partner][None, :], own[:, None]]
        return found

    def _least_at_own_price(
        self, costs: Numbers, prices: Numbers, own: Index, partner: Index, back: Index
    ) -> Numbers:
        weight = np.array(
            [
                _weights(self.problem.menus[kind], price)
                for kind, price in zip(self.kind, prices, strict=True)
            ]
        )
        left = np.minimum(costs, 1e300)[partner] - np.where(back < 0, 0.0, weight[partner, back])
        found: Numbers = left + weight[partner[None, :], own[:, None]]
        return found

    def _exchanged(
        self, server: Index, dearest: int, given: int, other: int, taken: int
    ) -> tuple[float, float]:
        """What both servers would cost."""
        after = server.copy()
        after[given] = other
        if taken >= 0:
            after[taken] = dearest
        mine = self.problem.seconds(dearest, np.flatnonzero(after == dearest))
        return mine, self.problem.seconds(other, np.flatnonzero(after == other))

    def kicked(self, server: Index, rng: np.random.Generator) -> Index:
        server = server.copy()
        for _ in range(KICKED):
            first, second = rng.integers(len(server), size=2)
            if rng.random() < 0.5:
                server[first], server[second] = server[second], server[first]
            else:
                server[first] = rng.integers(len(self.kind))
        return server

    def what_is_missing(self, server: Index) -> str:
        used = np.bincount(server, self.problem.sizes, len(self.kind))
        over = used - self.problem.room
        worst = int(np.argmax(over))
        return (
            f"no way was found to put whole tables where they have room: on server {worst} "
            f"{in_bytes(over[worst])} are missing; raise --ram or --ssd, or leave out "
            "--whole-tables"
        )


def _price(menu: Menu, segments: Index, ram: float) -> float:
    """Seconds that the last byte saves, where these segments share so much RAM."""
    at = int(np.searchsorted(np.cumsum(menu.ram[segments]), ram))
    if at == len(segments):
        return 0.0
    return float(menu.saved[segments[at]] / menu.ram[segments[at]])


def _weights(menu: Menu, price: float) -> Numbers:
    """Of each table: its seconds at this price of RAM, and what the RAM costs."""
    worth = menu.saved > price * menu.ram
    gained = np.where(worth, menu.saved - price * menu.ram, 0.0)
    return menu.base - np.bincount(menu.table, gained, menu.tables)
