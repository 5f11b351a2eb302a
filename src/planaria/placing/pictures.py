"""Statistics and plans for the eye: tables on a terminal, a PNG for a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from planaria.placement import Placement
from planaria.placing.making import Made
from planaria.placing.spreading import in_bytes
from planaria.placing.statistics import Statistics

PARTS = (0.001, 0.01, 0.1)  # of a table's rows, the hottest
MOST_SHOWN = 30  # tables, those with the most accesses
MOST_SERVERS = 32
RAM_COLOUR, SSD_COLOUR, PARITY_COLOUR = "#2a7f62", "#c8553d", "#3d6fc8"


def show_statistics(console: Console, found: Statistics) -> None:
    console.print(
        f"{found.source}: {found.sampled:,} of {found.samples:,} samples, "
        f"{100 * found.sampled / found.samples:.3g} %",
        markup=False,
        soft_wrap=True,
    )
    caption = (
        "accesses: rows per sample; coverage: samples that have the feature; seen: rows of the "
        "table that the sample met, and all will; unseen: accesses on rows that it did not meet; "
        "hottest: accesses that this part of the rows takes; all in %"
    )
    table = _table(
        caption,
        "table",
        "rows",
        "accesses",
        "coverage",
        "pooling",
        "seen",
        "in all",
        "unseen",
        "hottest\n0.1",
        "\n1",
        "\n10",
    )
    for one in sorted(found.tables, key=lambda one: -one.accesses)[:MOST_SHOWN]:
        table.add_row(
            one.name,
            f"{one.rows:,}",
            f"{one.accesses_per_sample:.3g}",
            _percent(one.coverage),
            f"{one.pooling:.3g}",
            _percent(one.distinct / one.rows),
            _percent(one.distinct_of_all / one.rows),
            _percent(one.unseen),
            *(_percent(one.hottest(part)) for part in PARTS),
        )
    console.print(table)
    _say_left_out(console, len(found.tables))


def show_made(console: Console, made: Made) -> None:
    plan = made.plan
    _show_tables(console, plan)
    _show_servers(console, plan)
    over = plan.largest / plan.bound_microseconds if plan.bound_microseconds else 1.0
    console.print(
        f"largest server {_short(plan.largest)} us per sample, {over:.4f} times the bound of the "
        f"linear program, {plan.balance:.4f} times the mean; {plan.solver}, {made.seconds:.2f} s",
        soft_wrap=True,
    )
    slow = plan.slow_lookups
    console.print(f"rows from SSDs: {_short(slow)} per sample", soft_wrap=True)
    for metric, largest in made.greedy.items():
        text = f"  largest server of greedy sharding by {metric}: {_short(largest)} us"
        console.print(text, soft_wrap=True)
    if not made.greedy:
        text = f"  with the same RAM for every table: {_short(made.even_split)}"
        console.print(text, soft_wrap=True)
    if made.known_of_all < 0.95 * slow:
        console.print(
            f"  with statistics of all samples: about {_short(made.known_of_all)}; more of the "
            "data, by a larger --sample if there is more, would know more of the rows",
            soft_wrap=True,
        )


def _show_tables(console: Console, plan: Placement) -> None:
    whole = any(one.server is not None for one in plan.tables)
    levels = range(len(plan.servers and plan.tables[0].hot))
    names = ["in RAM, %" if len(levels) == 1 else f"level {level}, %" for level in levels]
    table = _table(
        "hot rows by level, which servers with equal budgets share" * (len(levels) > 1),
        "table",
        "rows",
        "record",
        *names,
        *["server"] * whole,
    )
    for one in sorted(plan.tables, key=lambda one: -one.rows)[:MOST_SHOWN]:
        table.add_row(
            one.name,
            f"{one.rows:,}",
            f"{one.record_bytes:,}",
            *(_percent(hot / one.rows) for hot in one.hot),
            *[str(one.server)] * whole,
        )
    console.print(table)
    _say_left_out(console, len(plan.tables))


def _show_servers(console: Console, plan: Placement) -> None:
    caption = (
        "per sample: rows looked up in RAM and on SSD, bytes read and written, parity included"
    )
    table = _table(
        caption,
        "server",
        "share, %",
        "RAM",
        "SSD",
        "rows\nRAM",
        "\nSSD",
        "bytes\nRAM",
        "\nSSD",
        "parity\nbytes",
        "us",
    )
    for number, one in enumerate(plan.servers[:MOST_SERVERS]):
        table.add_row(
            str(number),
            _percent(one.share) if one.share else "-",
            in_bytes(one.ram_used),
            in_bytes(one.ssd_used),
            _short(one.lookups_ram),
            _short(one.lookups_ssd),
            in_bytes(one.bytes_ram),
            in_bytes(one.bytes_ssd),
            in_bytes(one.parity_ram + one.parity_ssd),
            _short(one.microseconds),
        )
    console.print(table)


def _table(caption: str, first: str, *names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=caption or None)
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _say_left_out(console: Console, tables: int) -> None:
    if tables > MOST_SHOWN:
        console.print(f"and {tables - MOST_SHOWN:,} tables more; --json has all")


def _percent(share: float) -> str:
    return f"{100 * share:.3g}"


def _short(number: float) -> str:
    return f"{number:,.4g}"


# ------------------------------------------------------------------------ PNG


def write_statistics_png(found: Statistics, path: Path) -> None:
    """The share of accesses over the share of rows, a line for each table."""
    figure = _figure()
    curves, unseen = figure.subplots(1, 2)
    for one in found.tables:
        rows = np.array(one.hot_rows[1:]) / one.rows
        label = one.name if len(found.tables) <= 12 else None
        (line,) = curves.plot(100 * rows, 100 * np.array(one.share[1:]), label=label)
        curves.plot(100 * rows, 100 * np.array(one.share_of_all[1:]), ":", color=line.get_color())
        unseen.plot(one.rows, 100 * one.unseen, "o", color=line.get_color())
    curves.set_xscale("log")
    curves.set_xlabel("hottest rows, % of a table")
    curves.set_ylabel("accesses that they take, % (dotted: if all data were known)")
    unseen.set_xscale("log")
    unseen.set_xlabel("rows of a table")
    unseen.set_ylabel("accesses on rows that the sample did not meet, %")
    if len(found.tables) <= 12:
        curves.legend(fontsize="small")
    _save(figure, f"{found.sampled:,} of {found.samples:,} samples", path)


def write_plan_png(plan: Placement, path: Path) -> None:
    """Which part of each table is in RAM, and what every server has to do."""
    figure = _figure()
    tables, servers = figure.subplots(1, 2)
    shown = sorted(plan.tables, key=lambda one: -one.rows * one.record_bytes)
    sizes = np.array([one.rows * one.record_bytes for one in shown]) / 1e9
    hot = np.array([one.hot[0] / one.rows for one in shown])
    places = np.arange(len(shown))
    tables.bar(places, sizes, color=SSD_COLOUR, width=1.0, label="on SSD")
    tables.bar(places, sizes * hot, color=RAM_COLOUR, width=1.0, label="in RAM")
    tables.set_yscale("log")
    tables.set_xlabel("tables, the largest first")
    tables.set_ylabel("GB of records (lower part: in RAM)")
    tables.legend()
    numbers = np.arange(len(plan.servers))
    rows = np.array([[one.lookups_ram, one.lookups_ssd] for one in plan.servers])
    servers.bar(numbers, [one.microseconds for one in plan.servers], color=PARITY_COLOUR)
    servers.axhline(plan.bound_microseconds, color="black", linewidth=1)
    servers.set_xlabel("server")
    servers.set_ylabel("us per sample (line: bound of the linear program)")
    slow, every = rows[:, 1].sum(), max(rows.sum(), 1e-300)
    _save(figure, f"{100 * slow / every:.3g} % of the rows come from SSDs", path)


def _figure() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, needed only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, title: str, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
