"""Commands for trained models: planaria export, planaria predict, planaria import."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from planaria.cluster.scripts import INCLUDED, Scripts, environment_of, job_of
from planaria.config import Config
from planaria.config.text import read_file
from planaria.errors import ConfigError, DamagedCheckpoint, PlanariaError
from planaria.exits import EXIT_CONFIG, EXIT_FAILED, Output, leave
from planaria.exporting import FORMATS, check_free, export, open_model
from planaria.foreign import open_foreign
from planaria.importing import check_empty, fit, import_model
from planaria.trainer.declaring import Settings

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
    """Write a trained model out of its checkpoint, for NumPy, torch, safetensors or DCP.

    OUT gets tables/NAME.npy, float32[rows, dim], or tables.pt, or tables.safetensors; the weights
    and biases of both MLPs in dense.npz, or dense.pt, or dense.safetensors; of a script's job, what
    it kept in kept.npz, kept.pt or kept.safetensors; and model.json, which says what they are. With
    `--to dcp` tables and dense part are one checkpoint of torch.distributed.checkpoint. Every byte
    that is used is checked, and rows are streamed: a model may be larger than the memory.

    `planaria import` starts a job with what was written; with `--optimizer` it goes on exactly.

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
    rows = sum(table.rows for table in checkpoint.manifest.tables)
    try:
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
    schema: Annotated[
        str | None,
        typer.Option(
            help="data.schema of the job. Without: as the job was given it, from this folder on."
        ),
    ] = None,
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
            folder = out.resolve().parent
            predictor = predicting.Predictor(checkpoint, folder, more, schema)
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


def import_command(
    model: Annotated[
        Path,
        typer.Argument(
            help="A folder that planaria export wrote, or a state_dict: .pt, .pth or .safetensors."
        ),
    ],
    checkpoints: Annotated[
        str, typer.Argument(help="checkpoint.path of the job: a folder or URL without checkpoints.")
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The job's YAML file. Without: as the model was exported."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="path=value, on top of that. May be given several times."),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            help="A script of planaria run, in quotes with its arguments, whose tables the model "
            "is for: it is run up to its first batch, to ask for them."
        ),
    ] = None,
) -> None:
    """Make a checkpoint out of a model, so that a job starts with it.

    The job is started by `planaria train --resume --set checkpoint.path=CHECKPOINTS`, or `planaria
    run --resume` with the same path and the script. Of a state_dict, the table NAME is what has a
    key that ends in NAME.weight, float32[rows, dim]; which tables there are is up to the job's
    settings.

    What the model lacks begins as it does in a fresh job, and the job begins at step 0. A model of
    `planaria export --optimizer` lacks nothing: it goes on at its step, exactly.

    Exit codes: 0 done, 1 the model cannot be read or writing failed, 2 the model does not fit the
    job, or CHECKPOINTS has some already. Unless it is done, nothing is left in CHECKPOINTS.
    """
    try:
        check_empty(checkpoints)
        found = open_foreign(model)
        saved = found.facts.get("config") if config is None else None
        if script is None:
            job = Config.load(config, sets or (), saved)
            named = not job.is_built_in and job.data.source != "script"
            if saved is None and named:  # the data's schema says which tables there are
                settings = Settings(None, [], job.to_dict())
                job = _declared([str(INCLUDED)], job, settings, own_data=False)
        else:
            given = Config.load(config, sets or ())
            settings = Settings(read_file(config) if config else None, sets or [])
            job = _declared(shlex.split(script), given, settings)
        fitted = fit(found, job)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    rows = sum(table.rows for table in job.tables)
    try:
        with Progress(console=console) as bar:
            more = partial(bar.advance, bar.add_task(f"step {fitted.step}", total=rows))
            import_model(fitted, checkpoints, more)
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    for note in fitted.notes:
        console.print(note)
    console.print(f"step {fitted.step}, {rows:,} rows: {checkpoints}; start a job with --resume")


def _declared(
    command: list[str], given: Config, settings: Settings, *, own_data: bool = True
) -> Config:
    """The job of a script, as it declares it at its first batch; then it is ended."""
    variables = environment_of(given, settings)
    with Scripts(command, given.trainers, 0, variables, _show_line) as scripts:
        return Config.from_dict(job_of(scripts.declare(), own_data=own_data))


def _show_line(line: str) -> None:
    """As the script has printed it."""
    console.print(line, markup=False, soft_wrap=True)
