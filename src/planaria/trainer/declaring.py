"""What a script says of itself before its job can start: tables, steps, sizes, what it keeps.

A trainer's process and whoever has started it talk over one socket, in single messages: the
process declares, and gets its part in the job, or a sentence that says why it gets none. When the
other end closes, the one who started it is gone.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

SOCKET = "PLANARIA_SOCKET"  # a variable: the number of a script's end of its socket
SETTINGS = "PLANARIA_SETTINGS"  # another one: what the command line says, as JSON
MOST_BYTES = 1 << 20  # of one message: so many tables can be declared


class Settings(msgspec.Struct, frozen=True):
    """Of the command that runs a script: what its configuration file has, and what --set overrides.
    Not the file's name, which means nothing on another machine.
    """

    file: dict[str, Any] | None
    sets: list[str]
    base: dict[str, Any] | None = None  # a whole configuration, where there is one already


class Declaration(msgspec.Struct, frozen=True, tag=True):
    """Equal in all trainers of a job: they train one model."""

    config: dict[str, Any]  # what the script has set
    tables: list[dict[str, Any]]  # as the configuration has them
    steps: int
    batch: int  # samples of a step, of all trainers together
    ids: int  # of a trainer's first batch
    parameters: int  # of the dense network
    kept: str  # a fingerprint of what it keeps
    state: str  # a digest of what it keeps, before the first step


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The script has ended by an exception; the ranks of a job mostly raise the same one."""

    traceback: str


Said = Declaration | Raised


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """A process's part in the job; without a rank it waits for one in the job itself."""

    folder: str
    member: str
    rank: int | None
    local_rank: int | None = None  # of one that was a spare on a machine that is one of several


class Refusal(msgspec.Struct, frozen=True, tag=True):
    why: str


Reply = Assignment | Refusal


def encode(said: Said) -> bytes:
    """As one message: a socket takes some 200 kB of it, which a thousand tables are more than."""
    return zlib.compress(msgspec.json.encode(said), 1)


def decode(message: bytes) -> Said:
    said: Said = msgspec.json.decode(zlib.decompress(message), type=Said)
    return said


def difference(one: Declaration, other: Declaration, *, begins: bool = False) -> str:
    """What two trainers disagree about, in words; "" if nothing.

    begins: both start the job, from the states that they have. Others are given theirs later.
    """
    words = {
        "tables": "the tables",
        "kept": "what is kept: names, shapes or types",
        "steps": "the number of steps",
        "batch": "the size of a batch",
        "parameters": "the size of the dense network",
        "config": "what connect() was given",
    }
    if begins and one.kept == other.kept:
        words["state"] = (
            "the values that training starts with: call torch.manual_seed() before the model is "
            "made"
        )
    differ = [name for name in words if getattr(one, name) != getattr(other, name)]
    return " and ".join(words[name] for name in differ)
