"""Asking a running job, from outside: its folder says where, and has the key to do so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeVar

from planaria.cluster.files import JobFiles, home
from planaria.cluster.transport import open_transport
from planaria.errors import ClusterError, ConfigError
from planaria.wire.control import AskStatus, Status
from planaria.wire.messages import NO_VIEW, Scrub, Scrubbed

ASK_AGAIN_S = 2.0
ASK_S = 10.0
T = TypeVar("T")


def running_jobs() -> list[Path]:
    """The folders of the jobs that this user runs on this machine."""
    addresses = (home() / "jobs").glob("*/coordinator.address")
    return sorted(a.parent for a in addresses if JobFiles(a.parent).running())


def scrub(folder: Path, deadline_s: float) -> Scrubbed:
    """Verifies all stripes of the job in `folder` while it goes on."""
    return _ask(folder, "coordinator", Scrub(view=NO_VIEW, round=0), Scrubbed, deadline_s)


def status(folder: Path, deadline_s: float = ASK_S) -> Status:
    """How far the job in `folder` is, and who runs for it where."""
    return _ask(folder, "supervisor", AskStatus(), Status, deadline_s)


def stop(folder: Path, deadline_s: float = ASK_S) -> Status:
    """The job is to end, as by Ctrl-C: it saves first, where it saves at all."""
    return _ask(folder, "supervisor", AskStatus(stop=True), Status, deadline_s)


def _ask(folder: Path, who: str, message: Any, kind: type[T], deadline_s: float) -> T:
    """Again and again until an answer of this kind comes."""
    files = JobFiles(folder)
    try:
        if not files.running():
            raise ConfigError(f"no job runs in '{folder}'; a job's first line names its folder")
        keys, address = files.keys(), (folder / f"{who}.address").read_text()
    except OSError as error:
        raise ClusterError(f"the job in {folder} cannot be asked yet: {error}") from None
    own = f"client-{time.monotonic_ns()}"
    if address.startswith("ipc:"):
        bind = f"ipc://{folder}/{own}.ipc"
    else:
        bind = f"tcp://{address.removeprefix('tcp://').rpartition(':')[0]}:*"
    transport = open_transport(own, keys, bind)
    try:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            transport.send(address, transport.encode(message))
            asked = time.monotonic()
            while time.monotonic() < min(deadline, asked + max(ASK_AGAIN_S, deadline_s / 3)):
                transport.poll(50)
                for envelope in transport.receive():
                    if isinstance(envelope.message, kind):
                        return envelope.message
        raise ClusterError(f"the job in {folder} did not answer within {deadline_s:.0f} s")
    finally:
        transport.close()
        Path(bind.removeprefix("ipc://")).unlink(missing_ok=True)
