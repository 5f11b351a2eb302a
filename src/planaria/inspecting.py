"""What is in files of samples, and a schema to start from: planaria data.

What needs PyArrow is imported by the commands themselves: it takes a third of a second, which all
other commands can do without.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from planaria.data.presets import PRESETS
from planaria.data.schema import Schema
from planaria.errors import PlanariaError
from planaria.exits import EXIT_CONFIG, leave
from planaria.files import write_atomically

if TYPE_CHECKING:
    from planaria.data.opening import Opened
    from planaria.data.survey import ColumnSurvey

MOST_BATCH = 2048
LEAST_STEPS = 100  # of an epoch, by the batch that is suggested

app = typer.Typer(no_args_is_help=True, help="Look at files of samples before a job reads them.")
console = Console(highlight=False)

Files = Annotated[
    list[str], typer.Argument(help="Parquet or CSV, plain or gzip: files, folders or patterns.")
]


@app.command()
def inspect(
    files: Files,
    write: Annotated[
        Path | None, typer.Option(help="Write a schema to start from here, as YAML.")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(help="Write a job here that trains on the files by that schema, as YAML."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"What the files are: {', '.join(PRESETS)}.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="The column to learn, if it is not seen.")
    ] = None,
) -> None:
    """Show the columns of files: types, nulls, values, and how unevenly they are used.

    Values are counted exactly up to a million in a column; figures after a ~ are estimates. The
    share of the hottest 1 % is how much of all uses goes to the 1 % of values that are used most.
    """
    from planaria.data.opening import open_tables
    from planaria.data.survey import survey

    if preset is not None and preset not in PRESETS:
        leave(EXIT_CONFIG, f"--preset: expected {', '.join(PRESETS)}, got {preset!r}")
    if job is not None and (write is None or len(files) > 1):
        leave(EXIT_CONFIG, "--job: expected --write beside it, and one file, folder or pattern")
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            counting = bar.add_task("looking for lines", total=None)
            known = None if preset is None else PRESETS[preset]
            opened = open_tables(files, known, lambda: bar.advance(counting))
            bar.remove_task(counting)
            with closing(opened.tables) as tables:
                rows = int(tables.starts[-1])
                task = bar.add_task("reading", total=rows)
                columns = survey(tables, lambda more: bar.advance(task, more))
        _show(columns, rows)
        if write is not None:
            _write(write, files, columns, opened, label)
        if write is not None and job is not None:
            _write_job(job, files[0], write, rows)
    except PlanariaError as error:
        leave(EXIT_CONFIG, str(error))


@app.command()
def vocabulary(
    schema: Annotated[Path, typer.Argument(help="A schema whose columns have vocabularies.")],
    files: Files,
) -> None:
    """Make the files of vocabularies that a schema names and that are not there yet.

    The most frequent values come first, as many as the table has rows for.
    """
    from planaria.data.opening import open_source

    try:
        with console.status("reading"), open_source(files, Schema.load(schema)) as source:
            made = source.make_vocabularies()
    except PlanariaError as error:
        leave(EXIT_CONFIG, str(error))
    for path, values in made.items():
        console.print(f"{path}: {values:,} values", markup=False, soft_wrap=True)
    if not made:
        console.print("nothing to do: all vocabularies are there")


def _show(columns: list[ColumnSurvey], rows: int) -> None:
    table = Table(title=f"{rows:,} rows", title_justify="left")
    table.add_column("column", overflow="fold")
    for name in ("type", "nulls", "values", "hottest 1 %", "10 %", "mean length"):
        table.add_column(name, justify="right" if name != "type" else "left")
    for column in columns:
        counts, about = column.counts, "" if column.counts.exact else "~"
        table.add_row(
            column.name,
            f"{'many ' if column.many else ''}{column.type}",
            f"{column.nulls / column.rows:.1%}" if column.nulls else "0",
            f"{about}{counts.distinct:,}",
            f"{about}{counts.hot_share(0.01):.1%}",
            f"{about}{counts.hot_share(0.1):.1%}",
            f"{column.mean_length:.2f}" if column.many else "",
        )
    console.print(table)


def _write(
    path: Path,
    files: list[str],
    columns: list[ColumnSurvey],
    opened: Opened,
    label: str | None,
) -> None:
    from planaria.data.suggesting import suggest

    lines = [f"Made by planaria data inspect, from {', '.join(files)}. Look it over."]
    if opened.preset is not None:
        schema = opened.preset
        lines.append("These files are well known; this is the preset for them.")
    else:
        schema, left_out = suggest(columns, label, opened.delimiter)
        lines += [f"Left out: {name}, because {why}." for name, why in left_out.items()]
        (values,) = (one.counts.distinct for one in columns if one.name == schema.label)
        if values > 2:
            lines.append(
                f"{schema.label} has {values} values, and planaria train learns 0 and 1: "
                "positive_from says from which value on it is a 1."
            )
    try:
        schema.save(path, "\n".join(lines))
    except OSError as error:
        leave(EXIT_CONFIG, f"cannot write {path}: {error.strerror}; check the path")
    console.print(f"a schema to start from: {path}", markup=False, soft_wrap=True)


def _write_job(path: Path, files: str, schema: Path, rows: int) -> None:
    batch = max(2, min(MOST_BATCH, 2 ** (rows // LEAST_STEPS).bit_length() // 2))
    data = {"source": "files", "path": files, "schema": str(schema), "epochs": 1}
    values = {"batch": batch, "data": data, "model": {"name": "dlrm", "dim": 16}}
    text = f"# Start it: planaria train {path}\n{yaml.safe_dump(values, sort_keys=False)}"
    text += "# checkpoint: {path: checkpoints}  # for planaria predict and planaria export\n"
    try:
        write_atomically(path.resolve(), text.encode())
    except OSError as error:
        leave(EXIT_CONFIG, f"cannot write {path}: {error.strerror}; check the path")
    console.print(f"a job to start from: {path}", markup=False, soft_wrap=True)
