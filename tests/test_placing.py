"""Plans: what of which table is in RAM, against linear and integer programs."""

from __future__ import annotations

import numpy as np
import pytest

from planaria.errors import ArgumentError, PlacementError
from planaria.placing.costs import Curve, Heat, Machine, Storing
from planaria.placing.exact import assign_tables, choose_steps
from planaria.placing.filling import hot_rows, lower_hull, menu_of, seconds_of
from planaria.placing.simple import METRICS, even_split, greedy, slow_lookups
from planaria.placing.sizes import for_servers
from planaria.placing.spreading import spread
from planaria.placing.whole import Problem, assign_exactly, assign_heuristically

AGREEMENT = 1.03


def a_heat(rng: np.random.Generator, name: str = "t", steps: int = 6) -> Heat:
    rows = int(np.exp(rng.uniform(np.log(50), np.log(1e6))))
    hot = np.unique(np.round(np.geomspace(1, rows, steps)).astype(np.int64))
    hot = np.append(0, hot)
    accesses = float(np.exp(rng.uniform(-3, 3)))
    record = int(rng.choice([64, 128, 256, 512]))
    return Heat(name, rows, record, accesses, hot, (hot / rows) ** rng.uniform(0.1, 0.9))


def some_curves(rng: np.random.Generator, most: int, storing: Storing) -> list[Curve]:
    return [Curve(a_heat(rng, f"t{n}"), storing) for n in range(int(rng.integers(3, most + 1)))]


def some_machines(rng: np.random.Generator, curves: list[Curve], servers: int) -> list[Machine]:
    """With room for all, of which a part is RAM; in half of the cases they differ."""
    size, largest = sum(curve.bytes for curve in curves), max(curve.bytes for curve in curves)
    machines = [
        Machine(
            size / servers * rng.uniform(0.02, 0.5),
            max(largest, size / servers) * rng.uniform(1.05, 1.6),
            ssd_rate=float(rng.choice([0.2e9, 1e9])),
        )
        for _ in range(servers)
    ]
    return machines if rng.random() < 0.5 else machines[:1] * servers


# ------------------------------------------------------------------------ costs


def test_costs_are_bytes_by_tier_over_their_rates() -> None:
    heat = Heat("t", 100, 512, 2.0, np.array([0, 10, 100]), np.array([0.0, 0.75, 1.0]))
    curve = Curve(heat, Storing(k=4, r=2))
    # Two rows per sample, each read and written, with two parity records; 4096 bytes from an SSD.
    hot, cold = 2 * 0.75 * (2 + 2 * 2) * 512, 2 * 0.25 * (2 + 2 * 2) * 4096
    assert curve.ram[1] == 10 * 512 * (1 + 2 / 4)
    assert curve.bytes == 100 * 512 * (1 + 2 / 4)
    assert seconds_of(curve, 10, Machine(0, 0, 10e9, 1e9)) == pytest.approx(hot / 10e9 + cold / 1e9)
    assert curve.hot_of(curve.ram[1]) == 10
    assert curve.hot_of(curve.ram[1] - 1) == 9


def test_rows_that_are_not_renumbered_have_parity_of_mixed_stripes_in_ram() -> None:
    heat = Heat("t", 1000, 512, 1.0, np.array([0, 100, 1000]), np.array([0.0, 0.9, 1.0]))
    sorted_rows, mixed = Curve(heat, Storing(4, 1)), Curve(heat, Storing(4, 1, renumbered=False))
    # Of 250 stripes 1 - 0.9^4 have a hot row among their four; drawn here, by chance within 4 %.
    rng = np.random.default_rng(0)
    stripes = [len(set(rng.choice(1000, 100, replace=False) // 4)) for _ in range(200)]
    hundred = np.array([100.0])
    ram = mixed.ram_of(hundred)[0]
    assert ram == pytest.approx(512 * (100 + np.mean(stripes)), rel=0.04)
    assert ram > 1.4 * sorted_rows.ram_of(hundred)[0]
    assert mixed.ram[-1] == sorted_rows.ram[-1] == mixed.bytes
    here, there = (curve.traffic_of(hundred).parity_ssd for curve in (mixed, sorted_rows))
    assert here < there


def test_a_curve_that_does_not_ascend_is_refused() -> None:
    with pytest.raises(ArgumentError, match="must ascend"):
        Heat("t", 100, 512, 2.0, np.array([0, 10, 100]), np.array([0.0, 0.75, 0.5]))


# ------------------------------------------------------------------------ one server


def test_a_hull_is_below_all_points_and_goes_through_some() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        x = np.sort(rng.choice(1000, 12, replace=False)).astype(float)
        y = rng.uniform(0, 1, 12)
        corners = lower_hull(x, y)
        assert (np.interp(x, x[corners], y[corners]) <= y + 1e-12).all()
        assert (np.diff(np.diff(y[corners]) / np.diff(x[corners])) > 0).all()


def test_filling_is_the_optimum_of_the_linear_program() -> None:
    from scipy.optimize import linprog

    rng = np.random.default_rng(2)
    for _ in range(20):
        curves = some_curves(rng, 6, Storing(page=1))
        machine = Machine(sum(curve.bytes for curve in curves) * rng.uniform(0, 1.1), 1e12)
        menu = menu_of(curves, machine)
        every = np.arange(len(menu.table))
        found = linprog(-menu.saved, [menu.ram], [machine.ram], bounds=(0, 1))
        assert menu.saving(every, machine.ram) == pytest.approx(-found.fun, rel=1e-7)
        hot = hot_rows(curves, menu.fill(every, machine.ram))
        ram = sum(
            curve.ram_of(np.array([float(n)]))[0] for curve, n in zip(curves, hot, strict=True)
        )
        assert ram <= machine.ram * (1 + 1e-9)


# ------------------------------------------------------------------------ rows spread over servers


@pytest.mark.parametrize(
    "storing", [Storing(page=1), Storing(4, 1), Storing(4, 2, renumbered=False)]
)
def test_rows_that_are_spread_agree_with_highs(storing: Storing) -> None:
    """A hundred instances with steps: 34 of each kind."""
    compared = 0
    for seed in range(34):
        rng = np.random.default_rng([seed, storing.r])
        steps = 12 if storing.renumbered else 4  # these are divided further
        curves = [
            Curve(a_heat(rng, f"t{n}", steps), storing) for n in range(int(rng.integers(3, 7)))
        ]
        machines = some_machines(rng, curves, 3)
        found = spread(curves, machines)
        assert found.largest >= found.bound
        exact = max(
            choose_steps(curves, machine, 1 / len(machines)).seconds for machine in found.kinds
        )
        assert exact >= found.bound * (1 - 1e-4)
        assert found.largest <= AGREEMENT * exact
        compared += 1
    assert compared == 34


def test_free_shares_level_the_costs_of_servers_that_differ() -> None:
    rng = np.random.default_rng(5)
    curves = some_curves(rng, 8, Storing(page=1))
    size = sum(curve.bytes for curve in curves)
    machines = [Machine(size * part, size) for part in (0.02, 0.02, 0.3)]
    even, free = spread(curves, machines), spread(curves, machines, even=False)
    assert free.largest < even.largest
    assert free.seconds.max() == pytest.approx(free.seconds.min(), rel=1e-3)
    assert float(free.shares @ np.bincount(free.kind)) == pytest.approx(1)
    assert free.largest == pytest.approx(free.bound, rel=1e-3)


def test_all_cost_the_same_and_ram_suffices_for_all_or_nothing() -> None:
    rng = np.random.default_rng(6)
    curves = some_curves(rng, 8, Storing(page=1))
    size = sum(curve.bytes for curve in curves)
    everything = spread(curves, [Machine(size, 0)] * 2)
    assert (everything.hot[0] == [curve.heat.rows for curve in curves]).all()
    nothing = spread(curves, [Machine(0, size)] * 2)
    assert not nothing.hot.any()


@pytest.mark.parametrize(
    ("ram", "even", "says"), [(0.2, True, "missing"), (0.45, True, "missing there")]
)
def test_what_has_no_room_says_how_much_is_missing(ram: float, even: bool, says: str) -> None:
    heat = Heat("t", 1000, 1000, 1.0, np.array([0, 1000]), np.array([0.0, 1.0]))
    curve = Curve(heat, Storing())
    machines = [Machine(ram * 1e6, 0), Machine(0.6e6, 0)]
    with pytest.raises(PlacementError, match=says) as raised:
        spread([curve], machines, even=even)
    assert ("200 kB are missing;" if ram == 0.2 else "50 kB are missing there") in str(raised.value)


# ------------------------------------------------------------------------ whole tables


def test_whole_tables_agree_with_highs_on_a_hundred_instances() -> None:
    compared, both_refused = 0, 0
    for seed in range(104):
        rng = np.random.default_rng(seed)
        curves = [
            Curve(a_heat(rng, f"t{n}", 4), Storing(page=1)) for n in range(int(rng.integers(3, 6)))
        ]
        problem = Problem(curves, some_machines(rng, curves, 2))
        try:
            exact = assign_exactly(problem)
        except PlacementError:  # no partition fits
            both_refused += 1
            continue
        found = assign_heuristically(problem)
        assert found.largest <= AGREEMENT * exact.largest, seed
        assert exact.largest <= found.largest * (1 + 1e-3), seed
        assert found.largest >= found.bound * (1 - 1e-6)
        compared += 1
    assert compared >= 98
    assert both_refused == 104 - compared


def test_the_bound_is_that_of_the_linear_program() -> None:
    rng = np.random.default_rng(8)
    for servers in (2, 3):
        curves = some_curves(rng, 6, Storing(page=1))
        problem = Problem(curves, some_machines(rng, curves, servers))
        relaxed = assign_tables(
            problem.sizes, problem.menus, problem.kinds, problem.kind, whole=False
        )
        alone = float(problem.alone.min(axis=0).max())
        assert problem.bound() == pytest.approx(max(relaxed.seconds, alone), rel=1e-4)


def test_tables_that_no_partition_fits_say_how_much_is_missing() -> None:
    heat = Heat("t", 1000, 1000, 1.0, np.array([0, 1000]), np.array([0.0, 1.0]))
    three = [Curve(heat, Storing())] * 3
    problem = Problem(three, [Machine(0.5e6, 1.2e6)] * 2)  # 1.7 MB each: one table of 1 MB
    with pytest.raises(PlacementError, match="300 kB are missing"):
        assign_heuristically(problem)
    with pytest.raises(PlacementError, match="HiGHS found no placement"):
        assign_exactly(problem)
    with pytest.raises(PlacementError, match=r"no server has room for more than 700 kB: 300 kB"):
        Problem(three, [Machine(0.1e6, 0.6e6)] * 9)


def test_a_plan_of_whole_tables_beats_greedy_sharding() -> None:
    rng = np.random.default_rng(9)
    curves = [Curve(a_heat(rng, f"t{n}", 20), Storing(page=1)) for n in range(40)]
    size = sum(curve.bytes for curve in curves)
    machines = [Machine(size / 40, size / 2, 10e9, 0.1e9)] * 4
    ours = assign_heuristically(Problem(curves, machines))
    others = [float(greedy(curves, machines, metric).max()) for metric in METRICS]
    assert ours.largest < min(others)
    assert ours.largest <= 1.05 * ours.bound


# ------------------------------------------------------------------------ without a plan


def test_an_even_split_leaves_what_small_tables_do_not_need_to_others() -> None:
    heats = [Heat("s", 10, 100, 1.0, np.array([0, 10]), np.array([0.0, 1.0]))]
    heats += [Heat("l", 1000, 100, 1.0, np.array([0, 1000]), np.array([0.0, 1.0]))] * 2
    curves = [Curve(heat, Storing()) for heat in heats]
    hot = even_split(curves, 100 * 110.0)
    assert hot.tolist() == [10, 50, 50]
    assert slow_lookups(curves, hot) == pytest.approx(2 * 0.95)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64GB", [64e9] * 4),
        ("1.5 TB", [1.5e12] * 4),
        ("1GiB*3,2g", [2.0**30] * 3 + [2e9]),
        ("1,2,3,4", [1, 2, 3, 4]),
    ],
)
def test_sizes_are_for_all_servers_or_for_each(text: str, sizes: list[float]) -> None:
    assert for_servers("--ram", text, 4) == sizes


@pytest.mark.parametrize(
    "text", ["", "GB", "1XB", "1GB*2", "1GB*5", "1GB,2GB", "-1GB", "1..2GB", "."]
)
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="--ram: "):
        for_servers("--ram", text, 4)
