"""The `planaria` command on tiny jobs, as a user starts it, and a disk that is slow on demand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cluster_jobs import TINY, wait_until

from planaria.checkpoints import list_checkpoints
from planaria.cluster.asking import running_jobs, status

LIMIT_S = 240.0  # for one command, on a machine that has other things to do
PLAIN = ("strategy=none", "servers=2", "spares=0")  # quick to start

# Python ignores SIGINT where whoever started the tests did, as a shell does in the background, and
# the command leaves SIGHUP alone where nohup has made it be ignored.
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from planaria.cli import main
main()
"""


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    code: int
    out: str
    error: str
    report: dict[str, Any]

    @property
    def sentence(self) -> str:
        return " ".join(self.error.split())


def command(*words: str) -> list[str]:
    """words: path=value settings, and options."""
    pairs = [word for word in words if not word.startswith("--")]
    sets = [option for pair in (*TINY, *pairs) for option in ("--set", pair)]
    options = [word for word in words if word.startswith("--")]
    return [sys.executable, "-c", MAIN, "train", *sets, *options]


@contextmanager
def started(*words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs. more: variables of its environment. It is ended with the block."""
    with subprocess.Popen(
        command(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "400", **more},
    ) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGKILL)


def finished(job: subprocess.Popen[str], report: Path | None = None) -> Done:
    out, error = job.communicate(timeout=LIMIT_S)
    assert "Traceback" not in error, error
    found = json.loads(report.read_text()) if report and report.exists() else {}
    return Done(job.returncode, out, error, found)


def train(folder: Path, *words: str, **more: str) -> Done:
    """The command from start to end. folder: where it can leave its report."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    with started(*words, f"--report={report}", **more) as job:
        return finished(job, report)


def planaria(*words: str) -> subprocess.CompletedProcess[str]:
    """Another command, beside a job."""
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "COLUMNS": "400"},
    )


def only_job() -> Path:
    """Once it trains."""
    assert wait_until(lambda: len(running_jobs()) == 1, LIMIT_S)
    (folder,) = running_jobs()
    assert wait_until(lambda: status(folder).step > 3, LIMIT_S)
    return folder


def wait_for_line(job: subprocess.Popen[str], part: str) -> list[str]:
    """Everything that it says until a line has `part` in it."""
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        if part in line:
            return lines
    raise AssertionError(
        f"it ended before it said {part!r}: {lines} {job.stderr and job.stderr.read()}"
    )


def whole_steps(folder: Path) -> list[int]:
    return [one.step for one in list_checkpoints(folder) if one.checkpoint]


def wait_for_checkpoint(folder: Path, after: int = 0) -> int:
    """The step of a whole checkpoint beyond `after`."""
    assert wait_until(lambda: any(step > after for step in whole_steps(folder)), LIMIT_S)
    return max(whole_steps(folder))


# ---------------------------------------------------------------------------- a slow disk

SLOW_SYNC = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_if_slow(int descriptor) {
    const char *part = getenv("SLOW_SYNC_PATH"), *seconds = getenv("SLOW_SYNC_S");
    char link[64], path[4096];
    if (!part || !seconds) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (strstr(path, part)) usleep((useconds_t)(atof(seconds) * 1e6));
}

extern "C" int fsync(int descriptor) {
    wait_if_slow(descriptor);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}

extern "C" int fdatasync(int descriptor) {
    wait_if_slow(descriptor);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(descriptor);
}
"""


@cache
def _slow_sync_library(folder: Path) -> Path:
    source, library = folder / "slow_sync.cpp", folder / "slow_sync.so"
    source.write_text(SLOW_SYNC)
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def slow_sync(folder: Path, path: str, seconds: float) -> Mapping[str, str]:
    """Variables under which a file whose path has `path` in it takes so long to become durable."""
    library = str(_slow_sync_library(folder))
    return {"LD_PRELOAD": library, "SLOW_SYNC_PATH": path, "SLOW_SYNC_S": str(seconds)}
