"""`planaria compare`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from planaria.cluster.nursery import sharing
from planaria.comparing.emulation import CONTENDERS, Emulation
from planaria.comparing.page import as_page
from planaria.comparing.pictures import as_csv, overhead_png, quality_png, show
from planaria.comparing.runs import Comparison, Outcome, compare, prepare, run_here
from planaria.config import Config
from planaria.display import Display
from planaria.errors import ConfigError, Interrupted, PlanariaError
from planaria.exits import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Output,
    leave,
    leave_if_unprinted,
)
from planaria.files import write_atomically
from planaria.planning.machine import Origin
from planaria.planning.options import refuse_existing, takes_options_of
from planaria.schedule import Fault

FILES = ("report.json", "table.csv", "overhead.png", "quality.png", "index.html")
DEFAULT = ("erasure", "checkpoint", "cpr-vanilla", "cpr-mfu")


@takes_options_of(Emulation)
def compare_command(
    given: dict[str, Any],
    config: Annotated[
        Path | None,
        typer.Argument(help="A YAML file; docs/config.md lists its keys. Without: a small job."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="path=value, as in optimizer.lr=0.1. Overrides the file. May be given several "
            "times.",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(CONTENDERS)}. May be given several times. Default: "
            f"{', '.join(DEFAULT)}."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for index.html, report.json, table.csv, overhead.png, quality.png."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace files.")] = False,
) -> None:
    """Run one job under several strategies, with the same failures, and compare.

    Servers are really killed. A run stands for a long job on a cluster: its hours are the run's
    steps, and saves, loads and lost work are charged in those hours (docs/comparing.md). An
    undisturbed run comes first; the others are compared with it.

    Exit codes: 0 done, 1 a run failed, 2 an option is wrong (nothing was started). A strategy that
    the failures stop is a line of the table.
    """
    console = Output(highlight=False)
    try:
        emulation, job = Emulation(**given), Config.load(config, sets or ())
        names = _named(strategy or DEFAULT)
        prepare(emulation, job, names)
        made = _make_folder(out, force=force)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    with _never_left_empty(made):
        found = _run(console, emulation, job, names)
        show(console, found)
        if out is not None:
            _write(console, out, found)
    failed = [row.name for row in found.rows if not all(run.lost for run in row.stopped)]
    if failed:
        leave(EXIT_FAILED, f"runs of {', '.join(failed)} failed, see above; please report this")
    if out is None:
        leave_if_unprinted(console)


def _run(console: Console, emulation: Emulation, job: Config, names: Sequence[str]) -> Comparison:
    def run(title: str, job: Config, schedule: Sequence[Fault]) -> Outcome:
        console.print(title)
        with Display(console, title, job) as display:
            return run_here(display, job, schedule)

    try:
        with sharing():
            return compare(emulation, job, names, run)
    except (KeyboardInterrupt, Interrupted):
        leave(EXIT_INTERRUPTED, "interrupted; all processes were stopped")
    except (PlanariaError, OSError) as error:
        leave(EXIT_FAILED, str(error))


def _named(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(f"--strategy: expected one of {', '.join(CONTENDERS)}, got {name!r}")
    return list(dict.fromkeys(names))


def _make_folder(out: Path | None, *, force: bool) -> list[Path]:
    """Which ones were made for it, the innermost first."""
    if out is None:
        return []
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    for name in FILES:
        refuse_existing("--out", out / name, force=force)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: expected a folder: {error}") from None
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out: expected a folder that can be written to, got {out}")
    return made


@contextlib.contextmanager
def _never_left_empty(folders: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):  # it has something in it
                folder.rmdir()


def _write(console: Console, out: Path, found: Comparison) -> None:
    origin, overhead, quality = Origin.now(), overhead_png(found), quality_png(found)
    pictures = {"overhead of each strategy": overhead, "AUC and lost samples": quality}
    report = {"made": asdict(origin), **found.to_dict()}
    contents = (
        msgspec.json.format(msgspec.json.encode(report)) + b"\n",
        as_csv(found).encode(),
        overhead,
        quality,
        as_page(found, pictures, origin).encode(),
    )
    try:
        for name, content in zip(FILES, contents, strict=True):
            write_atomically(out / name, content)
    except OSError as error:
        leave(EXIT_FAILED, f"the runs are done, but could not be written: {error}")
    console.print(f"written to {out / 'index.html'}", soft_wrap=True)
