"""More servers or trainers, or fewer, while a job trains: planaria scale, planaria drain."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from planaria.cluster import asking, preflight
from planaria.cluster.files import JobFiles
from planaria.cluster.reporting import counted
from planaria.config import Config
from planaria.errors import ConfigError
from planaria.exits import EXIT_CONFIG, EXIT_FAILED, leave, leave_if_unprinted
from planaria.running import console
from planaria.watching import Deadline, JobOnly, ask_or_leave, find_job
from planaria.wire.control import Running

SPARE = "spare"  # as planaria status names it
LEAST_S = 1.0  # for one question, though the deadline is near


def scale_command(
    job: JobOnly,
    servers: Annotated[
        int | None, typer.Option(help="How many embedding servers it is to have.", min=1)
    ] = None,
    trainers: Annotated[
        int | None,
        typer.Option(help="How many trainers it is to have, where trainer.elastic is on.", min=1),
    ] = None,
    after: Annotated[
        int, typer.Option(help="The step after which trainers change; else the next one.", min=0)
    ] = 0,
    deadline: Deadline = 600.0,
) -> None:
    """Change the number of a job's servers, or of its trainers, while it trains.

    Records move in the background, and every one stays protected meanwhile; the model that comes
    out is the same, bit for bit. New servers are started where the job has room; of too many, the
    last ones leave. k and parity stay as they are, so at least k + parity servers must be left.

    Trainers change between two steps, and share the batches anew. Results then depend on the step
    at which that was, so it needs trainer.elastic=on.

    Exit codes: 0 the job has so many, 1 it cannot or does not answer in time, 2 no such job
    runs here.
    """
    if (servers is None) == (trainers is None):
        leave(EXIT_CONFIG, "name one number: --servers or --trainers")
    if servers is not None and after:
        leave(EXIT_CONFIG, "--after: it has a meaning with --trainers only; servers change at once")
    folder = find_job(job)
    if servers is not None:
        _scale(folder, servers, [], deadline)
    else:
        assert trainers is not None
        _scale_trainers(folder, trainers, after, deadline)
    leave_if_unprinted(console)


def drain_command(
    job: JobOnly,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A machine to free of servers, as planaria status names it."),
    ] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="A server to free, as planaria status names it.")
    ] = None,
    deadline: Deadline = 600.0,
) -> None:
    """Free machines, or single servers, of their records while a job trains; then they leave.

    The job goes on with as many servers less.

    Exit codes: 0 they are free, 1 that cannot be or the job does not answer in time, 2 there is no
    such job or server.
    """
    folder, until = find_job(job), time.monotonic() + deadline
    hosts = host or []
    unwanted = _named(_servers(folder), hosts, server or [])
    while True:
        left_s = max(until - time.monotonic(), LEAST_S)
        _scale(folder, None, [one.member for one in unwanted if one.who != SPARE], left_s, hosts)
        # A spare on such a host may have taken a place before it was ended.
        unwanted = [one for one in _servers(folder) if one.host in hosts and one.who != SPARE]
        if not unwanted:
            break
    leave_if_unprinted(console)


def _servers(folder: Path) -> list[Running]:
    """And spares; not those that leave."""
    status = ask_or_leave(lambda: asking.status(folder))
    return [one for one in status.processes if one.who.startswith(("server:", SPARE))]


def _named(servers: Sequence[Running], hosts: Sequence[str], names: Sequence[str]) -> list[Running]:
    placed = [one for one in servers if one.who != SPARE]
    known_hosts = {one.host for one in servers if one.host}
    for name in hosts:
        if name not in known_hosts:
            there = f"they are on {', '.join(sorted(known_hosts))}, as planaria status says"
            beside = "all of them run beside the command, on this machine"
            said = there if known_hosts else beside
            leave(EXIT_CONFIG, f"there is no host {name!r} with servers; {said}")
    for name in names:
        if not any(name in (one.who, one.member) for one in placed):
            there = ", ".join(f"{one.who} ({one.member})" for one in placed)
            leave(EXIT_CONFIG, f"there is no server {name!r}; there is {there}")
    if not hosts and not names:
        leave(EXIT_CONFIG, "name what to free: --host or --server")
    return [one for one in servers if one.host in hosts or {one.who, one.member} & {*names}]


def _scale(
    folder: Path,
    servers: int | None,
    without: Sequence[str],
    deadline_s: float,
    drain: Sequence[str] = (),
) -> None:
    _check_room(folder, servers, len(without))
    with console.status(f"{folder.name}: records move, while training goes on") as shown:

        def say(how_far: str) -> None:
            shown.update(f"{folder.name}: {how_far or 'records move'}, while training goes on")

        found = ask_or_leave(lambda: asking.scale(folder, servers, without, deadline_s, drain, say))
    if found.state == "refused":
        leave(EXIT_FAILED, f"{folder.name} keeps its {found.servers} servers: {found.why}")
    console.print(f"{folder.name} has {found.servers} servers")


def _scale_trainers(folder: Path, trainers: int, after: int, deadline_s: float) -> None:
    with console.status(f"{folder.name}: trainers change, between two steps") as shown:

        def say(how_far: str) -> None:
            shown.update(f"{folder.name}: {how_far or 'trainers change, between two steps'}")

        found = ask_or_leave(
            lambda: asking.scale_trainers(folder, trainers, after, deadline_s, say)
        )
    if found.state != "done":
        kept = counted(found.trainers, "trainer")
        leave(EXIT_FAILED, f"{folder.name} keeps its {kept}: {found.why}")
    console.print(f"{folder.name} has {counted(found.trainers, 'trainer')}")


def _check_room(folder: Path, servers: int | None, fewer: int) -> None:
    """Before anything moves. What other machines have is not known here."""
    running = _servers(folder)
    now = sum(one.who != SPARE for one in running)
    if any(one.host for one in running):
        return
    try:
        config = Config.from_dict(JobFiles(folder).config())
        preflight.check_servers(config, now, now - fewer if servers is None else servers)
    except (ConfigError, OSError) as error:
        leave(EXIT_FAILED, f"{folder.name} keeps its {now} servers: {error}")
