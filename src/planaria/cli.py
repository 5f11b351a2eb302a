"""The `planaria` command."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import planaria
from planaria import kernels
from planaria.errors import ArgumentError, PlanariaError
from planaria.rehearsal import Job, Rehearsal, run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Fault-tolerant training of deep-learning recommendation models.",
)
console = Console(highlight=False)

EXIT_DIGESTS_DIFFER = 1
EXIT_BAD_ARGUMENTS = 2


@app.command()
def version() -> None:
    """Print the version and what the kernels run on here."""
    console.print(f"planaria {planaria.__version__}, kernels: {kernels.level()}")


@app.command()
def train(
    servers: Annotated[int, typer.Option(help="Embedding servers.")] = 6,
    parity: Annotated[int, typer.Option(help="Servers of a group that may be lost at once.")] = 1,
    k: Annotated[
        int | None, typer.Option(help="Data records per stripe; follows from the servers.")
    ] = None,
    trainers: Annotated[int, typer.Option(help="Trainers, each with its own samples.")] = 2,
    steps: Annotated[int, typer.Option(help="Synchronous steps over all trainers.")] = 150,
    seed: Annotated[int, typer.Option(help="Decides initial weights and samples.")] = 0,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="server:N@STEP, several times if you like; default: server:1, halfway."),
    ] = None,
) -> None:
    """Rehearse a job in one process: train it undisturbed, then again losing servers.

    All arithmetic is real: erasure-coded stores, deltas into parity, decoding of every lost
    record. Both runs must end with the same digest, which stands for every bit of every record;
    exit code 1 says that they did not.
    """
    try:
        _check_counts(servers=servers, trainers=trainers, steps=steps)
        job = Job(servers=servers, parity=parity, k=k, trainers=trainers, steps=steps, seed=seed)
        if kill is None:
            kill = [f"server:1@{max(steps // 2, 1)}"] if parity else []
        schedule = _parse_kills(kill, job)
        console.print(
            f"{servers} servers, parity {parity}, {trainers} trainers, {steps} steps; "
            f"kernels: {kernels.level()}"
        )
        undisturbed = _run("undisturbed", job, {})
        disturbed = _run("losing servers", job, schedule)
    except PlanariaError as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(EXIT_BAD_ARGUMENTS) from None
    _summary(undisturbed, disturbed, schedule)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not 1 <= count <= 1_000_000:
            raise ArgumentError(f"--{name} must be 1 or more, not {count}")


def _parse_kills(kills: list[str], job: Job) -> dict[int, set[int]]:
    schedule: dict[int, set[int]] = {}
    for text in kills:
        match = re.fullmatch(r"server:(\d+)@(\d+)", text)
        if not match:
            raise ArgumentError(f"--kill {text!r} is not of the form server:2@100")
        place, step = int(match[1]), int(match[2])
        if place >= job.servers or not 1 <= step <= job.steps:
            raise ArgumentError(
                f"--kill {text}: servers are 0 to {job.servers - 1}, steps 1 to {job.steps}"
            )
        schedule.setdefault(step, set()).add(place)
    return schedule


def _run(name: str, job: Job, schedule: dict[int, set[int]]) -> Rehearsal:
    columns = (TextColumn("{task.description:>15}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("loss {task.fields[loss]:.4f}"))  # fmt: skip
    with Progress(*columns, console=console, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task(name, total=job.steps, loss=float("nan"))
        return run(job, schedule, lambda now: progress.update(task, advance=1, loss=now.loss))


def _summary(undisturbed: Rehearsal, disturbed: Rehearsal, schedule: dict[int, set[int]]) -> None:
    for step, places in sorted(schedule.items()):
        named = ", ".join(f"server:{place}" for place in sorted(places))
        console.print(f"after step {step}: lost {named}, rebuilt from stripe-mates")
    console.print(f"loss of the last step  {disturbed.loss:.4f} (guessing: 0.6931)")
    console.print(f"digest undisturbed     {undisturbed.digest}")
    console.print(f"digest losing servers  {disturbed.digest}")
    if undisturbed.digest != disturbed.digest:
        console.print("[red]The digests differ: records were lost. Please report this.[/red]")
        raise typer.Exit(EXIT_DIGESTS_DIFFER)
    console.print("[green]equal: not one bit was lost[/green]")


def main() -> None:
    app()
