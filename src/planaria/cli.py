"""The `planaria` command."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TextIO

import typer

import planaria
from planaria import kernels
from planaria.cluster.trace import Trace
from planaria.comparing.command import compare_command
from planaria.compressing.command import compress_command
from planaria.config import CheckpointConfig
from planaria.config.text import read_file
from planaria.display import show_report
from planaria.errors import PlanariaError
from planaria.exits import (
    EXIT_CONFIG,
    EXIT_FAILED,
    leave,
    leave_if_unprinted,
)
from planaria.inspecting import app as data_app
from planaria.joining import (
    KeyFile,
    ListenAt,
    On,
    coordinator_command,
    launched,
    server_command,
    spread_over,
    trainer_command,
)
from planaria.outside import export_command, import_command, predict_command
from planaria.placing.command import place, stats
from planaria.planning.command import plan
from planaria.running import (
    ConfigFile,
    Freezes,
    Kills,
    ReportFile,
    Resume,
    Sets,
    as_started_before,
    check_early,
    check_file,
    console,
    leave_if_unsaved,
    look_for_start,
    make_schedule,
    parse_faults,
    read,
    run_job,
    trainers,
    write_report,
)
from planaria.scaling import drain_command, scale_command
from planaria.trainer.declaring import Settings
from planaria.watching import (
    jobs_command,
    logs_command,
    scrub_command,
    status_command,
    stop_command,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # the lines of a paragraph flow, and brackets are no markup
    help="Fault-tolerant training of deep-learning recommendation models.",
)


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
    on: On = "local",
    listen: ListenAt = None,
    key: KeyFile = None,
) -> None:
    """Train a job, and disturb it on purpose if you like.

    Servers, trainers and the coordinator are processes of their own. Of every group, as many
    servers as the job's parity says can be killed at any instant: the digest at the end is that of
    an undisturbed run, bit for bit.

    With checkpoint.path and checkpoint.every_steps, or checkpoint.every_s=auto, checkpoints are
    saved meanwhile; docs/checkpoints.md says what they promise.

    All processes run on this machine; or on others, which join the job with planaria server,
    planaria trainer and, if you like, planaria coordinator (--on none), or where Ray starts them
    (--on ray).

    Exit codes: 0 done, 1 failed, 2 wrong configuration or nothing to resume from (nothing was
    started), 3 more was lost than the parity can bear, 130 interrupted (Ctrl-C, SIGTERM, SIGHUP).
    """
    check_file(report)
    given, notes = read(config, sets, resume)
    check_early(given, kill, freeze, resume)
    with (
        launched(given, on, listen, key) as hosts,
        trainers(given, hosts=hosts) as (job, scripts),
    ):
        schedule = make_schedule(job, kill, freeze)
        start = look_for_start(job, resume)
        start = replace(start, notes=(*notes, *start.notes))
        job = spread_over(hosts, job)
        run, found = run_job("training", job, schedule, report, start, scripts, hosts=hosts)
    show_report(console, found)
    leave_if_unsaved(run, found, report)


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
    on: On = "local",
    listen: ListenAt = None,
    key: KeyFile = None,
) -> None:
    """Run a script of yours as the trainers of a job.

    The script connects with planaria.torch.connect() and loops over job.batches(...); each of the
    job's `trainers` runs it, with RANK and WORLD_SIZE set. Servers, a coordinator and spares are
    started for it. A trainer that dies is replaced by a spare, which has run the script up to its
    first batch, and goes on at the committed step.

    With --on, the processes run on other machines, as those of planaria train do. The script, what
    it imports and what it reads must be there, too, in the same place.

    Exit codes are those of planaria train; 1 also where the script has raised an exception.
    """
    check_file(report)
    if not script.is_file():
        leave(EXIT_CONFIG, f"{script}: expected a Python file, but there is none")
    if resume and config is None:
        sets = as_started_before(sets or [])
    given, _ = read(config, sets)
    check_early(given, kill, freeze, resume)
    settings = Settings(read_file(config) if config else None, sets or [])
    command = [str(script), *(arguments or ())]
    with (
        launched(given, on, listen, key) as hosts,
        trainers(given, command, settings, hosts) as (job, scripts),
    ):
        schedule = make_schedule(job, kill, freeze)
        start = look_for_start(job, resume)
        job = spread_over(hosts, job)
        run, found = run_job("training", job, schedule, report, start, scripts, hosts=hosts)
    show_report(console, found)
    leave_if_unsaved(run, found, report)
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
    check_file(report)
    job, _ = read(config, sets)
    if not job.survival.keeps_parity:
        leave(
            EXIT_CONFIG,
            f"strategy: expected erasure for a drill, got {job.strategy}; planaria compare shows "
            "what other strategies lose",
        )
    job = replace(job, checkpoint=CheckpointConfig())
    console.print("1 of 2: undisturbed")
    with trainers(job) as (known, scripts):
        halfway = f"server:any@{max(known.steps // 2, 1)}"
        schedule = make_schedule(known, kill if kill or freeze else [halfway], freeze)
        first, undisturbed = run_job("undisturbed", known, [], report, scripts=scripts)
    console.print("2 of 2: disturbed")
    with trainers(job) as (known, scripts):
        known = replace(known, wire=first.config.wire)  # what was chosen there, is chosen
        _, disturbed = run_job("disturbed", known, schedule, report, scripts=scripts)
    show_report(console, disturbed)
    console.print(f"digest undisturbed  {undisturbed['digest']}")
    console.print(f"digest disturbed    {disturbed['digest']}")
    if unwritten := write_report(report, {"undisturbed": undisturbed, "disturbed": disturbed}):
        leave(EXIT_FAILED, f"the runs are done, but {unwritten}")
    if undisturbed["digest"] != disturbed["digest"]:
        leave(EXIT_FAILED, "the digests differ: something was lost. Please report this.")
    console.print("[green]equal: not one bit was lost[/green]")


@app.command()
def trace(
    config: ConfigFile = None,
    sets: Sets = None,
    steps: Annotated[int, typer.Option(help="How many steps to trace.", min=1)] = 5,
    at: Annotated[
        int | None,
        typer.Option(
            help="From which step on. Without: two steps before the first --kill or --freeze, or "
            "the twentieth.",
            min=1,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the trace goes.")] = Path("trace.json"),
    kill: Kills = None,
    freeze: Freezes = None,
) -> None:
    """Run the first steps of a job, and show what all its processes do in some of them.

    The file is for ui.perfetto.dev or chrome://tracing: for every process, when it waited, looked
    up, computed, pushed, applied, sent deltas; and of a recovery when the loss was noticed, the
    view prepared and installed, the first record decoded and the replacement whole again. The job
    ends when the steps are traced, and saves no checkpoint.
    """
    check_file(out, "--out")
    given, _ = read(config, sets)
    if given.survival.needs_saves:
        leave(
            EXIT_CONFIG,
            f"strategy: expected erasure or none for a trace, which saves nothing, got "
            f"{given.strategy}",
        )
    given = replace(given, checkpoint=CheckpointConfig())
    check_early(given, kill, freeze, resume=False)
    strikes = [fault.step for fault in parse_faults(kill, freeze)]
    # A blow may find that votes of the step before are still out: a recovery goes back that far.
    first = at or max(min(strikes, default=22) - 2, 1)
    end = first + steps if given.data.epochs else min(first + steps, given.steps)
    if first >= end:
        leave(EXIT_CONFIG, f"--at: the job has {given.steps} steps, so step {first} is too late")
    if max(strikes, default=0) >= end:
        leave(EXIT_CONFIG, f"--kill, --freeze: the job ends with step {end}; raise --steps")
    data = replace(given.data, epochs=None)
    job = replace(given, steps=end, data=data)
    found = Trace(first, steps, until_whole=bool(kill))
    try:
        with trainers(job) as (known, scripts):
            schedule = make_schedule(known, kill, freeze)
            run_job("tracing", known, schedule, None, scripts=scripts, trace=found)
    finally:  # also of a job that ends badly: that may be why it is traced
        if found.spans:
            _write_trace(found, out)
    if not found.spans:
        leave(EXIT_FAILED, f"nothing was traced: the job has ended before step {first}")


def _write_trace(found: Trace, out: Path) -> None:
    try:
        found.write(out)
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    console.print(f"{found.spans:,} spans of {found.members} processes: {out}")
    leave_if_unprinted(console)


app.command("jobs")(jobs_command)
app.command("status")(status_command)
app.command("stop")(stop_command)
app.command("logs")(logs_command)
app.command("scrub")(scrub_command)
app.command("scale")(scale_command)
app.command("drain")(drain_command)
app.command("server")(server_command)
app.command("trainer")(trainer_command)
app.command("coordinator")(coordinator_command)
app.command()(plan)
app.command()(stats)
app.command()(place)
app.command("compare")(compare_command)
app.command("compress")(compress_command)
app.command("export")(export_command)
app.command("predict")(predict_command)
app.command("import")(import_command)
app.add_typer(data_app, name="data")


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
