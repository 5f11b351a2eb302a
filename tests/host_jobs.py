"""Jobs on several machines: addresses of this one, or network namespaces with links to cut."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from cluster_commands import MAIN, Done, command, finished, wait_for_line
from cluster_jobs import children_of, wait_until

JOB = ("servers=4", "k=2", "parity=1", "spares=1", "steps=60")
RELAY = (sys.executable, str(Path(__file__).with_name("relay.py")))
LATER_S = 30.0  # for hosts to end after their job
HUB = 0


class Addresses:
    """Of this machine. Number 0 is where the job's command runs."""

    def address(self, number: int) -> str:
        return f"127.0.0.{number + 1}"

    def inside(self, number: int) -> list[str]:
        """What to put in front of a command so that it runs there."""
        return []


class Network(Addresses):
    """Namespaces, each with a link to a bridge in the first. Use it as a context manager."""

    def __init__(self, machines: int) -> None:
        self._machines = range(machines)
        self._relay: subprocess.Popen[bytes] | None = None

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def inside(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(number)]

    def _name(self, number: int) -> str:
        return f"planaria-test-{os.getpid()}-{number}"

    def __enter__(self) -> Network:
        for number in self._machines:
            _run("ip", "netns", "add", self._name(number))
            self._ip(number, "link", "set", "lo", "up")
        self._ip(HUB, "link", "add", "bridge", "type", "bridge")
        self._ip(HUB, "address", "add", f"{self.address(HUB)}/24", "dev", "bridge")
        self._ip(HUB, "link", "set", "bridge", "up")
        for number in self._machines[1:]:
            ends = ("type", "veth", "peer", "name", "eth0", "netns", self._name(number))
            self._ip(HUB, "link", "add", f"to{number}", *ends)
            self._ip(HUB, "link", "set", f"to{number}", "master", "bridge", "up")
            self._ip(number, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            self._ip(number, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for number in self._machines:
            name = self._name(number)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _ip(self, number: int, *words: str) -> None:
        _run("ip", "-n", self._name(number), *words)

    def cut(self, number: int) -> None:
        """Nothing reaches it, and nothing leaves it."""
        self._ip(HUB, "link", "set", f"to{number}", "down")

    def heal(self, number: int) -> None:
        self._ip(HUB, "link", "set", f"to{number}", "up")

    def part(self, number: int) -> None:
        """Only the job's command and this machine still reach each other."""
        for other in self._machines[1:]:
            if other != number:
                self._ip(number, "route", "add", "blackhole", f"{self.address(other)}/32")

    def mute(self, number: int) -> None:
        """Everything reaches it, and nothing leaves it."""
        for half in ("10.77.0.0/25", "10.77.0.128/25"):
            self._ip(number, "route", "add", "blackhole", half)

    def unmute(self, number: int) -> None:
        for half in ("10.77.0.0/25", "10.77.0.128/25"):
            self._ip(number, "route", "del", "blackhole", half)

    def relay(self, seconds: float, loss: float) -> None:
        """From any machine to any other, everything takes so long, and that share of it is lost.
        Before anything runs.
        """
        links = self._machines[1:]
        for number in links:
            ends = ("type", "veth", "peer", "name", f"near{number}")
            self._ip(HUB, "link", "add", f"far{number}", *ends)
            self._ip(HUB, "link", "set", f"to{number}", "nomaster")
            self._ip(HUB, "link", "set", f"near{number}", "master", "bridge", "up")
            self._ip(HUB, "link", "set", f"far{number}", "up")
            _run(*self.inside(number), *RELAY, "plain", "eth0")
        _run(*self.inside(HUB), *RELAY, "plain", "bridge", *(f"near{number}" for number in links))
        pairs = [f"to{number}=far{number}" for number in links]
        each = [str(seconds / 2), str(loss / 2)]  # there are two links on the way
        self._relay = subprocess.Popen([*self.inside(HUB), *RELAY, "pass", *each, *pairs])

    def slow_down(self, mbit: int) -> None:
        """Every link, both ways."""
        limit = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms")
        for number in self._machines[1:]:
            for where, device in ((HUB, f"to{number}"), (number, "eth0")):
                name = self._name(where)
                _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *limit)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def can_make_networks() -> bool:
    return os.geteuid() == 0 and bool(shutil.which("ip")) and bool(shutil.which("tc"))


class Cluster:
    """A job that waits for hosts, and the hosts. Everything ends with the stack."""

    def __init__(self, folder: Path, stack: ExitStack, machines: Addresses) -> None:
        self.key = folder / "job.key"
        self.report = folder / "report.json"
        self.hosts: list[subprocess.Popen[str]] = []
        self._machines = machines
        self._stack = stack

    def train(self, *words: str, port: str = "") -> None:
        """words: as in cluster_commands.command. port: of a job before this one."""
        self._wait(command(*JOB, *words, *self._options(port)))

    def run(self, script: Path, *arguments: str, options: Sequence[str] = ()) -> None:
        """options: path=value settings, and options of `planaria run`."""
        sets = [word for one in options if not one.startswith("--") for word in ("--set", one)]
        more = [one for one in options if one.startswith("--")]
        words = [sys.executable, "-c", MAIN, "run", *sets, *more, *self._options()]
        self._wait([*words, str(script), *arguments])

    def _options(self, port: str = "") -> list[str]:
        listen = self._machines.address(HUB) + port
        return ["--on=none", f"--listen={listen}", f"--key={self.key}", f"--report={self.report}"]

    def _wait(self, words: Sequence[str]) -> None:
        """Until it waits for hosts."""
        self.report.unlink(missing_ok=True)
        self.job = self._start(HUB, words, subprocess.PIPE, subprocess.PIPE)
        said = wait_for_line(self.job, "waiting for hosts")[-1]
        found = re.search(r"--join (\S+) ", said)
        assert found, said
        self.address = found[1]

    def join(self, role: str, *options: str, key: Path | None = None) -> subprocess.Popen[str]:
        """On the next machine."""
        number = len(self.hosts) + 1
        joins = ("--join", self.address, "--key", str(key or self.key))
        words = [sys.executable, "-c", MAIN, role, *joins, *options]
        if type(self._machines) is Addresses:  # all of them lead to the job
            words += ["--host", self._machines.address(number)]
        with self._log(number).open("w") as log:
            self.hosts.append(self._start(number, words, log, log))
        return self.hosts[-1]

    def _log(self, number: int) -> Path:
        return self.key.with_name(f"host-{number}.log")

    def said_by(self, host: subprocess.Popen[str]) -> str:
        return self._log(self.hosts.index(host) + 1).read_text()

    def _start(
        self, number: int, words: Sequence[str], out: int | IO[str], errors: int | IO[str]
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self._machines.inside(number), *words],
            stdout=out,
            stderr=errors,
            text=True,
            env={**os.environ, "COLUMNS": "400"},
        )
        self._stack.callback(_end, process)
        return process

    def finished(self) -> Done:
        try:
            done = finished(self.job, self.report)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error.output!r}\n{self._said()}") from None
        assert done.code == 0, f"{done.error}\n{self._said()}"
        return done

    def _said(self) -> str:
        """By all hosts."""
        return "\n".join(f"{host.args!r}: {self.said_by(host)}" for host in self.hosts)

    def codes(self) -> list[int]:
        """How the hosts have ended."""
        try:
            return [host.wait(LATER_S) for host in self.hosts]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self._said()}") from None

    def host_of(self, member: str) -> subprocess.Popen[str]:
        """Which one runs it."""
        return self.hosts[self.number_of(member) - 1]

    def number_of(self, member: str) -> int:
        """The machine that runs it."""
        for number, host in enumerate(self.hosts, 1):
            if member in self._running(host):
                return number
        raise AssertionError(f"no host runs {member}")

    def _running(self, host: subprocess.Popen[str]) -> list[str]:
        names = []
        for child in children_of(host.pid):
            with contextlib.suppress(OSError):  # it has ended
                names.append(Path(f"/proc/{child}/comm").read_text().strip())
        return names

    def wait_until_empty(self, host: subprocess.Popen[str], limit_s: float) -> bool:
        """Until no server or trainer runs there."""
        return wait_until(lambda: not [n for n in self._running(host) if "er-" in n], limit_s)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


@contextmanager
def cluster(
    folder: Path,
    *words: str,
    servers: Sequence[int] = (1, 1, 1, 1, 1),
    trainers: int = 1,
    coordinators: int = 0,
    machines: Addresses | None = None,
) -> Iterator[Cluster]:
    """servers: for how many there is room on each machine; others have room for one trainer. Before
    them come machines with room for the coordinator.
    """
    with ExitStack() as stack:
        found = Cluster(folder, stack, machines or Addresses())
        found.train(*words)
        for _ in range(coordinators):
            found.join("coordinator")
            wait_for_line(found.job, "room for 1 coordinator")
        for count in servers:
            found.join("server", "--count", str(count))
        for _ in range(trainers):
            found.join("trainer")
        yield found
