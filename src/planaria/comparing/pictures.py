"""A comparison for the eye: tables and bars on a terminal, PNGs for a page, CSV for a sheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planaria.comparing.accounts import (
    MEASURED,
    NOISE,
    NOT_MEASURED,
    PARTS,
    Interval95,
    Protection,
)
from planaria.comparing.emulation import CONTENDERS
from planaria.comparing.runs import UNDISTURBED, Comparison, Row

BAR_WIDTH = 50
NOTHING = "-"
# Told apart without colours as well: on a terminal by the block, in a picture by the order.
BLOCKS = dict(zip(PARTS, "█▓▒░▚", strict=True))
COLOURS = dict(zip(PARTS, ("#c8553d", "#3d6fc8", "#8a5a9e", "#d9a441", "#2a7f62"), strict=True))


UNKNOWN = {
    NOT_MEASURED: "which one run cannot measure",
    NOISE: "which so few runs on this machine do not tell from noise",
}


@dataclass(frozen=True)
class Cells:
    """A table as text; the first column is words, the others are numbers."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def cost_cells(comparison: Comparison) -> Cells:
    hours = comparison.emulation.hours
    lines = []
    for row in comparison.rows:
        every = f"{row.every_hours:.2f}" if row.every_steps else NOTHING
        formula = NOTHING if row.formula is None else f"{100 * row.formula:.2f}"
        if (account := row.account) is None:
            parts = ["lost" if all(run.lost for run in row.stopped) else "failed"]
            parts += [NOTHING] * len(PARTS)
        else:
            shares = [f"{100 * part / hours:.2f}" for part in astuple(account)[:-1]]
            parts = [_overhead(row, hours), *shares, _protection(row.protection)]
        lines.append((_name(row), every, *parts, formula))
    return Cells(
        f"overhead, % of {hours:g} h",
        ("strategy", "saves every, h", "overhead", *(_words(part) for part in PARTS), "by formula"),
        tuple(lines),
    )


def _overhead(row: Row, hours: float) -> str:
    """In percent; what is not known of it is not in it."""
    assert row.account is not None
    more = "" if row.protection.is_known else ">"
    return f"{more}{100 * row.account.total / hours:.2f}"


def _protection(found: Protection) -> str:
    """In percent, and how it is known."""
    if (share := found.share) is None:
        return found.source.replace(" ", "\n")
    if not share.mean and share.error is None:
        return "0.00"
    error = "" if share.error is None else f"±{100 * share.error:.2f}"
    return f"{100 * share.mean:.2f}{error}\n{found.source}"


def memory_cells(comparison: Comparison) -> Cells:
    parts = ("total", "records", "parity", "history", "priorities")
    return Cells(
        "memory of one server, MB, as computed",
        ("strategy", *parts),
        tuple(
            (row.name, *(f"{getattr(row.memory, part) / 1e6:,.2f}" for part in parts))
            for row in comparison.rows
        ),
    )


def quality_cells(comparison: Comparison) -> Cells:
    reports = [reference.report for reference in comparison.references]
    auc, entropy = (
        [report[key] for report in reports if report[key] is not None]
        for key in ("auc", "normalized_entropy")
    )
    lines = [(UNDISTURBED, "0", _mean(auc), NOTHING, _mean(entropy), NOTHING, NOTHING)]
    for row in comparison.rows:
        pls = row.mean("pls")
        lines.append(
            (
                _name(row),
                NOTHING if pls is None else f"{100 * pls:.2f}",
                _number(row.mean("auc")),
                _with_error(row.difference("auc")),
                _number(row.mean("normalized_entropy")),
                _with_error(row.difference("normalized_entropy")),
                digest_word(row),
            )
        )
    return Cells(
        "what becomes of the model",
        ("strategy", "PLS, %", "AUC", "difference", "entropy", "difference", "digest"),
        tuple(lines),
    )


def digest_word(row: Row) -> str:
    ended = len(row.ended)
    if not ended:
        return NOTHING
    if row.equal in (0, ended):
        return "equal" if row.equal else "differs"
    return f"equal in {row.equal} of {ended}"


def sentences(comparison: Comparison) -> list[str]:
    """What the tables leave out and a reader must know."""
    emulation, job = comparison.emulation, comparison.job
    servers = "a server" if emulation.lost == 1 else f"{emulation.lost} servers at once"
    found = [
        f"{job.steps:,} steps on {job.servers} servers stand for {emulation.hours:g} h; "
        f"{emulation.failures} failures took {servers} each; a save costs {emulation.save_min:g} "
        f"min, a load {emulation.load_min:g} min, rescheduling {emulation.reschedule_min:g} min, "
        "as given; lost work is measured"
    ]
    for row in comparison.rows:
        if 0 < len(row.stopped) < len(row.outcomes):
            found.append(
                f"{row.name}: {len(row.ended)} of {len(row.outcomes)} runs reached the end; its "
                "lines are their mean"
            )
        for run in row.stopped:
            verb = "lost" if run.lost else "failed"
            step, why = run.report["steps"], run.report["failed"]
            found.append(f"{row.name} {verb} at step {step}, seed {run.seed}: {why}")
        if beyond := _beyond(row):
            found.append(beyond)
        for run in row.outcomes:
            due = len(comparison.schedules[0])
            if run.ended and len(run.killed) < due:
                found.append(
                    f"{row.name}: {due - len(run.killed)} of {due} kills of seed {run.seed} came "
                    "too late for the run; give it more steps"
                )
    found += _on_protection(comparison)
    return found


def _on_protection(comparison: Comparison) -> list[str]:
    """How far the column can be believed."""
    found = []
    if any(row.protection.source == MEASURED for row in comparison.rows):
        found.append(
            "protection is measured on this machine, whose cores all processes share: the mean of "
            f"{comparison.emulation.seeds} seeds and its 95 % interval"
        )
    for source, why in UNKNOWN.items():
        names = [row.name for row in comparison.rows if row.protection.source == source]
        if names:
            found.append(
                f"{', '.join(names)}: the overhead is without protection, {why}; --seeds 5 or more "
                "may measure it, --protection-percent says it, per parity"
            )
    return found


def _beyond(row: Row) -> str:
    """Where all rolled back although the strategy is there to avoid that."""
    strategy = CONTENDERS[row.name].strategy
    times = sum(len(run.report["rollbacks"]) for run in row.outcomes)
    if not times or not (strategy.keeps_parity or strategy.partial):
        return ""
    limit = "its parity bears" if strategy.keeps_parity else "cpr.target_pls allows"
    return f"{row.name}: more was lost than {limit}; times that all rolled back: {times}"


def show(console: Console, comparison: Comparison) -> None:
    for cells in (cost_cells(comparison), quality_cells(comparison), memory_cells(comparison)):
        console.print(_table(cells))
    console.print(bars(comparison))
    for sentence in sentences(comparison):
        console.print(sentence, markup=False, soft_wrap=True)


def bars(comparison: Comparison) -> Text:
    """Overheads, each part as long as its share."""
    width = max(len(row.name) for row in comparison.rows)
    longest = max((row.account.total for row in comparison.rows if row.account), default=0.0)
    text = Text()
    for row in comparison.rows:
        text.append(f"{row.name:>{width}} ")
        if (account := row.account) is None:
            text.append("did not reach the end\n", "red")
            continue
        ends = _ends(astuple(account), longest)
        for part, start, end in zip(PARTS, [0, *ends], ends, strict=False):
            text.append(BLOCKS[part] * (end - start), COLOURS[part])
        text.append(f" {_overhead(row, comparison.emulation.hours)} %\n")
    text.append(" " * (width + 1))
    for part in PARTS:
        text.append(BLOCKS[part], COLOURS[part])
        text.append(f" {_words(part)}  ")
    return text


def _ends(parts: Sequence[float], longest: float) -> list[int]:
    """Where each part of a bar ends; rounded from the sums, so that rounding does not add up."""
    reached, ends = 0.0, []
    for part in parts:
        reached += part
        ends.append(round(BAR_WIDTH * reached / longest) if longest else 0)
    return ends


def _table(cells: Cells) -> Table:
    """As narrow as a terminal of 80 columns: words of a heading stand below one another."""
    table = Table(
        title=cells.title,
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    deepest = max(len(name.split()) for name in cells.header)
    for number, name in enumerate(cells.header):
        words = name.split()
        heading = "\n".join([""] * (deepest - len(words)) + words)
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for line in cells.lines:
        table.add_row(*line)
    return table


# ------------------------------------------------------------------------------ files


def as_csv(comparison: Comparison) -> str:
    """One line per strategy; numbers as they are, empty where there are none."""
    columns: list[dict[str, Any]] = []
    for row in comparison.rows:
        hours, auc = row.overhead_hours or {}, row.difference("auc")
        share = row.protection.share
        entropy = row.difference("normalized_entropy")
        columns.append(
            {
                "strategy": row.name,
                "runs": len(row.outcomes),
                "ended": len(row.ended),
                "digests_equal": row.equal,
                "saves_every_hours": row.every_hours or None,
                "overhead_hours": hours.get("total"),
                **{f"{part}_hours": hours.get(part) for part in PARTS},
                "protection_is": row.protection.source,
                "protection_error_95_hours": (
                    share.error * comparison.emulation.hours if share and share.error else None
                ),
                "memory_bytes": row.memory.total,
                "overhead_by_formula_hours": (
                    None if row.formula is None else row.formula * comparison.emulation.hours
                ),
                "pls": row.mean("pls"),
                "auc": row.mean("auc"),
                "auc_difference": auc.mean if auc else None,
                "auc_error_95": auc.error if auc else None,
                "normalized_entropy": row.mean("normalized_entropy"),
                "normalized_entropy_difference": entropy.mean if entropy else None,
                "normalized_entropy_error_95": entropy.error if entropy else None,
                "samples_per_s": row.mean("samples_per_s"),
            }
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(columns)
    return text.getvalue()


def overhead_png(comparison: Comparison) -> bytes:
    """Stacked bars; a line where the formulas expect the end."""
    figure = _figure(comparison)
    axes = figure.subplots()
    hours, rows = comparison.emulation.hours, list(reversed(comparison.rows))
    for number, row in enumerate(rows):
        if (account := row.account) is None:
            axes.text(0, number, " did not reach the end", va="center", color="#c8553d")
            continue
        start = 0.0
        for part, cost in zip(PARTS, astuple(account), strict=True):
            share = 100 * cost / hours
            axes.barh(number, share, left=start, color=COLOURS[part])
            start += share
        axes.text(start, number, f" {_overhead(row, hours)} %", va="center")
        if row.formula is not None:
            axes.plot(100 * row.formula, number, "k|", markersize=18)
    for part in PARTS:
        axes.barh(0, 0, color=COLOURS[part], label=_words(part))
    axes.plot([], [], "k|", markersize=12, label="by formula")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel(f"overhead, % of {hours:g} h")
    longest = max((row.account.total for row in rows if row.account), default=0.0)
    axes.set_xlim(0, 1.15 * 100 * longest / hours or 1)
    figure.legend(loc="outside lower center", ncols=len(PARTS) + 1, fontsize="small")
    return _png(figure, axes)


def quality_png(comparison: Comparison) -> bytes:
    """How far the AUC fell, with its interval, and the samples lost beside it."""
    figure = _figure(comparison)
    axes = figure.subplots()
    rows = list(reversed(comparison.rows))
    for number, row in enumerate(rows):
        pls, change = row.mean("pls"), row.difference("auc")
        if pls is None or change is None:
            axes.text(0, number, f" {NOTHING}", va="center")
            continue
        colour = "#999999" if digest_word(row) == "equal" else "#c8553d"
        axes.barh(number, -change.mean, xerr=change.error, color=colour, capsize=4)
        words = "no bit differs" if digest_word(row) == "equal" else f"PLS {100 * pls:.2f} %"
        end = max(-change.mean, 0) + (change.error or 0)
        axes.text(end, number, f" {words}", va="center")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel("AUC lost against the undisturbed run")
    axes.margins(x=0.25)
    return _png(figure, axes)


def _figure(comparison: Comparison) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, needed only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8 + 0.5 * len(comparison.rows)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any, axes: Any) -> bytes:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


# ------------------------------------------------------------------------------ words


def _words(part: str) -> str:
    return part.replace("_", " ")


def _name(row: Row) -> str:
    """What a line shows is the mean of the runs that ended, so it must say if some did not."""
    ended, runs = len(row.ended), len(row.outcomes)
    return row.name if ended in (0, runs) else f"{row.name} {ended}/{runs}"


def _mean(values: Sequence[float]) -> str:
    return _number(sum(values) / len(values)) if values else NOTHING


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _with_error(found: Interval95 | None) -> str:
    if found is None:
        return NOTHING
    error = "" if found.error is None else f"±{found.error:.4f}"
    return f"{found.mean:+.4f}{error}"
