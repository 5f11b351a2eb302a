"""`planaria stats` and `planaria place`."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import Progress

from planaria.config import Config
from planaria.errors import ConfigError, PlanariaError
from planaria.exits import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Output,
    leave,
    leave_if_unprinted,
)
from planaria.layout import default_k
from planaria.placement import write_plan
from planaria.placing.costs import Machine, Storing
from planaria.placing.making import SOLVERS, Wishes, make_placement
from planaria.placing.pictures import (
    show_made,
    show_statistics,
    write_plan_png,
    write_statistics_png,
)
from planaria.placing.sampling import Surveyed, open_files, open_job
from planaria.placing.sizes import for_servers
from planaria.placing.statistics import gather, read_statistics, write_statistics

YAML = (".yaml", ".yml")
DEFAULT_OUT = "stats.json"

Png = Annotated[Path | None, typer.Option(help="Write a picture here.")]
Json = Annotated[bool, typer.Option("--json", help="Print what was written, instead of tables.")]


def stats(
    data: Annotated[
        list[str],
        typer.Argument(help="A job, a YAML file; or Parquet or CSV: files, folders, patterns."),
    ],
    sample: Annotated[float, typer.Option(help="Which percentage of the samples to read.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides which ones.", min=0)] = 0,
    schema: Annotated[
        str | None,
        typer.Option(help="Of files that are not recognised: a schema's file, or a preset."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where statistics go; the rows by heat go beside it, as .npz.")
    ] = Path(DEFAULT_OUT),
    png: Png = None,
    json: Json = False,
) -> None:
    """Say how unevenly the rows of every table are used, from a sample of the samples.

    Per table: the share of accesses that its hottest rows take, how many samples have the feature
    and how many rows each of those, how many rows are used at all, and how much is on rows that the
    sample did not meet. docs/placement.md says how that is estimated; planaria place plans by it.

    Exit codes: 0 done, 1 reading or writing failed, 2 an option or the data are wrong.
    """
    console = Output(highlight=False, quiet=json)
    try:
        if not 0 < sample <= 100:
            raise ConfigError(f"--sample: expected a number above 0, up to 100, got {sample:g}")
        for path in (out, png):
            _check_folder(path)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("opening", total=None)
            surveyed = _open(data, schema, lambda: bar.advance(task, 0))
            total = max(round(surveyed.samples * sample / 100), 1)
            bar.update(task, description="reading", total=total)
            with closing(surveyed):
                found, heat = gather(
                    surveyed,
                    ", ".join(data),
                    sample / 100,
                    seed,
                    observe=lambda samples: bar.advance(task, samples),
                )
        found = write_statistics(out, found, heat)
        show_statistics(console, found)
        if png is not None:
            write_statistics_png(found, png)
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "interrupted")
    except OSError as error:
        leave(EXIT_FAILED, f"cannot write: {error}")
    except PlanariaError as error:
        leave(EXIT_CONFIG, str(error))
    if json:
        _print_json(found)
    console.print(f"written to {out}: planaria place {out}", markup=False, soft_wrap=True)
    leave_if_unprinted(console)


def _open(data: list[str], schema: str | None, on_progress: Any) -> Surveyed:
    if not data[0].endswith(YAML):
        return open_files(data, schema, on_progress)
    if len(data) > 1:
        raise ConfigError(f"expected one job, got {', '.join(data)}")
    if schema is not None:
        raise ConfigError("--schema: the job names its own, as data.schema")
    return open_job(Config.load(Path(data[0])), on_progress)


def place(
    statistics: Annotated[Path, typer.Argument(help="What planaria stats has written.")],
    ram: Annotated[
        str,
        typer.Option(help="Of each server, for records: 64GB; or 64GB*3,128GB where they differ."),
    ],
    servers: Annotated[int, typer.Option(help="Embedding servers.", min=1, max=100_000)] = 6,
    ssd: Annotated[str, typer.Option(help="Of each server, in the same way.")] = "1TB",
    parity: Annotated[int, typer.Option(help="Parity records per stripe.", min=0, max=4)] = 1,
    k: Annotated[
        int | None, typer.Option(help="Data records per stripe. By default as a job has it.", min=1)
    ] = None,
    ram_rate: Annotated[
        str, typer.Option(help="Bytes per second from RAM, records here and there; by server.")
    ] = "5GB",
    ssd_rate: Annotated[str, typer.Option(help="The same from the SSD.")] = "1GB",
    page: Annotated[
        int, typer.Option(help="Bytes that an SSD reads and writes at least.", min=1)
    ] = 4096,
    renumber: Annotated[
        bool,
        typer.Option(help="Whether hot rows lie together, so that stripes are hot or cold as one."),
    ] = False,
    shares: Annotated[
        str,
        typer.Option(help="Of the rows: even, as layouts are, or free, larger for better servers."),
    ] = "even",
    whole_tables: Annotated[
        bool, typer.Option("--whole-tables", help="Give each table to one server, as others do.")
    ] = False,
    record_bytes: Annotated[
        int | None, typer.Option(help="Of every record, instead of what the statistics say.", min=1)
    ] = None,
    solver: Annotated[str, typer.Option(help=f"{', '.join(SOLVERS)}.")] = "auto",
    out: Annotated[
        Path, typer.Option(help="Where the plan goes; the hot rows go beside it, as .npz.")
    ] = Path("plan.json"),
    png: Png = None,
    json: Json = False,
) -> None:
    """Decide which rows of every table are in RAM and which on the SSD, on each server.

    The largest cost of a server is made as small as it can be, within the RAM and the SSD of each;
    a cost is the bytes of lookups, updates and parity over the bandwidth of their tier, per sample.
    docs/placement.md has the formulas. What no placement can be below is shown beside it.

    Exit codes: 0 done, 1 writing failed, 2 an option is wrong, or the tables have no room.
    """
    console = Output(highlight=False, quiet=json)
    try:
        for path in (out, png):
            _check_folder(path)
        wishes = _wishes(
            servers, parity, k, page, renumber, shares, whole_tables, record_bytes, solver
        )
        sizes = [
            for_servers(option, text, servers)
            for option, text in (
                ("--ram", ram),
                ("--ssd", ssd),
                ("--ram-rate", ram_rate),
                ("--ssd-rate", ssd_rate),
            )
        ]
        if min(sizes[2] + sizes[3]) <= 0:
            raise ConfigError("--ram-rate, --ssd-rate: expected more than 0 bytes per second")
        machines = [Machine(*each) for each in zip(*sizes, strict=True)]
        found, heat = read_statistics(statistics)
        made = make_placement(found, heat, machines, wishes)
        plan = write_plan(out, made.plan, made.hot)
        show_made(console, made)
        if png is not None:
            write_plan_png(plan, png)
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "interrupted")
    except OSError as error:
        leave(EXIT_FAILED, f"cannot write: {error}")
    except PlanariaError as error:
        leave(EXIT_CONFIG, str(error))
    if json:
        _print_json(plan)
    console.print(f"written to {out}", markup=False, soft_wrap=True)
    leave_if_unprinted(console)


def _wishes(
    servers: int,
    parity: int,
    k: int | None,
    page: int,
    renumber: bool,
    shares: str,
    whole: bool,
    record_bytes: int | None,
    solver: str,
) -> Wishes:
    if solver not in SOLVERS:
        raise ConfigError(f"--solver: expected {', '.join(SOLVERS)}, got {solver!r}")
    if shares not in ("even", "free"):
        raise ConfigError(f"--shares: expected even or free, got {shares!r}")
    if parity and not whole and servers < parity + 1:
        raise ConfigError(f"--servers: expected {parity + 1} or more for --parity {parity}")
    data = k or (default_k(servers, parity) if parity else 1)
    if parity and data + parity > servers:
        raise ConfigError(f"--k: expected at most {servers - parity}, got {data}")
    storing = Storing(data, 0 if whole else parity, renumber or whole, page)
    return Wishes(storing, whole, shares == "even", solver, record_bytes)


def _check_folder(path: Path | None) -> None:
    if path is not None and not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: expected a file in a folder that can be written to")


def _print_json(found: msgspec.Struct) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(found)) + b"\n", nl=False)
