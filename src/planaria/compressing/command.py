"""`planaria compress`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import Progress

from planaria.checkpoints import Checkpoint
from planaria.cluster import asking
from planaria.cluster.files import JobFiles
from planaria.compressing.measuring import Report, measure
from planaria.compressing.pictures import show, write_png
from planaria.compressing.recommending import Recommendation, recommend
from planaria.compressing.sampling import take_samples
from planaria.config import Config
from planaria.config.wire import bits_per_s
from planaria.errors import ConfigError, DamagedCheckpoint, PlanariaError
from planaria.exits import EXIT_CONFIG, EXIT_FAILED, Output, leave, leave_if_unprinted
from planaria.exporting import open_model
from planaria.files import write_atomically

ROWS = 2048


def compress_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|JOB",
            help="checkpoint.path of a job, a folder or URL; or a job that runs here, its name or "
            "how that begins, of which the newest checkpoint is taken.",
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Of which step; without, the newest.")] = None,
    rows: Annotated[int, typer.Option(help="How many of each table, at most.", min=1)] = ROWS,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="The link of one server, such as 1Gbit/s: how to send which table."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything here; - prints it.")] = None,
) -> None:
    """Show what lossy lookups would make of a model's rows: bytes, errors and rates.

    Some rows of each table are read out of a checkpoint, encoded as an answer's rows are, with
    every encoder and bound, and decoded again. With --bandwidth, each table gets the encoder with
    which its rows arrive first, and the keys to set are shown.

    Exit codes: 0 done, 1 the checkpoint is damaged or writing failed, 2 there is no such checkpoint
    or an option is wrong.
    """
    quiet = str(json) == "-"
    console = Output(highlight=False, quiet=quiet)
    try:
        rate = _rate(bandwidth)
        for path in (png, None if quiet else json):
            _check_folder(path)
        checkpoint = open_model(_folder_of(source), step, console.print)
    except DamagedCheckpoint as error:
        leave(EXIT_FAILED, f"{error}; an earlier one can be named with --step")
    except PlanariaError as error:
        leave(EXIT_CONFIG, str(error))
    try:
        report = _measured(console, checkpoint, rows)
    except DamagedCheckpoint as error:
        leave(EXIT_FAILED, f"{error}; an earlier one can be named with --step")
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    found = None if rate is None else recommend(report, rate)
    show(console, report, found)
    _write(report, found, png, json, quiet=quiet)
    leave_if_unprinted(console)


def _rate(bandwidth: str | None) -> float | None:
    """Bits per second."""
    if bandwidth is None:
        return None
    if not (rate := bits_per_s(bandwidth)):
        raise ConfigError(
            f"--bandwidth: expected a rate in bits, such as 10Gbit or 300Mbit, got {bandwidth}"
        )
    return rate


def _measured(console: Output, checkpoint: Checkpoint, rows: int) -> Report:
    tables = len(checkpoint.manifest.tables)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(f"reading step {checkpoint.step}", total=None)
        samples = take_samples(checkpoint, rows)
        task = progress.add_task("encoding", total=tables)
        return measure(checkpoint.step, samples, lambda: progress.advance(task))


def _folder_of(source: str) -> str:
    """Of checkpoints: the one that is named, or that a job saves into."""
    if source == "":  # a variable of the shell's that is not set, say
        raise ConfigError("CHECKPOINT|JOB is empty; planaria jobs lists the jobs that are running")
    if "://" in source or (Path(source).is_dir() and not _is_job(Path(source))):
        return source
    known = [Path(source)] if _is_job(Path(source)) else asking.running_jobs()
    found = [folder for folder in known if folder == Path(source) or folder.name.startswith(source)]
    if len(found) != 1:
        names = ", ".join(folder.name for folder in found or known) or "none"
        raise ConfigError(
            f"'{source}' is neither a folder of checkpoints nor one running job; running: {names}"
        )
    path = Config.from_dict(JobFiles(found[0]).config()).checkpoint.path
    if path is None:
        raise ConfigError(
            f"job {found[0].name} saves nothing, and only a checkpoint has rows to look at: start "
            "it with checkpoint.path and checkpoint.every_steps, and ask when it has saved"
        )
    if "://" not in path and not Path(path).is_dir():
        raise ConfigError(
            f"job {found[0].name} saves into '{path}', which is not a folder here yet: ask when it "
            "has saved, and where that is not a whole path, from the folder it was started in"
        )
    return path


def _is_job(folder: Path) -> bool:
    return (folder / "start.json").is_file()


def _check_folder(path: Path | None) -> None:
    if path is not None and not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: expected a file in a folder that can be written to")


def _write(
    report: Report,
    found: Recommendation | None,
    png: Path | None,
    file: Path | None,
    *,
    quiet: bool,
) -> None:
    everything = {**report.to_dict(), "recommendation": found and found.to_dict()}
    text = msgspec.json.format(msgspec.json.encode(everything)) + b"\n"
    try:
        if quiet:
            typer.echo(text, nl=False)
        elif file is not None:
            write_atomically(file, text)
        if png is not None:
            write_png(report, png)
    except (PlanariaError, OSError) as error:
        leave(EXIT_FAILED, f"all is measured, but could not be written: {error}")
