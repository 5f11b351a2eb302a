"""What was measured, for the eye: tables for a terminal, a PNG for a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from planaria.compressing.measuring import CLASSES, HALVES, Report
from planaria.compressing.recommending import Recommendation
from planaria.wire.measuring import candidates

NOTHING = "-"
COLOURS = ("#999999", "#2a7f62", "#c8553d", "#3d6fc8", "#8a5a9e", "#d9a441", "#555555")


def show(console: Console, report: Report, recommendation: Recommendation | None) -> None:
    shares = ", ".join(f"{share:g} ({name})" for name, share in CLASSES.items())
    _print(
        console,
        _lines(report),
        f"step {report.step:,}; ratio: bytes of rows over bytes sent; bounds are {shares} of what "
        "a table's weights span",
    )
    _print(
        console,
        _totals(report),
        "all tables; rates: MB of rows per second of one core here, the median of all tables and "
        "bounds",
    )
    if recommendation is not None:
        _print(console, _choices(recommendation), *recommendation.sentences())


def _print(console: Console, table: Table, *sentences: str) -> None:
    console.print(table)
    for sentence in sentences:
        console.print(sentence, markup=False, soft_wrap=True)


def _table(columns: Sequence[str], words: int) -> Table:
    """The first columns are words, the others numbers. For a terminal of 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        heading = name if "\n" in name else f"\n{name}"
        table.add_column(heading, justify="left" if number < words else "right", no_wrap=True)
    return table


def _lines(report: Report) -> Table:
    encoders = candidates()
    columns = ["table", "bound", "largest\nerror", "mean\nerror", *HALVES, *encoders]
    table = _table(columns, 2)
    for line in report.lines:
        cells = [line.table, line.bound_class]
        cells += [f"{line.largest_error:.1e}", f"{line.mean_error:.1e}"]
        for name in (*HALVES, *encoders):
            found = line.measured.get(name)
            cells.append(f"{found.ratio:.1f}" if found else NOTHING)
        table.add_row(*cells)
    return table


def _totals(report: Report) -> Table:
    table = _table(["encoder", *CLASSES, "encode\nMB/s", "decode\nMB/s"], 1)
    for name in (*HALVES, *candidates()):
        found = [line.measured[name] for line in report.lines if name in line.measured]
        ratios = [report.ratio(name, name)] * len(CLASSES) if name in HALVES else None
        ratios = ratios or [report.ratio(one, name) for one in CLASSES]
        table.add_row(
            name,
            *(f"{ratio:.1f}" for ratio in ratios),
            f"{statistics.median(one.encode_rate for one in found) / 1e6:,.0f}",
            f"{statistics.median(one.decode_rate for one in found) / 1e6:,.0f}",
        )
    return table


def _choices(recommendation: Recommendation) -> Table:
    table = _table(["table", "bound", "encoder", "ratio", "gain"], 3)
    for one in recommendation.choices:
        table.add_row(
            one.table, one.bound_class, one.encoder, f"{one.ratio:.1f}", f"{one.gain:.2f}"
        )
    return table


def write_png(report: Report, path: Path) -> None:
    """The ratio of each table under each bound by the best encoder, and rates against ratios."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, needed only here
    from matplotlib.figure import Figure

    tables = [sample.table for sample in report.samples]
    figure = Figure(figsize=(11, max(4.5, 1.5 + 0.3 * len(tables))), layout="constrained")
    FigureCanvasAgg(figure)
    bars, rates = figure.subplots(1, 2)
    _draw_ratios(bars, report, tables)
    _draw_rates(rates, report)
    for axes in (bars, rates):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"rows of step {report.step:,} within an error bound")
    figure.savefig(path, format="png", dpi=120)


def _draw_ratios(axes: Any, report: Report, tables: Sequence[str]) -> None:
    height = 0.8 / len(CLASSES)
    for number, name in enumerate(CLASSES):
        lines = [line for line in report.lines if line.bound_class == name]
        best = [max(one.ratio for one in line.measured.values()) for line in lines]
        rows = [row + (number - 1) * height for row in range(len(tables))]
        axes.barh(rows, best, height, color=COLOURS[1 + number], label=name)
    axes.set_yticks(range(len(tables)), tables)
    axes.invert_yaxis()
    axes.set_xlabel("bytes of rows over bytes sent, best encoder")
    axes.legend(fontsize="small")


def _draw_rates(axes: Any, report: Report) -> None:
    for colour, name in zip(COLOURS, (*HALVES, *candidates()), strict=False):
        found = [line.measured[name] for line in report.lines if name in line.measured]
        both = [1e-6 / (1 / one.encode_rate + 1 / one.decode_rate) for one in found]
        axes.plot([one.ratio for one in found], both, "o", color=colour, label=name, alpha=0.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of rows over bytes sent")
    axes.set_ylabel("MB of rows encoded and decoded per second of a core")
    axes.legend(fontsize="small")
