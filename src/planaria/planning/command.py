"""`planaria plan`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
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
from planaria.files import write_atomically
from planaria.planning.bandwidth import link_of
from planaria.planning.inputs import LEAST_HOURS, PlanInputs
from planaria.planning.jobs import as_yaml, base_job, inputs_of, job_of
from planaria.planning.machine import command_line
from planaria.planning.measure import Measurement
from planaria.planning.measure import measure as measure_here
from planaria.planning.options import flag, refuse_existing, require, takes_options_of
from planaria.planning.pictures import show_network, show_plan, write_png
from planaria.planning.plan import Recommendation, make_plan
from planaria.planning.strategies import name_of
from planaria.planning.traces import Trace, read_trace

# What a trace says itself.
SAID_BY_TRACE = ("mtbf_hours", "shape", "burst_percent", "burst_servers")
# What a plan depends on most: those that nobody has said are named with the defaults they have.
DECISIVE = (
    "servers",
    "trainers",
    "hours",
    "model_gb",
    "touched_mb",
    "step_seconds",
    "network_gb_per_s",
    "disk_gb_per_s",
    "memory_gb_per_s",
    "restart_seconds",
    "mtbf_hours",
)


@takes_options_of(PlanInputs)
def plan(
    given: dict[str, Any],
    job: Annotated[
        Path | None,
        typer.Argument(help="A job, a YAML file: says what it can of the options below."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Failures that happened, JSON or CSV (docs/planning.md); instead of --mtbf-hours.",
            rich_help_panel="Failures",
        ),
    ] = None,
    server_mtbf_hours: Annotated[
        float | None,
        typer.Option(
            help="From one failure of a server to its next, on average; a job of N servers meets N "
            "times as many. Instead of --mtbf-hours.",
            rich_help_panel="Failures",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="The network of one machine, such as 10Gbit; and say what a step and a rebuild "
            "take on it.",
            rich_help_panel="Bandwidths of one server",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the costs with short runs of JOB here.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything here; - prints it.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write JOB with the recommended strategy here, as YAML.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --write replace a file.")] = False,
) -> None:
    """Compare what every strategy costs a job, and say which one to take.

    Each strategy gets the overhead by the formulas of the papers, by a simulation with the same
    assumptions, and by a simulation of the whole job, in which failures strike during saves, loads
    and rebuilds, too, and come as they came in a trace. docs/planning.md has every formula.

    Partial recovery's own example, 8.5 % against 0.53 %:

    planaria plan --servers 8 --mtbf-hours 28 --save-seconds 336 --load-seconds 24

    Exit codes: 0 done, 1 measuring or writing failed, 2 an option is wrong.
    """
    quiet = str(json) == "-"
    console = Output(highlight=False, quiet=quiet)
    try:
        given = _with_link(given, link)
        present = None if job is None else Config.load(job)
        given = _with_server_mtbf(given, server_mtbf_hours, trace, present)
        inputs, notes, known = _inputs(given, job, present)  # before anything is measured
        failed = _read_trace(trace, given)
        for path in (png, None if quiet else json, write):
            _check_folder(path)
        if write is not None:
            refuse_existing("--write", write, force=force)
            base = base_job(inputs, present)
        if measure:
            found = _measured(console, inputs, present)
            inputs, notes, known = _inputs(given, job, present, found)
        notes += _defaults(inputs, known if failed is None else {*known, *SAID_BY_TRACE})
        made = _made(console, inputs, failed, notes, present)
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "interrupted")
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except (PlanariaError, OSError) as error:
        leave(EXIT_FAILED, str(error))
    show_plan(console, made)
    if link is not None:
        show_network(console, made)
    _write(made, png, json, quiet=quiet)
    if write is not None:
        _write_job(console, made, base, write)
    leave_if_unprinted(console)


def _with_link(given: dict[str, Any], link: str | None) -> dict[str, Any]:
    if link is None:
        return given
    if "network_gb_per_s" in given:
        raise ConfigError("--link: --network-gb-per-s is the same; give one of the two")
    return {**given, "network_gb_per_s": link_of(link).bits_per_s / 8e9}


def _with_server_mtbf(
    given: dict[str, Any], hours: float | None, trace: Path | None, job: Config | None
) -> dict[str, Any]:
    """With the mean of the job, which has that of one server divided by how many there are."""
    if hours is None:
        return given
    if "mtbf_hours" in given:
        raise ConfigError(
            "--server-mtbf-hours: --mtbf-hours says the same of the whole job; give one of the two"
        )
    if trace is not None:
        raise ConfigError("--server-mtbf-hours: the trace says it; give one of the two")
    servers = max(given.get("servers", PlanInputs().servers if job is None else job.servers), 1)
    least = LEAST_HOURS * servers
    expected = f"a number from {least:g} to 1e+09"
    require(least <= hours <= 1e9, "server_mtbf_hours", expected, hours)
    return {**given, "mtbf_hours": hours / servers}


def _inputs(
    given: dict[str, Any],
    path: Path | None,
    job: Config | None,
    measured: Measurement | None = None,
) -> tuple[PlanInputs, list[str], set[str]]:
    """What was given wins over what was measured, and that over what the job says; notes on it,
    and the names of all that was said somehow.
    """
    notes = []
    costs = measured.costs if measured else {}
    said: dict[str, Any] = {}
    if job is not None:
        step_seconds = {**costs, **given}.get("step_seconds", PlanInputs().step_seconds)
        said = inputs_of(job, step_seconds)
        used = {name: value for name, value in said.items() if name not in {**costs, **given}}
        guess = "" if "step_seconds" in {**costs, **given} else ", a guess: --measure tells"
        notes.append(
            f"from {path}: {_as_options(used)}; {job.steps:,} steps of {step_seconds:.4g} s{guess}"
        )
    known = {**said, **costs, **given}
    inputs = PlanInputs(**known).check()
    if measured:
        used = {name: value for name, value in costs.items() if name not in given}
        notes.append(measured.sentence(inputs.servers))
        notes.append(f"measured: {_as_options(used)}")
    return inputs, notes, set(known)


def _defaults(inputs: PlanInputs, known: set[str]) -> list[str]:
    """A plan for a cluster that nobody has must not pass for one of the reader's own."""
    assumed = {name: getattr(inputs, name) for name in DECISIVE if name not in known}
    if not assumed:
        return []
    whose = "all defaults, not your cluster" if len(assumed) == len(DECISIVE) else "defaults"
    return [f"{whose}: {_as_options(assumed)}"]


def _as_options(values: dict[str, Any]) -> str:
    """As they could be given."""
    return " ".join(
        f"{flag(name)} {value:.4g}" if isinstance(value, float) else f"{flag(name)} {value}"
        for name, value in values.items()
    )


def _read_trace(path: Path | None, given: dict[str, Any]) -> Trace | None:
    if path is None:
        return None
    for name in SAID_BY_TRACE:
        if name in given:
            raise ConfigError(f"{flag(name)}: the trace says it; give one of the two")
    return read_trace(path)


def _made(
    console: Console,
    inputs: PlanInputs,
    trace: Trace | None,
    notes: list[str],
    job: Config | None,
) -> Recommendation:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {}

        def observe(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(f"simulating, {what}", total=of)
            progress.update(tasks[what], completed=done)

        present = None if job is None else name_of(job)
        return make_plan(inputs, trace, observe, notes=notes, present=present)


def _measured(console: Console, inputs: PlanInputs, job: Config | None) -> Measurement:
    with console.status("measuring") as status:
        return measure_here(
            inputs.servers,
            inputs.trainers,
            job,
            observe=lambda what: status.update(f"measuring: {what}"),
        )


def _check_folder(path: Path | None) -> None:
    if path is not None and not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: expected a file in a folder that can be written to")


def _write(made: Recommendation, png: Path | None, json: Path | None, *, quiet: bool) -> None:
    text = msgspec.json.format(msgspec.json.encode(made.to_dict())) + b"\n"
    try:
        if quiet:
            typer.echo(text, nl=False)
        elif json is not None:
            write_atomically(json, text)
        if png is not None:
            write_png(made, png)
    except OSError as error:
        leave(EXIT_FAILED, f"the plan is made, but could not be written: {error}")


def _write_job(console: Console, made: Recommendation, base: Config, path: Path) -> None:
    if made.best is None:
        leave(EXIT_FAILED, f"--write: {made.reasons[0]}; {path} was not written")
    title = f"{made.reasons[0]}\n{command_line()}"
    try:
        write_atomically(path, as_yaml(job_of(made, base), title).encode())
    except (PlanariaError, OSError) as error:
        leave(EXIT_FAILED, f"the plan is made, but {path} could not be written: {error}")
    console.print(f"written to {path}: planaria train {path}", markup=False, soft_wrap=True)
