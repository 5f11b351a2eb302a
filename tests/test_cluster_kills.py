"""kill -9 of everything at random instants, again and again; what is resumed loses no bit.

PLANARIA_KILLS=50 python -m pytest tests/test_cluster_kills.py   (`make kills`) takes minutes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from cluster_jobs import TINY, leaving_nothing, processes_of, tiny, wait_until

from planaria.checkpoints import latest
from planaria.cluster.run import JobRun

pytestmark = [pytest.mark.torch, pytest.mark.campaign]

KILLS = int(os.environ.get("PLANARIA_KILLS", "2"))
SHAPE = ("servers=3", f"steps={150 * (KILLS + 1)}", "model.rows=2000", "data.test_samples=100")
SAVES = ("checkpoint.every_steps=10", "checkpoint.policy=intermittent", "checkpoint.keep_last=2")
LIMIT_S = 120.0


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    pairs = (*TINY, *SHAPE, *SAVES, "strategy=none", f"checkpoint.path={folder}")
    sets = [f"--set={pair}" for pair in pairs]
    return subprocess.Popen(
        [sys.executable, "-m", "planaria", "train", *sets, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def newest(folder: Path) -> int:
    return max((int(file.parent.name[5:]) for file in folder.glob("*/MANIFEST.json")), default=0)


def has_saved_since(step: int, folder: Path) -> bool:
    return newest(folder) > step


def test_random_kills_of_everything_lose_no_bit(tmp_path: Path) -> None:
    draw = random.Random(9)
    folder, report = tmp_path / "saves", tmp_path / "report.json"
    undisturbed = JobRun(tiny(*SHAPE, "strategy=none")).run()["digest"]
    torn = 0
    with leaving_nothing() as temporary:
        for number in range(KILLS):
            saved = partial(has_saved_since, newest(folder), folder)
            with start(folder, *(["--resume"] if number else [])) as job:
                assert wait_until(saved, LIMIT_S), job.poll()
                time.sleep(draw.uniform(0, 0.15))
                assert job.poll() is None, "the job was over before it was killed"
                for process in (job.pid, *processes_of(temporary)):
                    os.kill(process, signal.SIGKILL)
            found = latest(folder, verify=True)
            assert found.checkpoint is not None
            torn += bool(found.passed_over)
            # The coordinator, which would clean up for the supervisor, was killed as well.
            assert wait_until(lambda: processes_of(temporary) == [], LIMIT_S)
            shutil.rmtree(temporary / "jobs")
        with start(folder, "--resume", "--report", str(report)) as last:
            _, errors = last.communicate(timeout=LIMIT_S)
    assert last.returncode == 0, errors
    assert json.loads(report.read_text())["digest"] == undisturbed
    print(f"{KILLS} kills, {torn} of them while a checkpoint was being written")
