"""A host: a command that has joined a job elsewhere, and runs processes of it on this machine."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from planaria.cluster.files import JobFiles
from planaria.cluster.launcher import LocalLauncher
from planaria.cluster.scripts import INCLUDED, Scripts
from planaria.cluster.transport import Keys, Transport, open_transport
from planaria.config import Config
from planaria.control.children import Ended
from planaria.control.hosting import BEAT_S, Enter, HostMachine, Prepare, Run, Signal
from planaria.errors import ClusterError, ConfigError, PlanariaError
from planaria.trainer.declaring import Declaration, decode, encode
from planaria.wire.control import Rehearsal, Wanted
from planaria.wire.limits import OF_HOSTS

POLL_MS = 200  # messages and ends of processes come at once; scripts are looked at so often
LEAVE_S = 3.0  # within which the supervisor must have heard that this host leaves

Say = Callable[[str], None]


def resolve(host: str, option: str) -> str:
    """As numbers, which mean the same to every transport."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"{option}: {host} is not known here: {error.strerror}") from None


def own_address(to: str) -> str:
    """The address of this machine on the way to another."""
    host, port = _split(to)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # nothing is sent
        except OSError as error:
            raise ConfigError(
                f"--join: there is no way to {to}: {error.strerror or error}"
            ) from None
        return str(probe.getsockname()[0])


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"--join: expected an address as 10.0.0.1:7000, which planaria train --on none prints, "
            f"got {address}"
        )
    return host, int(port)


class Host:
    """Use `run`; it returns when the job is over, and leaves no process behind."""

    def __init__(
        self,
        join: str,
        keys: Keys,
        offers: Mapping[str, int],
        own: str | None,
        domain: str | None,
        say: Say,
    ) -> None:
        """own: the address of this machine that the job's other processes reach it at. domain: what
        it shares with others that may die with it; None: only itself.
        """
        host, port = _split(join)
        self._address = f"tcp://{resolve(host, '--join')}:{port}"
        self._own = resolve(own, "--host") if own else own_address(self._address)
        self._domain = domain or self._own
        self._keys = keys
        self._offers = offers
        self._say = say
        self._files: JobFiles | None = None
        self._launcher: LocalLauncher | None = None
        self._scripts: Scripts | None = None
        self._failed = False  # whether logs are worth keeping
        self._member = f"host-{secrets.token_hex(4)}"
        self._runs = 0
        self._said_at = 0.0

    def run(self, wait_s: float) -> None:
        """wait_s: for how long it looks for a supervisor, also after it has lost one."""
        while not self._serve(wait_s):
            self._say("the job's supervisor is gone: its processes were ended; waiting for another")

    def _serve(self, wait_s: float) -> bool:
        """One supervisor; whether its job is over. If not, it is lost."""
        self._runs += 1
        with contextlib.ExitStack() as stack:
            bind = f"tcp://{self._own}:*"
            transport = open_transport(self._member, self._keys, bind, OF_HOSTS)
            stack.callback(transport.close)
            name = f"{socket.gethostname()}/{self._own}"
            now = time.monotonic()
            machine = HostMachine(name, self._offers, now, self._runs, self._domain)
            ends = stack.enter_context(select.epoll())
            transport.watch(ends.fileno())
            stack.callback(self._end_scripts)
            stack.callback(self._clear)
            try:
                self._follow(machine, transport, ends, time.monotonic() + wait_s)
            except KeyboardInterrupt:
                self._leave(machine, transport, ends)
                raise
            if machine.unfit is not None:
                raise ClusterError(machine.unfit.why)
            return machine.over

    def _follow(
        self, machine: HostMachine, transport: Transport, ends: select.epoll, deadline: float
    ) -> None:
        while not machine.over and not machine.lost:
            joined = machine.joined
            self._turn(machine, transport, ends)
            if machine.joined and not joined:
                self._say(f"joined the job at {self._address}, as {self._own}")
            if not machine.joined and time.monotonic() > deadline:
                raise ClusterError(
                    f"nobody has answered at {self._address}: is planaria train --on none running "
                    "there, with this key, and can it reach this machine?"
                )

    def _turn(self, machine: HostMachine, transport: Transport, ends: select.epoll) -> None:
        said = machine.says()
        transport.poll(POLL_MS)
        now = time.monotonic()
        # First: after the next message its name may be another's.
        for member, ended in self._launcher.ended() if self._launcher else ():
            self._failed |= ended.code != 0
            if self._scripts is not None:
                self._scripts.show(everything=True)  # its last words, before its end is told
            machine.on_exit(member, ended)
        for envelope in transport.receive():
            if isinstance(envelope.message, Wanted):
                machine.receive(envelope.message, now)
        self._tend_scripts(machine, now)
        machine.tick(now)
        for action in machine.take():
            match action:
                case Prepare() if "trainer" in self._offers:
                    self._prepare(action.script, machine)
                case Enter():
                    self._enter(action.files, ends)
                case Run(process=one) if one.role == "trainer" and machine.unfit:
                    machine.on_exit(one.member, Ended(1, machine.unfit.why))
                case Run(process=one) if self._launcher:
                    self._say(f"{one.member} starts")
                    self._launcher.start(one.role, one.member, one.number)
                case Signal() if self._launcher:
                    self._launcher.signal(action.member, action.number)
        if machine.says() != said or now - self._said_at >= BEAT_S:
            self._said_at = now
            transport.send(self._address, transport.encode(machine.says()))

    def _leave(self, machine: HostMachine, transport: Transport, ends: select.epoll) -> None:
        """Tells how its processes have ended, so that others are started elsewhere at once."""
        machine.leave()
        self._said_at = 0.0  # it is said at once
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and machine.joined and not machine.lost:
            self._turn(machine, transport, ends)
            if machine.empty:
                break

    # ------------------------------------------------------------------ scripts

    def _prepare(self, wanted: Rehearsal, machine: HostMachine) -> None:
        """Has the script run as often as is wanted, up to its first batch."""
        try:
            if self._scripts is None:
                self._scripts = self._open_scripts(wanted, machine)
            self._scripts.seat(wanted.ranks)
        except OSError as error:
            machine.refuse(f"host {self._own}: the script could not be started: {error}")
            return
        self._scripts.spares = wanted.spares
        if wanted.declared:
            declared = decode(wanted.declared)
            assert isinstance(declared, Declaration)
            self._scripts.declared = declared

    def _open_scripts(self, wanted: Rehearsal, machine: HostMachine) -> Scripts:
        folder = Path(wanted.folder)
        if not folder.is_dir():
            folder = Path.cwd()
        command = wanted.command or [str(INCLUDED)]
        if not (folder / command[0]).is_file():
            raise FileNotFoundError(
                f"there is no {folder / command[0]}; the script and what it imports must be on "
                "every host that trains, in the same place as where the job was started"
            )
        return Scripts(command, wanted.trainers, 0, wanted.variables, machine.print, folder)

    def _tend_scripts(self, machine: HostMachine, now: float) -> None:
        if self._scripts is None or machine.behind or machine.unfit:
            return
        if self._launcher is not None:
            machine.works.update(self._launcher.tend(machine.ranks, now))
            return
        try:
            if self._scripts.declared is None:
                for rank, declared in self._scripts.look().items():
                    if rank not in machine.declared:
                        machine.declared[rank] = encode(declared)
            self._scripts.tend()
        except PlanariaError as error:
            machine.refuse(str(error), given=isinstance(error, ConfigError))

    def _end_scripts(self) -> None:
        if self._scripts is not None:
            self._scripts.__exit__()
        self._scripts = None

    # ------------------------------------------------------------------ the job's folder here

    def _enter(self, files: Mapping[str, bytes], ends: select.epoll) -> None:
        self._clear()
        if not files:
            return
        config = Config.from_dict(msgspec.json.decode(files["config.json"]))
        here = replace(config, cluster=replace(config.cluster, host=self._own))
        self._files = JobFiles.fresh()
        try:
            self._files.fill({**files, "config.json": msgspec.json.encode(here.to_dict())})
        except OSError as error:
            raise ClusterError(f"the job's folder here cannot be written: {error}") from None
        # A coordinator is forked off what bears servers.
        nurseries = {"server" if role == "coordinator" else role for role in self._offers}
        self._launcher = LocalLauncher(here, self._files, self._scripts, nurseries)
        self._launcher.__enter__()
        ends.register(self._launcher.fileno(), select.EPOLLIN)

    def _clear(self) -> None:
        """Everything of the last job, or of its last set of processes, ends."""
        if self._launcher is not None:
            self._launcher.close()
        if self._files is not None:
            self._files.remove(keep_logs=self._failed)
        self._launcher = self._files = None
