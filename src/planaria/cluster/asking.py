"""Asking a running job, from outside: its folder says where, and has the key to do so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from planaria.cluster.files import JobFiles, home
from planaria.cluster.transport import open_transport
from planaria.errors import ClusterError, ConfigError
from planaria.wire.control import AskStatus, Status
from planaria.wire.messages import NO_VIEW, Scale, Scaled, ScaleTrainers, Scrub, Scrubbed

ASK_AGAIN_S, MOST_AGAIN_S = 2.0, 20.0
ASK_S = 10.0
SCALE_AGAIN_S = 0.3
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


def scale(
    folder: Path,
    servers: int | None,
    without: Sequence[str] = (),
    deadline_s: float = 600.0,
    drain: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Scaled:
    """The job in `folder` is to have so many servers, and those named not among them; servers None:
    as many as it has, less those. Returns when it has, or says why it cannot. drain: hosts that get
    no servers from here on, if it can. say: is told how far it is.
    """
    wanted = Scale(view=NO_VIEW, servers=servers, without=list(without), number=time.time_ns())
    return _scale(folder, wanted, deadline_s, drain, say)


def scale_trainers(
    folder: Path,
    trainers: int,
    after: int = 0,
    deadline_s: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Scaled:
    """The job in `folder` is to have so many trainers: after this step, or as soon as can be.
    Returns when it has, or says why it has not. say: is told how far it is.
    """
    number = time.time_ns()
    wanted = ScaleTrainers(view=NO_VIEW, trainers=trainers, after=after, number=number)
    return _scale(folder, wanted, deadline_s, (), say)


def _scale(
    folder: Path,
    wanted: Scale | ScaleTrainers,
    deadline_s: float,
    drain: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Scaled:
    """Asks until it is decided."""
    _address(JobFiles(folder), "coordinator")  # no such job is another error than one that ends
    deadline = time.monotonic() + deadline_s
    found = _ask_of_job(folder, wanted, deadline_s)
    if drain and found.state != "refused":
        _ask(folder, "supervisor", AskStatus(drain=list(drain)), Status, deadline_s)
    while found.state == "moving":
        say(found.why)
        time.sleep(SCALE_AGAIN_S)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            why = f" ({found.why})" if found.why else ""
            raise ClusterError(
                f"the job in {folder} has not changed within {deadline_s:.0f} s{why}; what has "
                "begun goes on, as planaria status shows, and what has not is withdrawn: ask again "
                "with a longer --deadline"
            )
        found = _ask_of_job(folder, wanted, left_s)
    return found


def _ask_of_job(folder: Path, wanted: Scale | ScaleTrainers, deadline_s: float) -> Scaled:
    try:
        return _ask(folder, "coordinator", wanted, Scaled, deadline_s)
    except ConfigError:
        raise ClusterError(f"the job in {folder} has ended meanwhile") from None


def _ask(folder: Path, who: str, message: Any, kind: type[T], deadline_s: float) -> T:
    """Again and again until an answer of this kind comes, and of whoever took over meanwhile."""
    files = JobFiles(folder)
    address = _address(files, who)
    try:
        keys = files.keys()
    except OSError as error:
        raise ClusterError(f"the job in {folder} cannot be asked: {error}") from None
    own = f"client-{time.monotonic_ns()}"
    here = _address(files, "supervisor")  # the coordinator may be on another machine
    if here.startswith("ipc:"):
        bind = f"ipc://{folder}/{own}.ipc"
    else:
        bind = f"tcp://{here.removeprefix('tcp://').rpartition(':')[0]}:*"
    transport = open_transport(own, keys, bind)
    try:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            asked = address = _address(files, who)
            transport.send(asked, transport.encode(message))
            again_at = time.monotonic() + min(max(ASK_AGAIN_S, deadline_s / 3), MOST_AGAIN_S)
            while address == asked and time.monotonic() < min(deadline, again_at):
                transport.poll(50)
                for envelope in transport.receive():
                    if isinstance(envelope.message, kind):
                        return envelope.message
                address = _address(files, who)
        raise ClusterError(f"the job in {folder} did not answer within {deadline_s:.0f} s")
    finally:
        transport.close()
        Path(bind.removeprefix("ipc://")).unlink(missing_ok=True)


def _address(files: JobFiles, who: str) -> str:
    """Where it listens now."""
    if not files.running():
        raise ConfigError(f"no job runs in '{files.folder}'; a job's first line names its folder")
    try:
        return (files.folder / f"{who}.address").read_text()
    except OSError as error:
        raise ClusterError(f"the job in {files.folder} cannot be asked yet: {error}") from None
