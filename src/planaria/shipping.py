"""Models out of their checkpoints: planaria export, planaria predict."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from planaria.errors import ConfigError, DamagedCheckpoint, PlanariaError
from planaria.exits import EXIT_CONFIG, EXIT_FAILED, Output, leave
from planaria.exporting import FORMATS, check_free, export, open_model

console = Output(highlight=False)


def export_command(
    checkpoints: Annotated[str, typer.Argument(help="checkpoint.path of a job: a folder or URL.")],
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    step: Annotated[int | None, typer.Option(help="Of which step; without, the newest.")] = None,
    to: Annotated[str, typer.Option(help=f"What reads it: {', '.join(FORMATS)}.")] = "numpy",
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="What optimizers keep for each row as well.")
    ] = False,
) -> None:
    """Write a trained model out of its checkpoint, as files for NumPy, torch or safetensors.

    OUT gets tables/NAME.npy, float32[rows, dim], or tables.pt, or tables.safetensors; the weights
    and biases of both MLPs in dense.npz, or dense.pt, or dense.safetensors; and model.json, which
    says what they are. Every byte that is used is checked, and rows are streamed: a model may be
    larger than the memory.

    Exit codes: 0 done, 1 the checkpoint is damaged or writing failed, 2 there is nothing to export,
    or OUT cannot be made.
    """
    if to not in FORMATS:
        leave(EXIT_CONFIG, f"--to: expected {', '.join(FORMATS)}, got {to!r}")
    try:
        check_free(out)
        checkpoint = open_model(checkpoints, step, console.print)
    except DamagedCheckpoint as error:
        leave(EXIT_FAILED, f"{error}; an earlier one can be named with --step")
    except PlanariaError as error:
        leave(EXIT_CONFIG, str(error))
    try:
        rows = sum(table.rows for table in checkpoint.manifest.tables)
        with Progress(console=console) as bar:
            task = bar.add_task(f"step {checkpoint.step}", total=rows)
            more = partial(bar.advance, task)
            export(checkpoint, out, more, to=to, with_state=optimizer)
    except DamagedCheckpoint as error:
        leave(EXIT_FAILED, f"{error}; an earlier one can be named with --step")
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    console.print(f"step {checkpoint.step}, {rows:,} rows: {out}")


def predict_command(
    checkpoints: Annotated[str, typer.Argument(help="checkpoint.path of a job: a folder or URL.")],
    data: Annotated[str, typer.Argument(help="What to score: a file, a folder or a pattern.")],
    out: Annotated[Path, typer.Argument(help="Where scores go: a .csv or .npy file.")],
    step: Annotated[int | None, typer.Option(help="Of which step; without, the newest.")] = None,
) -> None:
    """Score the samples of a file with a model that `planaria train` has trained.

    The file has the columns that the job was trained on; labels may be missing, and where they are
    there, the AUC is shown. OUT gets a chance from 0 to 1 for each sample, in their order. Tables
    are streamed into files beside OUT meanwhile, so a model may be larger than the memory.

    Exit codes: 0 done, 1 the checkpoint is damaged or the file cannot be read, 2 there is nothing
    to score with, or OUT cannot be made.
    """
    from planaria.models import predicting  # imports torch, which takes seconds

    if out.suffix not in (".csv", ".npy"):
        leave(EXIT_CONFIG, f"OUT: expected a .csv or .npy file, got {out}")
    try:
        check_free(out)
        checkpoint = open_model(checkpoints, step, console.print)
        rows = sum(table.rows for table in checkpoint.manifest.tables)
        with Progress(console=console) as bar:
            task = bar.add_task(f"reading step {checkpoint.step}", total=rows)
            more = partial(bar.advance, task)
            predictor = predicting.Predictor(checkpoint, out.resolve().parent, more)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    try:
        with predictor:
            scored = predicting.write_scores(predictor.score(data), out)
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    console.print(f"{scored.samples:,} samples: {out}")
    if scored.quality is not None:
        console.print(f"AUC {scored.quality.auc:.4f}")
