"""`planaria compare` with real kills on real processes, from its options to its files."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_commands import MAIN
from cluster_jobs import TINY, leaving_nothing, processes_of, tiny, wait_until

from planaria.comparing.runs import run_here
from planaria.schedule import parse_kill, resolve

pytestmark = pytest.mark.torch

# Steps that take a while: a kill should not come many of them too late.
SMALL = [*TINY, "steps=60", "servers=3", "batch=512", "data.test_samples=2000"]
OPTIONS = [f"--set={pair}" for pair in SMALL] + ["--failures=1", "--hours=20"]


@pytest.fixture(autouse=True)
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tmp_path_factory.getbasetemp()  # made before a test looks for what was left behind
    with leaving_nothing() as folder:
        yield folder


def planaria(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "compare", *OPTIONS, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "80"},
    )


def test_parity_and_rollback_end_with_the_undisturbed_bits_and_partial_recovery_does_not(
    jobs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "folder"
    names = ["erasure", "checkpoint", "cpr-vanilla"]
    strategies = [f"--strategy={name}" for name in names]
    started = planaria(jobs, *strategies, "--out", str(out))
    text, _ = started.communicate(timeout=300)
    assert started.returncode == 0, text
    for shown in ("1 of 4: undisturbed", "4 of 4: cpr-vanilla", "reschedule", "differs"):
        assert shown in text

    made = json.loads((out / "report.json").read_text())
    by_name: dict[str, dict[str, Any]] = {row["name"]: row for row in made["strategies"]}
    assert [row["digests_equal"] for row in by_name.values()] == [1, 1, 0]
    (undisturbed,) = made["undisturbed"]
    for name, row in by_name.items():
        (run,) = row["outcomes"]
        assert [kill["due_step"] for kill in run["killed"]] == [
            int(kill.partition("@")[2]) for kill in made["schedules"][0]
        ]
        is_same = run["report"]["auc"] == undisturbed["report"]["auc"]
        assert is_same == (name != "cpr-vanilla")
        parts = row["overhead_hours"]
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert by_name["erasure"]["overhead_hours"]["load"] == 0
    assert by_name["cpr-vanilla"]["overhead_hours"]["lost_work"] == 0
    assert by_name["cpr-vanilla"]["pls"] > 0
    redone = by_name["checkpoint"]["outcomes"][0]["report"]["rollbacks"]
    assert len(redone) == 1
    assert by_name["checkpoint"]["overhead_hours"]["lost_work"] == pytest.approx(
        sum(back["from_step"] - back["to_step"] for back in redone) * 20 / 60
    )

    lines = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert [line["strategy"] for line in lines] == names
    assert float(lines[1]["overhead_hours"]) == pytest.approx(
        sum(by_name["checkpoint"]["overhead_hours"].values())
    )
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    for name in ("overhead.png", "quality.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_a_strategy_that_cannot_go_on_is_an_outcome() -> None:
    config = tiny("steps=40", "servers=3", "strategy=none")
    found = run_here(
        lambda line, progress: None, config, resolve([parse_kill("server:1@9")], config)
    )
    assert found.lost
    assert not found.ended
    assert found.report["steps"] >= 8  # the ninth was computed, and perhaps not committed
    assert [kill["server"] for kill in found.killed] == [1]


def test_a_kill_waits_until_the_last_one_is_made_good() -> None:
    """Two servers of one group, one step apart: parity of 1 bears them only one by one."""
    config = tiny("steps=100", "servers=3", "rebuild.chunk=16", "rebuild.jobs=1", "spares=2")
    schedule = resolve([parse_kill("server:0@20"), parse_kill("server:1@21")], config)
    found = run_here(lambda line, progress: None, config, schedule)
    assert found.report["steps"] == 100
    first, second = found.killed
    assert (first["due_step"], second["due_step"]) == (20, 21)
    assert second["step"] > 21


def test_an_interrupt_leaves_nothing_behind(jobs: Path, tmp_path: Path) -> None:
    output: list[str] = []
    with planaria(jobs, "--set=steps=100000", f"--out={tmp_path}") as started:
        reader = threading.Thread(target=lambda: output.extend(started.stdout or []))
        reader.start()
        assert wait_until(lambda: any(" step " in line for line in output), 60), output
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 130
        reader.join()
    assert "interrupted" in output[-1]
    assert processes_of(jobs) == []
    assert list(tmp_path.iterdir()) == []
