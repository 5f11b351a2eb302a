"""Names of files: whose a part is, and which names that stand in a file may become paths.

A part carries the first eight digits of its job's id. So a job that removes what is left of a
checkpoint can tell its own files from those of another job in the same folder without opening one.
"""

from __future__ import annotations

import re
import secrets
import unicodedata

from planaria.kernels.checks import require

MAX_NAME_BYTES = 200  # file systems take 255, and something is put behind it
_JOB = re.compile(r"[0-9a-f]{8,64}")
_WHO = r"(?:dense|place-\d{5,})"
_RANDOM = r"[0-9a-f]{8}"


def new_job_id() -> str:
    """The id of a job that starts for the first time; one that is resumed keeps its id."""
    return secrets.token_hex(16)


def is_job_id(text: str) -> bool:
    """Nothing is the id of whoever has none: a script that saves without being a job."""
    return not text or bool(_JOB.fullmatch(text))


def check_job_id(job: str) -> None:
    require(is_job_id(job), f"a job's id has 8 to 64 digits of 0-9a-f, not {job!r}; see new_job_id")


def said_job(job: str) -> str:
    """A job in the middle of a sentence."""
    return f"job {job}" if job else "a job without an id"


def another_job(job: str) -> str:
    """One that is not the job at hand, in the middle of a sentence."""
    return f"another job, {job}" if job else "a job without an id"


def mark_of(job: str) -> str:
    """What stands in the names of a job's files; nothing for a job without an id."""
    return job[:8] + "-" if job else ""


def part_name(place: int, job: str) -> str:
    """A name that no other part has. place: -1 for the dense part."""
    who = "dense" if place < 0 else f"place-{place:05d}"
    return f"{who}-{mark_of(job)}{secrets.token_hex(4)}.part"


def temporary_name(name: str, job: str = "") -> str:
    """Of a file that is renamed to `name` when it is complete."""
    return f"{name}.{mark_of(job)}{secrets.token_hex(4)}.tmp"


def is_part_of(name: str, job: str) -> bool:
    """Whether a file is a part of that job by its name."""
    return bool(re.fullmatch(rf"{_WHO}-{mark_of(job)}{_RANDOM}\.part", name))


def is_file_of(name: str, job: str) -> bool:
    """Whether it is a part of that job or what a crash has left of a file that it wrote."""
    is_left_over = bool(re.fullmatch(rf".+\.{mark_of(job)}{_RANDOM}\.tmp", name))
    return is_left_over or is_part_of(name, job)


def name_problem(name: str) -> str | None:
    """Why a name out of a file must not become that of a file; None if it may.

    Whoever writes a manifest also writes its checksum: a name in it can be anything.
    """
    if not name:
        return "it is empty"
    if "/" in name or "\\" in name:
        return "it has a path separator"
    if name.startswith("."):
        return "it begins with a dot"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "it has a control character"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it has more than {MAX_NAME_BYTES} bytes"
    return None
