"""A plan for the eye: a table and bars on a terminal, a PNG for a page."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planaria.planning.choosing import Estimate, beyond_text, lost_text, short
from planaria.planning.memory import VARIANTS
from planaria.planning.plan import Recommendation
from planaria.planning.simulation import Interval99, Simulated
from planaria.planning.strategies import memory

BAR_WIDTH = 40
LEAST_SHOWN = 1e-4  # overheads below this are one dot of a bar
MOST_SHOWN = 1e3  # overheads above this are called what they are
COLOURS = {"none": "#999999", "erasure": "#2a7f62", "checkpoint": "#c8553d", "cpr": "#3d6fc8"}


def show_plan(console: Console, plan: Recommendation) -> None:
    for note in plan.notes:
        console.print(note, markup=False, soft_wrap=True)
    if plan.findings:
        for sentence in plan.findings.sentences():
            console.print(f"trace: {sentence}", soft_wrap=True)
    inputs = plan.inputs
    console.print(
        f"{inputs.servers:,} servers, {inputs.trainers:,} trainers, {short(inputs.model_gb)} GB of "
        f"records (a save takes {short(3600 * inputs.save_hours)} s), {inputs.hours:,.4g} h, a "
        f"failure every {plan.mtbf_hours:,.3g} h; the whole job was simulated with {plan.failures}",
        soft_wrap=True,
    )
    console.print(_table(plan))
    console.print(_variants(plan), soft_wrap=True)
    console.print(_bars(plan))
    for name in plan.left_out:
        console.print(f"left out: {name}", soft_wrap=True)
    if plan.recommended is None:
        console.print(f"[red]{plan.reasons[0]}[/red]; raise one:", soft_wrap=True)
    else:
        console.print(f"recommended: [bold green]{plan.recommended}[/bold green]")
    for reason in plan.reasons[plan.recommended is None :]:
        console.print(f"  {reason}", markup=False, soft_wrap=True)


def _table(plan: Recommendation) -> Table:
    """As narrow as a terminal of 80 columns."""
    unit, in_unit = _memory_unit(plan)
    caption = (
        f"overheads: % of the job's length, ± 99 %; {unit}: the memory of one server, with parity, "
        "history and copies; MB/s: of one server; beyond r: the chance that more servers of a "
        "group fail at once than its parity bears"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    table.add_column("\nstrategy", no_wrap=True)
    for name in (
        "\nformula",
        "formula\nsimulated",
        "whole job\nsimulated",
        "saves\nevery",
        f"\n{unit}",
        "\nMB/s",
        "samples\nlost, %",
        "beyond\nr, %",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for found in plan.estimates:
        table.add_row(
            found.name,
            percent(found.formula),
            _overhead(found.checked),
            _overhead(found.whole),
            _every(found.behaviour.interval),
            short(found.memory.total / in_unit),
            short(found.bandwidth_mb_per_s),
            lost_text(found.lost_samples),
            _chance(plan, found),
            style="bold green" if found.name == plan.recommended else "dim" * bool(found.refused),
        )
    return table


def _memory_unit(plan: Recommendation) -> tuple[str, float]:
    most = max(found.memory.total for found in plan.estimates)
    return ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)


def _every(hours: float) -> str:
    if not math.isfinite(hours):
        return "-"
    return f"{short(hours)} h" if hours >= 0.1 else f"{short(3600 * hours)} s"


def _variants(plan: Recommendation) -> str:
    """Partial recovery's memory depends on how it chooses rows; the table has one way."""
    of_cpr = next(row.behaviour for row in plan.estimates if row.behaviour.strategy.partial)
    unit, in_unit = _memory_unit(plan)
    bytes_of = {
        variant: memory(replace(plan.inputs, cpr_variant=variant), of_cpr).total
        for variant in VARIANTS
    }
    memories = [f"{variant} {short(size / in_unit)}" for variant, size in bytes_of.items()]
    return f"{unit} of cpr by --cpr-variant: {', '.join(memories)}"


def show_network(console: Console, plan: Recommendation) -> None:
    link = plan.inputs.link
    caption = (
        f"ms of a step and seconds of a rebuild, on links of {short(link.bits_per_s / 1e9)} Gbit/s "
        f"and {short(1e6 * link.latency_s)} us for each machine: gradients go out, rows come back, "
        "trainers compute while deltas travel; a lost server is rebuilt by one replacement, by all "
        "survivors (rebuild.by; - where they are too few), or, which no job does yet, from sums "
        "that they make"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    table.add_column("\nnetwork", no_wrap=True)
    for name in ("\npush", "\nrows", "\ncompute", "\ndeltas", "\na step", "slowest\nlink"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("replace-\nment", "sur-\nvivors", "\nsums"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in plan.network:
        step = found.step
        parts = (step.push, step.answers, step.compute, step.protect)
        table.add_row(
            found.name,
            *(short(1000 * seconds) for seconds in parts),
            f"{1000 * step.least:.3g}-{1000 * step.seconds:.3g}",
            step.bounds[0],
            *(
                "-" if math.isinf(way.seconds) else short(way.seconds)
                for way in found.rebuild.values()
            ),
        )
    console.print(table)


def percent(share: float) -> str:
    return short(100 * share) if share < MOST_SHOWN else "never"


def _overhead(found: Simulated) -> str:
    return "never" if found.unfinished else _with_error(found.overhead)


def _with_error(found: Interval99) -> str:
    digits = 1 if found.mean >= 0.1 else 2
    return f"{100 * found.mean:,.{digits}f}±{100 * found.error:.{digits}f}"


def _chance(plan: Recommendation, found: Estimate) -> str:
    """What the runs show; where none did, the formula if it applies, else what they exclude."""
    seen = found.whole.exceeded
    if seen.mean or plan.formula_applies:
        return beyond_text(found)
    return f"<{100 * seen.error:.2g}"


def _bars(plan: Recommendation) -> Text:
    """Overheads of the whole job, on a logarithmic scale: they differ by orders of magnitude."""
    shares = [max(found.whole.overhead.mean, LEAST_SHOWN) for found in plan.estimates]
    longest = math.log(max(shares) / LEAST_SHOWN) or 1.0
    width = max(len(found.name) for found in plan.estimates)
    text = Text()
    for found, share in zip(plan.estimates, shares, strict=True):
        bar = "█" * max(1, round(BAR_WIDTH * math.log(share / LEAST_SHOWN) / longest))
        more = "> " if found.whole.unfinished else ""
        text.append(f"{found.name:>{width}} ")
        text.append(bar, COLOURS[found.behaviour.kind])
        text.append(f" {more}{percent(found.whole.overhead.mean)} %\n")
    text.append(f"{'':>{width}} overhead of the whole job, logarithmic", "dim")
    return text


def write_png(plan: Recommendation, path: Path) -> None:
    """Overhead with its interval, formula beside it; and overhead against memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, needed only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    bars, costs = figure.subplots(1, 2)
    shown = [found for found in plan.estimates if not found.whole.unfinished]
    for row, found in enumerate(reversed(shown)):
        colour = COLOURS[found.behaviour.kind]
        mean = 100 * max(found.whole.overhead.mean, LEAST_SHOWN)  # the scale knows no zero
        error = 100 * found.whole.overhead.error
        bars.barh(row, mean, xerr=min(error, mean), color=colour, capsize=3)
        bars.plot(100 * found.formula, row, "k|", markersize=14)
        costs.plot(found.memory_gb, mean, "o", color=colour)
        costs.annotate(found.name, (found.memory_gb, mean), (4, 4), textcoords="offset points")
    bars.set_yticks(range(len(shown)), [found.name for found in reversed(shown)])
    bars.set_xlabel("overhead, % (bar: the whole job simulated; line: formula)")
    costs.set_xlabel("memory of a server, GB")
    costs.set_ylabel("overhead, %")
    for axes in (bars, costs):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    if shown:
        bars.set_xscale("log")
        bars.set_xlim(left=bars.get_xlim()[0] / 2)
        costs.set_yscale("log")
        costs.margins(x=0.3)
    title = f"{plan.inputs.servers:,} servers, a failure every {plan.mtbf_hours:,.3g} h"
    missing = [found.name for found in plan.estimates if found.whole.unfinished]
    if missing:
        title += f" (did not end: {', '.join(missing)})"
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
