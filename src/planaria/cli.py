"""The `planaria` command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import msgspec
import typer

import planaria
from planaria import kernels
from planaria.cluster import preflight
from planaria.cluster.resuming import FROM_THE_BEGINNING, Resumption, find_start, load_saved
from planaria.cluster.run import JobRun
from planaria.cluster.scripts import INCLUDED, INTERRUPTED, Scripts, environment_of, job_of
from planaria.cluster.scrub import running_jobs
from planaria.cluster.scrub import scrub as scrub_job
from planaria.comparing.command import compare_command
from planaria.config import CheckpointConfig, Config
from planaria.display import Display, show_report
from planaria.errors import (
    ClusterError,
    ConfigError,
    Interrupted,
    LeaseHeld,
    LossError,
    PlanariaError,
)
from planaria.exits import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    Output,
    leave,
    leave_if_unprinted,
)
from planaria.files import write_atomically
from planaria.inspecting import app as data_app
from planaria.outside import export_command, import_command, predict_command
from planaria.planning.command import plan
from planaria.schedule import Fault, parse_freeze, parse_kill, resolve
from planaria.trainer.declaring import Settings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # the lines of a paragraph flow, and brackets are no markup
    help="Fault-tolerant training of deep-learning recommendation models.",
)
console = Output(highlight=False)

ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="A YAML file; docs/config.md lists its keys. Without: a small job."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="path=value, as in optimizer.lr=0.1. Overrides the file. May be given several times.",
    ),
]
Kills = Annotated[
    list[str] | None,
    typer.Option(
        help="WHO@STEP: SIGKILL when STEP is done. WHO: server:2, server:any, server:any*2 (two "
        "at once), trainer:1, coordinator, spare:0. May be given several times."
    ),
]
Freezes = Annotated[
    list[str] | None,
    typer.Option(
        help="WHO@STEP:SECONDS: SIGSTOP, and SIGCONT after so many seconds. May be given several "
        "times."
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the newest checkpoint in checkpoint.path. Without a file: with the "
        "settings that it was saved with.",
    ),
]
ReportFile = Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"planaria {planaria.__version__}")
        leave_if_unprinted(console)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@app.command()
def version() -> None:
    """Print the version and what the kernels run on here."""
    console.print(f"planaria {planaria.__version__}, kernels: {kernels.level()}")
    leave_if_unprinted(console)


@app.command()
def train(
    config: ConfigFile = None,
    sets: Sets = None,
    kill: Kills = None,
    freeze: Freezes = None,
    report: ReportFile = None,
    resume: Resume = False,
) -> None:
    """Train a job on this machine, and disturb it on purpose if you like.

    Servers, trainers and the coordinator are processes of their own. Of every group, as many
    servers as the job's parity says can be killed at any instant: the digest at the end is that of
    an undisturbed run, bit for bit.

    With checkpoint.path and checkpoint.every_steps, or checkpoint.every_s=auto, checkpoints are
    saved meanwhile; docs/checkpoints.md says what they promise.

    Exit codes: 0 done, 1 failed, 2 wrong configuration or nothing to resume from (nothing was
    started), 3 more was lost than the parity can bear, 130 interrupted (Ctrl-C, SIGTERM, SIGHUP).
    """
    _check_report(report)
    given, notes = _read(config, sets, resume)
    _check_early(given, kill, freeze, resume)
    with _trainers(given) as (job, scripts):
        schedule = _schedule(job, kill, freeze)
        start = _find_start(job, resume)
        start = replace(start, notes=(*notes, *start.notes))
        run, found = _run("training", job, schedule, report, start, scripts)
    show_report(console, found)
    _leave_if_unsaved(run, found, report)


@contextmanager
def _trainers(
    given: Config, command: Sequence[str] = (), settings: Settings | None = None
) -> Iterator[tuple[Config, Scripts | None]]:
    """The job, and those who train it, if they run a script: a user's command, or the one that is
    ours for all models but the built-in one.
    """
    if not command and given.is_built_in:
        yield given, None
        return
    if not command:
        command, settings = [str(INCLUDED)], Settings(None, [], given.to_dict())
    assert settings is not None
    variables = environment_of(given, settings)
    with Scripts(command, given.trainers, given.script.spares, variables, _show_line) as scripts:
        try:
            declared = job_of(scripts.declare(), own_data=settings.base is None)
            job = Config.from_dict(declared)
        except KeyboardInterrupt:
            leave(EXIT_INTERRUPTED, f"{INTERRUPTED}; nothing was trained so far")
        except ConfigError as error:
            leave(EXIT_CONFIG, str(error))
        except PlanariaError as error:
            leave(EXIT_FAILED, str(error))
        yield job, scripts


def _show_line(line: str) -> None:
    """As the script has printed it."""
    console.print(line, markup=False, soft_wrap=True)


def _leave_if_unsaved(run: JobRun, found: dict[str, Any], report: Path | None) -> None:
    """The job is done; what it was for must be there as well."""
    if unwritten := _write(report, found):
        leave(EXIT_FAILED, f"the run is done, but {unwritten}{run.way_back()}")
    if problem := run.unsaved(found):
        leave(EXIT_FAILED, problem)


@app.command(
    "run",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run_command(
    script: Annotated[Path, typer.Argument(help="A Python file; options come before it.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script finds in sys.argv.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file; docs/config.md lists its keys.")
    ] = None,
    sets: Sets = None,
    kill: Kills = None,
    freeze: Freezes = None,
    report: ReportFile = None,
    resume: Resume = False,
) -> None:
    """Run a script of yours as the trainers of a job.

    The script connects with planaria.torch.connect() and loops over job.batches(...); each of the
    job's `trainers` runs it, with RANK and WORLD_SIZE set. Servers, a coordinator and spares are
    started for it. A trainer that dies is replaced by a spare, which has run the script up to its
    first batch, and goes on at the committed step.

    Exit codes are those of planaria train; 1 also where the script has raised an exception.
    """
    _check_report(report)
    if not script.is_file():
        leave(EXIT_CONFIG, f"{script}: expected a Python file, but there is none")
    given, _ = _read(config, sets)
    _check_early(given, kill, freeze, resume)
    settings = Settings(str(config) if config else None, sets or [])
    with _trainers(given, [str(script), *(arguments or ())], settings) as (job, scripts):
        schedule = _schedule(job, kill, freeze)
        start = _find_start(job, resume)
        run, found = _run("training", job, schedule, report, start, scripts)
    show_report(console, found)
    _leave_if_unsaved(run, found, report)
    if run.scripts_wrong:
        leave(EXIT_FAILED, f"the job is done, but {run.scripts_wrong} after its loop")


@app.command()
def drill(
    config: ConfigFile = None,
    sets: Sets = None,
    kill: Kills = None,
    freeze: Freezes = None,
    report: ReportFile = None,
) -> None:
    """Run a job twice, undisturbed and under kills, and compare the digests.

    Without --kill or --freeze, any server is killed halfway. Neither run saves checkpoints. Exit
    code 1 if the digests differ.
    """
    _check_report(report)
    job, _ = _read(config, sets)
    if not job.survival.keeps_parity:
        leave(
            EXIT_CONFIG,
            f"strategy: expected erasure for a drill, got {job.strategy}; planaria compare shows "
            "what other strategies lose",
        )
    job = replace(job, checkpoint=CheckpointConfig())
    console.print("1 of 2: undisturbed")
    with _trainers(job) as (known, scripts):
        halfway = f"server:any@{max(known.steps // 2, 1)}"
        schedule = _schedule(known, kill if kill or freeze else [halfway], freeze)
        _, undisturbed = _run("undisturbed", known, [], report, scripts=scripts)
    console.print("2 of 2: disturbed")
    with _trainers(job) as (known, scripts):
        _, disturbed = _run("disturbed", known, schedule, report, scripts=scripts)
    show_report(console, disturbed)
    console.print(f"digest undisturbed  {undisturbed['digest']}")
    console.print(f"digest disturbed    {disturbed['digest']}")
    if unwritten := _write(report, {"undisturbed": undisturbed, "disturbed": disturbed}):
        leave(EXIT_FAILED, f"the runs are done, but {unwritten}")
    if undisturbed["digest"] != disturbed["digest"]:
        leave(EXIT_FAILED, "the digests differ: something was lost. Please report this.")
    console.print("[green]equal: not one bit was lost[/green]")


@app.command()
def scrub(
    folder: Annotated[
        Path | None, typer.Argument(help="The job's folder; without, the only running job.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for the result.")] = 60.0,
) -> None:
    """Verify all stripes of a running job, byte for byte, while it trains.

    Every parity record is compared with what its data records, as of one committed step, make of
    it.

    Exit codes: 0 all are equal, 1 any differs or the job does not answer, 2 no such job runs here.
    """
    try:
        folder = folder or _only_job()
        found = scrub_job(folder, deadline)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    if not found.records:
        leave(EXIT_FAILED, f"the job in {folder} keeps no parity; there is nothing to verify")
    console.print(f"{found.records:,} parity records verified, {found.wrong:,} wrong")
    if found.wrong:
        raise typer.Exit(EXIT_FAILED)
    leave_if_unprinted(console)


def _only_job() -> Path:
    jobs = running_jobs()
    if not jobs:
        raise ConfigError("no job is running here; start one with planaria train")
    if len(jobs) > 1:
        raise ConfigError(f"name the job's folder; running here: {', '.join(map(str, jobs))}")
    return jobs[0]


app.command()(plan)
app.command("compare")(compare_command)
app.command("export")(export_command)
app.command("predict")(predict_command)
app.command("import")(import_command)
app.add_typer(data_app, name="data")


def _read(
    path: Path | None, sets: list[str] | None, resume: bool = False
) -> tuple[Config, Sequence[str]]:
    """The job, and what the user should know of where its settings come from."""
    try:
        if resume and path is None:
            return load_saved(sets or ())
        return Config.load(path, sets or ()), ()
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))


def _check_early(
    given: Config, kill: list[str] | None, freeze: list[str] | None, resume: bool
) -> None:
    """What is wrong whatever a script declares: before it is waited for."""
    try:
        _parse(kill, freeze)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    if not given.is_built_in and not resume:
        _find_start(given, resume)


def _parse(kill: list[str] | None, freeze: list[str] | None) -> list[Fault]:
    faults: list[Fault] = [parse_kill(text) for text in kill or ()]
    return faults + [parse_freeze(text) for text in freeze or ()]


def _schedule(job: Config, kill: list[str] | None, freeze: list[str] | None) -> list[Fault]:
    try:
        return resolve(_parse(kill, freeze), job)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))


def _find_start(job: Config, resume: bool) -> Resumption:
    try:
        if not resume:
            return find_start(job, resume=False)
        with console.status(f"reading the checkpoints in {job.checkpoint.path}"):
            return find_start(job, resume=True)
    except ConfigError as error:
        leave(EXIT_CONFIG, "\n".join([str(error), *_other_problems(job)]))


def _other_problems(job: Config) -> list[str]:
    """What else is wrong, besides the folder of checkpoints."""
    try:
        preflight.check(replace(job, checkpoint=CheckpointConfig()))
    except ConfigError as error:
        return [str(error)]
    return []


def _run(
    title: str,
    job: Config,
    schedule: Sequence[Fault],
    report: Path | None,
    start: Resumption = FROM_THE_BEGINNING,
    scripts: Scripts | None = None,
) -> tuple[JobRun, dict[str, Any]]:
    display = Display(console, title, job)
    try:
        run = JobRun(job, schedule, display, start, scripts=scripts)
    except PlanariaError as error:
        leave(EXIT_CONFIG, str(error))
    try:
        with display:
            return run, run.run()
    except (KeyboardInterrupt, Interrupted) as why:
        sentence = str(why) or f"{INTERRUPTED}; all processes were stopped{run.way_back()}"
        sentence += _nothing_saved(job, run)
        _leave(EXIT_INTERRUPTED, ClusterError(sentence), run, report)
    except (ConfigError, LeaseHeld) as error:  # no room on this machine, or another's folder
        leave(EXIT_CONFIG, str(error))
    except PlanariaError as error:
        _leave(EXIT_LOST if isinstance(error, LossError) else EXIT_FAILED, error, run, report)


def _nothing_saved(job: Config, run: JobRun) -> str:
    """Whoever has named a folder for checkpoints may expect one in it."""
    if job.checkpoint.path is None or run.saves.newest():
        return ""
    trained = "" if run.progress.step else "; nothing was trained so far"
    return f"{trained}; nothing was saved"


def _leave(code: int, error: PlanariaError, run: JobRun, report: Path | None) -> NoReturn:
    """With a report of how far it came; why the job has ended matters more than that report."""
    unwritten = _write(report, run.report_failure(error))
    leave(code, f"{error}; {unwritten}" if unwritten else str(error))


def _check_report(path: Path | None) -> None:
    """Before anything starts: a long run should not end with a path that was mistyped."""
    if path is None:
        return
    if path.is_dir():
        leave(EXIT_CONFIG, f"--report: expected a file, but {path} is a folder")
    if not path.resolve().parent.is_dir():
        leave(EXIT_CONFIG, f"--report: the folder of {path} does not exist")


def _write(path: Path | None, report: dict[str, Any]) -> str:
    """Why it could not be written; "" if it was, or if nobody wants it."""
    if path is None:
        return ""
    content = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # a pipe or a device
        else:
            write_atomically(path.resolve(), content)
    except OSError as error:
        return f"its report could not be written: {error}"
    return ""


def main() -> None:
    _open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)  # like Ctrl-C
    try:
        app()
    finally:
        for stream in (sys.stdout, sys.stderr):
            _give_up_unprinted(stream)
    sys.exit(0)


def _open_closed_streams() -> None:
    """Where the shell has closed one (>&-), what the job opens first would get its number, and the
    lines that are meant for it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _give_up_unprinted(stream: TextIO) -> None:
    """Lines that there is no room for would make another exit code of ours."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
