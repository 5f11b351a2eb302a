"""Asking a running job to verify itself."""

from __future__ import annotations

import time
from pathlib import Path

from planaria.cluster.files import JobFiles, home
from planaria.cluster.transport import open_transport
from planaria.errors import ClusterError, ConfigError
from planaria.wire.messages import NO_VIEW, Scrub, Scrubbed

ASK_AGAIN_S = 2.0


def running_jobs() -> list[Path]:
    """The folders of the jobs that this user runs on this machine."""
    addresses = (home() / "jobs").glob("*/coordinator.address")
    return sorted(a.parent for a in addresses if JobFiles(a.parent).running())


def scrub(folder: Path, deadline_s: float) -> Scrubbed:
    """Verifies all stripes of the job in `folder` while it goes on."""
    files = JobFiles(folder)
    try:
        if not files.running():
            raise ConfigError(f"no job runs in '{folder}'; a job's first line names its folder")
        keys, address = files.keys(), (folder / "coordinator.address").read_text()
    except OSError as error:
        raise ClusterError(f"the job in {folder} cannot be asked yet: {error}") from None
    transport_kind = "ipc" if address.startswith("ipc:") else "tcp"
    bind = (
        f"ipc://{folder}/scrub-{time.monotonic_ns()}.ipc"
        if transport_kind == "ipc"
        else f"tcp://{address.removeprefix('tcp://').rpartition(':')[0]}:*"
    )
    transport = open_transport(f"client-{time.monotonic_ns()}", keys, bind)
    try:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            transport.send(address, transport.encode(Scrub(view=NO_VIEW, round=0)))
            asked = time.monotonic()
            while time.monotonic() < min(deadline, asked + max(ASK_AGAIN_S, deadline_s / 3)):
                transport.poll(50)
                for envelope in transport.receive():
                    if isinstance(envelope.message, Scrubbed):
                        return envelope.message
        raise ClusterError(f"the job in {folder} did not answer within {deadline_s:.0f} s")
    finally:
        transport.close()
        Path(bind.removeprefix("ipc://")).unlink(missing_ok=True)
