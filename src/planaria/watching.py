"""Looking at running jobs from another terminal, and ending them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.table import Table

from planaria.cluster import asking
from planaria.cluster.files import JobFiles, home
from planaria.control.children import WAITS
from planaria.errors import ConfigError, PlanariaError
from planaria.exits import EXIT_CONFIG, EXIT_FAILED, leave, leave_if_unprinted
from planaria.running import console
from planaria.wire.control import Status

T = TypeVar("T")

Job = Annotated[
    str | None,
    typer.Argument(
        help="The job's folder, its name, or how that begins; without, the only job that runs."
    ),
]
JobOnly = Annotated[str, typer.Argument(help="The job's folder, its name, or how that begins.")]
Deadline = Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=0)]


def jobs_command() -> None:
    """List the jobs that run on this machine, for this user."""
    found = asking.running_jobs()
    if not found:
        console.print("no job is running here")
    else:
        table = Table("job", "step", "of", "saved", "failures", "processes", box=None)
        for folder in found:
            try:
                table.add_row(folder.name, *_numbers(asking.status(folder)))
            except PlanariaError:  # it has ended meanwhile, or hangs
                table.add_row(folder.name, "does not answer")
        console.print(table)
    leave_if_unprinted(console)


def _numbers(status: Status) -> list[str]:
    numbers = (status.step, status.steps, status.saved, status.failures, len(status.processes))
    return [f"{number:,}" for number in numbers]


def status_command(job: Job = None, deadline: Deadline = asking.ASK_S) -> None:
    """Show how far a running job is, and where its processes are.

    Exit codes: 0 shown, 1 the job does not answer, 2 no such job runs here.
    """
    folder = find_job(job)
    status = ask_or_leave(lambda: asking.status(folder, deadline))
    saved = f", step {status.saved:,} is saved" if status.saved else ""
    console.print(f"{folder.name}: step {status.step:,} of {status.steps:,}{saved}")
    console.print(f"failures so far: {status.failures}")
    if status.moving:
        console.print(status.moving)
    labelled = any(one.domain not in ("", one.host, one.member) for one in status.processes)
    table = Table("process", "name", "host", *["domain"] * labelled, "", box=None)
    for one in sorted(status.processes, key=lambda one: (one.who, one.member)):
        where = "" if one.state == WAITS else one.host or "here"
        table.add_row(one.who, one.member, where, *[one.domain] * labelled, one.state)
    for place in status.lost:
        table.add_row(place, "", "", *[""] * labelled, "is lost")
    console.print(table)
    leave_if_unprinted(console)


def stop_command(job: JobOnly, deadline: Deadline = asking.ASK_S) -> None:
    """End a running job as Ctrl-C does: it saves its current step first, if it saves at all.

    Returns as soon as the job knows it; the job's own command says how it has ended.

    Exit codes: 0 the job knows it, 1 the job does not answer, 2 no such job runs here.
    """
    folder = find_job(job)
    status = ask_or_leave(lambda: asking.stop(folder, deadline))
    console.print(f"{folder.name} was told to end, at step {status.step:,}")
    leave_if_unprinted(console)


def logs_command(
    job: JobOnly,
    member: Annotated[
        str | None,
        typer.Argument(help="A process, as planaria status names it: server-2, or server:2."),
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="How many lines of each, the last.")] = 20,
) -> None:
    """Show what the processes of a job have said, also of one that has ended badly.

    Of processes on other machines, the logs are on those machines, in folders of other names: name
    the folder there.

    Exit codes: 0 shown, 2 there is no such job or log here.
    """
    found = find_job(job, ended=True)
    folder = found / "logs"
    there = sorted(folder.glob("*.log"))
    named = {member, *_who_is(found, member)} if member and ":" in member else {member}
    files = [file for file in there if member is None or file.stem in named]
    if not files:
        names = f"; there is {', '.join(file.stem for file in there)}" if there else ""
        leave(EXIT_CONFIG, f"there is no log of {member or 'any process'} in {folder}{names}")
    for file in files:
        console.print(f"[bold]{file.stem}[/bold]")
        said = file.read_text(errors="replace").splitlines()[-lines:]
        console.print("\n".join(said), markup=False, soft_wrap=True)
    leave_if_unprinted(console)


def _who_is(folder: Path, place: str) -> list[str]:
    """The process that has this place or rank; of a job that has ended, nobody knows."""
    try:
        return [one.member for one in asking.status(folder).processes if one.who == place]
    except PlanariaError:
        return []


def scrub_command(job: Job = None, deadline: Deadline = 60.0) -> None:
    """Verify all stripes of a running job, byte for byte, while it trains.

    Every parity record is compared with what its data records, as of one committed step, make of
    it.

    Exit codes: 0 all are equal, 1 any differs or the job does not answer, 2 no such job runs here.
    """
    folder = find_job(job)
    found = ask_or_leave(lambda: asking.scrub(folder, deadline))
    if not found.records:
        leave(EXIT_FAILED, f"the job in {folder} keeps no parity; there is nothing to verify")
    console.print(f"{found.records:,} parity records verified, {found.wrong:,} wrong")
    if found.wrong:
        raise typer.Exit(EXIT_FAILED)
    leave_if_unprinted(console)


def ask_or_leave(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))


def find_job(job: str | None, *, ended: bool = False) -> Path:
    """The job's folder. ended: it need not be running, if no other of that name is."""
    if job == "":  # a variable of the shell's that is not set, say; not every job
        leave(EXIT_CONFIG, "JOB is empty; planaria jobs lists those that are running")
    if job and Path(job).is_dir():
        return Path(job)
    known = asking.running_jobs()
    found = _named(job, known)
    if ended and not found:
        folders = sorted((home() / "jobs").glob("*/"))
        # A host's folder has the logs of what ran for a job elsewhere.
        known = [folder for folder in folders if not JobFiles(folder).is_copy] or folders
        found = _named(job, known) or _named(job, folders)
    if len(found) != 1:
        _leave_unnamed(job, found, known)
    return found[0]


def _named(job: str | None, known: Sequence[Path]) -> list[Path]:
    return [folder for folder in known if folder.name.startswith(job or "")]


def _leave_unnamed(job: str | None, found: list[Path], known: list[Path]) -> NoReturn:
    named = ", ".join(folder.name for folder in found or known) or "none"
    if not found and job:
        leave(EXIT_CONFIG, f"no job runs in '{job}', nor has one a name like that; known: {named}")
    if not found:
        leave(EXIT_CONFIG, "no job is running here; start one with planaria train")
    leave(EXIT_CONFIG, f"name the job; known: {named}")
