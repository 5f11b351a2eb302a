"""`planaria plan`."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from planaria.cluster.files import write_atomically
from planaria.config import Config
from planaria.errors import ConfigError, PlanariaError
from planaria.planning.inputs import PlanInputs
from planaria.planning.measure import measure as measure_here
from planaria.planning.pictures import show_plan, write_png
from planaria.planning.plan import Plan, make_plan
from planaria.planning.traces import Trace, read_trace

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130

_DEFAULTS = PlanInputs()
_NAMES = {field.name for field in fields(PlanInputs)}


def _option(name: str, panel: str, text: str) -> Any:
    """An option whose default is the input's; None where another input decides."""
    default = getattr(_DEFAULTS, name)
    note = f" Default {default:g}." if isinstance(default, int | float) else ""
    return typer.Option(help=text + note, rich_help_panel=panel, show_default=False)


def _job(name: str, text: str) -> Any:
    return _option(name, "The job", text)


def _machines(name: str, text: str) -> Any:
    return _option(name, "Bandwidths of one server", text)


def _costs(name: str, text: str) -> Any:
    return _option(name, "Costs (else from the bandwidths, or --measure)", text)


def _failures(name: str, text: str) -> Any:
    return _option(name, "Failures", text)


def _budgets(name: str, text: str) -> Any:
    return _option(name, "Budgets", text)


Whole = int | None
Number = float | None


def plan(
    servers: Annotated[Whole, _job("servers", "Embedding servers.")] = None,
    trainers: Annotated[Whole, _job("trainers", "Trainers; they idle when the job does.")] = None,
    hours: Annotated[Number, _job("hours", "The job's length, were nothing to fail.")] = None,
    model_gb: Annotated[Number, _job("model_gb", "All records: weights, optimizer state.")] = None,
    touched_mb: Annotated[Number, _job("touched_mb", "Records that one step changes.")] = None,
    step_seconds: Annotated[Number, _job("step_seconds", "One step, unprotected.")] = None,
    k: Annotated[Whole, _job("k", "Data records per stripe; else it follows.")] = None,
    network_gb_per_s: Annotated[Number, _machines("network_gb_per_s", "Network.")] = None,
    disk_gb_per_s: Annotated[Number, _machines("disk_gb_per_s", "To the checkpoints.")] = None,
    memory_gb_per_s: Annotated[Number, _machines("memory_gb_per_s", "A copy in memory.")] = None,
    rebuild_gb_per_s: Annotated[
        Number, _machines("rebuild_gb_per_s", "Decoding a lost server; else the network's.")
    ] = None,
    save_seconds: Annotated[Number, _costs("save_seconds", "One synchronous save.")] = None,
    load_seconds: Annotated[Number, _costs("load_seconds", "Loading a checkpoint.")] = None,
    restart_seconds: Annotated[
        Number, _costs("restart_seconds", "Rescheduling after a failure.")
    ] = None,
    protection_percent: Annotated[
        Number, _costs("protection_percent", "How much longer a step takes per parity.")
    ] = None,
    pause_seconds: Annotated[
        Number, _costs("pause_seconds", "From a death until training goes on, with erasure.")
    ] = None,
    rebuild_seconds: Annotated[Number, _costs("rebuild_seconds", "Until it is whole.")] = None,
    slowdown_percent: Annotated[
        Number, _costs("slowdown_percent", "How much slower training is until then.")
    ] = None,
    backup_hours: Annotated[
        Number, _costs("backup_hours", "Between the checkpoints beneath erasure.")
    ] = None,
    mtbf_hours: Annotated[
        Number, _failures("mtbf_hours", "Between failures of any server of the job, on average.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Failures that happened, JSON or CSV (docs/planning.md); instead of --mtbf-hours.",
            rich_help_panel="Failures",
        ),
    ] = None,
    trace_servers: Annotated[
        Whole, _failures("trace_servers", "Servers of the trace's cluster; else those that failed.")
    ] = None,
    failures: Annotated[
        str | None,
        _failures(
            "failures",
            "What the simulation draws: exponential, weibull, gamma (fitted, with a trace) or "
            "replay. Default: replay with a trace, else exponential.",
        ),
    ] = None,
    shape: Annotated[
        Number, _failures("shape", "Of weibull or gamma without a trace; below 1 is bursty.")
    ] = None,
    burst_percent: Annotated[
        Number, _failures("burst_percent", "Share of failures that take several servers at once.")
    ] = None,
    burst_servers: Annotated[Whole, _failures("burst_servers", "How many those take.")] = None,
    lost_samples_percent: Annotated[
        Number,
        _budgets("lost_samples_percent", "Accuracy: the share of samples that may be lost (PLS)."),
    ] = None,
    memory_budget_gb: Annotated[Number, _budgets("memory_budget_gb", "Of one server.")] = None,
    loss_percent: Annotated[
        Number, _budgets("loss_percent", "The chance that erasure loses more than it bears.")
    ] = None,
    runs: Annotated[
        Whole, typer.Option(help="Simulated runs. Default 50 to 200.", show_default=False)
    ] = None,
    seed: Annotated[Whole, _option("seed", "Options", "Of the simulation.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the costs with short runs here.")
    ] = False,
    job: Annotated[
        Path | None, typer.Option(help="The job to measure, a YAML file; else a small one.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything here; - prints it.")] = None,
) -> None:
    """Compare what every strategy costs a job, and say which one to take.

    Each strategy gets the overhead by the formulas of the papers, by a simulation with the same
    assumptions, and by a simulation of the whole job, in which failures strike during saves, loads
    and rebuilds, too, and come as they came in a trace. docs/planning.md has every formula.

    Partial recovery's own example, 8.5 % against 0.53 %:

    planaria plan --servers 8 --mtbf-hours 28 --save-seconds 336 --load-seconds 24

    Exit codes: 0 done, 1 measuring or writing failed, 2 an option is wrong.
    """
    given = {
        name: value for name, value in locals().items() if name in _NAMES and value is not None
    }
    quiet = str(json) == "-"
    console = Console(highlight=False, quiet=quiet)
    try:
        inputs = PlanInputs(**given).check()
        failed = None if trace is None else read_trace(trace)
        for name in ("mtbf_hours", "shape", "burst_percent", "burst_servers"):
            if trace is not None and name in given:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option}: the trace says it; give one of the two")
        for path in (png, None if quiet else json):
            _check_folder(path)
        if job is not None and not measure:
            raise ConfigError("--job: it is measured only; add --measure")
        if measure:
            base = None if job is None else Config.load(job)
            inputs = PlanInputs(**{**_measured(console, inputs, base), **given}).check()
        made = _made(console, inputs, failed)
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "interrupted")
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except (PlanariaError, OSError) as error:
        leave(EXIT_FAILED, str(error))
    show_plan(console, made)
    _write(made, png, json, quiet=quiet)


def _made(console: Console, inputs: PlanInputs, trace: Trace | None) -> Plan:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {}

        def observe(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(f"simulating, {what}", total=of)
            progress.update(tasks[what], completed=done)

        return make_plan(inputs, trace, observe)


def _measured(console: Console, inputs: PlanInputs, base: Config | None) -> dict[str, float]:
    with console.status("measuring") as status:
        found = measure_here(
            inputs.servers,
            inputs.trainers,
            base,
            observe=lambda what: status.update(f"measuring: {what}"),
        )
    for name, value in found.items():
        console.print(f"measured {name.replace('_', '-')} {value:.4g}")
    return found


def _check_folder(path: Path | None) -> None:
    if path is not None and not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: expected a file in a folder that can be written to")


def _write(made: Plan, png: Path | None, json: Path | None, *, quiet: bool) -> None:
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


def leave(code: int, sentence: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(
        f"error: {sentence}", style="red", soft_wrap=True, markup=False
    )
    raise typer.Exit(code)
