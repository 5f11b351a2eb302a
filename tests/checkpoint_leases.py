"""Leases to take, and what others have left of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from planaria.checkpoints import Lease
from planaria.checkpoints.lease import LEASE, Holder, Process

OURS, THEIRS, THIRD = "0a" * 16, "b1" * 16, "c2" * 16
ELSEWHERE = Process("another machine", 17, "4711")
DEAD = msgspec.structs.replace(Process.this(), started="1")  # a number that another has now


def left_by(folder: Path, process: Process, renewals: int = 0) -> None:
    """A lease whose holder has not given it back."""
    holder = Holder("f" * 32, THEIRS, "host-2, process 17", process, renewals)
    (folder / LEASE).write_bytes(msgspec.json.encode(holder))


def read(folder: Path) -> Holder:
    return msgspec.json.decode((folder / LEASE).read_bytes(), type=Holder)


def lease(folder: Path, job: str = OURS, **more: Any) -> Lease:
    return Lease(folder, job, owner="host-1, process 5", **more)
