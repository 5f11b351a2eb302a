"""A network of namespaces on this machine, with links as slow as one likes; nothing of it is left.

As root, with `ip` and `tc` of iproute2. Links are of two kinds. `each`: every member has its own
namespace and link, as fast in one direction as in the other, like machines at a switch.
`shared`: everybody sends over one loopback device, both ways and servers among themselves: like a
bus.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from planaria.cluster import launcher

QUEUE_MS = 100  # of a link
LEAST_BYTES = 10_000  # of a job: neighbours say hello as well
HUB = f"planaria-{os.getpid()}"
HOSTS = Path("/etc/netns")  # `ip netns exec` puts what is there in the place of /etc


def check() -> None:
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise SystemExit(f"{' and '.join(missing)} not found: apt-get install iproute2")
    if os.geteuid() != 0:
        raise SystemExit("only root may make network namespaces and slow links: use sudo")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def inside(namespace: str, *command: str) -> None:
    run("ip", "netns", "exec", namespace, *command)


def namespace_of(member: str) -> str:
    return f"{HUB}-{member}"


def slow_down(namespace: str, device: str, mbit: int) -> None:
    if not mbit:
        qdisc = ("ip", "netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root")
        subprocess.run(qdisc, capture_output=True, check=False)  # there may be none
        return
    burst = max(128 << 10, mbit * 1_000_000 // 8 // 250)  # what a tick of the kernel lets go
    inside(
        namespace,
        *("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit"),
        *("burst", str(burst), "latency", f"{QUEUE_MS}ms"),
    )


def add(namespace: str, address: str) -> None:
    """In it, `here` is its own address."""
    run("ip", "netns", "add", namespace)
    inside(namespace, "ip", "link", "set", "lo", "up")
    folder = HOSTS / namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} here\n")


def join(number: int, member: str) -> None:
    """A namespace with a link to the hub's bridge."""
    namespace, port = namespace_of(member), f"to-{member}"
    add(namespace, f"10.77.0.{number}")
    inside(HUB, "ip", "link", "add", port, "type", "veth", "peer", "name", f"x{number}")
    inside(HUB, "ip", "link", "set", f"x{number}", "netns", namespace)
    inside(HUB, "ip", "link", "set", port, "master", "bridge", "up")
    inside(namespace, "ip", "link", "set", f"x{number}", "name", "eth0")
    inside(namespace, "ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
    inside(namespace, "ip", "link", "set", "eth0", "up")


@contextlib.contextmanager
def namespaces(members: Sequence[str], links: str) -> Iterator[None]:
    try:
        add(HUB, "127.0.0.1" if links == "shared" else "10.77.0.1")
        if links == "each":
            inside(HUB, "ip", "link", "add", "bridge", "type", "bridge")
            inside(HUB, "ip", "address", "add", "10.77.0.1/24", "dev", "bridge")
            inside(HUB, "ip", "link", "set", "bridge", "up")
            for number, member in enumerate(members, 2):
                join(number, member)
        yield
    finally:
        for namespace in [*map(namespace_of, members), HUB]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(HOSTS / namespace, ignore_errors=True)


def set_rate(members: Sequence[str], links: str, mbit: int) -> None:
    """Of all links; 0: as fast as they can."""
    if links == "shared":
        slow_down(HUB, "lo", mbit)
        return
    for member in members:
        slow_down(HUB, f"to-{member}", mbit)
        slow_down(namespace_of(member), "eth0", mbit)


def spread(folder: Path, hub: str, links: str, instead: Mapping[str, Sequence[str]]) -> None:
    """From now on, servers and trainers start in the namespaces of their names. instead: by role,
    what runs in the place of `-m planaria.cluster` there.
    """
    python = folder / "python"
    where = f'ip netns exec "{hub}-$3"' if links == "each" else ""
    lines = []
    for role in ("server", "trainer"):
        given = " ".join(instead.get(role, ("-m", "planaria.cluster")))
        lines.append(f'{role}) exec {where} "{sys.executable}" -P {given} "$@" ;;\n')
    python.write_text(
        "#!/bin/sh\n"
        "shift 3\n"  # -P -m planaria.cluster
        'case "$1" in\n'
        + "".join(lines)
        + f'*) exec "{sys.executable}" -P -m planaria.cluster "$@" ;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    launcher.borrow = _no_nursery  # type: ignore[attr-defined]
    sys.executable = str(python)


def _no_nursery(role: str, environment: dict[str, str]) -> NoReturn:
    raise OSError("who is forked is where its parent is, not in a namespace of its own")


def require_traffic(size: float) -> None:
    """size: bytes that a link has carried. So few say that its member is not where it should be."""
    if size < LEAST_BYTES:
        raise SystemExit("nothing has passed a link: processes do not start in their namespaces")


def in_hub(module: str, *options: str) -> str:
    """What a module prints that is run there, with the options --hub and --folder, too."""
    folder = Path(f"/tmp/{HUB}")
    folder.mkdir(exist_ok=True)
    command = [
        *("ip", "netns", "exec", HUB, sys.executable, "-m", module, *options),
        *("--hub", HUB, "--folder", str(folder)),
    ]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    finally:
        shutil.rmtree(folder)
    if ran.returncode:
        raise SystemExit(f"a job failed:\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout
