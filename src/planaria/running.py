"""From a command line to a job: what is read, checked and started before it, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from planaria.cluster import preflight
from planaria.cluster.hosts import Hosts
from planaria.cluster.resuming import FROM_THE_BEGINNING, Resumption, find_start, load_saved
from planaria.cluster.run import JobRun
from planaria.cluster.scripts import INCLUDED, INTERRUPTED, Scripts, environment_of, job_of
from planaria.cluster.trace import Trace
from planaria.config import CheckpointConfig, Config
from planaria.display import Display
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
)
from planaria.files import write_atomically
from planaria.schedule import Fault, parse_freeze, parse_kill, resolve
from planaria.trainer.declaring import Declaration, Settings
from planaria.wire.control import Rehearsal

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


def read(
    path: Path | None, sets: list[str] | None, resume: bool = False
) -> tuple[Config, Sequence[str]]:
    """The job, and what the user should know of where its settings come from."""
    try:
        if resume and path is None:
            return load_saved(sets or ())
        return Config.load(path, sets or ()), ()
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))


def as_started_before(sets: list[str]) -> list[str]:
    """With how the trainers of the saved job were started, which no script can say: before it runs
    there must be as many. What else was set, the script says again, or the command line.
    """
    saved, _ = read(None, sets, resume=True)
    kept = {
        "trainers": saved.trainers,
        "script.spares": saved.script.spares,
        "threads.trainer": saved.threads.trainer,
        "reproducible": saved.reproducible,
    }
    return [*(f"{key}={value}" for key, value in kept.items()), *sets]


def check_early(
    given: Config, kill: list[str] | None, freeze: list[str] | None, resume: bool
) -> None:
    """What is wrong whatever a script declares: before it is waited for."""
    try:
        parse_faults(kill, freeze)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    if not given.is_built_in and not resume:
        look_for_start(given, resume)


def parse_faults(kill: list[str] | None, freeze: list[str] | None) -> list[Fault]:
    faults: list[Fault] = [parse_kill(text) for text in kill or ()]
    return faults + [parse_freeze(text) for text in freeze or ()]


def make_schedule(job: Config, kill: list[str] | None, freeze: list[str] | None) -> list[Fault]:
    try:
        return resolve(parse_faults(kill, freeze), job)
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))


def look_for_start(job: Config, resume: bool) -> Resumption:
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


def run_job(
    title: str,
    job: Config,
    schedule: Sequence[Fault],
    report: Path | None,
    start: Resumption = FROM_THE_BEGINNING,
    scripts: Scripts | None = None,
    trace: Trace | None = None,
    hosts: Hosts | None = None,
) -> tuple[JobRun, dict[str, Any]]:
    display = Display(console, title, job)
    try:
        run = JobRun(job, schedule, display, start, scripts=scripts, trace=trace, hosts=hosts)
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
    unwritten = write_report(report, run.report_failure(error))
    leave(code, f"{error}; {unwritten}" if unwritten else str(error))


def check_file(path: Path | None, option: str = "--report") -> None:
    """Before anything starts: a long run should not end with a path that was mistyped."""
    if path is None:
        return
    if path.is_dir():
        leave(EXIT_CONFIG, f"{option}: expected a file, but {path} is a folder")
    if not path.resolve().parent.is_dir():
        leave(EXIT_CONFIG, f"{option}: the folder of {path} does not exist")


def write_report(path: Path | None, report: dict[str, Any]) -> str:
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


@contextmanager
def trainers(
    given: Config,
    command: Sequence[str] = (),
    settings: Settings | None = None,
    hosts: Hosts | None = None,
) -> Iterator[tuple[Config, Scripts | None]]:
    """The job, and those who train it on this machine, if they run a script: a user's command, or
    the one that is ours for all models but the built-in one. hosts: where they run, if not here.
    """
    if not command and given.is_built_in:
        yield given, None
        return
    settings = settings or Settings(None, [], given.to_dict())
    with ExitStack() as stack:
        try:
            scripts, declared = _declared(stack, given, command, settings, hosts)
            job = Config.from_dict(job_of(declared, own_data=settings.base is None))
            check_started_as_wanted(given, job)
        except KeyboardInterrupt:
            leave(EXIT_INTERRUPTED, f"{INTERRUPTED}; nothing was trained so far")
        except ConfigError as error:
            leave(EXIT_CONFIG, str(error))
        except PlanariaError as error:
            leave(EXIT_FAILED, str(error))
        yield job, scripts


def _declared(
    stack: ExitStack, given: Config, command: Sequence[str], settings: Settings, hosts: Hosts | None
) -> tuple[Scripts | None, Declaration]:
    """What a script says of the job, at its first batch; and its processes, if they are here."""
    variables = environment_of(given, settings)
    trainers, spares = given.trainers, given.script.spares
    if hosts is None:
        command = command or [str(INCLUDED)]
        scripts = stack.enter_context(Scripts(command, trainers, spares, variables, _show_line))
        return scripts, scripts.declare()
    hosts.wait_for({"trainer": trainers + spares}, _show_line)
    script = Rehearsal(
        command=[*command],
        folder=str(Path.cwd()),
        variables=variables,
        trainers=trainers,
        spares=spares,
    )
    return None, hosts.declare(script, _show_line)


def check_started_as_wanted(given: Config, job: Config) -> None:
    """What decides how trainers are started cannot wait for what they are told when they run."""
    pairs = {
        "script.spares": (given.script.spares, job.script.spares),
        "threads.trainer": (given.threads.trainer, job.threads.trainer),
        "reproducible": (given.reproducible, job.reproducible),
    }
    wrong = [
        f"{key}: the script wants {wanted}, but was started with {had}; start it with planaria run "
        f"--set {key}={wanted}"
        for key, (had, wanted) in pairs.items()
        if had != wanted
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _show_line(line: str) -> None:
    """As the script has printed it."""
    console.print(line, markup=False, soft_wrap=True)


def leave_if_unsaved(run: JobRun, found: dict[str, Any], report: Path | None) -> None:
    """The job is done; what it was for must be there as well."""
    if unwritten := write_report(report, found):
        leave(EXIT_FAILED, f"the run is done, but {unwritten}{run.way_back()}")
    if problem := run.unsaved(found):
        leave(EXIT_FAILED, problem)
