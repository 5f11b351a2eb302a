"""`planaria plan`, from its options to its files; and what --measure makes of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from planaria.cli import app
from planaria.config import Config
from planaria.errors import ClusterError
from planaria.planning import PlanInputs
from planaria.planning.measure import disk_gb_per_s, measure, memory_gb_per_s
from planaria.schedule import Event

FIXTURE = ["--servers", "8", "--mtbf-hours", "28", "--save-seconds", "336", "--load-seconds", "24"]


def plan(*options: str) -> Result:
    return CliRunner().invoke(app, ["plan", *options])


def test_a_plan_is_shown_and_written(tmp_path: Path) -> None:
    png, file = tmp_path / "plan.png", tmp_path / "plan.json"
    done = plan(*FIXTURE, "--runs", "50", "--png", str(png), "--json", str(file))
    assert done.exit_code == 0, done.output
    for shown in ("8.49", "4.40", "0.53", "recommended: cpr", "█"):
        assert shown in done.output
    assert max(map(len, done.output.split("recommended")[0].splitlines()[1:])) <= 80
    assert png.read_bytes().startswith(b"\x89PNG")
    made = json.loads(file.read_text())
    assert made["recommended"] == "cpr"
    by_name = {row["name"]: row for row in made["estimates"]}
    assert round(by_name["checkpoint"]["formula"], 3) == 0.085
    assert by_name["none"]["behaviour"]["interval"] is None


def test_a_trace_is_fitted_and_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"s{n % 5},{n // 3 * 40 + n % 3 * 0.01}" for n in range(60)]
    trace.write_text("\n".join(["server,time_hours", *lines]))
    done = plan("--trace", str(trace), "--runs", "20", "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert "replayed" in made["failures"]
    assert max(made["findings"]["burst_sizes"]) == 3
    done = plan("--trace", str(trace), "--runs", "20", "--failures", "gamma")
    assert "the trace is bursty" in done.output
    assert "gamma failures" in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--servers", "0"], "--servers: expected a number from 1 to 100000, got 0"),
        (["--hours", "nan"], "--hours: expected"),
        (["--trace", "no-such.json"], "--trace no-such.json: cannot be read"),
        (["--failures", "sometimes"], "--failures: expected one of auto"),
        (["--png", "no-such-folder/plan.png"], "no-such-folder/plan.png: expected a file"),
        (["--job", "job.yaml"], "--job: it is measured only; add --measure"),
        (["--measure", "--job", "no-such.yaml"], "no-such.yaml"),
    ],
)
def test_a_wrong_option_gets_a_sentence_and_exit_code_2(options: list[str], says: str) -> None:
    done = plan(*options)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_trace_and_a_mean_are_one_too_many(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("server,time_hours\n" + "".join(f"s,{n}\n" for n in range(20)))
    done = plan("--trace", str(trace), "--mtbf-hours", "3")
    assert done.exit_code == 2
    assert "--mtbf-hours: the trace says it" in done.output


def report(samples_per_s: float | None, failures: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"samples_per_s": samples_per_s, "failures": list(failures)}


def test_measured_costs_are_inputs_of_a_plan(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def run(config: Config, schedule: Sequence[Event]) -> dict[str, Any]:
        ran.append((config.strategy, len(schedule)))
        if config.strategy == "none":
            return report(2560.0)
        if not schedule:
            return report(2000.0)
        killed = {
            "gap_ms": 250.0,
            "rebuilt_ms": 500.0,
            "bytes_rebuilt": 10**9,
            "samples_per_s_during": 1800.0,
        }
        return report(500.0, [killed])  # a rebuild is no cost of protection

    found = measure(40, 9, folder=tmp_path, run=run)
    assert ran == [("none", 0), ("erasure", 0), ("erasure", 1)]
    assert found["step_seconds"] == pytest.approx(0.1)
    assert found["protection_percent"] == pytest.approx(28)
    assert found["pause_seconds"] == 0.25
    assert found["rebuild_gb_per_s"] == pytest.approx(2)
    assert found["slowdown_percent"] == pytest.approx(10)
    PlanInputs(**found).check()  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="too short"):
        measure(4, 1, folder=tmp_path, run=lambda config, schedule: report(None))
    assert list(tmp_path.iterdir()) == []


def test_disk_and_memory_have_a_rate(tmp_path: Path) -> None:
    assert disk_gb_per_s(tmp_path, megabytes=2) > 0
    assert memory_gb_per_s(megabytes=2) > 0


def test_the_command_line_starts_without_pictures_and_statistics() -> None:
    code = "import sys, planaria.cli; print({'matplotlib', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
