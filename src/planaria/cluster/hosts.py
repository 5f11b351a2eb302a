"""Processes on other machines, as the supervisor sees them: a door that hosts knock at, and a
launcher that starts processes on them.

The door outlives the sets of processes that a job may have, one after the other. It is tended by a
thread of its own: hosts must hear from it whatever the supervisor is busy with.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from planaria.cluster.files import JobFiles
from planaria.cluster.launcher import STOP_S, Launcher, LocalLauncher
from planaria.cluster.scripts import INTERRUPTED, how_it_ended, wait_for_all
from planaria.cluster.transport import Keys, open_transport
from planaria.config import Config
from planaria.control.children import Ended
from planaria.control.placing import PlacingMachine
from planaria.errors import ClusterError, ConfigError
from planaria.trainer.declaring import Declaration, decode, encode
from planaria.wire.control import Hosting, Rehearsal
from planaria.wire.limits import OF_HOSTS
from planaria.wire.messages import Member

POLL_MS = 50
POLL_S = 0.05
SAID_S = 30.0  # between two times that it is said who is missing
LEAVE_S = 3.0  # within which hosts must have ended what runs

Say = Callable[[str], None]
# Of an address, a role and a number: starts hosts that join there, with room for so many. The last
# says whether to wait until there is a machine for them.
Provide = Callable[[str, str, int, bool], None]


class Listen(NamedTuple):
    """Where hosts find the job."""

    host: str
    port: int | None  # None: any


class Hosts:
    """Use it as a context manager: on leaving, hosts are told that the job is over."""

    def __init__(
        self,
        listen: Listen,
        keys: Keys,
        how_to_join: Callable[[str], str],
        join_s: float,
        provide: Provide | None = None,
    ) -> None:
        """how_to_join: makes a sentence of the address. join_s: within which hosts must have joined
        with room for all. provide: starts some that do.
        """
        bind = f"tcp://{listen.host}:{'*' if listen.port is None else listen.port}"
        self._transport = open_transport("door", keys, bind, OF_HOSTS)
        self.host, self.address = listen.host, self._transport.address
        self._how_to_join = how_to_join(self.address)
        self._join_s = join_s
        self._provide = provide
        self._provided = Counter[str]()
        self._show: Say = lambda line: None  # what scripts print
        self._raised: set[str] = set()  # tracebacks that were shown
        by, now = secrets.token_hex(8), time.monotonic()
        self._machine = PlacingMachine(by, now, self._how_to_join)
        self._addresses: dict[Member, str] = {}
        self._lock = threading.Lock()
        # Written to: by the thread, when somebody has ended; and for the thread, when it has work.
        self._news, self._work = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self._transport.watch(self._work)
        self._refused, self._refused_at = 0, 0.0  # what was told of, and when to tell again
        self._closing = False
        self._problem = ""  # why the thread has ended, if it has
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Hosts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._machine.close()
        os.eventfd_write(self._work, 1)
        self.settle(LEAVE_S)
        self._closing = True
        self._thread.join()
        self._transport.close()
        os.close(self._news)
        os.close(self._work)

    def fileno(self) -> int:
        """Readable when there is something for `ended`."""
        return self._news

    # ------------------------------------------------------------------ for the launcher

    def wait_for(
        self,
        needs: dict[str, int],
        say: Say,
        is_over: Callable[[], bool] = lambda: False,
        domains: int = 0,
    ) -> None:
        """Until there is room for so many processes of each role; or it is over, for nobody waits
        any more. domains: how many of them servers are to stand in, where more hosts may come.
        """
        self._provide_for(needs, waits=True)
        deadline, say_at = time.monotonic() + self._join_s, 0.0
        while not is_over():
            self._check()
            with self._lock:
                here = {role: self._machine.room(role) for role in needs}
                apart = self._machine.domains if self._provide is None else domains
            if apart >= domains and all(here[role] >= count for role, count in needs.items()):
                break
            now = time.monotonic()
            named = " and ".join(
                f"{min(here[role], needs[role])} of {needs[role]} {role}s" for role in needs
            )
            if apart < domains:
                named += f", servers on {apart} of {domains} hosts,"
            if now > deadline:
                raise ClusterError(
                    f"hosts have offered room for {named} within {self._join_s:.0f} s "
                    f"(cluster.join_s); {self._how_to_join}"
                )
            if now >= say_at:
                say_at = now + SAID_S
                say(f"waiting for hosts: room for {named} so far; {self._how_to_join}")
            time.sleep(POLL_S)
            self.tell_notes(say)
            self.show_printed()
        self.tell_notes(say)

    def _provide_for(self, needs: dict[str, int], *, waits: bool) -> None:
        for role, count in needs.items():
            if count > self._provided[role]:
                if self._provide is not None:
                    self._provide(self.address, role, count - self._provided[role], waits)
                self._provided[role] = count

    @property
    def provides(self) -> bool:
        """Whether hosts are started as they are needed, and need not be waited for in vain."""
        return self._provide is not None

    def spread(self, servers: int) -> tuple[str, ...]:
        """The domains that servers will stand in, by place."""
        with self._lock:
            return tuple(self._machine.spread(servers))

    def declare(self, script: Rehearsal, show: Say) -> Declaration:
        """Runs a script on hosts up to its first batch: what all ranks declare there."""
        self._show = show
        with self._lock:
            self._machine.rehearse(script)
        os.eventfd_write(self._work, 1)
        declared = wait_for_all(self._look, script.trainers, not script.command, show)
        with self._lock:
            self._machine.agree(encode(declared))
        return declared

    def _look(self) -> dict[int, Declaration]:
        self._check()
        self.show_printed()
        self.tell_notes(self._show)
        with self._lock:
            unfit, said = self._machine.unfit, self._machine.declarations()
            unseated = sorted(self._machine.unseated)
        if unfit is not None:
            self.show_printed()
            raise (ConfigError if unfit.given else ClusterError)(unfit.why)
        if unseated:  # their host is gone
            self.wait_for({"trainer": self._provided["trainer"]}, self._show)
        found = {rank: decode(text) for rank, text in said.items()}
        return {rank: one for rank, one in found.items() if isinstance(one, Declaration)}

    @property
    def run_scripts(self) -> bool:
        return self._machine.rehearses

    def tend(self, ranks: Mapping[Member, int]) -> list[tuple[Member, int]]:
        """As a launcher does."""
        self.show_printed()
        with self._lock:
            self._machine.ranks(ranks)
            working, self._machine.working = self._machine.working, []
        return working

    def show_printed(self) -> None:
        with self._lock:
            lines, self._machine.printed = self._machine.printed, []
        for line in lines:
            if "\n" in line:  # a traceback: once, however many ranks have raised it
                raised = re.sub(r"^\[rank \d+\] ", "", line, flags=re.MULTILINE)
                if raised in self._raised:
                    continue
                self._raised.add(raised)
            self._show(line)

    def begin(self, files: JobFiles | None) -> None:
        """With another set of processes; None: with no more."""
        with self._lock:
            self._machine.begin(files.folder.name if files else "", files.shared() if files else {})
        os.eventfd_write(self._work, 1)

    def start(self, role: str, member: Member, number: int | None) -> None:
        with self._lock:
            self._machine.start(role, member, number)
            needed = self._machine.needed(role)
        os.eventfd_write(self._work, 1)
        if self._provide is not None:
            self._provide_for({role: needed}, waits=False)

    def coordinate(self, member: Member) -> bool:
        """Whether some host has room for the coordinator, and starts it."""
        with self._lock:
            found = self._machine.coordinate(member)
        os.eventfd_write(self._work, 1)
        return found

    def signal(self, member: Member, number: int) -> None:
        with self._lock:
            self._machine.signal(member, number)
        os.eventfd_write(self._work, 1)

    def where(self, member: Member) -> str:
        with self._lock:
            return self._machine.where(member)

    def domain(self, member: Member) -> str | None:
        with self._lock:
            return self._machine.domain(member)

    def waiting(self) -> list[Member]:
        with self._lock:
            return self._machine.waiting

    def drain(self, host: str) -> None:
        with self._lock:
            self._machine.drain(host)

    def ended(self) -> list[tuple[Member, Ended]]:
        self._check()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        with self._lock:
            found, self._machine.ended = self._machine.ended, []
        return found

    def tell_notes(self, say: Say) -> None:
        with self._lock:
            notes, self._machine.notes = self._machine.notes, []
        for note in notes:
            say(note)

    def settle(self, limit_s: float) -> None:
        """Waits until hosts have done what is wanted, but not for ever."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with self._lock:
                if self._machine.settled:
                    return
            time.sleep(POLL_S / 5)

    def _check(self) -> None:
        if self._problem:
            raise ClusterError(
                f"hosts cannot be talked to any more ({self._problem}); start the job again, with "
                "--resume if it has checkpoints"
            )

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._tend()
        except Exception as error:  # else the job would wait for hosts in silence
            self._problem = f"{type(error).__name__}: {error}"
            os.eventfd_write(self._news, 1)

    def _tend(self) -> None:
        while not self._closing:
            self._transport.poll(POLL_MS)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._work)
            now = time.monotonic()
            with self._lock:
                for envelope in self._transport.receive():
                    if isinstance(envelope.message, Hosting):
                        if self._machine.receive(envelope.sender, envelope.message, now):
                            self._addresses[envelope.sender] = envelope.address
                self._machine.tick(now)
                due = self._machine.take(now)
                news = bool(self._machine.ended)
                self._tell_of_strangers(now)
            for member, wanted in due:
                self._transport.send(self._addresses[member], self._transport.encode(wanted))
            if news:
                os.eventfd_write(self._news, 1)

    def _tell_of_strangers(self, now: float) -> None:
        refused = self._transport.refused
        if refused > self._refused and now >= self._refused_at:
            self._refused, self._refused_at = refused, now + SAID_S
            self._machine.notes.append(
                f"{refused} connections or messages were refused so far: they did not have the "
                "job's key"
            )


class HostsLauncher(Launcher):
    """Everybody on hosts; the coordinator beside the supervisor, if none has room for it."""

    def __init__(self, config: Config, files: JobFiles, hosts: Hosts, say: Say) -> None:
        self._local = LocalLauncher(config, files, nurseries=())
        self.processes = self._local.processes
        self._files = files
        self._hosts = hosts
        self._say = say
        self._epoll = select.epoll()
        self._ranks: Mapping[Member, int] = {}
        self._codes: dict[int, int] = {}  # by rank: how the last that had it has ended

    def __enter__(self) -> Self:
        self._local.__enter__()
        for one in (self._local, self._hosts):
            self._epoll.register(one.fileno(), select.EPOLLIN)
        self._hosts.begin(self._files)
        return self

    def fileno(self) -> int:
        return self._epoll.fileno()

    def where(self, member: Member) -> str:
        return self._hosts.where(member)

    def domain(self, member: Member) -> str | None:
        return self._hosts.domain(member)

    def waiting(self) -> list[Member]:
        return self._hosts.waiting()

    def start(self, role: str, member: Member, number: int | None) -> None:
        if role != "coordinator":
            self._hosts.start(role, member, number)
        elif not self._hosts.coordinate(member):
            self._local.start(role, member, number)

    def signal(self, member: Member, number: signal.Signals = signal.SIGKILL) -> None:
        where = self._local if member in self._local.processes else self._hosts
        where.signal(member, number)

    def ended(self) -> list[tuple[Member, Ended]]:
        self._hosts.tell_notes(self._say)
        found = self._hosts.ended()
        if found:
            self._hosts.show_printed()  # their last words
        self._codes |= {self._ranks[one]: end.code for one, end in found if one in self._ranks}
        return self._local.ended() + found

    def tend(self, ranks: Mapping[Member, int], now: float) -> list[tuple[Member, int]]:
        for rank in {rank for one, rank in ranks.items() if one not in self._ranks}:
            self._codes.pop(rank, None)  # another has it
        self._ranks = ranks
        return self._hosts.tend(ranks)

    def see_out(self, is_interrupted: Callable[[], bool]) -> str:
        if not self._hosts.run_scripts:
            return ""
        while len(self._codes) < len(self._ranks):
            if is_interrupted():
                return INTERRUPTED
            self.ended()
            self._hosts.show_printed()
            time.sleep(POLL_S)
        wrong = {rank: how_it_ended(code) for rank, code in sorted(self._codes.items()) if code}
        return " and ".join(f"rank {rank} {how}" for rank, how in wrong.items())

    def close(self) -> None:
        self._hosts.begin(None)
        self._local.close()
        self._hosts.settle(STOP_S + LEAVE_S)
        self._hosts.show_printed()
        self._epoll.close()
