"""Jobs on many machines, from the command line: who waits for hosts, and who joins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from planaria.cluster import ray_hosts
from planaria.cluster.host import Host, resolve
from planaria.cluster.hosts import Hosts, Listen
from planaria.cluster.keyfile import new_key, read_key, write_key
from planaria.cluster.transport import raise_descriptor_limit
from planaria.config import Config
from planaria.errors import ConfigError, PlanariaError
from planaria.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, leave
from planaria.running import console

WAIT_S = 600.0
LOCAL, BY_HAND, RAY = "local", "none", "ray"
EVERYWHERE = ("0.0.0.0", "*", "")

On = Annotated[
    str,
    typer.Option(
        metavar="local|none|ray",
        help="Who starts the processes. local: this command, here. none: you, with planaria server "
        "and planaria trainer, and planaria coordinator if you like, on any machines; this command "
        "waits for them at --listen. ray, or ray://HOST:PORT: Ray, on the nodes of that cluster, "
        "or of one that is started here.",
    ),
]
ListenAt = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="With --on none: an address of this machine that the others reach it at.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="With --on none: the job's key. It is made if there is none; copy it to the others."
    ),
]
Join = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="What planaria train --on none has printed.")
]
TheirKey = Annotated[Path, typer.Option(help="The job's key: a copy of the file that it made.")]
Count = Annotated[int, typer.Option(min=1, max=1024, help="For how many there is room here.")]
OwnHost = Annotated[
    str | None,
    typer.Option(
        help="An address of this machine that the job's other processes reach it at. Without: the "
        "one that leads to HOST."
    ),
]
Domain = Annotated[
    str | None,
    typer.Option(
        help="A label that machines share which may fail together: a rack, a zone. Without: this "
        "machine's address."
    ),
]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for the job to answer.")]


@contextmanager
def launched(
    given: Config, on: str, listen: str | None, key: Path | None
) -> Iterator[Hosts | None]:
    """The hosts that a job's processes run on; none, if they run here."""
    if on != BY_HAND:
        for option, value in (("--listen", listen), ("--key", key)):
            if value is not None:
                leave(EXIT_CONFIG, f"{option}: it has a meaning with --on none only")
    if on == LOCAL:
        yield None
        return
    with ExitStack() as stack:
        try:
            hosts = _hosts(stack, given, on, listen, key)
        except PlanariaError as error:  # nothing was started so far
            leave(EXIT_CONFIG, str(error))
        yield hosts


def _hosts(stack: ExitStack, given: Config, on: str, listen: str | None, key: Path | None) -> Hosts:
    if on == BY_HAND:
        if listen is None or key is None:
            raise ConfigError("--on none: give --listen and --key, too; hosts join with both")
        where = _listen(listen)
        keys = read_key(key) if key.exists() else new_key()
        join_s = given.cluster.join_s
        hosts = Hosts(where, keys, lambda address: _how_to_join(address, key), join_s)
        stack.enter_context(hosts)
        if not key.exists():  # only now: with an address that cannot be, there is no job to join
            write_key(key, keys)
        return hosts
    name, colon, address = on.partition("://")
    if name != RAY:
        raise ConfigError(f"--on: expected local, none, ray or ray://HOST:PORT, got {on}")
    given_address = address if colon else None
    own = stack.enter_context(ray_hosts.connected(given_address))
    keys = new_key()
    # It is left first: actors are told that the job is over before Ray ends them.
    here = ray_hosts.is_started_here(given_address)
    provide = partial(ray_hosts.start_actors, keys, given, here)
    join_s, how = given.cluster.join_s, "Ray starts some as soon as it has the CPUs"
    hosts = Hosts(Listen(own, None), keys, lambda _: how, join_s, provide)
    return stack.enter_context(hosts)


def spread_over(hosts: Hosts | None, job: Config) -> Config:
    """The job, once there is room for all of it: with an address that other machines know, and the
    hosts that its servers stand on.
    """
    if hosts is None:
        return job
    trainers = job.trainers + (0 if job.is_built_in else job.script.spares)
    needs = {"server": job.servers + job.spares, "trainer": trainers}
    if hosts.provides:
        needs["coordinator"] = 1
    apart = job.layout.k + job.r if job.r and job.cluster.require == "host" else 0
    try:
        hosts.wait_for(needs, _say, domains=apart)
        domains = hosts.spread(job.servers)
        cluster = replace(job.cluster, transport="tcp", host=hosts.host, domains=domains)
        return Config.from_dict(replace(job, cluster=cluster).to_dict())
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "interrupted; nothing was started so far")
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))


def _how_to_join(address: str, key: Path) -> str:
    where = address.removeprefix("tcp://")
    return (
        f"on each machine, with a copy of {key}: planaria server --join {where} --key {key.name} "
        "--count N, and planaria trainer likewise"
    )


def _listen(given: str) -> Listen:
    host, colon, port = given.rpartition(":")
    if not colon:
        host, port = given, ""
    if host in EVERYWHERE:
        raise ConfigError(f"--listen: expected an address that others can reach, got {given}")
    if colon and not (port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"--listen: expected HOST or HOST:PORT, got {given}")
    return Listen(resolve(host, "--listen"), int(port) if port else None)


def server_command(
    join: Join,
    key: TheirKey,
    count: Count = 1,
    host: OwnHost = None,
    domain: Domain = None,
    wait: Wait = WAIT_S,
) -> None:
    """Offer this machine to a job, for servers.

    The job decides what runs here: servers, spares, replacements for either. This command starts
    those processes, and ends with the job, or with Ctrl-C, after which the job goes on without this
    machine as far as its parity bears. It leaves no process behind.

    Exit codes: 0 the job is over, 1 no job has answered, 2 wrong options, 130 interrupted.
    """
    _join("server", join, key, count, host, domain, wait)


def trainer_command(
    join: Join,
    key: TheirKey,
    count: Count = 1,
    host: OwnHost = None,
    domain: Domain = None,
    wait: Wait = WAIT_S,
) -> None:
    """Offer this machine to a job, for trainers.

    As planaria server, whose help says more.
    """
    _join("trainer", join, key, count, host, domain, wait)


def coordinator_command(
    join: Join,
    key: TheirKey,
    host: OwnHost = None,
    wait: Wait = WAIT_S,
) -> None:
    """Offer this machine to a job, for its coordinator.

    A job that finds such a machine when it starts has its coordinator there, and not beside
    planaria train. If that process or this machine is lost, the next coordinator is started on
    another machine that was offered for it, or else beside planaria train. What it must remember
    stays with planaria train, so nothing is lost with this machine.

    Offer it before the servers and trainers: the job starts as soon as there is room for those.
    Else it takes over when the first coordinator is lost.

    Otherwise as planaria server, whose help says more.
    """
    _join("coordinator", join, key, 1, host, None, wait)


def _join(
    role: str,
    join: str,
    key: Path,
    count: int,
    host: str | None,
    domain: str | None,
    wait: float,
) -> None:
    raise_descriptor_limit()
    try:
        Host(join, read_key(key), {role: count}, host, domain, _say).run(wait)
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "interrupted: this machine's processes were ended")
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except PlanariaError as error:
        leave(EXIT_FAILED, str(error))
    _say("the job is over")


def _say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)
